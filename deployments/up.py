"""`tinkerflow up`: the Prefect server, the engine, the workers and the API, as children of one process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tinkerflow.backend.errors import ServerError
from tinkerflow.backend.processes import free_port, tail
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.keeper import LOOK_SECONDS, Keeper
from tinkerflow.deployments.local_host import LocalHost


class Stack:
    """All parts of one deployment on this machine; a context manager that ends what it started.

    Raises ServerError when a part ends before the stack is ready, with the end of that part's log.
    """

    def __init__(self, settings: Settings, *, report: Callable[[str], None]) -> None:
        """Nothing starts yet. `report` gets what the parts say, about compilation for example, from other threads."""
        self.settings = _with_ports(settings)
        self._workers = LocalHost(self.settings, report=report) if not settings.group else None
        parent = str(os.getpid())
        self._keeper = Keeper(
            {name: (sys.executable, "-m", "tinkerflow", name, "--parent", parent) for name in ("engine", "api")},
            environment=os.environ | self.settings.environment(),
            log_dir=self.settings.data_dir / "logs",
            silence=self.settings.heartbeat_timeout,
            report=report,
        )

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
            if self._workers is not None:
                self._workers.start()
            for name in ("engine", "api"):
                self._keeper.start(name)
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
        """Start parts again that end or are silent, for ever."""
        self._keeper.keep()

    def stop(self) -> None:
        """End all parts, and then what an engine may have left."""
        self._keeper.stop()
        if self._workers is not None:
            self._workers.stop()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.settings.start_deadline
        while waits_for := [name for name, part in self._keeper.parts.items() if not part.ready]:
            for name, part in self._keeper.parts.items():
                if (status := part.process.poll()) is not None:
                    raise ServerError(f"{name} ended with status {status} at the start:\n{tail(part.log)}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"not ready in {self.settings.start_deadline:.0f} s (start_deadline): {', '.join(waits_for)}"
                )
            time.sleep(LOOK_SECONDS)


def _with_ports(settings: Settings) -> Settings:
    """The settings with every port 0 replaced by a free one, and the Prefect mode that the environment asks for."""
    changes: dict[str, object] = {}
    if settings.port == 0:
        changes["port"] = free_port()
    if not settings.group:
        changes["group"] = f"127.0.0.1:{free_port()}"
    if settings.prefect == "embedded" and os.environ.get("PREFECT_API_URL"):
        changes["prefect"] = "external"
    elif settings.prefect == "embedded" and settings.prefect_port == 0:
        changes["prefect_port"] = free_port()
    return Settings(**(settings.model_dump() | changes))
