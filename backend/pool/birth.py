"""What a worker process is told on its standard input, a line each: whom to serve, and later whom to serve next."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True)
class Birth:
    """A driver to connect to. It never stands in argv, where everybody could read it.

    secret: of the generation, as hex. parent: process id of who writes this, and whom the process does not outlive.
    compile_cache_dir: this host's, in place of the one that the driver names; "" = the driver's.
    """

    host: str
    port: int
    secret: str
    generation: int
    rank: int
    parent: int
    compile_cache_dir: str

    def to_line(self) -> bytes:
        """As it is written."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """The inverse of `to_line`."""
        return cls(**json.loads(line))
