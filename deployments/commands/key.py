"""`tinkerflow key`: create, list and revoke API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.core.ids import LOCAL_OWNER
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.deployments.options import DataDir, database_of, minute, print_wide, settings_with

if TYPE_CHECKING:
    from tinkerflow.backend.journal.keys import KeyView

app = typer.Typer(
    help="Create, list and revoke API keys. While there are none, a server on loopback accepts every tml- key.",
    no_args_is_help=True,
)


@app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="name of the key, such as its user or purpose")],
    project: Annotated[
        str, typer.Option(help="project whose runs and checkpoints the key reads and writes")
    ] = "default",
    admin: Annotated[
        bool, typer.Option("--admin", help="the key reads everything of all projects, and manages all keys")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Create an API key; its secret is shown once. The first key's project takes over earlier work without a key."""
    from tinkerflow.backend.journal import command_line_actor
    from tinkerflow.deployments.parts import open_journal

    settings = settings_with(data_dir=data_dir)
    with open_journal(settings) as journal:
        first = not journal.keys.has_any()
        local = journal.models.runs(LOCAL_OWNER, limit=1, offset=0).total if first else 0
        key, secret = journal.keys.create(name, project, admin=admin, actor=command_line_actor())
        print(f"{key.id}: {secret}")
        typer.echo(f"stored in {database_of(settings)}, for services that use this database", err=True)
        if local and key.project != LOCAL_OWNER:
            note = f"project {key.project} takes over {local} training run(s) that were created without a key"
            typer.echo(note, err=True)


@app.command("list")
def list_keys(
    project: Annotated[str | None, typer.Option(help="only the keys of this project")] = None, data_dir: DataDir = None
) -> None:
    """List the API keys, without their secrets."""
    from rich.table import Table

    from tinkerflow.deployments.parts import open_existing_journal

    table = Table("id", "name", "project", "admin", "starts with", "made", "last used", "revoked")
    with open_existing_journal(settings_with(data_dir=data_dir)) as journal:
        keys = journal.keys.all()
    for key in (key for key in keys if project in (None, key.project)):
        times = (key.created_at, key.last_used_at, key.revoked_at)
        table.add_row(key.id, key.name, key.project, "yes" if key.admin else "", key.prefix, *map(minute, times))
    print_wide(table, empty="no keys: `tinkerflow key create NAME` creates one")


@app.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(help="the key's id or name, which `key list` shows")], data_dir: DataDir = None
) -> None:
    """Revoke an API key."""
    from tinkerflow.backend.journal import command_line_actor
    from tinkerflow.deployments.parts import open_existing_journal

    with open_existing_journal(settings_with(data_dir=data_dir)) as journal:
        key_id = _id_of(key, journal.keys.all())
        print(f"revoked {journal.keys.revoke(key_id, actor=command_line_actor()).name}")


def _id_of(wanted: str, keys: list[KeyView]) -> str:
    """The id of the key with this id, or of the only usable key with this name."""
    if any(key.id == wanted for key in keys):
        return wanted
    named = [key.id for key in keys if key.name == wanted and key.revoked_at is None]
    if len(named) > 1:
        raise UserError(f"key {wanted!r}: {len(named)} keys have this name; give one of their ids: {', '.join(named)}")
    if not named:
        usable = [name for key in keys if key.revoked_at is None for name in (key.id, key.name)]
        raise NotFoundError(f"key {wanted!r}: no usable key has this id or name{did_you_mean(wanted, usable)}")
    return named[0]
