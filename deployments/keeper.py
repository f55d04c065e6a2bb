"""Runs a part of a deployment (the engine, the API) as a child process, and restarts it when it ends or falls silent.

A part writes lines to its standard output: heartbeats (pulse.py), READY when it serves, and other lines for people.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.core.retry import STEADY_SECONDS, Restarts
from tinkerflow.backend.supervise import ChildProcess, HeartbeatMonitor, watch
from tinkerflow.backend.supervise.processes import tail
from tinkerflow.deployments.pulse import BEAT, READY

STOP_SECONDS = 20.0
FOR_PEOPLE = "tinkerflow: "  # begins a command's last line after an error that a person can fix


def _unanswered() -> Future[None]:
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # so that a cancelled waiter does not cancel the future
    return future


@dataclass(eq=False)
class Part:
    """One part. process: the current child, or the last one. ready: resolved when the child writes READY.

    name: the name for people and for the log file.
    command, environment: how the process is started.
    log_dir: the folder of the log file for its standard error.
    silence: the part is killed after this many seconds without a line.
    report: gets lines for people, also from another thread.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log_dir: Path
    silence: float
    report: Callable[[str], None]
    process: ChildProcess | None = field(default=None, init=False)
    ready: Future[None] = field(default_factory=_unanswered, init=False)
    _lines: int = field(default=0, init=False)  # number of lines from the current process
    _log_start: int = field(default=0, init=False)  # size of the log when the current process was started

    @property
    def log(self) -> Path:
        """The log file for the standard error of the part."""
        return self.log_dir / f"{self.name}.log"

    async def keep(self, may_end: Callable[[], bool] = lambda: True) -> None:
        """Run the part until cancelled. The pause before a restart grows while processes fail.

        A failure is a process that ends soon, before it is ready, or that cannot be started, as when memory is scarce.
        may_end: whether the deployment has started. Until then, the end of a part raises UserError with the line of its
        log that is for people, or else ServerError with the last lines.
        """
        clock, restarts = asyncio.get_running_loop().time, Restarts(1)
        while True:
            began = clock()
            try:
                how, why = f"ended with status {await self._run()}", self._reason()
            except OSError as error:
                if not may_end():
                    raise
                how, why = "could not be started", str(error)
            if not may_end():
                if why:
                    raise UserError(why)
                raise ServerError(f"{self.name} {how} at the start:\n{tail(self.log, since=self._log_start)}")
            pause = restarts.pause(steady=self.ready.done() or clock() - began > STEADY_SECONDS)
            how = f"{how}: {why}" if why else how
            self.report(f"{self.name} {how} (its log is {self.log}): started again in {pause:.1f} s")
            await asyncio.sleep(pause)

    async def _run(self) -> int | None:
        """Start the process, wait until it ends, and return its exit status. Stops the process when cancelled."""
        self._lines = 0
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        if self.ready.done():
            self.ready = _unanswered()
        process = ChildProcess(self.command, environment=self.environment, log=self.log, on_line=self._hear)
        self.process = process
        try:
            monitor = HeartbeatMonitor(self.silence, lambda: self._lines, is_starting=lambda: not self._lines)
            if (silent := await watch(process, monitor)) is not None:
                self.report(f"{self.name} sent no heartbeat for {silent:.0f} s (stopped?): killed")
                process.signal(signal.SIGKILL)
                await process.ended()
        finally:
            if not await process.stop(STOP_SECONDS):
                self.report(f"{self.name} did not stop in {STOP_SECONDS:.0f} s: killed")
        return process.status

    def _reason(self) -> str:
        """Why the last process ended, if one of the last lines of its log is for people; else "". srun adds lines."""
        lines = tail(self.log, 5, self._log_start).splitlines() if self.log.exists() else []
        return next((line.removeprefix(FOR_PEOPLE) for line in reversed(lines) if line.startswith(FOR_PEOPLE)), "")

    def _hear(self, line: str) -> None:
        self._lines += 1
        if line == READY and not self.ready.done():
            self.ready.set_result(None)
        elif line not in (READY, BEAT):
            self.report(f"{self.name}: {line}")
