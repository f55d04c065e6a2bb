"""Every setting of the service, declared once and read once, from arguments and `TINKERFLOW_*` variables.

The descriptions are the help of the command line and the table in docs/settings.md. A worker receives the settings
whose names are also fields of `backend.spec.commands.GroupConfig`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal, Self, get_origin

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tinkerflow.backend.core.ids import base_model_name
from tinkerflow.backend.core.joining import parse_address
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.backend.spec.drift import DriftLimits
from tinkerflow.backend.spec.formats import BaseWeights, CacheFormat, Dtype, PlatformName
from tinkerflow.backend.spec.ranks import RankRule

_PREFIX = "TINKERFLOW_"
_FORMS = {  # the text forms of settings with several values
    tuple: 'names with commas between them, as in a,b, or a JSON list, as in ["a", "b"]',
    dict: 'a JSON object, as in {"a": 1}',
}


def variable_of(setting: str) -> str:
    """The environment variable of a setting."""
    return _PREFIX + setting.upper()


class Settings(BaseSettings):
    """Settings of every part. An unknown key, in an argument or as a `TINKERFLOW_*` variable, is an error."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, extra="forbid", frozen=True, use_attribute_docstrings=True, enable_decoding=False
    )

    data_dir: Path = Path("~/.tinkerflow")
    """folder of the database, downloaded models, caches and logs"""
    host: str = "127.0.0.1"
    """address that the API listens on; any address but loopback needs API keys"""
    port: int = Field(8000, ge=0, le=65535)
    """port that the API listens on; 0 = any free port"""
    public_url: str = ""
    """URL at which clients reach the API, used in download links; empty = the URL of each request"""
    allowed_hosts: tuple[str, ...] = ()
    """names that the API answers under, beside those of its own machine and public_url; * = all names; none = all names
    when keys are needed, else no others"""
    base_models: tuple[str, ...] = ()
    """models to serve, as Hugging Face ids, folders, or file:// or gs:// URLs; none = the tiny embedded model"""
    store: str = ""
    """the checkpoint store: file:///FOLDER, gs://BUCKET/PREFIX, or memory://NAME for tests; empty = <data_dir>/store"""
    pipelines: str = ""
    """URL of the folder that pipelines write to, of a kind as for store; empty = <data_dir>/pipelines"""
    database_url: str = ""
    """SQLAlchemy URL of the journal database, SQLite or PostgreSQL; empty = SQLite in data_dir"""
    platform: PlatformName = "auto"
    """kind of devices to compute on; auto = the kind that JAX finds; startup fails if the given kind is absent"""
    dtype: Dtype = "auto"
    """number format of base weights and activations; auto = float32 on CPUs, bfloat16 on other devices"""
    base_weights: BaseWeights = "full"
    """full = base weights in dtype; int8, nf4 = layer matrices rounded to 8 or 4 bits, which saves device memory;
    mxfp4 = the experts of gpt-oss keep the 4 bits of its files"""
    kv_cache: CacheFormat = "full"
    """full = keys and values of samples in dtype; float8 = in 8 bits, for twice as many positions in the same memory"""

    processes: int = Field(1, ge=1, le=1024)
    """JAX processes in the worker group"""
    max_groups: int = Field(0, ge=0)
    """most worker groups that run at the same time; with more base models than that, a request starts its model's group
    when an idle group has ended; 0 = each base model always has a group"""
    group: str = ""
    """HOST:PORT at which workers of other hosts join; empty = all processes run on this machine"""
    group_secret_file: str = ""
    """file with the secret that authenticates joining workers; empty = <data_dir>/group.secret"""
    launcher: str = ""
    """launcher of worker processes: local, ray, slurm or kubernetes; empty = local, or none if group is set, where each
    host runs `tinkerflow worker`"""
    idle_release: float = Field(0.0, ge=0)
    """seconds without requests after which a launcher releases its worker processes until the next one; 0 = never"""
    process_devices: int = Field(0, ge=0)
    """accelerators that a launcher requests for each worker process; 0 = none"""
    spread_hosts: bool = False
    """whether a launcher starts each worker process on a separate host"""
    ray_address: str = ""
    """address of the Ray cluster for launcher ray, passed to ray.init; empty = RAY_ADDRESS, or one on this machine"""
    tensor_parallel: int = Field(1, ge=1)
    """size of the tensor axis of the device mesh; the fsdp axis gets the devices that both other axes leave"""
    expert_parallel: int = Field(1, ge=1)
    """size of the expert axis of the device mesh over all processes, for models with experts; 1 for all others"""
    context_parallel: int = Field(1, ge=1, le=32)
    """most devices over which a training sequence is split if it is too long for one device; a power of two"""
    expert_rank: RankRule = "divided"
    """rank of a new adapter's matrices in experts: divided = the requested rank divided by the number of experts per
    token, at least 1; full = the requested rank"""
    max_context: int = Field(0, ge=0)
    """longest sequence in tokens; 0 = as long as the model allows, at most 32768"""
    microbatch_tokens: int = Field(0, ge=0)
    """padded tokens in one training micro-batch, at least 32; 0 = as many as device memory allows"""
    share_prefixes: bool = True
    """compute a beginning that several examples of a training request share only once"""
    device_memory: float = Field(0.0, ge=0)
    """GB of each device that a worker group plans with; 0 = as much as the device reports; on CPU, 0 = no plan"""
    sample_slots: int = Field(64, ge=1)
    """most sequences that are decoded in one batch"""
    resident_snapshots: int = Field(32, ge=1)
    """most sampling snapshots in device memory; the least recently used idle one is evicted"""
    host_snapshot_bytes: int = Field(
        default=2**31,
        ge=0,
        description="bytes of host memory in each worker for evicted sampling snapshots, on CPUs only for those of "
        "fully trained models; a snapshot beyond this limit is reloaded from the store when it is sampled",
    )
    decode_chunk: int = Field(8, ge=1)
    """most tokens that are decoded before the sampler accepts new requests"""
    drafts: bool = Field(
        default=False,
        description="on CPUs, sample several tokens of a sequence in one step where they repeat earlier text; the "
        "sampled tokens do not change",
    )
    batch_invariant: bool = False
    """make the bits of each sample independent of other requests: each step computes sample_slots rows, and each prompt
    is prefilled alone, so small batches take longer"""
    inflight_kv_cache: Literal["keep", "recompute"] = "keep"
    """for requests whose `inflight` sampler gets new weights: keep = reuse keys and values of the old weights;
    recompute = prefill the prompt and the tokens so far again"""
    prefill_answers: bool = True
    """prefill answers for the prefix cache while a worker group is idle, for projects that continue their answers"""
    chunks_per_microbatch: float = Field(1.0, ge=0.01, le=100)
    """decoded chunks for each training micro-batch while both sampling and training wait"""
    most_drift: float = Field(
        default=0.1,
        ge=0,
        description="nats of kl_sample_train:mean above which a forward_backward is logged as a warning with its worst "
        "tokens, and Prefect gets the event tinkerflow.run.drift; 0 = never",
    )
    least_agreement: float = Field(
        default=0.8,
        ge=0,
        le=1,
        description="routing_agreement:mean below which a forward_backward is logged as a warning, and Prefect gets "
        "the event tinkerflow.run.routing; 0 = never",
    )
    routing_replay: bool = Field(
        default=False,
        description="record the experts of tokens that are sampled with record_stability_info, and reuse them when "
        "requests with provenance are trained (mixtures of experts)",
    )
    support_replay: bool = Field(
        default=False,
        description="record the tokens that top-k, top-p and min-p keep for samples with record_stability_info, and "
        "compare the policies of requests with provenance over these tokens",
    )
    warm_up: bool = Field(
        default=True,
        description="compile programs while the service is idle; doctor and /api/v1/metrics report the progress, and "
        "how many compilations requests waited for",
    )
    command_deadline: float = Field(600.0, gt=0)
    """seconds that one command to a worker group may take before the group is restarted"""
    start_deadline: float = Field(600.0, gt=0)
    """seconds that a worker group may take to start; with `max_groups` also the seconds of failing starts after which
    waiting requests fail"""

    heartbeat_timeout: float = Field(30.0, gt=0)
    """seconds without a heartbeat after which a worker process is treated as stopped"""
    snapshot_steps: int = Field(50, ge=1)
    """most optimizer steps between two recovery snapshots of a model"""
    snapshot_seconds: float = Field(60.0, gt=0)
    """most seconds between two recovery snapshots of a model that is being trained"""

    keep_last: int = Field(0, ge=0)
    """newest checkpoints kept of each run and kind; others are deleted unless keep_every keeps them; 0 = keep all"""
    keep_every: int = Field(0, ge=0)
    """of the checkpoints older than keep_last, keep those whose optimizer step is a multiple of this; 0 = none"""

    history: Literal["off", "chosen", "all"] = "chosen"
    """training runs whose requests are kept in the store, so that they can be forked and rerun: off = none; chosen =
    those with `history: true` in their metadata; all = every run"""
    recheck_share: float = Field(0.0, ge=0, le=1)
    """share of the work of runs with a history that is executed a second time, to detect devices that compute different
    bits; the event tinkerflow.run.corrupt names the step, and the hosts of the worker group are excluded"""
    history_days: float = Field(30.0, ge=0)
    """days for which the history of a run is kept after its last request; 0 = forever"""

    session_timeout: float = Field(300.0, gt=0)
    """seconds without a heartbeat from the client after which its session expires"""
    gap_timeout: float = Field(60.0, gt=0)
    """seconds to wait for a missing sequence id before later requests of its model are executed"""
    result_ttl: float = Field(
        default=3600.0,
        gt=0,
        description="seconds for which a result can be read again after its first read; an unread result expires this "
        "many seconds after its request was answered, but not in the ten minutes after the API was away",
    )
    poll_hold: float = Field(25.0, gt=0, le=40)
    """most seconds for which a poll for a result is held open"""
    metadata_only_over: int = Field(2**20, ge=0)
    """bytes of a result above which clients first receive its size, so that they can make room"""
    # Limits of one project, which all of its keys share.
    max_sampling_requests: int = Field(10_000, ge=0)
    """sample requests that a project may have waiting; 0 = no limit"""
    max_queued_tokens: int = Field(0, ge=0)
    """training tokens that a project may have waiting; 0 = no limit"""
    max_live_models: int = Field(0, ge=0)
    """models that a project may have loaded at the same time; models of a program that did not close its session count
    until session_timeout; 0 = no limit"""
    max_stored_bytes: int = Field(0, ge=0)
    """bytes of checkpoints and uploaded images that a project may have; further ones fail; 0 = no limit"""
    max_feedback_per_day: int = Field(0, ge=0)
    """answers that a project may rate in 24 hours; 0 = no limit"""
    max_queued_bytes: int = Field(2**33, ge=0)
    """bytes of requests that a project may have waiting; 0 = no limit"""
    max_sessions: int = Field(100_000, ge=0)
    """sessions that a project may keep in the database; 0 = no limit"""
    max_training_runs: int = Field(100_000, ge=0)
    """training runs that a project may keep in the database; 0 = no limit"""
    max_samplers: int = Field(1_000_000, ge=0)
    """samplers that a project may keep in the database; 0 = no limit"""
    max_custom_losses: int = Field(10_000, ge=0)
    """custom losses that a project may keep in the database; 0 = no limit"""
    max_images: int = Field(100_000, ge=0)
    """uploaded images that a project may keep; 0 = no limit"""
    max_feedback: int = Field(1_000_000, ge=0)
    """rated answers that a project may keep in the database; 0 = no limit"""
    max_metrics: int = Field(10_000_000, ge=0)
    """values of metrics, by run, name and step, that a project may keep in the database; 0 = no limit"""
    max_kept_bytes: int = Field(2**32, ge=0)
    """bytes of names, metadata, losses, feedback and metrics that a project may keep in the database; 0 = no limit"""
    max_history_bytes: int = Field(2**34, ge=0)
    """bytes of a project's histories in the store; beyond this limit the oldest are deleted; 0 = no limit"""
    max_body_bytes: int = Field(256 * 2**20, ge=2**16)
    """bytes of the largest body of one request, before and after decompression"""

    # Prices that are reported with usage.
    price_training: float = Field(0.0, ge=0)
    """US dollars for a million training tokens, reported with usage; 0 = not reported"""
    price_prefill: float = Field(0.0, ge=0)
    """US dollars for a million prompt tokens, reported with usage; 0 = not reported"""
    price_cached_prefill: float = Field(0.0, ge=0)
    """US dollars for a million prompt tokens found in the prefix cache, reported with usage; 0 = not reported"""
    price_sample: float = Field(0.0, ge=0)
    """US dollars for a million sampled tokens, reported with usage; 0 = not reported"""
    price_storage: float = Field(0.0, ge=0)
    """US dollars for a gigabyte of checkpoints over 720 hours, reported with usage; 0 = not reported"""

    prefect: Literal["embedded", "external", "off"] = "embedded"
    """embedded = start a Prefect server; external = use the server at PREFECT_API_URL; off = show nothing in Prefect"""
    prefect_port: int = Field(4200, ge=0, le=65535)
    """port of the embedded Prefect server; if another program uses it, a free port is taken; 0 = any free port"""
    prefect_public_url: str = ""
    """URL at which a proxy serves the embedded Prefect server to people; empty = this machine's browsers only"""
    tracked_runs_per_second: float = Field(3.0, gt=0)
    """most task runs per second that are sent to Prefect; above this rate, operations share task runs"""
    budget_tokens: int = Field(0, ge=0)
    """training tokens of one run after which Prefect gets the event tinkerflow.budget.reached; 0 = no budget"""

    trackers: tuple[str, ...] = ()
    """trackers that show training runs, such as mlflow or wandb; none = no tracker"""
    tracked_projects: tuple[str, ...] = ()
    """projects whose training runs the trackers show; none = all projects"""
    tracking_dir: str = ""
    """folder for the data of trackers that store it locally; empty = <data_dir>/tracking"""
    openlineage_url: str = ""
    """OpenLineage server (https://...) or file (file:///...) for the lineage of training runs; empty = none"""

    @field_validator("*", mode="before")
    @classmethod
    def _decoded(cls, value: object, info: ValidationInfo) -> object:
        """Parse a list or an object from the text of a variable: JSON, or names separated by commas."""
        kind = get_origin(cls.model_fields[str(info.field_name)].annotation)
        if not isinstance(value, str) or kind not in _FORMS:
            return value
        if kind is tuple and not value.lstrip().startswith("["):
            return tuple(filter(None, map(str.strip, value.split(","))))
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"must be {_FORMS[kind]}") from error

    @field_validator("data_dir", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        if value == "":  # as in `--data-dir "$UNSET"`; it would mean the current folder, and make its files private
            raise ValueError("must name a folder; . is the current one")
        return value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        folder = value.expanduser().resolve()
        for path in (folder, *folder.parents):
            if os.path.isfile(path):  # noqa: PTH113  Path.is_file raises PermissionError below another user's folder
                raise ValueError(f"must be a folder, and '{path}' is a file")
        return folder

    @field_validator("base_models")
    @classmethod
    def _without_last_slash(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(base_model_name, value))

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

    @field_validator("openlineage_url")
    @classmethod
    def _of_a_server_or_file(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://", "file:///")):
            raise ValueError("must start with http://, https:// or file:///")
        return value

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_variables(cls, values: object) -> object:
        known = set(map(variable_of, cls.model_fields))
        unknown = sorted(k for k in os.environ if k.startswith(_PREFIX) and k not in known)
        if unknown:
            near = did_you_mean(unknown[0], known, likeness=0.8)  # all names begin alike
            raise ValueError(f"unknown setting {unknown[0]} in the environment{near}; docs/settings.md lists them")
        return values

    @model_validator(mode="after")
    def _database_is_supported(self) -> Self:
        if self.database_url and not self.database_url.startswith(("sqlite:///", "postgresql")):
            scheme = self.database_url.partition(":")[0]  # the URL may contain a password
            raise ValueError(f"database_url {scheme!r}: must start with sqlite:/// or postgresql")
        return self

    @property
    def groups(self) -> int:
        """The number of worker groups that run at a time."""
        models = max(1, len(self.base_models))
        return min(self.max_groups or models, models)

    @property
    def drift_limits(self) -> DriftLimits:
        """The limits for the figures that compare the sampler with the trainer."""
        return DriftLimits(self.most_drift, self.least_agreement)

    @property
    def journal_url(self) -> str:
        """The SQLAlchemy URL of the journal."""
        return self.database_url or f"sqlite:///{self.data_dir / 'journal.db'}"

    @property
    def group_secret_path(self) -> Path:
        """The file with the secret of the worker group."""
        return Path(self.group_secret_file).expanduser() if self.group_secret_file else self.data_dir / "group.secret"

    @property
    def journal_file(self) -> Path | None:
        """The file of the journal; None if the journal is not an SQLite database."""
        scheme, _, file = self.journal_url.partition(":///")
        return Path(file.partition("?")[0]) if scheme == "sqlite" else None

    @property
    def has_journal(self) -> bool:
        """Whether a journal may already exist. False only for an SQLite file that does not exist."""
        return self.journal_file is None or self.journal_file.exists()

    @property
    def store_url(self) -> str:
        """The checkpoint store's URL."""
        return self.store or (self.data_dir / "store").as_uri()

    @property
    def tracking_folder(self) -> Path:
        """The folder for the data of trackers."""
        return Path(self.tracking_dir).expanduser().resolve() if self.tracking_dir else self.data_dir / "tracking"

    @property
    def pipelines_url(self) -> str:
        """The URL of the pipelines' work folder."""
        return self.pipelines or (self.data_dir / "pipelines").as_uri()

    @property
    def compile_cache(self) -> Path:
        """The folder of JAX's compilation cache. It contains native code, so it must be as secure as the program."""
        return self.data_dir / "jax-cache"

    def environment(self) -> dict[str, str]:
        """The settings as environment variables, for child processes."""
        return {
            variable_of(name): value if isinstance(value, str) else json.dumps(value)
            for name, value in self.model_dump(mode="json").items()
        }
