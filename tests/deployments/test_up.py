"""A stack that fails to start reports the reason, and leaves no process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.commands.service import up
from tinkerflow.deployments.up import Stack


def children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            found |= set((task / "children").read_text().split())
    return found


def test_late_stack_names_its_parts(tmp_path: Path) -> None:
    before = children()
    settings = Settings(data_dir=tmp_path, port=0, prefect="off", start_deadline=0.1)
    with pytest.raises(ServerError, match=r"not ready within 0 s \(start_deadline\): engine, api"):
        Stack(settings, report=print).__enter__()
    assert children() <= before


def test_a_part_that_ends_at_the_start_is_named_with_its_log(tmp_path: Path) -> None:
    before = children()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    settings = Settings(data_dir=tmp_path, port=0, prefect="off", base_models=(str(tmp_path / "model"),))
    with pytest.raises(UserError, match=r"^base model '.*/model': .*config\.json cannot be read.*$"):
        Stack(settings, report=print).__enter__()
    assert children() <= before


def test_closed_output_does_not_end_the_service(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def closed(line: str) -> None:
        raise BrokenPipeError(line)

    stack = Stack(Settings(data_dir=tmp_path, port=0, prefect="off"), report=closed)
    for report in (stack.report, *(part.report for part in stack._parts)):
        report("engine: warm")
    stack._loop.close()
    assert caplog.text.count("cannot report 'engine: warm': BrokenPipeError") == 3


def test_up_is_ready_although_its_output_has_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Stack] = []
    monkeypatch.setattr(Stack, "__enter__", lambda stack: stack)
    monkeypatch.setattr(Stack, "keep", lambda stack: kept.append(stack))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setenv("TINKERFLOW_PREFECT", "off")
    with suppress(OSError), Path("/dev/full").open("w", buffering=1) as full:  # the file is flushed when it is closed
        monkeypatch.setattr(sys, "stdout", full)
        up(port=0, data_dir=tmp_path)
    assert len(kept) == 1, "the service ended"
    kept[0]._loop.close()


def test_ray_launcher_without_a_cluster_names_the_command_that_starts_one(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, port=0, prefect="off", launcher="ray")
    with pytest.raises(UserError, match=r"^launcher 'ray': .*(`ray start --head`|install the extra `ray`).*$"):
        Stack(settings, report=print).__enter__()


def test_uncreatable_data_dir_is_a_one_line_error(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "file" / "data", port=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/data': cannot be written \(.+\): choose another --data-dir"):
        Stack(settings, report=print)


def test_occupied_port_is_refused_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits for the port"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        settings = Settings(data_dir=tmp_path, port=server.getsockname()[1])
        with pytest.raises(UserError, match=r"^port \d+ of 127\.0\.0\.1: address already in use; choose another"):
            Stack(settings, report=print)


def test_the_reason_of_a_failed_lookup_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_server(address: tuple[str, int], **_: object) -> None:
        reason = f"Name or service not known (while attempting to bind on address {address!r})"
        raise OSError(socket.EAI_NONAME, reason)  # as Python raises it

    monkeypatch.setattr(socket, "create_server", create_server)
    with pytest.raises(UserError, match=r"^port 1 of gpubox: name or service not known; choose another with --host"):
        Stack(Settings(data_dir=tmp_path, host="gpubox", port=1), report=print)


def test_importing_up_loads_no_large_library() -> None:
    code = "import sys; import tinkerflow.deployments.up; print({'sqlalchemy', 'jax', 'prefect'} & {*sys.modules})"
    loaded = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "set()", loaded
