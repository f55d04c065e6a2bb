"""The pages of the console. Each module defines a `router`; `routers` finds the modules by scanning the folder."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from fastapi import APIRouter


def routers() -> list[APIRouter]:
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return [module.router for module in modules]
