"""Every setting of the service, read once from arguments and `TINKERFLOW_*` variables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tinkerflow.backend.joining import parse_address

_PREFIX = "TINKERFLOW_"


class Settings(BaseSettings):
    """Settings of every part. An unknown key, in an argument or as a `TINKERFLOW_*` variable, is an error."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True)

    data_dir: Path = Field(default=Path("~/.tinkerflow"), description="database, models, caches and logs")
    host: str = Field(default="127.0.0.1", description="address the API binds")
    port: int = Field(default=8000, ge=0, le=65535, description="port the API binds, 0 = a free one")
    public_url: str = Field(default="", description="where clients reach the API, for links; empty = as they asked")
    base_models: tuple[str, ...] = Field(default=(), description="hub ids or folders; none = the embedded tiny one")
    store: str = Field(default="", description="fsspec URL of checkpoints; empty = <data_dir>/store")
    pipelines: str = Field(default="", description="where pipelines keep their work; empty = <data_dir>/pipelines")
    database_url: str = Field(default="", description="the journal's URL; empty = SQLite in data_dir")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="of base weights and activations")
    base_weights: Literal["full", "int8"] = Field(
        default="full", description="as dtype, or the layers' matrices rounded to int8, for memory"
    )

    processes: int = Field(default=1, ge=1, le=1024, description="JAX processes in the worker group")
    group: str = Field(
        default="", description="HOST:PORT where workers of other hosts join; empty = all processes run on this machine"
    )
    group_secret_file: str = Field(default="", description="what they must know; empty = <data_dir>/group.secret")
    tensor_parallel: int = Field(default=1, ge=1, description="size of the mesh's tensor axis; the rest is fsdp")
    expert_parallel: int = Field(default=1, ge=1, description="size of its expert axis, for models with experts")
    max_context: int = Field(default=0, ge=0, description="tokens; 0 = what the model allows, up to 32768")
    microbatch_tokens: int = Field(
        default=0, ge=0, description="padded tokens of a training micro-batch; 0 = as the devices' memory allows"
    )
    sample_slots: int = Field(default=64, ge=1, description="sequences decoded together at most")
    resident_snapshots: int = Field(
        default=32, ge=1, description="snapshots for sampling kept on the devices, unless more are being sampled"
    )
    host_snapshot_bytes: int = Field(
        default=2**31,
        ge=0,
        description="of other snapshots in each worker's memory (not on CPUs); the rest are loaded when sampled",
    )
    decode_chunk: int = Field(default=8, ge=1, description="tokens decoded at most between two looks at the queue")
    chunks_per_microbatch: float = Field(
        default=1.0, ge=0.01, le=100, description="decoded chunks for each training micro-batch, while both wait"
    )
    warm_up: bool = Field(default=True, description="compile what requests may need while there are none")
    command_deadline: float = Field(default=600.0, gt=0, description="seconds a pool command may take")
    start_deadline: float = Field(default=600.0, gt=0, description="seconds a worker group may take to start")

    heartbeat_timeout: float = Field(default=30.0, gt=0, description="seconds until a silent process counts as stopped")
    snapshot_steps: int = Field(default=50, ge=1, description="optimizer steps between a model's recovery snapshots")
    snapshot_seconds: float = Field(default=60.0, gt=0, description="seconds between them at most, while it changes")

    keep_last: int = Field(default=0, ge=0, description="checkpoints kept of each run and kind; 0 = all")
    keep_every: int = Field(default=0, ge=0, description="steps; beyond keep_last, those of every so many stay")

    session_timeout: float = Field(default=300.0, gt=0, description="seconds without heartbeat until a session expires")
    gap_timeout: float = Field(
        default=60.0, gt=0, description="seconds until a sequence id that never came counts as used"
    )
    result_ttl: float = Field(default=3600.0, gt=0, description="seconds a result stays re-readable")
    poll_hold: float = Field(default=25.0, gt=0, le=40, description="seconds retrieve_future is held open")
    metadata_only_over: int = Field(
        default=2**20, ge=0, description="bytes of a result above which clients are told its size first"
    )
    # Of one project (the keys made for it, together); 0 = no limit.
    max_sampling_requests: int = Field(default=10_000, ge=0, description="samples a project may have waiting")
    max_queued_tokens: int = Field(default=0, ge=0, description="training tokens a project may have waiting")
    max_live_models: int = Field(default=0, ge=0, description="models a project may have live at a time")
    max_stored_bytes: int = Field(default=0, ge=0, description="of a project's checkpoints; then nothing more is saved")
    max_body_bytes: int = Field(default=256 * 2**20, ge=2**16, description="largest body, after decompression")

    # What clients are told that their usage costs, in US dollars; 0 = not configured, and they are told nothing.
    price_training: float = Field(default=0.0, ge=0, description="of a million training tokens")
    price_prefill: float = Field(default=0.0, ge=0, description="of a million prompt tokens")
    price_cached_prefill: float = Field(default=0.0, ge=0, description="of a million prompt tokens that a cache spared")
    price_sample: float = Field(default=0.0, ge=0, description="of a million sampled tokens")
    price_storage: float = Field(default=0.0, ge=0, description="of a gigabyte of checkpoints for 720 hours")

    prefect: Literal["embedded", "external", "off"] = Field(
        default="embedded", description="start a Prefect server, use the one at PREFECT_API_URL, or track nothing"
    )
    prefect_port: int = Field(default=4200, ge=0, le=65535, description="of the embedded server, 0 = a free one")
    tracked_runs_per_second: float = Field(default=3.0, gt=0, description="above it, batches share one")

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().resolve()

    @field_validator("microbatch_tokens")
    @classmethod
    def _no_less_than_a_row(cls, value: int) -> int:
        if 0 < value < 32:
            raise ValueError("must be 0, or at least 32")
        return value

    @field_validator("group")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        if value:
            parse_address(value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_variables(cls, values: object) -> object:
        known = {_PREFIX + name.upper() for name in cls.model_fields}
        unknown = sorted(k for k in os.environ if k.startswith(_PREFIX) and k not in known)
        if unknown:
            raise ValueError(f"unknown setting {unknown[0]} in the environment; known: {', '.join(sorted(known))}")
        return values

    @model_validator(mode="after")
    def _mesh_divides(self) -> Self:
        if self.database_url and not self.database_url.startswith(("sqlite:///", "postgresql")):
            raise ValueError(f"database_url {self.database_url!r}: must start with sqlite:/// or postgresql")
        return self

    @property
    def journal_url(self) -> str:
        """The journal's SQLAlchemy URL."""
        return self.database_url or f"sqlite:///{self.data_dir / 'journal.db'}"

    @property
    def group_secret_path(self) -> Path:
        """The file that holds the group's secret."""
        return Path(self.group_secret_file).expanduser() if self.group_secret_file else self.data_dir / "group.secret"

    @property
    def has_journal(self) -> bool:
        """Whether there is a journal already, as far as can be told without opening one."""
        return bool(self.database_url) or (self.data_dir / "journal.db").exists()

    @property
    def store_url(self) -> str:
        """The checkpoint store's fsspec URL."""
        return self.store or f"file://{self.data_dir / 'store'}"

    @property
    def pipelines_url(self) -> str:
        """The URL of the pipelines' work folder."""
        return self.pipelines or f"file://{self.data_dir / 'pipelines'}"

    @property
    def compile_cache(self) -> Path:
        """Where JAX keeps what it compiled; native code, so it is trusted like the program itself."""
        return self.data_dir / "jax-cache"

    def environment(self) -> dict[str, str]:
        """The same settings as variables, for child processes."""
        return {
            _PREFIX + name.upper(): value if isinstance(value, str) else _encode(value)
            for name, value in self.model_dump(mode="json").items()
        }


def _encode(value: object) -> str:
    import json

    return json.dumps(value)
