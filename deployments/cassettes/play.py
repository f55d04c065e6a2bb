"""Answer a block of a program from a cassette."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tinkerflow.backend.core.environment import variables
from tinkerflow.backend.core.errors import UserError
from tinkerflow.deployments.cassettes.file import read_cassette
from tinkerflow.deployments.cassettes.replay import Replay
from tinkerflow.deployments.cassettes.server import API_KEY, is_recorded_now, serving

_QUIET = {"TINKER_TELEMETRY": "0"}


class CassetteError(AssertionError):
    """The program's requests differ from the recording."""


@dataclass(frozen=True)
class Playing:
    """A cassette that is being replayed. url: its server's URL, also in TINKER_BASE_URL."""

    url: str


@contextmanager
def play(path: str | Path, *, ignore: Collection[str] = (), partial: bool = False) -> Iterator[Playing]:
    """Answer the tinker SDK from a cassette during the block, through TINKER_BASE_URL and TINKER_API_KEY.

    path: the cassette. While `tinkerflow cassette record -o` records into this file, the block is answered by the real
    service. ignore: dotted paths of fields that may differ, such as `user_metadata.started`. partial: accept a
    recording that was interrupted.

    UserError: the file cannot be replayed. CassetteError, at the end of the block: a request differed from the
    recording, or was missing. An exception of the block itself takes precedence.
    """
    path = Path(path)
    if is_recorded_now(path):
        yield Playing(os.environ["TINKER_BASE_URL"])
        return
    replay = open_replay(path, ignore, partial=partial)
    with serving(replay.app()) as url, variables({"TINKER_BASE_URL": url, "TINKER_API_KEY": API_KEY} | _QUIET):
        yield Playing(url)
    if differences := replay.script.report():
        raise CassetteError(f"{path.name}: " + "\n".join(differences))


def open_replay(path: Path, ignore: Collection[str] = (), *, partial: bool = False) -> Replay:
    """Open a cassette for replay. UserError: as in `read_cassette`; for a missing file, names the recording command."""
    if not path.exists():
        raise UserError(f"there is no cassette {path}: `tinkerflow cassette record -o {path} -- COMMAND` records it")
    return Replay(read_cassette(path, partial=partial), ignore)
