"""Parameters that pipelines share: pydantic models whose descriptions and bounds make the form in the Prefect UI."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tinkerflow.backend.settings import Settings
from tinkerflow.tasks.pipelines.data import DataSource
from tinkerflow.tasks.pipelines.render import Format

NAME = r"^[a-z0-9]+(-[a-z0-9]+)*$"
PATH = r"^(tinker://.+)?$"
IMPORT = r"^([A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*)?$"


class Parameters(BaseModel):
    """Base of all parameter models: an unknown name is refused."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


class ModelParameters(Parameters):
    """The base model and the adapter that is trained on it."""

    base_model: str = Field("", description="A model that the server offers; empty = the first one it offers.")
    start_from: str = Field(
        "", pattern=PATH, description="A training checkpoint whose weights are trained on; empty = none."
    )
    rank: int = Field(32, ge=1, le=512, description="Rank of the LoRA adapter.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of the adapter's first weights and of the order of rows.")
    format: Format = Field("chat", description="chat: by the model's chat template. text: texts one after another.")


class TrainingParameters(Parameters):
    """How long and how fast to train."""

    steps: int = Field(100, ge=1, le=1_000_000, description="Optimizer steps.")
    batch_size: int = Field(8, ge=1, le=65536, description="Rows of a step: answers, pairs or prompts.")
    learning_rate: float = Field(1e-3, gt=0, le=1, description="The highest learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="How the learning rate falls to zero; constant: it does not fall."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps in which the learning rate rises from zero.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Weight decay of AdamW.")
    grad_clip: float = Field(1.0, ge=0, description="Largest norm of a step's mean gradient; 0 = no limit.")
    max_tokens: int = Field(2048, ge=8, description="Longest sequence in tokens; longer ones are left out.")
    segment_steps: int = Field(50, ge=1, description="Steps between two saved states; a retry resumes from the last.")
    state_days: int = Field(7, ge=1, le=3650, description="Days that the saved states in between are kept.")


class SampleParameters(Parameters):
    """What is sampled after each segment, for people to look at."""

    rows: int = Field(4, ge=0, le=32, description="Prompts: the first of the held-out data, or else of the data.")
    max_tokens: int = Field(48, ge=1, le=4096, description="Longest answer, in tokens.")


class RunParameters(Parameters):
    """What every pipeline is told."""

    name: str = Field(
        "default", pattern=NAME, max_length=40, description="Name of this line of runs: their artifacts follow one "
        "another. Small letters, digits and dashes."
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
    """What every training pipeline is told."""

    resume: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,127})?$",
        description="A run resumes where the last run with the same value here ended; empty = only retries resume.",
    )
    data: DataSource = Field(description="Rows to learn from.")
    held_out: DataSource | None = Field(None, description="Rows that are measured after each segment.")
    model: ModelParameters = Field(default_factory=ModelParameters, description="What is trained.")
    training: TrainingParameters = Field(default_factory=TrainingParameters, description="How long and how fast.")
    samples: SampleParameters = Field(default_factory=SampleParameters, description="What is sampled on the way.")
