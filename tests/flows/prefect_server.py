"""Fixtures of a real embedded Prefect server, and a client for requests to it."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prefect.client.base import PrefectHttpxSyncClient
from prefect.settings import PREFECT_API_AUTH_STRING

from tinkerflow.flows.prefect.server import PrefectServer, listen, start_server


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, prefect_database: Callable[[Path], None]
) -> Iterator[PrefectServer]:
    listener = asyncio.run(listen(0))
    prefect_database(data_dir := tmp_path_factory.mktemp("prefect"))
    server = asyncio.run(start_server(data_dir, listener))
    yield server
    asyncio.run(server.stop())
    listener.close()


@pytest.fixture(scope="module")
def collected_connections() -> Iterator[None]:
    """Close the connections of Prefect's clients, because an open socket is an error in a later module's tests.

    Prefect's flow engine does not close the client that reads the default storage of results. Another thread may still
    refer to it here.
    """
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    for client in [one for one in gc.get_objects() if issubclass(type(one), PrefectHttpxSyncClient)]:
        client.close()


def prefect_http(api_url: str, credential: str | None = None) -> httpx.AsyncClient:
    """A client with this credential, or with the one in Prefect's settings. An empty credential is not sent."""
    credential = PREFECT_API_AUTH_STRING.value() if credential is None else credential
    auth = httpx.BasicAuth(*credential.split(":", 1)) if credential else None
    return httpx.AsyncClient(base_url=api_url, auth=auth, timeout=60)
