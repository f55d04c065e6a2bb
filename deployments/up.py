"""`tinkerflow up`: the Prefect server, the engine with its pool, and the API, as children of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import httpx

from backend.errors import ServerError
from backend.processes import free_port
from backend.settings import Settings
from deployments.parts import READY

STOP_SECONDS = 20.0
LOOK_SECONDS = 0.1
STEADY_SECONDS = 60.0  # a part that ran this long ends a row of failures
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 30.0


@dataclass(frozen=True)
class Part:
    """A child process: its name and the file that holds its log."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    began: float  # monotonic


class Stack:
    """All parts of one deployment on this machine; a context manager that ends what it started.

    Raises ServerError when a part ends before the stack is ready, with the end of that part's log.
    """

    def __init__(self, settings: Settings, *, report: Callable[[str], None]) -> None:
        """Nothing starts yet. `report` gets what the parts say, about compilation for example, from other threads."""
        self.settings = _with_ports(settings)
        self._report = report
        self._parts: list[Part] = []
        self._failures: dict[str, int] = {}
        self._engine_ready = threading.Event()

    @property
    def api_url(self) -> str:
        """Base URL for the tinker SDK."""
        return f"http://{self.settings.host}:{self.settings.port}"

    @property
    def prefect_url(self) -> str:
        """Where Prefect's UI is; empty when nothing is tracked."""
        match self.settings.prefect:
            case "embedded":
                return f"http://127.0.0.1:{self.settings.prefect_port}"
            case "external":
                return os.environ["PREFECT_API_URL"].removesuffix("/").removesuffix("/api")
            case "off":
                return ""

    @property
    def ready_line(self) -> str:
        """The one line that says that requests can be served."""
        return f"ready: {self.api_url}  prefect: {self.prefect_url or 'off'}"

    def __enter__(self) -> Self:
        """Start the parts and wait until requests can be served."""
        self.settings.data_dir.mkdir(parents=True, exist_ok=True)
        try:
            for name in ("engine", "api"):
                self._start(name)
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop all parts."""
        self.stop()

    def keep(self) -> None:
        """Start parts again that end, for ever; each after a pause that grows while it ends soon."""
        while True:
            for part in tuple(self._parts):
                if (status := part.process.poll()) is not None:
                    self._again(part, status)
            time.sleep(LOOK_SECONDS)

    def _again(self, part: Part, status: int) -> None:
        name = part.name
        steady = time.monotonic() - part.began > STEADY_SECONDS
        failures = self._failures[name] = 0 if steady else self._failures.get(name, 0) + 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**failures)
        self._report(f"{name} ended with status {status} (its log is {part.log}): started again in {pause:.1f} s")
        time.sleep(pause)
        self._parts.remove(part)
        self._start(name)

    def stop(self) -> None:
        """SIGTERM to each part, last started first; SIGKILL to who does not end in STOP_SECONDS."""
        for part in reversed(self._parts):
            part.process.send_signal(signal.SIGTERM)  # nothing happens to one that has ended
            try:
                part.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._report(f"{part.name} did not stop in {STOP_SECONDS:.0f} s: killed")
                part.process.kill()
                part.process.wait()
        self._parts.clear()

    def _start(self, name: str) -> None:
        log = self.settings.data_dir / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "deployments.cli", name, "--parent", str(os.getpid())],
                env=os.environ | self.settings.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Ctrl-C reaches only this process, which then stops the parts in order.
                start_new_session=True,
            )
        part = Part(name, process, log, time.monotonic())
        self._parts.append(part)
        assert process.stdout is not None
        threading.Thread(target=self._relay, args=(part, process.stdout), daemon=True).start()

    def _relay(self, part: Part, lines: IO[str]) -> None:
        for line in map(str.rstrip, lines):
            if line == READY:
                self._engine_ready.set()
            else:
                self._report(f"{part.name}: {line}")

    def _wait_until_ready(self) -> None:
        """Until the engine has said READY and the API answers."""
        deadline = time.monotonic() + self.settings.start_deadline
        while not (self._engine_ready.wait(0.1) and self._api_answers()):
            for part in self._parts:
                if (status := part.process.poll()) is not None:
                    raise ServerError(f"{part.name} ended with status {status} at the start:\n{_tail(part.log)}")
            if time.monotonic() > deadline:
                waits_for = "the API" if self._engine_ready.is_set() else "the engine"
                raise ServerError(f"{waits_for} was not ready in {self.settings.start_deadline:.0f} s (start_deadline)")

    def _api_answers(self) -> bool:
        try:
            return httpx.get(f"{self.api_url}/api/v1/healthz", timeout=2.0).is_success
        except httpx.TransportError:
            return False


def _with_ports(settings: Settings) -> Settings:
    """The settings with every port 0 replaced by a free one, and the Prefect mode that the environment asks for."""
    changes: dict[str, object] = {}
    if settings.port == 0:
        changes["port"] = free_port()
    if settings.prefect == "embedded" and os.environ.get("PREFECT_API_URL"):
        changes["prefect"] = "external"
    elif settings.prefect == "embedded" and settings.prefect_port == 0:
        changes["prefect_port"] = free_port()
    return Settings(**(settings.model_dump() | changes))


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
