"""A child process, from its start to its end."""

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
    """The end of a process. how: for example "was killed by SIGKILL". crashed: False after SIGKILL."""

    how: str
    crashed: bool


class ChildProcess:
    """A process that this process started. Use it from any thread and any event loop.

    The child leads its own session, so Ctrl-C reaches only this process, which stops its children in turn.
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
        """Start the process. OSError: the start failed.

        command: the program and its arguments.
        environment: all environment variables of the process.
        log: the file for its output, which is appended; None: our stderr. A new file is readable only by its owner.
        input_lines: whether `write` sends lines until `close_input`. Otherwise its standard input is empty.
        on_line: called with each line of its standard output, in another thread; None: standard output goes to `log`.
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
                umask=0o077,  # only the owner may read its files
                pass_fds=sockets,
            )
        self.pid = self._process.pid
        self._ended: Future[int] = Future()
        self._ended.set_running_or_notify_cancel()  # so that a cancelled `ended` does not cancel the future
        if on_line is not None:
            threading.Thread(target=self._relay, args=(on_line,), name="output", daemon=True).start()
        threading.Thread(target=self._reap, name=f"process {self.pid}", daemon=True).start()

    @property
    def status(self) -> int | None:
        """The exit status, or the negative number of the signal that killed the process; None while it runs."""
        return self._ended.result() if self._ended.done() else None

    def write(self, line: bytes) -> None:
        """Write a short line to the process's standard input. Does nothing if the process has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: the pipe is closed
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def close_input(self) -> None:
        """Close the process's standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def signal(self, number: int) -> None:
        """Send a signal. Does nothing if the process has ended."""
        self._process.send_signal(number)

    async def ended(self) -> Ending:
        """Wait until the process has ended."""
        status = await asyncio.wrap_future(self._ended)
        return Ending(how_it_ended(status), crashed=status != -signal.SIGKILL)

    async def stop(self, grace: float) -> bool:
        """End the process with SIGTERM, or with SIGKILL after `grace` seconds. Returns whether SIGTERM was enough."""
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
        with self._process.stdout as lines:  # until the process ends
            for line in lines:
                on_line(line.decode(errors="replace").rstrip())


async def watch(process: ChildProcess, monitor: HeartbeatMonitor) -> float | None:
    """Wait until `process` ends or is silent. Returns None if it ended, or else the seconds of silence."""
    ended, silent = asyncio.create_task(process.ended()), asyncio.create_task(monitor.silence())
    try:
        await asyncio.wait((ended, silent), return_when=asyncio.FIRST_COMPLETED)
        return None if ended.done() else silent.result()
    finally:
        for task in (ended, silent):
            task.cancel()
        await asyncio.gather(ended, silent, return_exceptions=True)


def how_it_ended(status: int) -> str:
    """A description of a return code: `was killed by SIGKILL`, `ended with exit status 1`."""
    if status >= 0:
        return f"ended with exit status {status}"
    known = {s.value: s.name for s in signal.Signals}
    return f"was killed by {known.get(-status, f'signal {-status}')}"


def _appended(log: Path) -> IO[bytes]:
    make_folder(log.parent)
    return os.fdopen(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
