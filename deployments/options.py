"""Helpers for commands: options from settings, errors of options, times, tables, and the console.

The help of every command imports this module, so it imports pydantic and rich only where they are used.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.deployments.setting_help import describe
from tinkerflow.deployments.usage import value_of

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from rich.console import Console
    from rich.table import Table

    from tinkerflow.backend.settings import Settings


def _named(param: typer.CallbackParam, value: Any) -> Any:
    """The path of an option. Typer turns an empty path, as in `--data-dir "$UNSET"`, into the current folder."""
    if not isinstance(value, Path) or value_of(param, sys.argv[1:]) != "":
        return value
    if param.name == "data_dir":
        raise typer.BadParameter("must name a folder; . is the current one")
    return None


def setting(name: str, remark: str = "", *, default: str = "") -> Any:
    """An option for the setting `name`.

    remark: text in addition to the setting's description. default: the default that the help shows, for a command whose
    default differs from the setting's.
    """
    description, usual = describe(name)
    default = default or ("" if usual in ("", ()) else str(usual))
    shown = f" (default: {default})" if default else ""
    return typer.Option(help="; ".join(filter(None, (description, remark))) + shown, callback=_named)


DataDir = Annotated[Path | None, setting("data_dir")]


def settings_with(**given: Any) -> Settings:
    """Settings from the environment, overridden by the given options that are not None.

    UserError: a value is wrong. For a value from the environment, the error names its variable.
    """
    from pydantic import ValidationError

    from tinkerflow.backend.settings import Settings, variable_of

    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        return Settings(**chosen)
    except ValidationError as error:
        names = {name: variable_of(name) for name in Settings.model_fields if name not in chosen}
        raise UserError(explain(error, names=names)) from error


def export_data_dir(data_dir: Path | None) -> None:
    """Make settings that are read later, and child processes, use the given data dir.

    UserError: the path cannot be a data dir.
    """
    if data_dir is not None:
        settings_with(data_dir=data_dir)
        os.environ["TINKERFLOW_DATA_DIR"] = str(data_dir.absolute())


def minute(moment: datetime | None) -> str:
    """A time for people, to the minute; "" for None."""
    return f"{moment:%Y-%m-%d %H:%M} UTC" if moment else ""


def plain_console(**options: Any) -> Console:
    """A console that prints text unchanged: `:train:` in a model's id is no emoji, and `[gpu]` is no style."""
    from rich.console import Console

    return Console(emoji=False, markup=False, **options)


def print_wide(table: Table, *, empty: str = "") -> None:
    """Print a table whose cells people copy: a narrow table would fold or cut paths and ids.

    empty: the line to print instead of a table without rows.
    """
    if empty and not table.row_count:
        print(empty)
        return
    plain_console(width=max(plain_console().width, 240)).print(table)


def write_output(file: Path, text: str) -> None:
    """Write the file of the option --output. UserError: the file cannot be written."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {str(file)!r}: cannot be written ({error.strerror})") from error


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Write a new file or folder, or a draft beside it, in the block.

    option: the name for people of the option or argument with the path. UserError: the disk is full, or there cannot
    be a file in that place.
    """
    try:
        yield
    except OSError as error:
        folder, at = path.absolute().parent, Path(error.filename or "").absolute()
        below = at.relative_to(folder).parts[:1] if folder in at.parents else ()  # the file, its folder or its draft
        is_there = folder == at or at in folder.parents or any(path.name in name for name in below)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) and not (error.filename and is_there):
            raise  # errors of a file that is read, or of a closed output
        raise UserError(f"{option} {str(path)!r}: cannot be written ({error.strerror})") from error


def existing(settings: Settings, url: str) -> str:
    """The URL of a store. UserError: the store is a folder of a data dir that does not exist."""
    if is_in_missing_data_dir(settings, url):
        raise UserError(f"data dir {settings.data_dir}: does not exist")
    return url


def is_in_missing_data_dir(settings: Settings, url: str) -> bool:
    """Whether the store at `url` is a folder of a data dir that does not exist."""
    return f"{url}/".startswith(f"{settings.data_dir.as_uri()}/") and not settings.data_dir.is_dir()


def database_of(settings: Settings) -> str:
    """The journal's database without user and password, which may precede the host or be in the query."""
    return settings.journal_url.rsplit("@", 1)[-1].partition("?")[0]


def explain(
    error: ValidationError,
    model: type[BaseModel] | None = None,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The error as a line for people: the place, the value and the rule of each wrong value.

    model: the owner of the parameters, to suggest names for unknown parameters. names: replace outermost places.
    """
    return "; ".join(_explain(wrong, model, names) for wrong in error.errors(include_url=False))


def _explain(wrong: Any, model: type[BaseModel] | None, names: Mapping[str, str]) -> str:
    first, *inner = map(str, wrong["loc"] or ("settings",))
    *outer, last = first, *inner
    place = ".".join((names.get(first, first), *inner))
    if wrong["type"] == "extra_forbidden":
        known = [
            *_fields(model, outer),
            *(f"{name}.{last}" for name in _fields(model, []) if last in _fields(model, [name])),
        ]
        return f"{place}: is not a parameter{did_you_mean(last, known)}"
    message = wrong["msg"].removeprefix("Value error, ")
    value = wrong["input"]
    if wrong["type"] == "model_type" and (known := _fields(model, wrong["loc"])):
        if isinstance(value, str) and "url" in known:
            return f"{place}: must be a section: write {place}: {{url: {value if '@' not in value else '...'}}}"
        return f"{place}: must be a section with names such as {', '.join(known[:3])}"
    # A URL may contain a password. Some messages begin with the value.
    hidden = "url" in last or message.startswith(repr(value))
    simple = isinstance(value, str | int | float | bool) and not hidden
    return f"{place}: {value!r}: {message}" if simple else f"{place}: {message}"


def _fields(model: type[BaseModel] | None, path: list[Any]) -> list[str]:
    """The names of the fields of a model, below a path of field names."""
    from pydantic import BaseModel

    for name in path:
        field = None if model is None else model.model_fields.get(str(name))
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return [] if model is None else list(model.model_fields)
