"""Executes programs that a model wrote: with limits, without network access, with separate temporary files.

    async def solves(facts, answer):
        ran = await run_python(answer, stdin=facts["input"], seconds=5, megabytes=512)
        return float(ran.output.strip() == facts["output"])

On Linux the program runs in separate namespaces (`unshare`, from util-linux): it sees no network and no other process,
all files are read-only, and /tmp is an empty folder in memory. It gets none of our environment variables. Another kind
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
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from weakref import WeakKeyDictionary

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.environments import EnvironmentUnavailableError

COMMAND = "PIPELINES_SANDBOX"
IMAGE = "{image}"  # placeholder in COMMAND
_NAMESPACES = "unshare --user --map-root-user --mount --net --pid --fork --kill-child --mount-proc"
_CLOCK = 3  # wall-clock limit of a program, as a multiple of its CPU limit, because the machine may be busy
_START = 60.0  # seconds for the start and the end of a sandbox
_LINE = 2**25  # bytes of a command's outputs as JSON: two outputs of 1 MiB, at most six bytes for each byte
Files = Mapping[str, str | bytes]
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True)
class Ran:
    """A program that ended.

    status: its exit status, or minus the signal that ended it; 127 if it could not be started, for example because an
    earlier command has filled the sandbox's memory, so that its files cannot be written. timed_out: it exceeded a time
    limit. output, errors: the first MiB of each.
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
    files: Files = MappingProxyType({}),
    seconds: float = 10.0,
    megabytes: int = 1024,
    stdin: str = "",
) -> Ran:
    """Execute a command in a new sandbox. As many commands as there are CPUs run at the same time; the others wait.

    megabytes: memory of each process, and the size of the sandbox's /tmp. See `Sandbox.execute` for all other
    arguments.
    """
    async with Sandbox(megabytes) as sandbox:
        return await sandbox.execute(command, files, seconds, stdin)


class Sandbox:
    """A sandbox whose commands run one after another and share their files. It is a context manager.

    The sandbox starts with its first command. A command's processes end with the command. EnvironmentUnavailableError:
    the sandbox itself failed, for example because it was killed. UserError: this machine cannot isolate a program.
    """

    def __init__(self, megabytes: int = 1024, folders: Sequence[str] = (), image: str = "") -> None:
        """megabytes: memory of each process, and the size of /tmp including `folders`. folders: absolute paths of more
        empty folders. image: replaces {image} in PIPELINES_SANDBOX.
        """
        self._megabytes, self._folders, self._image = megabytes, [*folders], image
        self._process: asyncio.subprocess.Process | None = None
        self._idle = True  # whether no command is being executed

    async def __aenter__(self) -> Sandbox:
        return self

    async def execute(
        self,
        command: Sequence[str],
        files: Files = MappingProxyType({}),
        seconds: float = 10.0,
        stdin: str = "",
        folder: str = "",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Ran:
        """Execute a command. As many commands as there are CPUs run at the same time; the others wait.

        command: the program and its arguments; `python` is the sandbox's own Python. files: texts and bytes to write
        first, by path, absolute or relative to the sandbox's own folder. seconds: CPU time of each process; the
        wall-clock limit is three times as long. stdin: the program's standard input. folder: its working directory;
        "": the sandbox's own folder. variables: more environment variables.
        """
        spec = {
            "command": list(command),
            "files": {name: _encoded(content) for name, content in files.items()},
            "stdin": stdin,
            "seconds": seconds,
            "wall_seconds": (wall_seconds := _CLOCK * seconds),
            "megabytes": self._megabytes,
            "folder": folder,
            "variables": dict(variables),
        }
        async with _slot():
            process = self._process = self._process or await self._start()
            assert process.stdin is not None and process.stdout is not None, "they are pipes"
            self._idle = False
            try:
                async with asyncio.timeout(wall_seconds + _START):
                    process.stdin.write(f"{json.dumps(spec)}\n".encode())
                    await process.stdin.drain()
                    ran = Ran(**json.loads(await process.stdout.readline()))
            except (ConnectionError, ValueError, TypeError) as error:
                errors = await self._end()
                why = f"status {process.returncode}: {errors.decode(errors='replace')[-300:]}"
                raise EnvironmentUnavailableError(f"the sandbox ended before its program, with {why}") from error
            self._idle = True
            return ran

    async def _start(self) -> asyncio.subprocess.Process:
        own = shlex.split(os.environ.get(COMMAND, ""))
        if not own and (reason := await asyncio.to_thread(_refusal)):
            raise UserError(
                f"{COMMAND} is empty, and this machine cannot keep a program from the network by itself ({reason}): "
                "set it to a command that starts a container"
            )
        if IMAGE in " ".join(own) and not self._image:
            raise UserError(f"{COMMAND} {' '.join(own)!r}: {IMAGE} works only for tasks that name an image")
        own = [part.replace(IMAGE, self._image) for part in own]
        try:
            process = await asyncio.create_subprocess_exec(
                *(*(own or (*_NAMESPACES.split(), sys.executable)), "-I", "-c", _child()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=_LINE,
            )
        except OSError as error:
            raise EnvironmentUnavailableError(f"the sandbox cannot be started: {error}") from error
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(_settings(self._megabytes, self._folders, isolated=not own).encode())
        return process

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _end(self) -> bytes:
        """End the sandbox. Returns its last errors. It removes its files itself, unless a command is being executed."""
        process = self._process
        if process is None:
            return b""
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()
        try:
            async with asyncio.timeout(_START if self._idle else 0):
                return (await process.communicate())[1]
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return (await process.communicate())[1]


def _slot() -> asyncio.Semaphore:
    """The event loop's semaphore, held while a command is executed."""
    return _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))


def _encoded(content: str | bytes) -> str:
    # A model may write half of a surrogate pair, which is an error of its program and not of the sandbox.
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return b64encode(data).decode()


def _settings(megabytes: int, folders: Sequence[str], *, isolated: bool) -> str:
    return json.dumps({"megabytes": megabytes, "folders": list(folders), "isolated": isolated}) + "\n"


@cache
def _refusal() -> str:
    """The reason why this machine cannot isolate a program, or "" if it can."""
    try:
        command = [*_NAMESPACES.split(), sys.executable, "-I", "-c", _child()]
        begun = _settings(1024, ["/app"], isolated=True)
        ended = subprocess.run(command, input=begun, capture_output=True, text=True, timeout=_START, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ended.stderr[-300:] if ended.returncode else ""


@cache
def _child() -> str:
    return Path(__file__).with_name("sandbox_child.py").read_text()
