"""What the handlers work with, made once when the app is."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from tinkerflow.api.auth import Authenticator
from tinkerflow.api.holds import Holds
from tinkerflow.backend.clock import Clock
from tinkerflow.backend.journal import Journal, Limits, Waiters
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store import Store


@dataclass(frozen=True)
class Services:
    """Everything a handler may use.

    urgent: threads for keys and heartbeats, which must not stand in line behind the journal's calls for thousands of
    polls that come together.
    """

    settings: Settings
    journal: Journal
    waiters: Waiters
    store: Store
    auth: Authenticator
    holds: Holds
    urgent: Executor
    clock: Clock
    link_secret: bytes

    @property
    def limits(self) -> Limits:
        """What one project may have at a time."""
        settings = self.settings
        return Limits(
            sampling_requests=settings.max_sampling_requests,
            queued_tokens=settings.max_queued_tokens,
            live_models=settings.max_live_models,
            stored_bytes=settings.max_stored_bytes,
        )
