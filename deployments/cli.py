"""The `tinkerflow` command: each subcommand parses its options and calls one function."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError
from rich.table import Table

from tinkerflow.backend.core.errors import TinkerflowError, UserError
from tinkerflow.backend.core.prefect_access import find_server
from tinkerflow.backend.journal import command_line_actor
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments import checkpoint_commands
from tinkerflow.deployments.options import DataDir, minute, plain_console, setting, settings_with
from tinkerflow.deployments.parts import open_journal, run_api_part, run_engine_part, run_worker_part, with_base_models
from tinkerflow.deployments.run import example_names

app = typer.Typer(
    name="tinkerflow",
    help="Self-hosted fine-tuning with the tinker SDK: JAX workers on your machines, shown in Prefect.",
    no_args_is_help=True,
)
models = typer.Typer(help="Make or download base models.", no_args_is_help=True)
keys = typer.Typer(
    help="Create, list and revoke API keys. While there are none, a server on loopback accepts every tml- key.",
    no_args_is_help=True,
)
app.add_typer(models, name="models")
app.add_typer(keys, name="key")
app.add_typer(checkpoint_commands.app, name="checkpoint")

Parent = Annotated[int, typer.Option(hidden=True, help="end when this process ends")]
SCRATCH = "a scratch folder, removed at the end"


def main() -> None:
    """Run the command line; errors that we raise on purpose are one line on stderr and exit status 1."""
    try:
        app()
    except TinkerflowError as error:
        sys.exit(f"tinkerflow: {error.message}")
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors())
        sys.exit(f"tinkerflow: {'; '.join(wrong)}")


@app.command()
def up(
    host: Annotated[str | None, setting("host")] = None,
    port: Annotated[int | None, setting("port")] = None,
    base_model: Annotated[list[str] | None, setting("base_models", "may be repeated")] = None,
    store: Annotated[str | None, setting("store")] = None,
    database_url: Annotated[str | None, setting("database_url")] = None,
    processes: Annotated[int | None, setting("processes")] = None,
    group: Annotated[str | None, setting("group")] = None,
    launcher: Annotated[str | None, setting("launcher")] = None,
    ray_address: Annotated[str | None, setting("ray_address")] = None,
    data_dir: DataDir = None,
) -> None:
    """Serve: start the API, the engine, the workers and Prefect; print `ready:` when requests can be served.

    SIGTERM or Ctrl-C stops everything. A setting that has no option here is read from its variable TINKERFLOW_<NAME>.
    """
    from tinkerflow.deployments.up import Stack

    settings = settings_with(
        host=host,
        port=port,
        base_models=tuple(base_model) if base_model else None,
        store=store,
        database_url=database_url,
        processes=processes,
        group=group,
        launcher=launcher,
        ray_address=ray_address,
        data_dir=data_dir,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Stack(settings, report=lambda line: print(line, flush=True)) as stack:
            print(stack.ready_line, flush=True)
            if sys.stdout.isatty() and stack.sign_in_line:  # not into a log: whoever reads the link can use it
                print(stack.sign_in_line, flush=True)
            stack.keep()
    except KeyboardInterrupt:
        print("stopped", flush=True)


@app.command()
def prefect(
    page: Annotated[str, typer.Option(help="path of the page that the link opens")] = "/",
    env: Annotated[
        bool, typer.Option("--env", help="print variables for Prefect's own command line and clients instead")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Print a link that signs a browser in to the Prefect server of this data dir. It is valid for an hour."""
    settings = settings_with(data_dir=data_dir)
    if (server := find_server(settings.data_dir)) is None:
        raise UserError(f"no Prefect server runs for data dir {settings.data_dir}: start it with `tinkerflow up`")
    if env:
        for name, value in server.environment.items():
            print(f"export {name}={value}")
    else:
        print(server.link(page, time.time()))


@app.command()
def quickstart(
    data_dir: Annotated[Path | None, setting("data_dir", default=SCRATCH)] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="optimizer steps (default: 30)")] = None,
    stay: Annotated[bool, typer.Option("--stay", "--keep", help="keep serving after the lesson, until Ctrl-C")] = False,
) -> None:
    """Start everything in a scratch folder and teach the embedded model pig latin through the tinker SDK.

    The exit status is 0 only if the loss fell and the model learnt every answer.
    """
    from tinkerflow.deployments.quickstart import STEPS
    from tinkerflow.deployments.quickstart import quickstart as run

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _exit(run(plain_console(), data_dir=data_dir, steps=steps or STEPS, stay=stay))


@app.command()
def run(
    pipeline: Annotated[str, typer.Argument(help=f"one of {', '.join(example_names())}")],
    config: Annotated[Path | None, typer.Option(help="YAML file with the pipeline's parameters")] = None,
    example: Annotated[
        bool, typer.Option("--example", help="use our example data, and start a service for this run")
    ] = False,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="replace a parameter of the file, as in training.steps=10; may be repeated"),
    ] = None,
    data_dir: Annotated[Path | None, setting("data_dir", default=f"~/.tinkerflow, with --example {SCRATCH}")] = None,
) -> None:
    """Run a fine-tuning pipeline now, and show its progress.

    It uses the service at TINKER_BASE_URL, and the Prefect server at PREFECT_API_URL. Where that is not set, it uses
    the Prefect server of this machine, or starts one for this run.
    """
    from tinkerflow.deployments.run import run as run_pipeline

    _exit(run_pipeline(plain_console(), pipeline, config, example=example, changes=change or (), data_dir=data_dir))


def _exit(good: bool) -> None:
    """End this process, in which all is done and closed, at once, with the exit status 0 if all was `good`.

    The SDK's daemon threads can abort an interpreter that shuts down (seen with 0.38.0).
    """
    sys.stdout.flush()
    os._exit(0 if good else 1)


@app.command()
def serve(
    file: Annotated[Path, typer.Option(help="a prefect.yaml whose deployments are served")],
    limit: Annotated[int, typer.Option(min=1, help="most flow runs at the same time")] = 2,
    data_dir: DataDir = None,
) -> None:
    """Execute flow runs of deployments on this machine: scheduled ones, and those started in the Prefect UI.

    SIGTERM or Ctrl-C stops it.
    """
    from tinkerflow.deployments.serve import serve as serve_deployments

    serve_deployments(file, settings_with(data_dir=data_dir), limit=limit)


@app.command()
def doctor(data_dir: DataDir = None) -> None:
    """Check this machine and the settings: devices, database, store, base models, running services."""
    from tinkerflow.deployments.doctor import examine

    if not examine(settings_with(data_dir=data_dir), plain_console()):
        raise typer.Exit(1)


@app.command()
def plan(
    topology: Annotated[str, typer.Option(help="devices, such as h100:1, h100:8, v6e:2x4, or h100:2x8 for two hosts")],
    base_model: Annotated[str, typer.Option(help="Hugging Face id, folder or gs:// URL; only its config.json is read")],
    rank: Annotated[int, typer.Option(help="rank of the adapters")] = 32,
    max_context: Annotated[int | None, setting("max_context")] = None,
    base_weights: Annotated[Literal["full", "int8"] | None, setting("base_weights")] = None,
    tensor_parallel: Annotated[int | None, setting("tensor_parallel")] = None,
    expert_parallel: Annotated[int | None, setting("expert_parallel")] = None,
) -> None:
    """Print whether a base model fits a machine, which batch and context it allows, and its highest possible speed.

    It needs no accelerator: it makes the plan that the workers would make, and uses the devices' peak rates.
    """
    from tinkerflow.deployments.plan import describe_plan, plan_service

    settings = settings_with(
        max_context=max_context,
        base_weights=base_weights,
        tensor_parallel=tensor_parallel,
        expert_parallel=expert_parallel,
    )
    print(describe_plan(plan_service(settings, base_model, topology, rank=rank)))


@app.command()
def engine(parent: Parent = 0) -> None:
    """Run the engine alone: it executes requests on its JAX workers, and starts Prefect if that is embedded."""
    run_engine_part(Settings(), parent)


@app.command()
def api(parent: Parent = 0) -> None:
    """Run the API alone."""
    run_api_part(Settings(), parent)


@app.command()
def worker(
    group: Annotated[str, typer.Option(help="HOST:PORT of the engine, as in its own --group")],
    processes: Annotated[int, typer.Option(min=1, max=1024, help="worker processes to run on this host")] = 1,
    secret_file: Annotated[Path | None, setting("group_secret_file")] = None,
    data_dir: DataDir = None,
) -> None:
    """Run worker processes on this host for an engine on another host; SIGTERM or Ctrl-C ends them."""
    secret = None if secret_file is None else str(secret_file)
    run_worker_part(settings_with(data_dir=data_dir, group_secret_file=secret), group, processes)


@models.command("make-tiny")
def make_tiny_model(folder: Annotated[Path, typer.Argument(help="folder to write")]) -> None:
    """Write the tiny embedded model (Qwen3) and its tokenizer; the bytes are the same every time."""
    from tinkerflow.deployments.tiny_model import make_tiny

    make_tiny(folder)
    print(folder)


@models.command("fetch")
def fetch_models(
    base_model: Annotated[list[str] | None, setting("base_models", "may be repeated")] = None,
    weights: Annotated[bool, typer.Option(help="with the weights; the API needs only the tokenizer")] = True,
    data_dir: DataDir = None,
) -> None:
    """Make or download base models on this host, and print their folders.

    Without --base-model they are those of TINKERFLOW_BASE_MODELS, as `tinkerflow up` takes them.
    """
    from tinkerflow.backend.catalog.model_source import HUB_FILES, TEXT_FILES, find_model

    settings = settings_with(base_models=tuple(base_model) if base_model else None, data_dir=data_dir)
    for name in with_base_models(settings).base_models:
        print(find_model(name, HUB_FILES if weights else TEXT_FILES))


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="what the key is for")],
    project: Annotated[
        str, typer.Option(help="project whose runs and checkpoints the key reads and writes")
    ] = "default",
    admin: Annotated[
        bool, typer.Option("--admin", help="the key reads everything of all projects, and manages all keys")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Create an API key; its secret is shown once."""
    with open_journal(settings_with(data_dir=data_dir)) as journal:
        key, secret = journal.keys.create(name, project, admin=admin, actor=command_line_actor())
        print(f"{key.id}: {secret}")


@keys.command("list")
def list_keys(
    project: Annotated[str | None, typer.Option(help="only the keys of this project")] = None, data_dir: DataDir = None
) -> None:
    """List the API keys, without their secrets."""
    table = Table("id", "name", "project", "admin", "starts with", "last used", "revoked")
    with open_journal(settings_with(data_dir=data_dir)) as journal:
        keys = journal.keys.all()
    for key in (key for key in keys if project in (None, key.project)):
        times = (key.last_used_at, key.revoked_at)
        table.add_row(key.id, key.name, key.project, "yes" if key.admin else "", key.prefix, *map(minute, times))
    plain_console().print(table)


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="the id that `key list` shows")], data_dir: DataDir = None
) -> None:
    """Revoke an API key."""
    with open_journal(settings_with(data_dir=data_dir)) as journal:
        print(f"revoked {journal.keys.revoke(key_id, actor=command_line_actor()).name}")


if __name__ == "__main__":
    main()
