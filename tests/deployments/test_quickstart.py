"""What `tinkerflow quickstart` says at its end, with a stand-in for the service. With the real one: tests/e2e."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from rich.console import Console

from tinkerflow.backend.settings import Settings
from tinkerflow.deployments import local
from tinkerflow.deployments import quickstart as module

PAGE = "/runs/flow-run/1234"


class StandIn:
    """A service that starts nothing; `keep` ends as by Ctrl-C."""

    mode = "embedded"
    kept: list[Path]

    def __init__(self, settings: Settings, *, report: Any) -> None:
        self.settings = SimpleNamespace(prefect=self.mode, data_dir=settings.data_dir)
        self.api_url, self.prefect_url, self.ready_line = "http://127.0.0.1:5000", "http://127.0.0.1:5555", "ready"
        self.prefect = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop nothing."""

    def keep(self) -> None:
        self.kept.append(self.settings.data_dir)
        raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    monkeypatch.setattr(StandIn, "kept", [], raising=False)
    monkeypatch.setattr(local, "Stack", StandIn)
    monkeypatch.setattr(module, "teach", lambda *_: (True, PAGE))
    return StandIn


def say(**given: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    assert module.quickstart(console, **given)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_in_a_scratch_folder_is_said_to_be_gone() -> None:
    said = say()
    assert "this page and the run end with this command" in said and "--data-dir DIR" in said and "--stay" in said


def test_a_run_in_a_data_dir_can_be_shown_again(tmp_path: Path) -> None:
    said = say(data_dir=tmp_path)
    assert f"tinkerflow up --data-dir {tmp_path}" in said
    assert f"tinkerflow prefect --page {PAGE} --data-dir {tmp_path}" in said


def test_it_stays_up_when_asked(tmp_path: Path, stand_in: type[StandIn]) -> None:
    said = say(data_dir=tmp_path, stay=True)
    assert stand_in.kept == [tmp_path]
    assert "serving until Ctrl-C: http://127.0.0.1:5000  http://127.0.0.1:5555" in said
    assert f"tinkerflow up --data-dir {tmp_path}" in said and "--stay" not in said


@pytest.mark.parametrize(("prefect", "page"), [("external", PAGE), ("off", "")])
def test_nothing_is_said_of_a_page_that_stays_or_never_was(
    monkeypatch: pytest.MonkeyPatch, prefect: str, page: str
) -> None:
    monkeypatch.setattr(StandIn, "mode", prefect)
    monkeypatch.setattr(module, "teach", lambda *_: (True, page))
    assert say().strip() == "ready"
