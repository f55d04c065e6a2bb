"""Libraries of environments, one module for each: `reasoning_gym` serves `reasoning-gym:NAME` and `reasoning-gym://`.

A module has `environment_maker(name)`, which makes the conversations of `environment: PREFIX:NAME`, and
`read_rows(url)`, the rows of a data source `PREFIX://…`. It imports its library when one of them is called.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType

from tinkerflow.tasks.pipelines.environments import Asked, EnvironmentMaker, load


def adapter_named(prefix: str) -> ModuleType | None:
    """The module for this prefix of an environment or of a data source's URL; None when there is none."""
    modules = {module.name.replace("_", "-"): module.name for module in pkgutil.iter_modules(__path__)}
    return import_module(f"{__name__}.{modules[prefix]}") if prefix in modules else None


def environment_maker(reward: str, environment: str) -> EnvironmentMaker:
    """What makes conversations: `environment`, or one turn with the function `reward`.

    environment: the import path of a class, or PREFIX:NAME for one of a library in `adapters`.
    Raises UserError when an import path is wrong.
    """
    if environment:
        prefix, _, name = environment.partition(":")
        adapter = adapter_named(prefix)
        return load("environment", environment) if adapter is None else adapter.environment_maker(name)
    function = load("reward", reward)
    return lambda facts: Asked(facts, function)
