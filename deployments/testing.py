"""Pytest fixtures for tests of your own flows: `pytest_plugins = ["tinkerflow.deployments.testing"]` in conftest.py.

`tiny_service`: the whole service in this process, on the embedded tiny model; nothing is tracked, and no Prefect server
is needed. `plain_calls`: calls of tasks and flows are plain function calls (`task.fn`). Together these two test a flow
in seconds. `prefect_harness`: a real Prefect server with its own database, for tests of retries, states and artifacts.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from prefect import Flow, Task

from tinkerflow.backend.processes import free_port
from tinkerflow.backend.settings import Settings

if TYPE_CHECKING:
    import tinker

KEY = "tml-test"
_PREFECTS_OWN = ("wait_for", "return_state", "deferred")


@dataclass(frozen=True)
class TinyService:
    """A running service. url: of its API. base_model: the name of its only model. store: URL of its checkpoints."""

    url: str
    base_model: str
    store: str

    def client(self) -> tinker.ServiceClient:
        """A new client of the SDK; close it, or use it in a `with`."""
        import tinker

        return tinker.ServiceClient(base_url=self.url, api_key=KEY)


@contextmanager
def serve_tiny(data_dir: Path, **settings: Any) -> Iterator[TinyService]:
    """The API and the engine in a thread of this process until the block ends; a worker process computes.

    data_dir: for everything that the service stores; a folder that is used again has the programs compiled. settings:
    as in Settings. In the block, TINKER_BASE_URL and TINKER_API_KEY name the service, so that flows find it.
    """
    from tinkerflow.api.serve import serve_until
    from tinkerflow.deployments.parts import with_base_models
    from tinkerflow.flows import run_engine

    plain: dict[str, Any] = {"host": "127.0.0.1", "port": free_port(), "prefect": "off", "warm_up": False}
    chosen = with_base_models(Settings(data_dir=data_dir, **(plain | settings)))
    url = f"http://{chosen.host}:{chosen.port}"
    names = {"TINKER_BASE_URL": url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}

    async def main(ready: Callable[[], None], stop: asyncio.Event) -> None:
        computing = asyncio.Event()
        engine = asyncio.create_task(run_engine(chosen, on_ready=computing.set, on_progress=lambda line: None))
        try:
            first = asyncio.create_task(computing.wait())
            await asyncio.wait((engine, first), return_when=asyncio.FIRST_COMPLETED)
            first.cancel()
            if not engine.done():
                await serve_until(stop, chosen, on_ready=ready)
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
        if not engine.cancelled():
            engine.result()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, names))
        stack.enter_context(_in_thread(main))
        yield TinyService(url, str(chosen.base_models[0]), chosen.store_url)


@contextmanager
def calls_as_functions() -> Iterator[None]:
    """Make calls of tasks and flows plain function calls: no server, states, retries or parameter checks.

    This is for tasks that are called, not for tasks that are submitted or mapped to a task runner.
    """

    def call(self: Task[..., Any] | Flow[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **_for_the_function(kwargs))

    with mock.patch.object(Task, "__call__", call), mock.patch.object(Flow, "__call__", call):
        yield


def _for_the_function(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _PREFECTS_OWN}


@contextmanager
def _in_thread(main: Callable[[Callable[[], None], asyncio.Event], Any]) -> Iterator[None]:
    """Run `main(ready, stop)` in an event loop of another thread; the block begins when it calls `ready`."""
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    ended: Future[None] = Future()

    async def run() -> None:
        stop = asyncio.Event()
        await main(lambda: begun.set_result((asyncio.get_running_loop(), stop)), stop)

    def thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001  the thread that opened the block raises it
            ended.set_exception(error)
            if not begun.done():
                begun.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=thread, name="tiny service", daemon=True).start()
    loop, stop = begun.result()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        ended.result(60)


@pytest.fixture(scope="session")
def tiny_service(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[TinyService]:
    """The service on the embedded tiny model, for the whole session. Compiled programs are kept in pytest's cache."""
    folder = tmp_path_factory.mktemp("tinkerflow")
    if pytestconfig.cache is not None:
        (folder / "jax-cache").symlink_to(pytestconfig.cache.mkdir("jax"))
    with serve_tiny(folder) as service:
        yield service


@pytest.fixture
def plain_calls() -> Iterator[None]:
    """Calls of tasks and flows are plain function calls."""
    with calls_as_functions():
        yield


@pytest.fixture(scope="module")
def prefect_harness() -> Iterator[None]:
    """A real Prefect server with its own database, for the flows of one module's tests."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=900):
        yield
