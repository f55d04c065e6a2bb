"""The API with its small engine (tests/api), and a recorder in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.api.conftest import engine, journal, migrated, server, settings_for, start

from tinkerflow.deployments.cassettes.file import CassetteWriter, Recording, read_cassette
from tinkerflow.deployments.cassettes.record import Recorder
from tinkerflow.deployments.cassettes.server import serving

__all__ = ["engine", "journal", "migrated", "server", "settings_for", "start"]


class Tape:
    """A recording in progress. url: the recorder's."""

    def __init__(self, url: str, recorder: Recorder) -> None:
        self.url = url
        self.recorder = recorder


@pytest.fixture
def record(server, engine, tmp_path: Path) -> Callable[..., Iterator[Tape]]:
    """`with record(name) as tape:` records the requests to `tape.url`. The file is complete after the block."""

    @contextmanager
    def recording(name: str = "one.cassette") -> Iterator[Tape]:
        with CassetteWriter(tmp_path / name) as writer:
            recorder = Recorder(server.url, writer)
            with serving(recorder.app()) as url:
                yield Tape(url, recorder)
            writer.close()

    return recording


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Recording]:
    """recorded(name) reads a recording."""
    return lambda name="one.cassette": read_cassette(tmp_path / name)
