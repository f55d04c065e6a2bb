"""Commands that train: quickstart, run, serve."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tinkerflow.deployments.options import DataDir, export_data_dir, plain_console, setting, settings_with
from tinkerflow.deployments.overview import PIPELINES, STOPPED

app = typer.Typer()

SCRATCH = "a scratch folder, removed at the end"


@app.command()
def quickstart(
    data_dir: Annotated[Path | None, setting("data_dir", default=SCRATCH)] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="optimizer steps (default: 30)")] = None,
    stay: Annotated[
        bool | None,
        typer.Option(
            "--stay/--no-stay",
            "--keep/--no-keep",
            help="keep serving after the lesson, until Ctrl-C (default: in a terminal)",
        ),
    ] = None,
) -> None:
    """Start everything in a scratch folder and teach the embedded model pig latin through the tinker SDK.

    The exit status is 0 only if the loss fell and the model learned every answer.
    """
    from tinkerflow.deployments.quickstart import STEPS
    from tinkerflow.deployments.quickstart import quickstart as run

    stays = sys.stdin.isatty() and sys.stdout.isatty() if stay is None else stay
    _end(lambda: run(plain_console(), data_dir=data_dir, steps=steps or STEPS, stay=stays))


@app.command()
def run(
    pipeline: Annotated[str, typer.Argument(help=f"one of {', '.join(PIPELINES)}")],
    config: Annotated[Path | None, typer.Option(help="YAML file with the pipeline's parameters")] = None,
    example: Annotated[
        bool, typer.Option("--example", help="use the example data, and start a service for this run")
    ] = False,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="replace a parameter of the file, as in training.steps=10; NAME= leaves it out; may be repeated",
        ),
    ] = None,
    data_dir: Annotated[Path | None, setting("data_dir", default=f"~/.tinkerflow, with --example {SCRATCH}")] = None,
) -> None:
    """Run a fine-tuning pipeline now, and show its progress.

    It uses the service at TINKER_BASE_URL, and the Prefect server at PREFECT_API_URL. If a variable is not set, it
    uses the service or the Prefect server of the data dir. If no Prefect server runs there, it starts one for this run.
    """
    from tinkerflow.deployments.run import run as run_pipeline

    if not example:
        export_data_dir(data_dir)
    changes = change or ()
    _end(lambda: run_pipeline(plain_console(), pipeline, config, example=example, changes=changes, data_dir=data_dir))


def _end(work: Callable[[], bool]) -> None:
    """Do the work, and end this process at once, with status 0 if the work was good, 1 if not, or that of a signal.

    The SDK's daemon threads can abort an interpreter that shuts down (seen with 0.38.0).
    """
    try:
        status = 0 if work() else 1
    except KeyboardInterrupt:
        status = STOPPED
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    sys.stdout.flush()
    os._exit(status)


@app.command()
def serve(
    file: Annotated[Path, typer.Option(help="a prefect.yaml whose deployments are served")],
    limit: Annotated[int, typer.Option(min=1, help="maximum number of simultaneous flow runs")] = 2,
    data_dir: DataDir = None,
) -> None:
    """Execute flow runs of deployments on this machine: scheduled ones, and those started in the Prefect UI.

    SIGTERM or Ctrl-C stops it.
    """
    from tinkerflow.deployments.serve import serve as serve_deployments

    export_data_dir(data_dir)
    serve_deployments(file, settings_with(data_dir=data_dir), limit=limit)
