"""What commands share: options that are settings, whose help is the setting's description; times, and the console."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tinkerflow.backend.settings import Settings


def setting(name: str, remark: str = "", *, default: str = "") -> Any:
    """An option for the setting `name`.

    remark: what the setting's description does not say. default: what the help says in place of the setting's own
    default, for a command that has another one.
    """
    field = Settings.model_fields[name]
    default = default or ("" if field.default in ("", ()) else str(field.default))
    shown = f" (default: {default})" if default else ""
    return typer.Option(help="; ".join(filter(None, (field.description, remark))) + shown)


DataDir = Annotated[Path | None, setting("data_dir")]


def settings_with(**given: Any) -> Settings:
    """Settings from the environment, with those options on top that were given, which are not None."""
    return Settings(**{name: value for name, value in given.items() if value is not None})


def minute(moment: datetime | None) -> str:
    """A moment for people; "" for none."""
    return f"{moment:%Y-%m-%d %H:%M} UTC" if moment else ""


def plain_console(**options: Any) -> Console:
    """A console that prints texts as they are: the `:train:` of a model's id is no emoji, and `[gpu]` no style."""
    return Console(emoji=False, markup=False, **options)
