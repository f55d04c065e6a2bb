"""Entries that are declared one to a file and found by scanning their package: a new file is all that one needs."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, TypeVar


class Named(Protocol):
    """An entry has the name that requests use."""

    @property
    def name(self) -> str:
        """The name, the same as the file's."""


Entry = TypeVar("Entry", bound=Named)


def registered(package: str, attribute: str, kind: type[Entry]) -> dict[str, Entry]:
    """The entries of a package by name, sorted: the object called `attribute` in each of its modules.

    Call it where the package itself has defined all that its modules import from it. TypeError for a module without
    an `attribute` of type `kind` that has the module's name.
    """
    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)):
        entry = getattr(importlib.import_module(f"{package}.{name}"), attribute, None)
        if not isinstance(entry, kind) or entry.name != name:
            raise TypeError(f"{package}.{name} must hold {attribute}, a {kind.__name__} named {name!r}")
        found[name] = entry
    return found
