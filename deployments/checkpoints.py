"""`tinkerflow checkpoint`: tokens that let others load or copy a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from backend.settings import Settings
from deployments.parts import open_journal

app = typer.Typer(help="Checkpoints: tokens by which others can load or copy one.", no_args_is_help=True)

DataDir = Annotated[Path | None, typer.Option(help="database, models, caches and logs [default: ~/.tinkerflow]")]
_TITLES = ("id", "checkpoint", "made", "expires", "revoked")


@app.command()
def share(
    path: Annotated[str, typer.Argument(help="tinker://run/kind/name")],
    ttl: Annotated[float | None, typer.Option(min=1, help="seconds it is good for [default: until revoked]")] = None,
    data_dir: DataDir = None,
) -> None:
    """Make a weights_access_token for a checkpoint as it is now; it is shown once."""
    with open_journal(_settings(data_dir)) as journal:
        made, token = journal.share_checkpoint(path, None, ttl)
        print(f"{made.id}: {token}")


@app.command()
def shares(
    path: Annotated[str | None, typer.Argument(help="tinker://run/kind/name [default: of all checkpoints]")] = None,
    data_dir: DataDir = None,
) -> None:
    """List the tokens that were made, without the tokens themselves."""
    table = Table(*_TITLES)
    with open_journal(_settings(data_dir)) as journal:
        found = journal.shares(path)
    for one in found:
        times = (one.created_at, one.expires_at, one.revoked_at)
        table.add_row(one.id, one.path, *(f"{time:%Y-%m-%d %H:%M} UTC" if time else "" for time in times))
    Console().print(table)


@app.command()
def unshare(
    share_id: Annotated[str, typer.Argument(help="the id that `checkpoint shares` shows")], data_dir: DataDir = None
) -> None:
    """Make a token useless."""
    with open_journal(_settings(data_dir)) as journal:
        print(f"revoked the token for {journal.unshare(share_id).path}")


def _settings(data_dir: Path | None) -> Settings:
    return Settings() if data_dir is None else Settings(data_dir=data_dir)
