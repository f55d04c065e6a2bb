"""What all tests share."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

USES_THE_SDK = ("api", "e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK closes some connections only when they are collected, which may be in the middle of a test."""
    for item in items:
        if _uses_the_sdk(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(
                pytest.mark.filterwarnings("ignore:Exception ignored in. <:pytest.PytestUnraisableExceptionWarning")
            )


@pytest.fixture(autouse=True, scope="module")
def _sdk_leaves_sockets_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """So have them collected before the tests of other rooms, for which an open socket is an error."""
    yield
    if _uses_the_sdk(request.path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.fixture(scope="session")
def compiled_programs(pytestconfig: pytest.Config) -> Path:
    """A folder for JAX's compilation cache that all tests share: most of them compile the same few programs."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("jax")


def _uses_the_sdk(path: Path) -> bool:
    return path.parent.name in USES_THE_SDK
