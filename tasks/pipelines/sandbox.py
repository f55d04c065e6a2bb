"""Execute a program that a model wrote: with limits, without the network, with temporary files of its own.

    async def solves(facts, answer):
        ran = await run_python(answer, stdin=facts["input"], seconds=5, megabytes=512)
        return float(ran.output.strip() == facts["output"])

On Linux the program has namespaces of its own (`unshare`, from util-linux): it sees no network and no other process,
all files are read-only, and /tmp is an empty folder in memory. Its environment has no variables of ours. Another kind
of sandbox, such as a container, is a command in PIPELINES_SANDBOX, to which a Python program is appended:

    PIPELINES_SANDBOX="docker run --rm -i --network none --memory 1g python:3.12-slim python3"
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.environments import EnvironmentUnavailableError

COMMAND = "PIPELINES_SANDBOX"
_NAMESPACES = "unshare --user --map-root-user --mount --net --pid --fork --kill-child --mount-proc"
_CLOCK = 3  # times the CPU time of a program that it may last: a busy machine is not the program's fault
_START = 60.0  # seconds for the start and the end of a sandbox
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True)
class Ran:
    """A program that ended. status: its exit status, or minus the signal that ended it. timed_out: at a time limit.
    output, errors: the first MiB of each.
    """

    status: int
    timed_out: bool
    output: str
    errors: str


async def run_python(code: str, seconds: float = 10.0, megabytes: int = 1024, stdin: str = "") -> Ran:
    """Execute Python code in a sandbox; see `run_program`."""
    return await run_program(["python", "-I", "main.py"], {"main.py": code}, seconds, megabytes, stdin)


async def run_program(
    command: Sequence[str],
    files: Mapping[str, str],
    seconds: float = 10.0,
    megabytes: int = 1024,
    stdin: str = "",
) -> Ran:
    """Execute a command in a sandbox. There are at most as many sandboxes at once as CPUs; others wait.

    command: the program and its arguments; `python` is the sandbox's own Python. files: texts, by their paths below the
    folder in which the program begins. seconds: CPU time of each process; the program ends after three times as long by
    the clock. megabytes: memory of each process, and the size of its /tmp. stdin: the program's standard input.
    Raises EnvironmentUnavailableError when the sandbox itself fails, for example because it is killed. Raises UserError
    when this machine cannot isolate a program.
    """
    spec = {
        "command": list(command),
        "files": dict(files),
        "stdin": stdin,
        "seconds": seconds,
        "wall_seconds": _CLOCK * seconds,
        "megabytes": megabytes,
    }
    own = shlex.split(os.environ.get(COMMAND, ""))
    if not own and (reason := await asyncio.to_thread(_refusal)):
        raise UserError(
            f"{COMMAND} is empty, and this machine cannot keep a program from the network by itself ({reason}): set it "
            "to a command that starts a container"
        )
    async with _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1)):
        return await _run(own or [*_NAMESPACES.split(), sys.executable], spec | {"isolated": not own})


async def _run(sandbox: Sequence[str], spec: Mapping[str, Any]) -> Ran:
    try:
        process = await asyncio.create_subprocess_exec(
            *(*sandbox, "-I", "-c", _child()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentUnavailableError(f"the sandbox cannot be started: {error}") from error
    try:
        async with asyncio.timeout(spec["wall_seconds"] + _START):
            output, errors = await process.communicate(json.dumps(spec).encode())
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    try:
        return Ran(**json.loads(output))
    except (ValueError, TypeError) as error:
        why = f"status {process.returncode}: {errors.decode(errors='replace')[-300:]}"
        raise EnvironmentUnavailableError(f"the sandbox ended before its program, with {why}") from error


@cache
def _refusal() -> str:
    """The reason why this machine cannot isolate a program; "" if it can."""
    spec = {"files": {}, "stdin": "", "seconds": 10, "wall_seconds": 30, "megabytes": 1024, "isolated": True}
    try:
        command = [*_NAMESPACES.split(), sys.executable, "-I", "-c", _child()]
        nothing = json.dumps({**spec, "command": ["python", "-c", ""]})
        ended = subprocess.run(command, input=nothing, capture_output=True, text=True, timeout=_START, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ended.stderr[-300:] if ended.returncode else ""


@cache
def _child() -> str:
    return Path(__file__).with_name("sandbox_child.py").read_text()
