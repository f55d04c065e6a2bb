"""What people fill in to train: pydantic models whose descriptions and bounds make the form in the Prefect UI."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tinkerflow.tasks.pipelines.data import DataSource
from tinkerflow.tasks.pipelines.render import Format

NAME = r"^[a-z0-9]+(-[a-z0-9]+)*$"
PATH = r"^(tinker://.+)?$"
IMPORT = r"^([A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*)?$"
MOST_POINTS = 256


class Parameters(BaseModel):
    """Base of all parameter models: what is not known is refused by name."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


class ModelParameters(Parameters):
    """The base model and the adapter that is trained on it."""

    base_model: str = Field("", description="A model that the server offers; empty = the first one it offers.")
    start_from: str = Field(
        "", pattern=PATH, description="A training checkpoint whose weights are trained on; empty = none."
    )
    rank: int = Field(32, ge=1, le=512, description="Rank of the LoRA adapter.")
    seed: int = Field(0, ge=0, lt=2**31, description="Of the adapter's first weights and of the order of the rows.")
    format: Format = Field("chat", description="chat: by the model's chat template. text: texts one after another.")


class TrainingParameters(Parameters):
    """How long and how fast."""

    steps: int = Field(100, ge=1, le=1_000_000, description="Optimizer steps.")
    batch_size: int = Field(8, ge=1, le=65536, description="Rows of a step: answers, pairs or prompts.")
    learning_rate: float = Field(1e-3, gt=0, le=1, description="The highest learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field("linear", description="How it falls to zero, if it does.")
    warmup_steps: int = Field(0, ge=0, description="Steps in which it rises from zero.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Of AdamW.")
    grad_clip: float = Field(1.0, ge=0, description="Largest norm of a step's mean gradient; 0 = no limit.")
    max_tokens: int = Field(2048, ge=8, description="Longer sequences are left out.")
    segment_steps: int = Field(50, ge=1, description="Steps between two saved states; a retry goes on at the last one.")
    state_days: int = Field(7, ge=1, le=3650, description="Days that the saved states in between are kept.")


class SampleParameters(Parameters):
    """What is sampled on the way, to look at."""

    rows: int = Field(4, ge=0, le=32, description="Prompts, the first of the held-out data, or else of the data.")
    max_tokens: int = Field(48, ge=1, le=4096, description="Longest answer.")


class PipelineParameters(Parameters):
    """What every training pipeline is told."""

    name: str = Field(
        "default", pattern=NAME, max_length=40, description="Of this line of runs: artifacts of runs with one name "
        "follow one another. Small letters, digits and dashes."
    )  # fmt: skip
    connection: str = Field(
        "", description="Name of a Tinkerflow Connection block; empty = TINKER_BASE_URL and TINKER_API_KEY."
    )
    work: str = Field("", description="URL of the work folder; empty = the setting TINKERFLOW_PIPELINES.")
    resume: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,127})?$",
        description="Runs with the same value here go on where the one before ended; empty = only retries of this run.",
    )
    data: DataSource = Field(description="Rows to learn from.")
    held_out: DataSource | None = Field(None, description="Rows that are measured after each segment.")
    model: ModelParameters = Field(default_factory=ModelParameters, description="What is trained.")
    training: TrainingParameters = Field(default_factory=TrainingParameters, description="How long and how fast.")
    samples: SampleParameters = Field(default_factory=SampleParameters, description="What is sampled on the way.")


class SftParameters(PipelineParameters):
    """Supervised fine-tuning on answers."""

    data: DataSource = Field(description="Rows with answers: chat or prompt/completion.")
    held_out: DataSource | None = Field(None, description="Rows whose loss is measured after each segment.")


class DpoParameters(PipelineParameters):
    """Direct preference optimization: chosen answers become likelier than rejected ones."""

    data: DataSource = Field(description="Preferences: a prompt, the chosen and the rejected answer.")
    held_out: DataSource | None = Field(None, description="Preferences that are measured after each segment.")
    beta: float = Field(
        0.1, gt=0, le=10, description="How dear it is to leave the model that the run begins with: higher stays nearer."
    )


class SamplingParameters(PipelineParameters):
    """What pipelines share that learn from the model's own samples."""

    group_size: int = Field(8, ge=1, le=1024, description="Answers that are sampled for each prompt of a step.")
    answer_tokens: int = Field(128, ge=1, le=65536, description="Longest sampled answer.")
    loss: Literal["importance_sampling", "ppo"] = Field("importance_sampling", description="The policy's loss.")


class RlParameters(SamplingParameters):
    """Reinforcement learning: answers with more reward than others to the same prompt become likelier."""

    data: DataSource = Field(description="Prompts; what else a row holds is for the reward.")
    held_out: DataSource | None = Field(None, description="Prompts whose reward is measured after each segment.")
    group_size: int = Field(8, ge=2, le=1024, description="Answers that are sampled for each prompt of a step.")
    reward: str = Field(
        "",
        pattern=IMPORT,
        description="package.module:function, called with the row's fields and the answer; gives a number.",
    )
    environment: str = Field(
        "",
        pattern=IMPORT,
        description="package.module:Class, an Environment (tinkerflow.tasks.pipelines.environments) for "
        "conversations of several turns; instead of reward.",
    )
    max_turns: int = Field(1, ge=1, le=1000, description="Most answers in a conversation with an environment.")
    by_deviation: bool = Field(
        False, description="Divide a group's advantages by their standard deviation, as GRPO first did."
    )
    kl_coefficient: float = Field(
        0.0, ge=0, le=100, description="How dear it is to leave the base model; 0 = it is only measured."
    )

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        if bool(self.reward) == bool(self.environment):
            raise ValueError("give either reward or environment")
        return self


class TeacherParameters(Parameters):
    """Who is learnt from: a model that the server offers, or weights that were trained on one."""

    base_model: str = Field("", description="A model that the server offers; empty = the student's.")
    weights: str = Field("", pattern=PATH, description="Sampler weights; empty = the base model itself.")


class DistillParameters(SamplingParameters):
    """On-policy distillation: the student learns from what a teacher says of the student's own answers."""

    data: DataSource = Field(description="Prompts, or rows of which only the prompts are used.")
    held_out: DataSource | None = Field(None, description="Prompts on which the divergence is measured, too.")
    teacher: TeacherParameters = Field(default_factory=TeacherParameters, description="Who is learnt from.")


class NightlyParameters(SftParameters):
    """A fine-tune whose result is promoted only if it is better."""

    held_out: DataSource = Field(description="Rows on which the result and the champion are compared.")
    champion: str = Field(pattern=NAME, max_length=40, description="The name under which the best weights are kept.")
    metric: Literal["loss", "exact_match"] = Field("loss", description="What decides.")
    margin: float = Field(0.0, ge=0, description="By how much the result must be better.")


class GridParameters(Parameters):
    """The values to try, every combination of them; an empty list = only the value that the fine-tune says."""

    learning_rate: list[Annotated[float, Field(gt=0, le=1)]] = Field([], description="Highest learning rates.")
    rank: list[Annotated[int, Field(ge=1, le=512)]] = Field([], description="Ranks of the adapter.")
    batch_size: list[Annotated[int, Field(ge=1, le=65536)]] = Field([], description="Rows of a step.")
    steps: list[Annotated[int, Field(ge=1, le=1_000_000)]] = Field([], description="Optimizer steps.")
    seed: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field([], description="Seeds.")

    @model_validator(mode="after")
    def _some(self) -> Self:
        size = math.prod(len(values) or 1 for values in self.model_dump().values())
        if not any(self.model_dump().values()):
            raise ValueError("list values for at least one parameter")
        if size > MOST_POINTS:
            raise ValueError(f"{size} combinations, must be {MOST_POINTS} at most")
        return self


class SweepParameters(SftParameters):
    """A fine-tune for every combination of some parameters' values; the best is named."""

    held_out: DataSource = Field(description="Rows on which the results are compared.")
    grid: GridParameters = Field(description="The values to try.")
    metric: Literal["loss", "exact_match"] = Field("loss", description="What decides.")
    at_once: int = Field(2, ge=1, le=64, description="Fine-tunes that run at the same time.")


class EvaluateParameters(Parameters):
    """Weights against others, on rows with answers."""

    name: str = Field("default", pattern=NAME, max_length=40, description="Of this line of evaluations.")
    connection: str = Field(
        "", description="Name of a Tinkerflow Connection block; empty = TINKER_BASE_URL and TINKER_API_KEY."
    )
    work: str = Field("", description="URL of the work folder; empty = the setting TINKERFLOW_PIPELINES.")
    base_model: str = Field("", description="A model that the server offers; empty = the first one it offers.")
    weights: str = Field("", pattern=PATH, description="Sampler weights to evaluate; empty = none.")
    against: str = Field("", pattern=PATH, description="Sampler weights to compare with; empty = none.")
    champion: str = Field(
        "", pattern=rf"^$|{NAME}", max_length=40, description="A champion to compare with; empty = none."
    )
    data: DataSource = Field(description="Rows with answers: chat or prompt/completion.")
    format: Format = Field("chat", description="chat: by the model's chat template. text: texts one after another.")
    max_tokens: int = Field(48, ge=1, le=4096, description="Longest answer.")
