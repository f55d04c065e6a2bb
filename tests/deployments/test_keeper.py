"""Parts that end, are stopped or hang: real processes that do nothing but beat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tinkerflow.deployments.keeper import Keeper

PULSE = (
    "from tinkerflow.deployments.pulse import Pulse, say, READY; import time; p = Pulse(hung_seconds=2); p.start(); "
)
PARTS = {
    "well": PULSE + "say(READY); time.sleep(600)",
    "hung": PULSE + "say(READY); p.turns(); time.sleep(600)",
    "broken": "print('I give up', flush=True); exit(3)",
}


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def keeper(tmp_path: Path, said: list[str]) -> Iterator[Keeper]:
    commands = {name: (sys.executable, "-c", code) for name, code in PARTS.items()}
    keeper = Keeper(commands, environment=os.environ, log_dir=tmp_path, silence=10.0, report=said.append)
    yield keeper
    began = [part.process for part in keeper.parts.values()]
    keeper.stop()
    assert all(process.poll() is not None for process in began)


def look_until(keeper: Keeper, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        keeper.look()
        time.sleep(0.05)


def started(keeper: Keeper, name: str) -> subprocess.Popen[str]:
    keeper.start(name)
    look_until(keeper, lambda: keeper.parts[name].ready)
    return keeper.parts[name].process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_part_that_ends_or_is_stopped_is_started_again(keeper: Keeper, said: list[str], number: int) -> None:
    first = started(keeper, "well")
    os.kill(first.pid, number)
    look_until(keeper, lambda: keeper.parts["well"].process is not first and keeper.parts["well"].ready)
    assert first.returncode == -signal.SIGKILL
    assert any("stopped?" in line for line in said) == (number == signal.SIGSTOP)
    assert said[-1].endswith("started again in 0.1 s")


def test_a_part_whose_loop_hangs_is_killed(keeper: Keeper, said: list[str]) -> None:
    first = started(keeper, "hung")
    look_until(keeper, lambda: first.poll() is not None)
    assert "hung was silent for" in said[0]


def test_a_part_that_cannot_start_is_tried_ever_more_rarely(keeper: Keeper, said: list[str]) -> None:
    keeper.start("broken")
    look_until(keeper, lambda: sum("status 3" in line for line in said) == 3)
    assert [line.rsplit(" in ")[1] for line in said if "status 3" in line] == ["0.2 s", "0.4 s", "0.8 s"]
    assert "broken: I give up" in said
