"""Keeping the parts of a deployment running: one that ends, or is silent, is started again.

A part writes lines to its standard output: beats (pulse.py), READY when it serves, and anything else for people.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tinkerflow.backend.retry import backoff
from tinkerflow.deployments.pulse import BEAT, READY

STOP_SECONDS = 20.0
LOOK_SECONDS = 0.1
BIRTH_SECONDS = 60.0  # until a part's first line: it has hardly imported anything by then
ASLEEP_SECONDS = 5.0  # we did not look for so long: the machine slept, or we were stopped
STEADY_SECONDS = 60.0  # a part that ran this long ends a row of failures


@dataclass
class Part:
    """A child process, and the file that holds its log. Times are monotonic; heard: its last line, if there was one."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    began: float
    heard: float | None = None
    ready: bool = False


class Keeper:
    """Child processes by name. Use it from one thread; `report` is also called from others."""

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        *,
        environment: Mapping[str, str],
        log_dir: Path,
        silence: float,
        report: Callable[[str], None],
    ) -> None:
        """Nothing starts yet. silence: seconds without a line after which a part counts as stopped, and is killed."""
        self._commands = commands
        self._environment = environment
        self._log_dir = log_dir
        self._silence = silence
        self._report = report
        self._failures = dict.fromkeys(commands, 0)
        self._due: dict[str, float] = {}  # parts that have ended: when they are started again
        self._looked = time.monotonic()
        self.parts: dict[str, Part] = {}

    def start(self, name: str) -> None:
        """Start a part."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log = self._log_dir / f"{name}.log"
        with log.open("a") as errors:
            process = subprocess.Popen(
                self._commands[name],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Ctrl-C reaches only this process, which then stops the parts in order.
                start_new_session=True,
            )
        part = self.parts[name] = Part(name, process, log, time.monotonic())
        assert process.stdout is not None
        threading.Thread(target=self._relay, args=(part, process.stdout), daemon=True).start()

    def keep(self) -> None:
        """Look after the parts for ever."""
        while True:
            self.look()
            time.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Kill parts that are silent, and start again those that have ended: after a pause that grows while they fail.

        A failure is a life that ended soon and before the part was ready.
        """
        now = time.monotonic()
        if now - self._looked > ASLEEP_SECONDS:
            for part in self.parts.values():
                part.heard = now
        self._looked = now
        for part in tuple(self.parts.values()):
            if part.name in self._due:
                if now >= self._due[part.name]:
                    del self._due[part.name]
                    self.start(part.name)
            elif (status := part.process.poll()) is not None:
                self._ended(part, status, now)
            elif (silent := now - (part.heard or part.began + BIRTH_SECONDS)) > self._silence:
                self._report(f"{part.name} was silent for {silent:.0f} s (stopped?): killed")
                part.process.kill()
                part.process.wait()

    def stop(self) -> None:
        """SIGTERM to each part, last started first; SIGKILL to who does not end in STOP_SECONDS."""
        for part in reversed(self.parts.values()):
            part.process.send_signal(signal.SIGTERM)  # nothing happens to one that has ended
            try:
                part.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._report(f"{part.name} did not stop in {STOP_SECONDS:.0f} s: killed")
                part.process.kill()
                part.process.wait()
        self.parts.clear()

    def _ended(self, part: Part, status: int, now: float) -> None:
        steady = part.ready or now - part.began > STEADY_SECONDS
        failures = self._failures[part.name] = 0 if steady else self._failures[part.name] + 1
        pause = backoff(failures + 1)
        self._due[part.name] = now + pause
        self._report(f"{part.name} ended with status {status} (its log is {part.log}): started again in {pause:.1f} s")

    def _relay(self, part: Part, lines: IO[str]) -> None:
        with lines:  # to the end of the process
            for line in map(str.rstrip, lines):
                part.heard = time.monotonic()
                if line == READY:
                    part.ready = True
                elif line != BEAT:
                    self._report(f"{part.name}: {line}")
