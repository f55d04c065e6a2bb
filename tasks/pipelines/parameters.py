"""What people fill in to train: pydantic models whose descriptions and bounds make the form in the Prefect UI."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.pipelines.data import DataSource
from tasks.pipelines.render import Format

NAME = r"^[a-z0-9]+(-[a-z0-9]+)*$"
PATH = r"^(tinker://.+)?$"


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


class NightlyParameters(SftParameters):
    """A fine-tune whose result is promoted only if it is better."""

    held_out: DataSource = Field(description="Rows on which the result and the champion are compared.")
    champion: str = Field(pattern=NAME, max_length=40, description="The name under which the best weights are kept.")
    metric: Literal["loss", "exact_match"] = Field("loss", description="What decides.")
    margin: float = Field(0.0, ge=0, description="By how much the result must be better.")


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
