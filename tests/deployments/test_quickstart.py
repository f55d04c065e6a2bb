"""The end of `tinkerflow quickstart`, with a stand-in for the service. With the real one: tests/e2e."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from rich.console import Console
from tests.health_server import Healthy, health_server
from typer.testing import CliRunner

from tinkerflow.backend.core.prefect_access import PrefectAccess
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments import local
from tinkerflow.deployments import quickstart as module
from tinkerflow.deployments.commands import every_command

PAGE = "/runs/flow-run/1234"


class StandIn:
    """A service that starts nothing, and whose `keep` ends as if by Ctrl-C."""

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


def test_a_scratch_folder_ends_with_the_command_that_keeps_one() -> None:
    assert "to keep it: tinkerflow quickstart --data-dir DIR" in say()


def test_quickstart_keeps_serving_on_request_and_names_its_data_dir(tmp_path: Path, stand_in: type[StandIn]) -> None:
    shown = say(data_dir=tmp_path, stay=True)
    assert stand_in.kept == [tmp_path]
    assert 'serving until Ctrl-C; from Python: tinker.ServiceClient(base_url="http://127.0.0.1:5000"' in shown
    assert f"saved in {tmp_path}; to continue: tinkerflow up --data-dir {tmp_path}" in shown
    assert f"tinkerflow prefect --page {PAGE} --data-dir {tmp_path}" in shown


def test_a_file_gets_every_phase_and_no_escaped_characters() -> None:
    console = Console(file=io.StringIO(), width=200)
    with console.status("starting") as status:
        for line in ("engine: starting the Prefect server", "ready: http://127.0.0.1:5000"):
            module._progress(status)(line)
    console.print(module._table(["a\ufffdb"] * 3, ["c"] * 3))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "engine: starting the Prefect server\nready: http" in shown
    assert "a?b" in shown and "ufffd" not in shown


def test_the_flow_run_is_found_after_a_busy_answer_of_prefect() -> None:
    answers = [(503, b'{"exception_message": "Service Unavailable"}'), (200, b'[{"id": "1234"}]')]

    class Prefect(Healthy):
        def do_POST(self) -> None:
            status, body = answers.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

    with health_server(Prefect) as port:
        prefect = PrefectAccess(f"http://127.0.0.1:{port}/api", "", "")
        assert module._flow_run_page(prefect, "s:train:0") == PAGE
    assert not answers


@pytest.mark.parametrize(("signal", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_interrupted_quickstart_ends_with_the_status_of_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: BaseException, status: int
) -> None:
    def interrupted(*_: object) -> None:
        raise signal

    def ended(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(module, "teach", interrupted)
    monkeypatch.setattr(os, "_exit", ended)
    done = CliRunner().invoke(every_command(), ["quickstart", "--data-dir", str(tmp_path)])
    assert done.exit_code == status
    assert "stopped" in done.stdout and f"to continue: tinkerflow up --data-dir {tmp_path}" in done.stdout
