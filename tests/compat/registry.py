"""The SDK's methods and commands, and the tests that exercise them. test_table.py checks that none is missing.

A test declares `@exercises("RestClient.list_sessions")`. The test fails unless it calls every declared method itself;
calls inside the SDK do not count. Its assertions must be about the meaning of the answers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, get_args
from unittest.mock import patch

import click
import pytest
import tinker
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.lib.public_interfaces.admin_client import AdminClient

F = TypeVar("F", bound=Callable[..., Any])

CLIENTS: tuple[type, ...] = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    AdminClient,
)
HERE = Path(__file__).parent

_TESTS: dict[str, list[str]] = {}


def exercises(*names: str) -> Callable[[F], F]:
    """Declare that the decorated test calls these methods ("Class.method") or CLI commands ("tinker run list").

    Kinds of chunks ("types.EncodedTextChunk") can be declared, too, but nothing checks that the test uses them.
    """

    def declare(test: F) -> F:
        test.__dict__["exercises"] = names
        for kind in ("ignore:DEPRECATED:FutureWarning", "ignore::tinker.ExperimentalWarning"):
            pytest.mark.filterwarnings(kind)(test)  # deprecated and experimental methods are served too
        for name in names:
            _TESTS.setdefault(name, []).append(f"{Path(inspect.getfile(test)).name}::{test.__name__}")
        return test

    return declare


def tests_of(name: str) -> list[str]:
    """The tests that declare that they exercise a name, as `file::test`, in the modules imported so far."""
    return sorted(set(_TESTS.get(name, [])))


def declared() -> set[str]:
    """All names that tests declare."""
    return set(_TESTS)


def methods() -> list[str]:
    """Every public method of the SDK's clients, as "Class.method", sorted by class and name."""
    return [f"{client.__name__}.{name}" for client in CLIENTS for name in dir(client) if _is_method(client, name)]


def chunks() -> list[str]:
    """Every kind of chunk that a prompt may contain, as "types.ImageChunk"."""
    union = get_args(types.ModelInputChunk)[0]  # the first argument of an Annotated
    return [f"types.{kind.__name__}" for kind in get_args(union)]


def commands() -> list[str]:
    """Every command of the SDK's command line, as "tinker run list"."""
    return sorted(_below(main_cli, "tinker"))


def is_method(name: str) -> bool:
    """Whether a name is "Class.method", not a command or a kind of chunk."""
    return not name.startswith(("tinker ", "types."))


def _is_method(client: type, name: str) -> bool:
    # properties count, because users can reach each public attribute of a class
    return not name.startswith("_") and not inspect.isclass(inspect.getattr_static(client, name))


def _below(command: click.Command, path: str) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield path
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None, f"{path} {name} cannot be loaded"
        yield from _below(child, f"{path} {name}")


@contextmanager
def watched(names: tuple[str, ...]) -> Iterator[set[str]]:
    """Yield a set that collects the methods among `names` that code of this folder calls."""
    called: set[str] = set()
    patches = []
    for name in names:
        if not is_method(name):
            continue
        owner, attribute = name.split(".")
        client = next(c for c in CLIENTS if c.__name__ == owner)
        raw = inspect.getattr_static(client, attribute)
        patches.append(patch.object(client, attribute, _watch(raw, name, called)))
    for each in patches:
        each.start()
    try:
        yield called
    finally:
        for each in patches:
            each.stop()


def _watch(raw: Any, name: str, called: set[str]) -> Any:
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(_watch(raw.__func__, name, called))
    if isinstance(raw, property):
        assert raw.fget is not None
        return property(_watch(raw.fget, name, called))

    @wraps(raw)
    def watching(*args: Any, **kwargs: Any) -> Any:
        if Path(sys._getframe(1).f_code.co_filename).parent == HERE:
            called.add(name)
        return raw(*args, **kwargs)

    return watching
