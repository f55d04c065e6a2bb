"""What the handlers work with, made once when the app is."""

from __future__ import annotations

from dataclasses import dataclass

from api.auth import Authenticator
from api.holds import Holds
from backend.clock import Clock
from backend.journal import Journal, Waiters
from backend.settings import Settings
from backend.store import Store


@dataclass(frozen=True)
class Services:
    """Everything a handler may use."""

    settings: Settings
    journal: Journal
    waiters: Waiters
    store: Store
    auth: Authenticator
    holds: Holds
    clock: Clock
    link_secret: bytes
