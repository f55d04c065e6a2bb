"""The parts of a checkpoint: its `tinker://` path, the keys and digests of its files, and its metadata."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Self

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.ids import NAME_RULE, CheckpointKind, about_id, is_name
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER
from tinkerflow.backend.spec.ranks import LoraSpec

WEIGHTS, SAMPLER_WEIGHTS, EXTERNAL_WEIGHTS = CheckpointKind
KINDS = tuple(CheckpointKind)
RECOVERY = "recovery"  # recovery snapshots: clients can neither list nor name them; the journal stores their paths
RUNS = "runs"
UPLOADS = "uploads"  # uploaded files, until they become a checkpoint
RUN_RULE = "1 to 200 letters, digits, '.', '_', ':' or '-', not starting with '.' or ':'"
BLOCK = 4 * 2**20  # bytes of a stored file that are hashed together, so that a part can be read and verified
# Run ids contain ':' (`sess-1:train:0`). POSIX file names and object keys allow it, so all stores have one layout.
_RUN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._:-]{0,199}")
_STEP = re.compile(r"@(0|[1-9][0-9]{0,17})")


def is_run_id(text: str) -> bool:
    """Whether `text` is a valid run id: see RUN_RULE (one path segment, no traversal)."""
    return _RUN.fullmatch(text) is not None


def check_run_id(text: str) -> str:
    """The run id itself. UserError: it is malformed."""
    if not is_run_id(text):
        raise UserError(f"checkpoint run id {text!r}: must be {RUN_RULE}")
    return text


def is_checkpoint_name(kind: str, text: str) -> bool:
    """Whether `text` is a valid name for a checkpoint of this kind: see NAME_RULE; weights may also be `@{step}`."""
    return is_name(text) or (kind == WEIGHTS and _STEP.fullmatch(text) is not None)


@dataclass(frozen=True)
class CheckpointPath:
    """`tinker://{run_id}/{kind}/{name}`. Every part is checked, so that no path leads out of the store.

    `tinker://{run_id}/weights/@{step}` is the run's state after that optimizer step, recomputed from its history.
    """

    run_id: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        """UserError: a part is malformed."""
        check_run_id(self.run_id)
        if self.kind not in (*KINDS, RECOVERY):
            raise UserError(f"checkpoint kind {self.kind!r}: must be one of {', '.join(KINDS)}")
        if not is_checkpoint_name(self.kind, self.name):
            raise UserError(f"checkpoint name {self.name!r}: must be {NAME_RULE}, or of weights @STEP")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `tinker://run/kind/name`. UserError: the text has another form."""
        scheme, separator, rest = text.partition("://")
        parts = rest.split("/")
        if scheme != "tinker" or not separator or len(parts) != 3:
            raise UserError(
                f"checkpoint path {text!r}: must be tinker://<run id>/<{'|'.join(KINDS)}>/<name>{about_id(text)}"
            )
        return cls(*parts)

    @classmethod
    def of_folder(cls, folder: str) -> Self:
        """The path of the checkpoint, from the key prefix of one of its attempts."""
        _, run_id, kind, name, _ = folder.split("/")
        return cls(run_id, kind, name)

    def __str__(self) -> str:
        """The tinker:// URI."""
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    @property
    def step(self) -> int | None:
        """The optimizer step of a path whose name is `@{step}`; None for other paths."""
        return int(self.name[1:]) if self.name.startswith("@") else None

    @property
    def folder(self) -> str:
        """The key prefix of the commit object and the attempts."""
        return f"{RUNS}/{self.run_id}/{self.kind}/{self.name}"

    @property
    def commit(self) -> str:
        """The key of the commit object."""
        return f"{self.folder}/commit.json"

    def attempt(self, attempt: str) -> str:
        """The key prefix of one attempt's files."""
        return f"{self.folder}/{attempt}"


@dataclass(frozen=True)
class Digest:
    """The size of a file in bytes, its SHA-256 (hex), and the SHA-256 of each of its blocks of BLOCK bytes."""

    size: int
    sha256: str
    blocks: tuple[str, ...]

    def __post_init__(self) -> None:
        """ValueError: the number of blocks does not match the size."""
        if len(self.blocks) != max(1, -(-self.size // BLOCK)):
            raise ValueError(f"{self.size} bytes have {len(self.blocks)} blocks of {BLOCK}")

    @classmethod
    def of(cls, data: bytes) -> Self:
        """The digest of these bytes."""
        whole, view = hashlib.sha256(data).hexdigest(), memoryview(data)
        if len(data) <= BLOCK:
            return cls(len(data), whole, (whole,))
        blocks = (hashlib.sha256(view[start : start + BLOCK]).hexdigest() for start in range(0, len(data), BLOCK))
        return cls(len(data), whole, tuple(blocks))


@dataclass(frozen=True)
class CheckpointMeta:
    """Facts about a checkpoint, saved with its state.

    request_id: the save's request. A repeated save with the same id gives the same checkpoint.
    expires_at: with a time zone, or None for never. generation: the generation of the worker group. run_metadata: the
    metadata of the training run. programs: `GroupInfo.programs` of the worker group that computed the state.
    `Store.amend` changes `public` and `expires_at` after the save.
    """

    base_model: str
    owner: str
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    expires_at: datetime | None = None
    request_id: str = ""
    generation: int = 0
    run_metadata: Mapping[str, str] = field(default_factory=dict)
    public: bool = False
    programs: str = ""


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, with everything in its database row, so that rows can be rebuilt from commits."""

    path: str
    run_id: str
    kind: str
    name: str
    attempt: str
    spec: LoraSpec
    step: int
    created_at: datetime
    meta: CheckpointMeta
    files: Mapping[str, Digest]
    optimizer: str = DEFAULT_OPTIMIZER

    @property
    def size_bytes(self) -> int:
        """The total size of all files."""
        return sum(digest.size for digest in self.files.values())
