"""`tinkerflow models`: make or download base models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tinkerflow.deployments.options import DataDir, setting, settings_with, writing

app = typer.Typer(help="Create or download base models.", no_args_is_help=True)


@app.command("make-tiny")
def make_tiny_model(folder: Annotated[Path, typer.Argument(help="folder to write")]) -> None:
    """Write the tiny embedded model (Qwen3) and its tokenizer, with the same bytes every time."""
    from tinkerflow.deployments.tiny_model import make_tiny

    with writing("folder", folder):
        make_tiny(folder)
    print(folder)


@app.command("fetch")
def fetch_models(
    base_model: Annotated[list[str] | None, setting("base_models", "may be repeated")] = None,
    weights: Annotated[
        bool, typer.Option(help="with the weights (default), or with only the tokenizer, for the API")
    ] = True,
    data_dir: DataDir = None,
) -> None:
    """Make or download base models on this host, and print their folders.

    Without --base-model, the models are those of TINKERFLOW_BASE_MODELS, as for `tinkerflow up`.
    """
    from tinkerflow.backend.catalog.model_source import HUB_FILES, TEXT_FILES, find_model
    from tinkerflow.deployments.parts import with_base_models

    settings = settings_with(base_models=tuple(base_model) if base_model else None, data_dir=data_dir)
    for name in with_base_models(settings).base_models:
        print(find_model(name, HUB_FILES if weights else TEXT_FILES))
