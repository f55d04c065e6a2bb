"""`tinker://` paths of checkpoints, and the keys under which a store keeps their files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from tinkerflow.backend.errors import UserError
from tinkerflow.backend.ids import NAME_RULE, CheckpointKind, is_name

WEIGHTS, SAMPLER_WEIGHTS, EXTERNAL_WEIGHTS = CheckpointKind
KINDS = tuple(CheckpointKind)
RECOVERY = "recovery"  # recovery snapshots: clients can neither list nor name them; the journal knows their paths
RUNS = "runs"
UPLOADS = "uploads"  # files that are uploaded, until they become a checkpoint
RUN_RULE = "1 to 200 letters, digits, '.', '_', ':' or '-', not starting with '.' or ':'"
# Run ids contain ':' (`sess-1:train:0`). POSIX file names and object keys allow it, so all stores have one layout.
_RUN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._:-]{0,199}")


def is_run_id(text: str) -> bool:
    """Whether `text` may be a run id: see RUN_RULE (one path segment, no traversal)."""
    return _RUN.fullmatch(text) is not None


def check_run_id(text: str) -> str:
    """The run id itself; UserError when it is malformed."""
    if not is_run_id(text):
        raise UserError(f"checkpoint run id {text!r}: must be {RUN_RULE}")
    return text


@dataclass(frozen=True)
class CheckpointPath:
    """`tinker://{run_id}/{kind}/{name}`. Every part is checked, so that no path leads out of the store."""

    run_id: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        """UserError when a part is malformed."""
        check_run_id(self.run_id)
        if self.kind not in (*KINDS, RECOVERY):
            raise UserError(f"checkpoint kind {self.kind!r}: must be one of {', '.join(KINDS)}")
        if not is_name(self.name):
            raise UserError(f"checkpoint name {self.name!r}: must be {NAME_RULE}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The parts of `tinker://run/kind/name`; UserError for any other text."""
        scheme, separator, rest = text.partition("://")
        parts = rest.split("/")
        if scheme != "tinker" or not separator or len(parts) != 3:
            raise UserError(f"checkpoint path {text!r}: must be tinker://<run id>/<{'|'.join(KINDS)}>/<name>")
        return cls(*parts)

    @classmethod
    def of_folder(cls, folder: str) -> Self:
        """The path whose attempt's key prefix this is."""
        _, run_id, kind, name, _ = folder.split("/")
        return cls(run_id, kind, name)

    def __str__(self) -> str:
        """The tinker:// URI."""
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    @property
    def folder(self) -> str:
        """The key prefix that holds the commit object and the attempts."""
        return f"{RUNS}/{self.run_id}/{self.kind}/{self.name}"

    @property
    def commit(self) -> str:
        """The key of the commit object."""
        return f"{self.folder}/commit.json"

    def attempt(self, attempt: str) -> str:
        """The key prefix of one attempt's files."""
        return f"{self.folder}/{attempt}"
