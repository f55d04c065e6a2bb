"""The subcommands of `tinkerflow`, by module. Each command parses its options and calls one function."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from tinkerflow.backend.core.errors import TinkerflowError
from tinkerflow.deployments.extras import require_extra
from tinkerflow.deployments.options import explain
from tinkerflow.deployments.overview import ABOUT, CLIENT, MODULES, PREFECT
from tinkerflow.deployments.usage import help_of, is_usage_error, usage_line

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def command_line(*modules: str) -> typer.Typer:
    """The command line with the commands of these modules. A module that is named after a command is a group."""
    # Plain help: rich takes 0.1 s of CPU time.
    app = typer.Typer(name="tinkerflow", help=ABOUT, no_args_is_help=True, rich_markup_mode=None)
    app.callback()(lambda: None)  # otherwise a single command would need no name
    for module in modules:
        part: typer.Typer = import_module(f"tinkerflow.deployments.commands.{module}").app
        if module in MODULES:
            app.add_typer(part, name=module)
        else:
            app.registered_commands += part.registered_commands
    return app


def every_command() -> typer.Typer:
    """The whole command line."""
    return command_line(*sorted(set(MODULES.values())))


def run(module: str) -> None:
    """Run a command of a module. Print an error that a person can fix as one line on stderr.

    The exit status is then 1, or 2 for a wrong command line.
    """
    command, words = typer.main.get_command(command_line(module)), sys.argv[1:]
    if text := help_of(command, words):
        print(text)
        return
    try:
        if words[0] not in CLIENT:
            require_extra("pipelines" if words[0] in PREFECT else "server", f"`tinkerflow {words[0]}`")
        _refuse_empty_paths(command)
        status = command(words, prog_name="tinkerflow", standalone_mode=False)
    except Exception as error:
        if is_usage_error(error):
            print(usage_line(error, words), file=sys.stderr)
            sys.exit(2)
        if (line := one_line(error)) is None:
            raise
        sys.exit(f"tinkerflow: {line}")
    sys.exit(status)


def _refuse_empty_paths(command: Any) -> None:
    """Refuse "", as in `--to "$UNSET"`, for each path in `paths_of`. Typer reads it as the current folder."""
    for one in getattr(command, "commands", {}).values():
        _refuse_empty_paths(one)
    paths = set() if command.callback is None else paths_of(command.callback)
    for param in command.params:
        if param.name in paths:
            param.process_value = partial(_path, param, param.process_value)


def paths_of(function: Callable[..., Any]) -> set[str]:
    """The parameters of a command that are paths, except settings, which `setting` checks."""
    found = set()
    for name, hint in get_type_hints(function, include_extras=True).items():
        if get_origin(hint) is Annotated and hint.__metadata__[0].callback is None:
            kind = hint.__origin__
            found |= {name} if Path in (kind, *get_args(kind)) else set()
    return found


def _path(param: Any, process: Callable[..., Any], ctx: Any, value: Any) -> Any:
    if value == "":
        raise typer.BadParameter("must name a file or a folder; . is the current folder", ctx, param)
    return process(ctx, value)


def one_line(error: Exception) -> str | None:
    """The error as a line for people; None if the error is a bug of ours."""
    if isinstance(error, TinkerflowError):
        return error.message
    from pydantic import ValidationError

    from tinkerflow.deployments.data_dir import fix_of

    match error:
        case ValidationError():
            return explain(error)
        case OSError(errno=number, strerror=why, filename=name) if number in _DISK_ERRORS:
            action = "read or written" if number in (errno.EACCES, errno.EPERM) else "written"
            return f"the file{'' if name is None else f' {name!r}'} cannot be {action} ({why}): {fix_of(error)}"
        case OSError(errno=errno.ENAMETOOLONG, strerror=why, filename=str(name)):
            return f"path '{name[:40]}…' cannot be used ({why}): give a shorter name"
        case UnicodeEncodeError(object=text, reason="surrogates not allowed"):
            return f"{text!r} cannot be used: must be UTF-8"
    if type(error).__module__.startswith("sqlalchemy.") and (cause := getattr(error, "orig", None)) is not None:
        return f"the journal's database cannot be used: {' '.join(str(cause).split())}"
    return None
