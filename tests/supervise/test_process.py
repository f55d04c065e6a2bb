"""Real child processes that end, hang and write lines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tinkerflow.backend.supervise import ChildProcess, Ending, HeartbeatMonitor, watch
from tinkerflow.backend.supervise.process import how_it_ended

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"


def python(code: str, log: Path | None = None, **options: object) -> ChildProcess:
    return ChildProcess((sys.executable, "-c", code), environment=os.environ, log=log, **options)  # type: ignore[arg-type]


def test_exit_statuses_are_described() -> None:
    assert how_it_ended(0) == "ended with exit status 0"
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-40) == "was killed by signal 40"


async def test_every_waiter_gets_the_ending_of_a_process(tmp_path: Path) -> None:
    child = python("exit(3)", tmp_path / "logs" / "x.log")
    given_up = asyncio.create_task(child.ended())
    await asyncio.sleep(0)
    given_up.cancel()
    assert await child.ended() == await child.ended() == Ending("ended with exit status 3", crashed=True)
    assert child.status == 3
    child.signal(signal.SIGKILL)  # has no effect


async def test_output_is_appended_to_a_log_of_the_owner(tmp_path: Path) -> None:
    for _ in range(2):
        await python("import sys; print('out'); print('error', file=sys.stderr)", tmp_path / "x.log").ended()
    assert sorted((tmp_path / "x.log").read_text().split()) == ["error", "error", "out", "out"]
    assert (tmp_path / "x.log").stat().st_mode & 0o777 == 0o600


async def test_lines_are_passed_in_both_directions(tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import sys\nfor line in sys.stdin: print(line.strip() + '!', flush=True)"
    child = python(code, tmp_path / "x.log", input_lines=True, on_line=lines.append)
    child.write(b"one\n")
    child.write(b"two\n")
    child.close_input()
    assert (await child.ended()).how == "ended with exit status 0"
    async with asyncio.timeout(60):
        while len(lines) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert lines == ["one!", "two!"]
    child.write(b"nobody reads this\n")


@pytest.mark.parametrize("deaf", [False, True])
async def test_stop_kills_only_a_process_that_ignores_sigterm(tmp_path: Path, deaf: bool) -> None:
    lines: list[str] = []
    code = DEAF if deaf else "import signal; print('up', flush=True); signal.pause()"
    child = python(code, tmp_path / "x.log", on_line=lines.append)
    async with asyncio.timeout(60):
        while not lines:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await child.stop(grace=0.2 if deaf else 60.0) is not deaf
    assert child.status == (-signal.SIGKILL if deaf else -signal.SIGTERM)
    assert await child.stop(grace=60.0)


async def test_watch_distinguishes_an_ended_from_a_silent_process(tmp_path: Path) -> None:
    child = python("import signal; signal.pause()", tmp_path / "x.log")
    assert await watch(child, HeartbeatMonitor(0.06, lambda: 0)) == pytest.approx(0.06)
    child.signal(signal.SIGKILL)
    assert await watch(child, HeartbeatMonitor(60.0, lambda: 0)) is None
    assert await child.ended() == Ending("was killed by SIGKILL", crashed=False)


def test_process_survives_the_loop_that_started_it(tmp_path: Path) -> None:
    async def start() -> ChildProcess:
        return python("import signal; signal.pause()", tmp_path / "x.log")

    child = asyncio.run(start())
    assert child.status is None
    assert asyncio.run(child.stop(60.0))
