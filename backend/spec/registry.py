"""Registries: each entry is declared in its own file, and a scan of the package collects them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, TypeVar


class Named(Protocol):
    """An entry. Requests use its name."""

    @property
    def name(self) -> str:
        """The name, which is also the file's name."""


Entry = TypeVar("Entry", bound=Named)


def registered(package: str, attribute: str, kind: type[Entry]) -> dict[str, Entry]:
    """The entries of a package, sorted by name: the object called `attribute` in each of its modules.

    Call it after the package has defined everything that its modules import from it. TypeError: a module has no
    `attribute` of type `kind` with the module's name.
    """
    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)):
        entry = getattr(importlib.import_module(f"{package}.{name}"), attribute, None)
        if not isinstance(entry, kind) or entry.name != name:
            raise TypeError(f"{package}.{name} must hold {attribute}, a {kind.__name__} named {name!r}")
        found[name] = entry
    return found
