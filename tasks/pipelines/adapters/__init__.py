"""Libraries of environments, one module for each: `reasoning_gym` serves `reasoning-gym:NAME` and `reasoning-gym://`.

A module defines `environment_maker(name)`, which makes the conversations of `environment: PREFIX:NAME`, and
`read_rows(url, split)`, which returns the rows of a data source `PREFIX://…`.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.environments import Asked, EnvironmentMaker, check_methods, load


def adapter_named(prefix: str) -> ModuleType | None:
    """The module for this prefix of an environment or of a data source's URL, or None.

    UserError: the module's library is not installed.
    """
    modules = {module.name.replace("_", "-"): module.name for module in pkgutil.iter_modules(__path__)}
    if prefix not in modules:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # some libraries warn while they are compiled
            return import_module(f"{__name__}.{modules[prefix]}")
    except ImportError as error:
        raise UserError(f"{prefix}: install {prefix}: pip install '.[environments]' ({error})") from error


def url_settings(query: str) -> dict[str, Any]:
    """The settings in a URL's query. Values that are not valid JSON are texts."""
    settings: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def environment_maker(reward: str, environment: str) -> EnvironmentMaker:
    """The function that makes conversations: with `environment`, or with one turn that the function `reward` rewards.

    environment: the import path of a class, or PREFIX:NAME for an environment of a library in `adapters`.
    UserError: an import path is wrong, the function does not accept two arguments, or a method of the class is not
    `async def`.
    """
    if environment:
        prefix, _, name = environment.partition(":")
        adapter = adapter_named(prefix)
        if adapter is not None:
            return adapter.environment_maker(name)  # type: ignore[no-any-return]
        made = load("environment", environment)
        if inspect.isclass(made):
            check_methods(made, environment)
        return made
    function = load("reward", reward)
    try:
        inspect.signature(function).bind({}, "")
    except TypeError as error:
        raise UserError(f"reward {reward!r}: {error}; it is called with the row's fields and the answer") from error
    except ValueError:  # a builtin without a signature
        pass
    return lambda facts: Asked(facts, function)
