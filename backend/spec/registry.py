"""Entries that are declared one to a file and found by scanning their package: a new file is registered by being there.

The scan happens on first use, so that the files may import their own package.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    """An entry has the name that requests use."""

    @property
    def name(self) -> str:
        """The name, the same as the file's."""


Entry = TypeVar("Entry", bound=Named)


class Registry(Mapping[str, Entry], Generic[Entry]):
    """The entries of a package by name, sorted: the object called `attribute` in each of its modules."""

    def __init__(self, package: str, attribute: str, kind: type[Entry]) -> None:
        """`package` is scanned on first use; every module in it must hold an `attribute` of type `kind`."""
        self._package, self._attribute, self._kind = package, attribute, kind

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        package = importlib.import_module(self._package)
        modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
        return {name: self._load(name) for name in modules}

    def _load(self, module: str) -> Entry:
        path = f"{self._package}.{module}"
        entry = getattr(importlib.import_module(path), self._attribute, None)
        if not isinstance(entry, self._kind) or entry.name != module:
            raise TypeError(f"{path} must hold {self._attribute}, a {self._kind.__name__} named {module!r}")
        return entry

    def __getitem__(self, name: str) -> Entry:
        """The entry called `name`; KeyError when there is none."""
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        """The names, sorted."""
        return iter(self._entries)

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._entries)
