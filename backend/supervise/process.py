"""A child process of this one, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tinkerflow.backend.core.disk import make_folder
from tinkerflow.backend.supervise.heartbeat import HeartbeatMonitor


@dataclass(frozen=True)
class Ending:
    """How a process ended, as in "rank 2 was killed by SIGKILL". crashed: by itself, not by a signal from outside."""

    how: str
    crashed: bool


class ChildProcess:
    """A process that this process started. Use it from any thread and any event loop.

    The child leads a session of its own: Ctrl-C reaches only this process, which stops its children in order.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path | None,
        input_lines: bool = False,
        on_line: Callable[[str], None] | None = None,
        sockets: Sequence[int] = (),
    ) -> None:
        """Start the process. OSError when the machine has no room for it.

        command: the program and its arguments.
        environment: all of the process's environment variables.
        log: the file to which its output is appended (made where it is missing, for the owner only); None = our stderr.
        input_lines: whether it gets lines by `write`, until `close_input`; otherwise its standard input is empty.
        on_line: gets each line of its standard output, in a thread of its own; None: standard output goes to `log`.
        sockets: numbers of our open sockets that the process inherits under the same numbers.
        """
        with contextlib.ExitStack() as stack:
            output = 2 if log is None else stack.enter_context(_appended(log)).fileno()
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE if input_lines else subprocess.DEVNULL,
                stdout=output if on_line is None else subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                umask=0o077,  # its files are the service's: no other user may read them
                pass_fds=sockets,
            )
        self.pid = self._process.pid
        self._ended: Future[int] = Future()
        self._ended.set_running_or_notify_cancel()  # whoever stops waiting for the end does not change it
        if on_line is not None:
            threading.Thread(target=self._relay, args=(on_line,), name="output", daemon=True).start()
        threading.Thread(target=self._reap, name=f"process {self.pid}", daemon=True).start()

    @property
    def status(self) -> int | None:
        """Its exit status, the negative number of the signal that killed it, or None while it runs."""
        return self._ended.result() if self._ended.done() else None

    def write(self, line: bytes) -> None:
        """Write to its standard input, far less than a pipe holds; nothing happens when it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: its end has closed the pipe
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def close_input(self) -> None:
        """End its standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens when it has ended."""
        self._process.send_signal(number)

    async def ended(self) -> Ending:
        """Wait until it has ended."""
        status = await asyncio.wrap_future(self._ended)
        return Ending(how_it_ended(status), crashed=status != -signal.SIGKILL)

    async def stop(self, grace: float) -> bool:
        """End it by SIGTERM, or by SIGKILL after `grace` seconds; whether SIGTERM was enough. Repeating is fine."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace):
                await self.ended()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.ended()
            return False
        return True

    def _reap(self) -> None:
        status = self._process.wait()
        if self._process.stdin is not None:
            self.close_input()
        self._ended.set_result(status)

    def _relay(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:  # to the end of the process
            for line in lines:
                on_line(line.decode(errors="replace").rstrip())


async def watch(process: ChildProcess, monitor: HeartbeatMonitor) -> float | None:
    """Wait until `process` ends: None; or until it is silent, as when it was stopped: for how many seconds it was."""
    ended, silent = asyncio.create_task(process.ended()), asyncio.create_task(monitor.silence())
    try:
        await asyncio.wait((ended, silent), return_when=asyncio.FIRST_COMPLETED)
        return None if ended.done() else silent.result()
    finally:
        for task in (ended, silent):
            task.cancel()
        await asyncio.gather(ended, silent, return_exceptions=True)


def how_it_ended(status: int) -> str:
    """`was killed by SIGKILL`, `ended with exit status 1`: for a process's return code."""
    if status >= 0:
        return f"ended with exit status {status}"
    known = {s.value: s.name for s in signal.Signals}
    return f"was killed by {known.get(-status, f'signal {-status}')}"


def _appended(log: Path) -> IO[bytes]:
    make_folder(log.parent)
    return os.fdopen(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
