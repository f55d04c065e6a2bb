"""`tinkerflow limit`: limits for individual projects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.deployments.options import DataDir, print_wide, settings_with

app = typer.Typer(
    help="Set limits of single projects, in place of the limits of the settings (docs/keys-and-limits.md).",
    no_args_is_help=True,
)


@app.command("set")
def set_limits(
    project: Annotated[str, typer.Argument(help="the project, which `key list` shows")],
    limits: Annotated[
        list[str],
        typer.Argument(
            help="such as max_live_models=2; 0: no limit; `default`: the value of the setting", metavar="NAME=VALUE..."
        ),
    ],
    data_dir: DataDir = None,
) -> None:
    """Change limits of a project. A running service applies them within seconds."""
    from tinkerflow.backend.journal import command_line_actor
    from tinkerflow.deployments.parts import open_journal

    changes = dict(map(_parsed, limits))
    with open_journal(settings_with(data_dir=data_dir)) as journal:
        own = journal.project_limits.set(project, changes, command_line_actor())
        if project not in (known := {key.project for key in journal.keys.all()}):
            near = did_you_mean(project, known)
            typer.echo(
                f"project {project} has no key yet{near}: `tinkerflow key create NAME --project {project}`", err=True
            )
    print(f"{project}: {_shown(own)}")


@app.command("list")
def list_limits(data_dir: DataDir = None) -> None:
    """List the projects that have limits of their own."""
    from rich.table import Table

    from tinkerflow.deployments.parts import open_existing_journal

    table = Table("project", "limits")
    with open_existing_journal(settings_with(data_dir=data_dir)) as journal:
        known = {key.project for key in journal.keys.all()}
        for project, own in journal.project_limits.all().items():
            table.add_row(project if project in known else f"{project} (no such project yet)", _shown(own))
    print_wide(table, empty="no project has its own limits: `tinkerflow limit set PROJECT NAME=VALUE` sets one")


def _parsed(limit: str) -> tuple[str, int | None]:
    name, equals, value = limit.partition("=")
    if not equals or not (value == "default" or (value.isdecimal() and len(value) < 20)):
        raise UserError(f"limit {limit!r}: must be NAME=VALUE with a number or `default`, such as max_live_models=2")
    return name, None if value == "default" else int(value)


def _shown(own: Mapping[str, int]) -> str:
    return ", ".join(f"max_{name}={value}" for name, value in own.items()) or "the limits of the settings"
