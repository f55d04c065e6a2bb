"""`tinkerflow champion`: the best weights that pipelines have promoted under a name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from tinkerflow.backend.core.errors import ConflictError, NotFoundError
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.deployments.options import DataDir, existing, print_wide, settings_with

if TYPE_CHECKING:
    from tinkerflow.backend.store.blobs import Blobs

app = typer.Typer(help="List the best weights of pipelines, and roll one back.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="name of the champion, which `champion list` shows")]


@app.command("list")
def list_champions(data_dir: DataDir = None) -> None:
    """List the newest champion of each name. `champion/NAME` is a model for OpenAI's and Anthropic's clients."""
    from tinkerflow.backend.catalog.champions import champion_names, newest_champion

    work = _work(data_dir)
    _print([(name, entry) for name in champion_names(work) if (entry := newest_champion(work, name))])


@app.command()
def show(name: Name, data_dir: DataDir = None) -> None:
    """List all champions of a name, oldest first."""
    _print([(name, entry) for entry in _history(_work(data_dir), name)])


@app.command()
def rollback(
    name: Name,
    to: Annotated[
        int | None, typer.Option(help="number of the champion to go back to (default: the one before)")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Promote an earlier champion again, as a new entry: the history stays."""
    from tinkerflow.backend.catalog.champions import champion_key
    from tinkerflow.backend.core.clock import SystemClock
    from tinkerflow.tasks.pipelines.work import create_json

    work = _work(data_dir)
    history = _history(work, name)
    number = to if to is not None else history[-1]["number"] - 1
    entry = next((entry for entry in history if entry["number"] == number), None)
    if entry is None:
        raise NotFoundError(f"champion {name!r}: has no number {number}; its numbers are 1 to {history[-1]['number']}")
    after = entry | {"number": history[-1]["number"] + 1, "promoted_at": SystemClock().now().isoformat()}
    try:
        create_json(work, champion_key(name, after["number"]), after)
    except FileExistsError as error:
        raise ConflictError(f"champion {name!r}: another champion was promoted meanwhile; try again") from error
    print(f"champion/{name} is number {after['number']} now: {after['weights']}")


def _work(data_dir: Path | None) -> Blobs:
    from tinkerflow.backend.store.blobs import open_blobs

    settings = settings_with(data_dir=data_dir)
    return open_blobs(existing(settings, settings.pipelines_url))


def _history(work: Blobs, name: str) -> list[dict[str, Any]]:
    from tinkerflow.backend.catalog.champions import champion_history, champion_names

    if not (history := champion_history(work, name)):
        raise NotFoundError(f"champion {name!r}: does not exist{did_you_mean(name, champion_names(work))}")
    return history


def _print(entries: list[tuple[str, dict[str, Any]]]) -> None:
    from rich.table import Table

    from tinkerflow.tasks.pipelines.parameters import Metric

    metrics = get_args(Metric)
    table = Table("name", "number", "weights", "run", *(metric.replace("_", " ") for metric in metrics), "promoted")
    for name, entry in entries:
        scores = entry["scores"]
        measured = (scores.get(metric) for metric in metrics)
        figures = ("" if value is None else f"{value:.4g}" for value in measured)
        promoted = str(entry["promoted_at"])[:16]
        table.add_row(name, str(entry["number"]), entry["weights"], entry["run"], *figures, promoted)
    print_wide(table, empty="no champions: the pipeline `nightly` promotes them")
