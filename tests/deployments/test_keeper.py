"""Restarts of parts that end, are stopped or hang. The parts are real processes that only write heartbeats."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.supervise import ChildProcess
from tinkerflow.deployments.keeper import Part

PULSE = (
    "from tinkerflow.deployments.pulse import Pulse, say, READY; import time; p = Pulse(hung_seconds=2); p.start(); "
)
PARTS = {
    "well": PULSE + "say(READY); time.sleep(600)",
    "hung": PULSE + "say(READY); p.turns(); time.sleep(600)",
    "broken": "print('I give up', flush=True); exit(3)",
    "refused": "import sys; sys.exit('tinkerflow: the driver has another version\\nsrun: error: Exited with 1')",
}


def test_a_hung_part_without_up_exits_with_the_tracebacks_of_its_threads() -> None:
    hang = "from tinkerflow.deployments.pulse import Pulse; import time; Pulse(hung_seconds=1).turns(); time.sleep(600)"
    ended = subprocess.run((sys.executable, "-c", hang), capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 1 and 'File "<string>", line 1 in <module>' in ended.stderr


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
async def keep(tmp_path: Path, said: list[str]) -> AsyncIterator[Callable[[str], Part]]:
    tasks: list[asyncio.Task[None]] = []
    parts: list[Part] = []

    def started(name: str) -> Part:
        command = (sys.executable, "-c", PARTS[name])
        part = Part(name, command, environment=os.environ, log_dir=tmp_path, silence=10.0, report=said.append)
        tasks.append(asyncio.create_task(part.keep()))
        parts.append(part)
        return part

    yield started
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(part.process is not None and part.process.status is not None for part in parts)


async def ready(part: Part) -> ChildProcess:
    await until(lambda: part.process is not None and part.ready.done())
    assert part.process is not None
    return part.process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_ended_or_stopped_part_is_restarted(keep: Callable[[str], Part], said: list[str], number: int) -> None:
    part = keep("well")
    first = await ready(part)
    os.kill(first.pid, number)
    await until(lambda: part.process is not first and part.ready.done())
    assert first.status == -signal.SIGKILL
    assert any("stopped?" in line for line in said) == (number == signal.SIGSTOP)
    assert said[-1].endswith("started again in 0.1 s")


async def test_hung_part_is_killed(keep: Callable[[str], Part], said: list[str]) -> None:
    first = await ready(keep("hung"))
    await until(lambda: first.status is not None)
    assert "hung sent no heartbeat for" in said[0]


async def test_failing_part_is_restarted_with_back_off(keep: Callable[[str], Part], said: list[str]) -> None:
    keep("broken")
    await until(lambda: sum("status 3" in line for line in said) == 3)
    assert [line.rsplit(" in ")[1] for line in said if "status 3" in line] == ["0.2 s", "0.4 s", "0.8 s"]
    assert "broken: I give up" in said


async def test_part_that_cannot_be_started_is_tried_again(
    keep: Callable[[str], Part], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = keep("well")
    first = await ready(part)
    failures = [OSError(11, "Resource temporarily unavailable")] * 2

    def start(*args: Any, **options: Any) -> ChildProcess:
        if failures:
            raise failures.pop()
        return ChildProcess(*args, **options)

    monkeypatch.setattr("tinkerflow.deployments.keeper.ChildProcess", start)
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: part.process is not first and part.ready.done())
    assert [line.rsplit(" in ")[1] for line in said if "could not be started: [Errno 11]" in line] == ["0.2 s", "0.4 s"]


async def test_start_failure_shows_only_its_user_message(tmp_path: Path) -> None:
    code = "import sys; print('INFO begins', file=sys.stderr); sys.exit('tinkerflow: store x: is away')"
    command = (sys.executable, "-c", code)
    part = Part("engine", command, environment=os.environ, log_dir=tmp_path, silence=10.0, report=print)
    with pytest.raises(UserError, match=r"^store x: is away$"):
        await part.keep(lambda: False)


async def test_reason_of_an_end_after_the_start_is_reported(keep: Callable[[str], Part], said: list[str]) -> None:
    part = keep("refused")
    await until(lambda: said)
    assert said[0] == (
        f"refused ended with status 1: the driver has another version (its log is {part.log}): started again in 0.2 s"
    )


async def test_killed_part_has_no_reason_of_an_earlier_process(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("tinkerflow: the reason of yesterday\n")
    command = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    part = Part("engine", command, environment=os.environ, log_dir=tmp_path, silence=10.0, report=print)
    with pytest.raises(ServerError, match=r"^engine ended with status -9 at the start:\n$"):
        await part.keep(lambda: False)


async def test_part_that_ends_during_the_start_is_an_error(tmp_path: Path, said: list[str]) -> None:
    code = "import sys; print('no such database', file=sys.stderr); exit(4)"
    part = Part(
        "engine", (sys.executable, "-c", code), environment=os.environ, log_dir=tmp_path, silence=10.0, report=print
    )
    with pytest.raises(ServerError, match="engine ended with status 4 at the start:\nno such database"):
        await part.keep(lambda: False)
