"""Pytest fixtures for tests of your own flows: `pytest_plugins = ["tinkerflow.deployments.testing"]` in conftest.py.

`tiny_service`: the whole service on the embedded tiny model; nothing is tracked, and no Prefect server is needed.
`plain_calls`: calls of tasks and flows are plain function calls (`task.fn`). Together, these two fixtures test a flow
in seconds. `prefect_harness`: a real Prefect server with its own database, for tests of retries, states and artifacts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from prefect import Flow, Task

from tinkerflow.deployments.local import API_KEY, running_stack
from tinkerflow.deployments.parts import with_base_models

if TYPE_CHECKING:
    import tinker

_PREFECTS_OWN = ("wait_for", "return_state", "deferred")


@dataclass(frozen=True)
class TinyService:
    """A running service. url: its API's URL. base_model: the name of its only model. store: URL of its checkpoints."""

    url: str
    base_model: str
    store: str

    def client(self) -> tinker.ServiceClient:
        """A new client of the SDK; close it, or use it in a `with`."""
        import tinker

        return tinker.ServiceClient(base_url=self.url, api_key=API_KEY)


@contextmanager
def serve_tiny(data_dir: Path, **settings: Any) -> Iterator[TinyService]:
    """Run the API, the engine and a worker as child processes until the block ends.

    data_dir: for everything that the service stores; a reused folder already contains compiled programs. settings: as
    in Settings. In the block, TINKER_BASE_URL and TINKER_API_KEY point to the service, so that flows find it.
    """
    plain: dict[str, Any] = {"prefect": "off", "warm_up": False}
    with running_stack(data_dir, lambda line: None, **(plain | settings)) as stack:
        base_model = with_base_models(stack.settings).base_models[0]
        yield TinyService(stack.api_url, base_model, stack.settings.store_url)


@contextmanager
def calls_as_functions() -> Iterator[None]:
    """Make calls of tasks and flows plain function calls: no server, states, retries or parameter checks.

    This applies to tasks that are called, not to tasks that are submitted or mapped to a task runner.
    """

    def call(self: Task[..., Any] | Flow[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **{name: value for name, value in kwargs.items() if name not in _PREFECTS_OWN})

    with mock.patch.object(Task, "__call__", call), mock.patch.object(Flow, "__call__", call):
        yield


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
    """Make calls of tasks and flows plain function calls during a test."""
    with calls_as_functions():
        yield


@pytest.fixture(scope="module")
def prefect_harness() -> Iterator[None]:
    """A real Prefect server with its own database, for the flows of one module's tests."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=900):
        yield
