"""Commands that run or inspect the service: up, status, doctor, plan, and the individual parts."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.formats import BaseWeights
from tinkerflow.deployments.options import DataDir, plain_console, setting, settings_with

app = typer.Typer()

Parent = Annotated[int, typer.Option(hidden=True, help="end when this process ends")]


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
            stack.report(stack.ready_line)
            if sys.stdout.isatty() and stack.sign_in_line:  # not in a log: any reader could use the link
                stack.report(stack.sign_in_line)
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
    from tinkerflow.backend.core.prefect_access import find_server

    settings = settings_with(data_dir=data_dir)
    if (server := find_server(settings.data_dir)) is None:
        raise UserError(f"no Prefect server runs for data dir {settings.data_dir}: start it with `tinkerflow up`")
    if env:
        for name, value in server.environment.items():
            print(f"export {name}={value}")
    else:
        print(server.link(page, time.time()))


@app.command()
def status(data_dir: DataDir = None) -> None:
    """Show the service of a data dir, its base models, and its work. The exit status is 0 only if the API answers."""
    from tinkerflow.deployments.status import show_status

    if not show_status(settings_with(data_dir=data_dir), plain_console()):
        raise typer.Exit(1)


@app.command()
def doctor(data_dir: DataDir = None) -> None:
    """Check this machine and the settings: devices, database, store, base models, running services."""
    from tinkerflow.deployments.doctor import examine

    if not examine(settings_with(data_dir=data_dir), plain_console()):
        raise typer.Exit(1)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="Hugging Face id, folder or gs:// URL; only its config.json is read")
    ] = "",
    topology: Annotated[
        str,
        typer.Option(
            "--for", "--topology", help="devices, such as h100:1, rtx4090:2, v6e:2x4, or h100:2x8 for two hosts"
        ),
    ] = "",
    base_model: Annotated[str, typer.Option(help="another way to name the model")] = "",
    price: Annotated[
        float, typer.Option(min=0, help="US dollars an hour for all devices: adds the cost of a million tokens")
    ] = 0.0,
    rank: Annotated[int, typer.Option(help="rank of the adapters")] = 32,
    max_context: Annotated[int | None, setting("max_context")] = None,
    base_weights: Annotated[BaseWeights | None, setting("base_weights")] = None,
    tensor_parallel: Annotated[int | None, setting("tensor_parallel")] = None,
    expert_parallel: Annotated[int | None, setting("expert_parallel")] = None,
    context_parallel: Annotated[int | None, setting("context_parallel")] = None,
) -> None:
    """Print whether a base model fits a machine, which batch and context it allows, and its highest possible speed.

    `tinkerflow plan Qwen/Qwen3-8B --for h100:1` needs no accelerator: it makes the plan that the workers would make,
    and uses the devices' peak rates. For popular models it needs no network. The exit status is 0 only if it fits.
    """
    if bool(model) == bool(base_model) or not topology:
        raise UserError("plan: name one model and the devices, as in `tinkerflow plan Qwen/Qwen3-8B --for h100:1`")
    from tinkerflow.deployments import plan as planning  # this import takes two seconds

    name = model or base_model

    settings = settings_with(
        max_context=max_context,
        base_weights=base_weights,
        tensor_parallel=tensor_parallel,
        expert_parallel=expert_parallel,
        context_parallel=context_parallel,
    )
    try:
        made = planning.plan_service(settings, name, topology, rank=rank)
    except planning.DoesNotFitError as error:
        fits = planning.what_fits(settings, name, topology, rank=rank)
        raise UserError(f"no: {name} does not fit {topology}: {error.message}{fits}") from error
    print(planning.describe_plan(made, price))
    if line := planning.with_expert_axis(made, settings):
        print(line)
    print(f"start it: {planning.command_of(made, settings)}", *planning.about_hosts(made.target), sep="\n")


@app.command()
def engine(parent: Parent = 0) -> None:
    """Run the engine alone: it executes requests on its JAX workers, and starts Prefect if that is embedded."""
    from tinkerflow.deployments.parts import run_engine_part

    run_engine_part(settings_with(), parent)


@app.command()
def api(parent: Parent = 0) -> None:
    """Run the API alone."""
    from tinkerflow.deployments.parts import run_api_part

    run_api_part(settings_with(), parent)


@app.command()
def worker(
    group: Annotated[str, typer.Option(help="HOST:PORT of the engine, as in its own --group")],
    processes: Annotated[int, typer.Option(min=1, max=1024, help="worker processes to run on this host")] = 1,
    secret_file: Annotated[Path | None, setting("group_secret_file")] = None,
    data_dir: DataDir = None,
) -> None:
    """Run worker processes on this host for an engine on another host; SIGTERM or Ctrl-C ends them."""
    from tinkerflow.deployments.parts import run_worker_part

    secret = None if secret_file is None else str(secret_file)
    run_worker_part(settings_with(data_dir=data_dir, group_secret_file=secret), group, processes)


@app.command()
def track(
    once: Annotated[bool, typer.Option("--once", help="mirror the runs in the journal, and exit")] = False,
    parent: Parent = 0,
    data_dir: DataDir = None,
) -> None:
    """Mirror training runs to the trackers of TINKERFLOW_TRACKERS, and to OpenLineage.

    `tinkerflow up` starts this if TINKERFLOW_TRACKERS or TINKERFLOW_OPENLINEAGE_URL is set.
    """
    from tinkerflow.deployments.parts import run_track_part

    run_track_part(settings_with(data_dir=data_dir), parent, once=once)
