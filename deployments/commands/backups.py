"""`tinkerflow backup` and `tinkerflow restore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tinkerflow.deployments.options import DataDir, settings_with, writing

app = typer.Typer()


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="file to write; it must not exist")], data_dir: DataDir = None
) -> None:
    """Copy the database, the store, the pipelines' work folder and Prefect's database into one file.

    The service may keep running. A part that is stored elsewhere (PostgreSQL, a bucket) is named and not copied.
    """
    from tinkerflow.deployments.backup import write_backup

    with writing("backup", file):
        for line in write_backup(settings_with(data_dir=data_dir), file):
            print(line)


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="file that `tinkerflow backup` wrote")], data_dir: DataDir = None
) -> None:
    """Unpack a backup into a data dir that is new or empty."""
    from tinkerflow.deployments.backup import restore_backup, unused_places

    settings = settings_with(data_dir=data_dir)
    for line in (*restore_backup(file, settings.data_dir), *unused_places(settings)):
        print(line)
