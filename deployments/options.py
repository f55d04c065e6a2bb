"""Options of the command line that are settings: their help is the setting's description."""

from __future__ import annotations

from typing import Any

import typer

from tinkerflow.backend.settings import Settings


def setting(name: str, remark: str = "") -> Any:
    """An option for the setting `name`; remark: what the setting's description does not say."""
    field = Settings.model_fields[name]
    default = f" (default: {field.default})" if field.default not in ("", ()) else ""
    return typer.Option(help="; ".join(filter(None, (field.description, remark))) + default)


def settings_with(**given: Any) -> Settings:
    """Settings from the environment, with those options on top that were given, which are not None."""
    return Settings(**{name: value for name, value in given.items() if value is not None})
