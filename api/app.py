"""The HTTP app: the routers of all modules in `routes`, error handlers, and the routes that need no key."""

from __future__ import annotations

import pkgutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from importlib import import_module
from typing import Any, Literal

from fastapi import Depends, FastAPI

from tinkerflow import __version__
from tinkerflow.api import console, errors, links, openapi, routes
from tinkerflow.api.bodies import Memories
from tinkerflow.api.call import Holds, Services, authorized
from tinkerflow.api.counted import Counted
from tinkerflow.api.hosts import HostGuard
from tinkerflow.api.identity import Authenticator
from tinkerflow.api.metrics import Metrics
from tinkerflow.api.sampler_sessions import EndpointSamplers
from tinkerflow.api.schemas import API, Wire
from tinkerflow.api.text import Tokenizers
from tinkerflow.backend.core.clock import Clock, SystemClock
from tinkerflow.backend.core.threads import FairThreads
from tinkerflow.backend.journal import Journal, Limits, ResultSubscriptions
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store import Store

_SLOW = 8  # threads for work that may take seconds
# The error format in the OpenAPI document. Without this entry, FastAPI would describe its own format.
_REFUSALS: dict[int | str, dict[str, Any]] = {"4XX": {"description": "The request is wrong: the body has the reason."}}
_HEAVY = 2  # threads for large bodies: few, because parsing a body also takes memory


def create_app(
    settings: Settings,
    journal: Journal,
    subscriptions: ResultSubscriptions,
    store: Store,
    *,
    clock: Clock | None = None,
) -> FastAPI:
    """Create the app that serves the tinker protocol, the APIs of OpenAI and Anthropic, and the console.

    Every endpoint needs a key, except healthz, the front page, the OpenAPI document, and signed links.
    Visitors of the console sign in with a key.

    settings: the service's settings. journal, store: must be open. subscriptions: must be running. clock: by default
    the machine's clock.
    """
    # The OpenAPI document describes each endpoint. FastAPI's page for it would load scripts from another site.
    app = FastAPI(title="tinkerflow", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    clock, metrics = clock or SystemClock(), Metrics()
    urgent = ThreadPoolExecutor(2, "urgent")
    app.state.services = Services(
        settings=settings,
        journal=journal,
        subscriptions=subscriptions,
        store=store,
        auth=Authenticator(settings, journal, clock, urgent),
        holds=Holds(),
        urgent=urgent,
        slow=FairThreads("slow", _SLOW),
        heavy=FairThreads("heavy", _HEAVY),
        memories=Memories.for_bodies_of(settings.max_body_bytes),
        clock=clock,
        link_secret=journal.keys.service_secret(links.SECRET),
        metrics=metrics,
        limits=Limits(**{limit.name: getattr(settings, f"max_{limit.name}") for limit in fields(Limits)}),
        samplers=EndpointSamplers(journal, clock, settings.session_timeout),
        tokenizers=Tokenizers(),
        imports=FairThreads("imports", 1),
    )
    app.add_middleware(HostGuard, settings=settings, is_open=app.state.services.auth.is_open)
    app.add_middleware(Counted, metrics=metrics)  # added last, so it is the outermost
    errors.install(app)
    openapi.serve_document(app)
    app.add_api_route(f"{API}/healthz", healthz, methods=["GET"])
    # Every module of `routes` defines a `router`, and some a `link_router` with routes that need a signed link, not a
    # key.
    modules = [import_module(f"{routes.__name__}.{module.name}") for module in pkgutil.iter_modules(routes.__path__)]
    for module in sorted(modules, key=lambda module: -module.router.busy):
        app.include_router(
            module.router, prefix=module.router.at, dependencies=[Depends(authorized)], responses=_REFUSALS
        )
    for module in modules:
        if hasattr(module, "link_router"):
            app.include_router(module.link_router, prefix=API, responses=_REFUSALS)
    for router in console.routers():
        app.include_router(router)
    return app


class Healthy(Wire):
    """The response of healthz: the API is running."""

    status: Literal["ok"] = "ok"


async def healthz() -> Healthy:
    return Healthy()
