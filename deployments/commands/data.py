"""`tinkerflow data`: look at data as a pipeline would read it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tinkerflow.deployments.options import DataDir, plain_console, settings_with
from tinkerflow.deployments.overview import PIPELINES

app = typer.Typer(help="Check data before training, without a server.", no_args_is_help=True)
app.callback()(lambda: None)


@app.command()
def check(
    url: Annotated[str | None, typer.Argument(help="file, folder or URL; or give --config")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of a pipeline, whose data sets are checked")] = None,
    pipeline: Annotated[str, typer.Option(help=f"pipeline to check for: {', '.join(PIPELINES)}")] = "",
    base_model: Annotated[
        str, typer.Option(help="model whose tokenizer and chat template are used (default: the first one served)")
    ] = "",
    kind: Annotated[str, typer.Option(help="form of the rows, as data.kind")] = "auto",
    column: Annotated[list[str] | None, typer.Option(help="FIELD=COLUMN, as in data.columns; may be repeated")] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="field to leave out, as in data.ignore; may be repeated")
    ] = None,
    format_: Annotated[Literal["chat", "text"], typer.Option("--format", help="as model.format")] = "chat",
    max_tokens: Annotated[int, typer.Option(min=8, help="longest sequence, as training.max_tokens")] = 2048,
    against: Annotated[
        str, typer.Option(help="run or checkpoint with a history: shows which rows it was already trained on")
    ] = "",
    show: Annotated[int, typer.Option(min=0, help="number of rows to show as the model reads them")] = 2,
    data_dir: DataDir = None,
) -> None:
    """Show how a pipeline reads data: its form, tokens, lengths, trained tokens, duplicates and problems.

    No server is needed, and no file is written. The tokenizer of tinkerflow/tiny is made in memory.

    The exit status is 0 only if a run with this data would begin. With --against, it is also 1 if a row was trained
    on: word for word, or 80 % of its tokens in n-grams of 13 tokens.
    """
    from tinkerflow.deployments.data_check import check_files, sources_of

    settings = settings_with(data_dir=data_dir)
    row = {"kind": kind, "column": column or [], "ignore": ignore or []}
    sources = sources_of(url, config, pipeline, {**row, "max_tokens": max_tokens, "format": format_})
    if not check_files(plain_console(), settings, sources, base_model, show, against):
        raise typer.Exit(1)
