"""The subcommands of `tinkerflow`, by module. Each command parses its options and calls one function."""

from __future__ import annotations

import errno
import sys
from importlib import import_module

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
    app, words = command_line(module), sys.argv[1:]
    if text := help_of(typer.main.get_command(app), words):
        print(text)
        return
    try:
        if words[0] not in CLIENT:
            require_extra("pipelines" if words[0] in PREFECT else "server", f"`tinkerflow {words[0]}`")
        status = app(words, prog_name="tinkerflow", standalone_mode=False)
    except Exception as error:
        if is_usage_error(error):
            print(usage_line(error, words), file=sys.stderr)
            sys.exit(2)
        if (line := one_line(error)) is None:
            raise
        sys.exit(f"tinkerflow: {line}")
    sys.exit(status)


def one_line(error: Exception) -> str | None:
    """The error as a line for people; None if the error is a bug of ours."""
    if isinstance(error, TinkerflowError):
        return error.message
    from pydantic import ValidationError

    from tinkerflow.deployments.data_dir import fix_of

    match error:
        case ValidationError():
            return explain(error)
        case OSError(errno=number) if number in _DISK_ERRORS:
            where = f" {error.filename!r}" if error.filename else ""
            return f"the file{where} cannot be written ({error.strerror}): {fix_of(error)}"
    if type(error).__module__.startswith("sqlalchemy.") and (cause := getattr(error, "orig", None)) is not None:
        return f"the journal's database cannot be used: {' '.join(str(cause).split())}"
    return None
