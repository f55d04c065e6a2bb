"""The HTTP app."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from fastapi import Depends, FastAPI

from tinkerflow.api import errors, links
from tinkerflow.api.auth import Authenticator
from tinkerflow.api.call import Holds, Services, Wire, authorised
from tinkerflow.api.routes import (
    auth,
    billing,
    copies,
    downloads,
    futures,
    lookup,
    runs,
    sampling,
    service,
    sessions,
    training,
    weights,
)
from tinkerflow.backend.clock import Clock, SystemClock
from tinkerflow.backend.journal import Journal, Waiters
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store import Store

_PREFIX = "/api/v1"


def create_app(
    settings: Settings, journal: Journal, waiters: Waiters, store: Store, *, clock: Clock | None = None
) -> FastAPI:
    """The app that speaks the tinker protocol. `waiters` must be running.

    Only healthz answers without a key, and what a signed link leads to.
    """
    app = FastAPI(title="tinkerflow", openapi_url=None)
    clock = clock or SystemClock()
    urgent = ThreadPoolExecutor(2, "urgent")
    app.state.services = Services(
        settings=settings,
        journal=journal,
        waiters=waiters,
        store=store,
        auth=Authenticator(settings, journal, clock, urgent),
        holds=Holds(),
        urgent=urgent,
        clock=clock,
        link_secret=journal.service_secret(links.SECRET),
    )
    errors.install(app)
    app.add_api_route(f"{_PREFIX}/healthz", _healthz, methods=["GET"])
    busiest_first = (
        futures,
        training,
        sampling,
        service,
        sessions,
        weights,
        runs,
        lookup,
        billing,
        auth,
        copies,
        downloads,
    )
    for subject in busiest_first:
        app.include_router(subject.router, prefix=_PREFIX, dependencies=[Depends(authorised)])
    app.include_router(downloads.link_router, prefix=_PREFIX)
    app.include_router(lookup.link_router, prefix=_PREFIX)
    return app


class Health(Wire):
    """The API answers."""

    status: Literal["ok"] = "ok"


async def _healthz() -> Health:
    return Health()
