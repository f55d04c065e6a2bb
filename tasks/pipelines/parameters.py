"""The parameters of all pipelines: pydantic models whose descriptions and bounds define the form in the Prefect UI.

This module does not import Prefect, so that `tinkerflow run` can reject a wrong parameter within a second.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.losses import loss_named
from tinkerflow.backend.tracking.trackers import trackers_named
from tinkerflow.tasks.pipelines.data import Use
from tinkerflow.tasks.pipelines.render import Format
from tinkerflow.tasks.pipelines.rows import Schema
from tinkerflow.tasks.pipelines.sources import DataSource, HeldOutSource


@dataclass(frozen=True)
class Matches:
    """A text that must match a regular expression. Forms contain the expression, and errors the rule in words."""

    pattern: str
    rule: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of a text, followed by this check."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema of a text with the pattern."""
        return {**handler(schema), "pattern": f"^({self.pattern})$"}

    def _check(self, value: str) -> str:
        if re.fullmatch(self.pattern, value) is None:
            raise ValueError(self.rule)
        return value


_NAME = r"[a-z0-9]+(-[a-z0-9]+)*"
_NAME_RULE = "must be lowercase letters and digits, with dashes between them, as in my-run"
_PATH_RULE = "must be the tinker:// path of a checkpoint, which `tinkerflow checkpoint list` shows"
_RESUME_RULE = "must be at most 128 letters, digits, dots, dashes and underscores, with a letter or a digit first"
Name: TypeAlias = Annotated[str, Matches(_NAME, _NAME_RULE)]
NameOrEmpty: TypeAlias = Annotated[str, Matches(f"({_NAME})?", _NAME_RULE)]
Path: TypeAlias = Annotated[str, Matches(r"(tinker://.+)?", _PATH_RULE)]
PathOrRun: TypeAlias = Annotated[str, Matches(r"(tinker://.+|[^/]+)?", f"{_PATH_RULE}, or the id of a training run")]
Resume: TypeAlias = Annotated[str, Matches(r"([A-Za-z0-9][A-Za-z0-9._-]{0,127})?", _RESUME_RULE)]
Metric = Literal["loss", "exact_match", "reward"]
PolicyLoss: TypeAlias = Literal["importance_sampling", "ppo", "cispo", "gspo", "dro"]
MOST_POINTS = 256  # points of a sweep's grid
Import: TypeAlias = Annotated[
    str, Matches(r"([A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*)?", "write module:function, as in rewards:vowels")
]
EnvironmentName: TypeAlias = Annotated[
    str, Matches(r"([A-Za-z_][A-Za-z0-9_.-]*:\S+)?", "write module:Class, as in games:Guessing, or LIBRARY:NAME")
]


def _tracker_names(value: object) -> object:
    """Convert a single name to a list. ValueError: a tracker cannot be used here."""
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        try:
            trackers_named(names)
        except UserError as error:
            raise ValueError(error.message.removeprefix("tracker ")) from error
    return names


class Parameters(BaseModel):
    """Base of all parameter models. Unknown names are rejected."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


class ModelParameters(Parameters):
    """The base model and the adapter that is trained on it."""

    base_model: str = Field("", description="A model that the server offers; empty = the first one it offers.")
    start_from: Path = Field(
        "", description="A training checkpoint of this base model to start from; empty = a new adapter."
    )
    rank: int = Field(32, ge=1, le=512, description="Rank of the LoRA adapter.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of the adapter's first weights and of the order of rows.")
    format: Format = Field(
        "chat", description="chat: rendered by the model's chat template. text: texts joined without a template."
    )


class TrainingParameters(Parameters):
    """How long and how fast to train."""

    steps: int = Field(100, ge=1, le=1_000_000, description="Optimizer steps.")
    batch_size: int = Field(8, ge=1, le=65536, description="Rows per step: answers, pairs or prompts.")
    learning_rate: float = Field(1e-3, gt=0, le=1, description="The highest learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="How the learning rate falls to zero; constant: it does not."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises from zero.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Weight decay of AdamW.")
    grad_clip: float = Field(1.0, ge=0, description="Largest norm of a step's mean gradient; 0 = no limit.")
    max_tokens: int = Field(2048, ge=8, description="Longest sequence in tokens; longer ones are left out.")
    segment_steps: int = Field(50, ge=1, description="Steps between two saved states; a retry resumes from the last.")
    state_days: int = Field(7, ge=1, le=3650, description="Days for which intermediate saved states are kept.")

    @property
    def state_seconds(self) -> int:
        """Seconds for which intermediate saved states are kept."""
        return self.state_days * 24 * 3600


class SampleParameters(Parameters):
    """Samples after each segment, for people to read."""

    rows: int = Field(
        4, ge=0, le=32, description="Number of prompts: the first ones of the held-out data, or else of the data."
    )
    max_tokens: int = Field(48, ge=1, le=4096, description="Longest answer, in tokens.")


class RunParameters(Parameters):
    """Parameters of every pipeline. `pipeline` is its name."""

    pipeline: ClassVar[str]

    name: Name = Field(
        "default", max_length=40, description="Name of a series of runs, whose artifacts are versions of each "
        "other. Lowercase letters, digits and dashes."
    )  # fmt: skip
    connection: str = Field(
        "", description="Name of a Tinkerflow Connection block; empty = TINKER_BASE_URL and TINKER_API_KEY."
    )
    work: str = Field("", description="URL of the work folder; empty = the setting TINKERFLOW_PIPELINES.")

    @property
    def work_url(self) -> str:
        """The work folder: `work`, or else TINKERFLOW_PIPELINES, or else `pipelines` in the data dir."""
        return self.work or Settings().pipelines_url


class PipelineParameters(RunParameters):
    """Parameters of every training pipeline."""

    def use(self) -> Use:
        """How the pipeline uses rows."""
        return Use(self.pipeline, ("chat", "prompt_completion", "text"), self.training.max_tokens)

    def sources(self) -> dict[str, DataSource]:
        """The data sets of a run, by parameter."""
        return {"data": self.data} | ({"held_out": self.held_out} if self.held_out else {})

    def base_model_and_format(self) -> tuple[str, Format]:
        """The requested base model (empty = the first one), and the format of rows."""
        return self.model.base_model, self.model.format

    @model_validator(mode="after")
    def _held_out_like_data(self) -> Self:
        if self.held_out is not None:
            self.held_out = self.held_out.like(self.data)
        return self

    resume: Resume = Field(
        "",
        description="A run resumes where the last run with the same value ended; empty = only retries resume.",
    )
    data: DataSource = Field(description="Rows to learn from.")
    held_out: HeldOutSource | None = Field(None, description="Rows that are evaluated after each segment.")
    tracking: Annotated[list[str], BeforeValidator(_tracker_names)] = Field(
        [], description="Trackers that show the run, such as mlflow or wandb: one name or a list."
    )
    history: bool = Field(
        False,
        description="Whether the server keeps the requests of the run, so that steps can be forked and run again.",
    )
    model: ModelParameters = Field(default_factory=ModelParameters, description="The model that is trained.")
    training: TrainingParameters = Field(
        default_factory=TrainingParameters, description="The length and speed of training."
    )
    samples: SampleParameters = Field(default_factory=SampleParameters, description="Samples during training.")


class SftParameters(PipelineParameters):
    """Supervised fine-tuning on answers."""

    pipeline = "sft"
    data: DataSource = Field(description="Rows with answers (chat, ShareGPT, Alpaca, prompt/completion), or texts.")
    held_out: HeldOutSource | None = Field(None, description="Rows whose loss is measured after each segment.")
    on_outlier: Literal["report", "skip"] = Field(
        "report", description="After a step with an unusual gradient norm or loss. report: continue. skip: go back to "
        "the state before, and continue without the rows that caused it; the run then keeps a history."
    )  # fmt: skip


class DpoParameters(PipelineParameters):
    """Direct preference optimization: chosen answers become likelier than rejected ones."""

    pipeline = "dpo"
    data: DataSource = Field(description="Preferences: a prompt, the chosen and the rejected answer.")
    held_out: HeldOutSource | None = Field(None, description="Preferences that are evaluated after each segment.")
    beta: float = Field(
        0.1,
        gt=0,
        le=10,
        description="Penalty for diverging from the initial model: higher values keep the weights closer to it.",
    )

    def use(self) -> Use:
        return Use(self.pipeline, ("preference",), self.training.max_tokens)


class SamplingParameters(PipelineParameters):
    """Parameters of pipelines that learn from the model's own samples."""

    group_size: int = Field(8, ge=1, le=1024, description="Answers that are sampled for each prompt of a step.")
    answer_tokens: int = Field(128, ge=1, le=65536, description="Longest sampled answer, in tokens.")
    loss: PolicyLoss = Field(
        "importance_sampling",
        description="The policy's loss. ppo, cispo and gspo clip ratios, which changes nothing without max_staleness.",
    )
    loss_config: dict[str, float] = Field(
        {}, description="The loss's `loss_fn_config`, such as clip_high_threshold: 1.28 for ppo."
    )
    trust_region: float = Field(
        0.0,
        ge=0,
        le=1,
        description="How far training may move the probability of a sampled token before ppo stops it, as in DPPO; 0 = "
        "by the ratios of `loss_config`.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=16,
        description="How many optimizer steps the sampled weights may lag behind the trained weights: as many steps "
        "sample while others train. A segment begins with fresh samples. 0 = each step samples, then trains.",
    )
    uses_fields: ClassVar[frozenset[str] | None]  # fields in addition to those of the row's form; None = all

    def use(self) -> Use:
        schemas: tuple[Schema, ...] = ("prompt", "prompt_completion", "chat")
        longest = self.training.max_tokens
        return Use(self.pipeline, schemas, longest, False, self.uses_fields, self.answer_tokens)

    @model_validator(mode="after")
    def _known_config(self) -> Self:
        try:
            loss_named(self.loss).read_config(self.loss_config)
        except UserError as error:
            raise ValueError(error.message) from error
        if self.trust_region and self.loss != "ppo":
            raise ValueError(f"trust_region {self.trust_region:g}: needs loss: ppo")
        return self


class JudgeParameters(Parameters):
    """The reward of answers: a function, or an environment that leads conversations."""

    reward: Import = Field(
        "",
        description="package.module:function, called with the row's fields and the answer; returns a number.",
    )
    environment: EnvironmentName = Field(
        "",
        description="package.module:Class, an Environment (tinkerflow.tasks.pipelines.environments) for "
        "conversations of several turns, or one of a library: reasoning-gym:TASK, verifiers:NAME, openenv:URL or "
        "harbor:FOLDER; instead of reward.",
    )
    group_size: int = Field(8, ge=1, le=1024, description="Answers that are sampled for each prompt, to reward them.")
    max_turns: int = Field(
        1, ge=1, le=1000, description="Maximum number of answers in a conversation with an environment."
    )
    environment_seconds: float = Field(
        600.0, gt=0, le=86400, description="Maximum duration of a call to the reward or environment."
    )
    environment_retries: int = Field(
        2,
        ge=0,
        le=16,
        description="How many times a conversation is restarted if its environment was unavailable or too slow; "
        "after that, it is left out of its group.",
    )

    @property
    def judge(self) -> str:
        """The reward or environment, as people read it; "" when there is none."""
        return f"reward {self.reward}" if self.reward else self.environment and f"environment {self.environment}"

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        if self.reward and self.environment:
            fix = "`--set reward=` leaves out the reward of the file"
            raise ValueError(f"give reward or environment, not both; {fix}")
        return self


class CurriculumParameters(Parameters):
    """Easy rows first. Steps pick from a pool of the easiest rows, which grows until it contains all."""

    by: str = Field(min_length=1, description="A row's field with its difficulty, a number.")
    first: float = Field(0.2, gt=0, le=1, description="Share of the rows, the easiest ones, that training begins with.")
    until: float = Field(0.5, ge=0, le=1, description="Share of the steps after which all rows are in the pool.")


class RlParameters(JudgeParameters, SamplingParameters):
    """Reinforcement learning: answers with higher rewards than others to the same prompt become likelier."""

    pipeline = "rl"
    uses_fields = None
    data: DataSource = Field(description="Prompts; the other fields of a row are for the reward.")
    held_out: HeldOutSource | None = Field(None, description="Prompts whose reward is measured after each segment.")
    group_size: int = Field(8, ge=2, le=1024, description="Answers that are sampled for each prompt of a step.")
    advantage: Literal[
        "group_mean", "group_deviation", "leave_one_out", "batch_deviation", "group_mean_batch_deviation"
    ] = Field(
        "group_mean",
        description="How rewards become advantages: minus the group's mean (Dr. GRPO); also divided by the group's "
        "deviation (GRPO); minus the mean of the others (RLOO); normalized by the batch's mean and deviation "
        "(REINFORCE++); minus the group's mean, divided by the batch's deviation.",
    )
    resample: int = Field(
        0,
        ge=0,
        le=16,
        description="How many times groups with equal rewards are replaced by groups of other prompts, as in DAPO; "
        "0 = they stay.",
    )
    curriculum: CurriculumParameters | None = Field(None, description="Easy rows first; empty = all rows, always.")
    overlong_tokens: int = Field(
        0,
        ge=0,
        le=65536,
        description="Over how many tokens before `answer_tokens` a penalty for long answers grows from 0 to 1, as in "
        "DAPO; 0 = none.",
    )
    kl_coefficient: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Penalty for diverging from the base model; 0 = the divergence is only measured, on one answer to "
        "each prompt.",
    )

    @model_validator(mode="after")
    def _judge_and_penalty(self) -> Self:
        if not self.judge:
            raise ValueError("give either reward or environment")
        if self.overlong_tokens > self.answer_tokens:
            rule = f"must be at most answer_tokens, {self.answer_tokens}"
            raise ValueError(f"overlong_tokens {self.overlong_tokens}: {rule}")
        return self


class TeacherParameters(Parameters):
    """The teacher: a model that a server offers, weights trained on such a model, or the student itself."""

    connection: str = Field("", description="A Tinkerflow Connection block of the teacher's server; empty = the run's.")
    base_model: str = Field("", description="A model that the server offers; empty = the student's.")
    weights: Path = Field("", description="Sampler weights; empty = the base model itself.")
    student: bool = Field(
        False, description="Whether the teacher is the student, with the weights that drew the answers; needs `prompt`."
    )
    prompt: str = Field(
        "",
        description="The teacher's last message in place of the student's, with fields of the row: {prompt}, "
        "{completion} or others, as in `{prompt} The right answer is {answer}.`; empty = the same message.",
    )

    @model_validator(mode="after")
    def _knows_more(self) -> Self:
        for _, name, *_ in string.Formatter().parse(self.prompt):
            if name is not None and not name.isidentifier():
                raise ValueError(f"prompt: {{{name}}} must be the name of a row's field; write {{{{ for a brace")
        if self.student and (self.connection or self.base_model or self.weights):
            raise ValueError("student: true names the model; leave out connection, base_model and weights")
        if self.student and not self.prompt:
            raise ValueError("student: true needs a prompt that gives the teacher more information")
        return self


class DistillParameters(SamplingParameters):
    """On-policy distillation: the student learns from a teacher's log probabilities of the student's answers."""

    pipeline = "distill"
    uses_fields = frozenset({"answer"})
    data: DataSource = Field(description="Prompts, or other rows, whose prompts alone are used.")
    held_out: HeldOutSource | None = Field(
        None, description="Prompts on which the divergence is evaluated after each segment."
    )
    teacher: TeacherParameters = Field(default_factory=TeacherParameters, description="The model to learn from.")

    def use(self) -> Use:
        """How the pipeline uses rows. A teacher's prompt may use further fields of rows."""
        return replace(super().use(), extra=None) if self.teacher.prompt else super().use()


class EvaluateParameters(JudgeParameters, RunParameters):
    """Scores of weights, compared with other weights, by a reward or on rows with answers."""

    pipeline = "evaluate"
    base_model: str = Field("", description="A model that the server offers; empty = the first one it offers.")
    weights: PathOrRun = Field(
        "",
        description="Sampler weights to evaluate: a tinker:// path, or the id of a training run for its newest ones; "
        "empty = none.",
    )
    against: PathOrRun = Field("", description="Sampler weights to compare with, as `weights`; empty = none.")
    champion: NameOrEmpty = Field("", max_length=40, description="A champion to compare with; empty = none.")
    data: DataSource = Field(
        description="Rows with answers: chat or prompt/completion. With a reward or environment: prompts, as in `rl`."
    )
    format: Format = Field(
        "chat", description="chat: rendered by the model's chat template. text: texts joined without a template."
    )
    max_tokens: int = Field(48, ge=1, le=65536, description="Longest answer, in tokens.")
    rows_at_once: int = Field(
        64, ge=1, le=65536, description="Rows whose answers are sampled and rewarded at the same time."
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of the answers that are rewarded, as `model.seed` of `rl`.")

    def use(self) -> Use:
        """How the pipeline uses rows. Scoring samples one token after each sequence."""
        if self.judge:
            schemas: tuple[Schema, ...] = ("prompt", "prompt_completion", "chat")
            return Use(self.pipeline, schemas, 2**31, False, None, self.max_tokens)
        return Use(self.pipeline, ("chat", "prompt_completion"), 2**31, answer_tokens=1)

    def sources(self) -> dict[str, DataSource]:
        return {"data": self.data}

    def base_model_and_format(self) -> tuple[str, Format]:
        return self.base_model, self.format


class ComparedParameters(JudgeParameters, SftParameters):
    """A fine-tune whose weights are compared with other weights by a score on the held-out rows."""

    held_out: HeldOutSource = Field(description="Rows on which the results are compared.")
    metric: Metric = Field("loss", description="The score that decides.")

    def use(self) -> Use:
        """How the pipeline uses rows. A reward may use further fields of rows."""
        return replace(super().use(), extra=None) if self.judge else super().use()

    @model_validator(mode="after")
    def _reward_decides(self) -> Self:
        if bool(self.judge) != (self.metric == "reward"):
            raise ValueError("metric: reward needs a reward or an environment, and they need metric: reward")
        return self


class NightlyParameters(ComparedParameters):
    """A fine-tune whose result is promoted only if it is better."""

    pipeline = "nightly"
    champion: Name = Field(max_length=40, description="The name under which the best weights are kept.")
    margin: float = Field(0.0, ge=0, description="By how much the result must be better.")
    approval_hours: float = Field(
        0.0, ge=0, le=720, description="Hours within which a person must approve a better result, on the page of "
        "the run `approval of nightly NAME`; after that, the champion stays. 0 = no one is asked."
    )  # fmt: skip


class GridParameters(Parameters):
    """The values to try, in every combination. If a list is empty, the fine-tune's own value is used."""

    learning_rate: list[Annotated[float, Field(gt=0, le=1)]] = Field([], description="Highest learning rates.")
    rank: list[Annotated[int, Field(ge=1, le=512)]] = Field([], description="Ranks of the adapter.")
    batch_size: list[Annotated[int, Field(ge=1, le=65536)]] = Field([], description="Rows per step.")
    steps: list[Annotated[int, Field(ge=1, le=1_000_000)]] = Field([], description="Optimizer steps.")
    seed: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field([], description="Seeds.")

    @model_validator(mode="after")
    def _some(self) -> Self:
        size = math.prod(len(values) or 1 for values in self.model_dump().values())
        if not any(self.model_dump().values()):
            raise ValueError("list values for at least one parameter")
        if size > MOST_POINTS:
            raise ValueError(f"{size} combinations: must be at most {MOST_POINTS}")
        return self


class SweepParameters(ComparedParameters):
    """A fine-tune for every combination of some parameters' values. The best one is reported."""

    pipeline = "sweep"
    grid: GridParameters = Field(description="The values to try.")
    at_once: int = Field(2, ge=1, le=64, description="Fine-tunes that run at the same time.")


AnyParameters: TypeAlias = PipelineParameters | EvaluateParameters
_ALL: tuple[type[AnyParameters], ...] = (
    *(DistillParameters, DpoParameters, EvaluateParameters, NightlyParameters),
    *(RlParameters, SftParameters, SweepParameters),
)
PARAMETERS: Mapping[str, type[AnyParameters]] = {model.pipeline: model for model in _ALL}
