"""`tinkerflow run`: one run of a pipeline, now, in this process, with a progress bar."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, resources
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import httpx
import yaml
from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tinkerflow.backend.errors import ServerError, UserError
from tinkerflow.backend.processes import free_port
from tinkerflow.backend.settings import Settings

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import State


def run(
    console: Console,
    pipeline: str,
    config: Path | None,
    *,
    example: bool,
    changes: Sequence[str],
    data_dir: Path | None,
) -> bool:
    """Run `pipeline` as the YAML file `config` says, with `changes` (`training.steps=10`) on top; whether it completed.

    example: with our example data and file, on a service of its own in `data_dir` (default: a scratch folder).
    Otherwise the service at TINKER_BASE_URL does the work.
    """
    if example == (config is not None):
        raise UserError("run: give either --config FILE or --example")
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")  # read when Prefect is imported
    if not example:
        assert config is not None
        settings = Settings(data_dir=data_dir) if data_dir else Settings()
        with _prefect(console, settings) as url:
            sys.path.insert(0, str(config.resolve().parent))  # where rewards and environments of its own may be
            return _completes(console, pipeline, read_config(config, changes), url)
    from tinkerflow.deployments.up import Stack

    Thread(target=_import, daemon=True).start()  # while other processes start
    with tempfile.TemporaryDirectory(prefix="tinkerflow-example-") as scratch:
        settings = Settings(data_dir=data_dir or Path(scratch), port=0, prefect_port=0)
        with Stack(settings, report=lambda line: console.print(f"  {line}", style="dim", highlight=False)) as stack:
            console.print(stack.ready_line, highlight=False)
            os.environ |= {"TINKER_BASE_URL": stack.api_url, "TINKER_API_KEY": "tml-example"}
            found = read_config(example_file(f"{pipeline}.yaml"), changes)
            found.setdefault("work", settings.pipelines_url)
            prefect_url = f"{stack.prefect_url}/api"
            wait_for_prefect(prefect_url, settings.start_deadline)
            if pipeline == "distill" and "teacher" not in found:
                _student_and_teacher(console, found, prefect_url)
            return _completes(console, pipeline, found, prefect_url)


def example_file(name: str) -> Path:
    """A file of our examples."""
    return Path(str(resources.files("tinkerflow.deployments").joinpath("examples", name)))


def read_config(file: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The parameters that a YAML file gives. Relative paths of data in it are relative to the file.

    UserError when it cannot be read, or a change is not NAME.NAME=VALUE.
    """
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"config {file}: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"config {file}: must hold names and values")
    for change in changes:
        names, separator, value = change.partition("=")
        if not separator:
            raise UserError(f"--set {change!r}: must be NAME=VALUE, as in training.steps=10")
        *outer, last = names.split(".")
        inner = found
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = yaml.safe_load(value)
    beside(file.resolve().parent, found)
    return found


def beside(folder: Path, values: dict[str, Any]) -> None:
    """Make relative paths of data, the values of `url`, relative to `folder`."""
    for name, value in values.items():
        if isinstance(value, dict):
            beside(folder, value)
        elif name == "url" and isinstance(value, str) and "://" not in value:
            values[name] = str(folder / value)


@contextmanager
def _prefect(console: Console, settings: Settings) -> Iterator[str]:
    """The Prefect API to use: the one at PREFECT_API_URL, the one of this machine, or one for the time being."""
    local = f"http://127.0.0.1:{settings.prefect_port}/api"
    if url := os.environ.get("PREFECT_API_URL"):
        yield url
    elif settings.prefect_port and _answers(local):
        yield local
    else:
        from tinkerflow.flows import start_server

        console.print("  no Prefect server: one is started for this run", style="dim")
        server = asyncio.run(start_server(settings.data_dir, free_port()))
        try:
            yield server.url
        finally:
            asyncio.run(server.stop())


def wait_for_prefect(url: str, seconds: float) -> None:
    """The service is ready without Prefect; a pipeline is not."""
    deadline = time.monotonic() + seconds
    while not _answers(url):
        if time.monotonic() > deadline:
            raise ServerError(f"run: Prefect at {url} does not answer, waited {seconds:.0f} s (start_deadline)")
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0).is_success
    except httpx.TransportError:
        return False


def _import() -> None:
    """Load what a run needs, some seconds' worth."""
    for module in ("tinkerflow.flows.pipelines", "tinker", "transformers.tokenization_utils_tokenizers"):
        import_module(module)


def _student_and_teacher(console: Console, config: dict[str, Any], prefect_url: str) -> None:
    """Make what our example of `distill` needs: a student that has learnt a little, and a teacher that has gone on."""
    lesson = read_config(example_file("sft.yaml")) | {"work": config["work"], "samples": {"rows": 0}}
    del lesson["held_out"]  # nobody looks on: fewer programs to compile
    student = _run(
        console, "sft", lesson | {"name": "student", "training": lesson["training"] | {"steps": 8}}, prefect_url
    )
    start = config.setdefault("model", {})["start_from"] = _made(student)["state"]
    lesson["model"] |= {"start_from": start}
    config["teacher"] = {"weights": _made(_run(console, "sft", lesson | {"name": "teacher"}, prefect_url))["weights"]}


def _made(state: State[BaseModel]) -> dict[str, Any]:
    """What a run made; raises what it failed with."""
    return asyncio.run(state.aresult()).model_dump()


def _completes(console: Console, pipeline: str, config: Mapping[str, Any], prefect_url: str) -> bool:
    """Run it and show what it made; whether it completed."""
    state = _run(console, pipeline, config, prefect_url)
    page = f"{prefect_url.removesuffix('/api')}/runs/flow-run/{state.state_details.flow_run_id}"
    if state.is_completed():
        _show(console, asyncio.run(state.aresult()))
    else:
        console.print(f"{pipeline}: {state.name}: {state.message}", markup=False, highlight=False)
    console.print(f"see it in Prefect: {page}", highlight=False, soft_wrap=True)
    return state.is_completed()


def _run(console: Console, pipeline: str, config: Mapping[str, Any], prefect_url: str) -> State[BaseModel]:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from tinkerflow.flows.pipelines import PIPELINES
    from tinkerflow.tasks.pipelines.board import follower

    if pipeline not in PIPELINES:
        raise UserError(f"pipeline {pipeline!r}: must be one of {', '.join(PIPELINES)}")
    flow, parameters = PIPELINES[pipeline]
    given = parameters.model_validate(config)
    logging.getLogger("tinker").setLevel(logging.ERROR)  # it says that it asks again whenever an answer takes long
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[values]}"),
        console=console,
    )
    with temporary_settings({PREFECT_API_URL: prefect_url}), bar:
        shown = bar.add_task(pipeline, total=None, values="")

        def follow(step: int, steps: int, values: Mapping[str, float]) -> None:
            bar.update(shown, completed=step, total=steps, values=_numbers(values))

        token = follower.set(follow)
        try:
            state = asyncio.run(_state(flow, given))
        finally:
            follower.reset(token)
    return state


async def _state(flow: Flow[..., Any], parameters: BaseModel) -> State[BaseModel]:
    """Run the flow; its final state."""
    call: Callable[..., Awaitable[State[BaseModel]]] = flow
    return await call(parameters, return_state=True)


def _show(console: Console, result: BaseModel) -> None:
    """What a pipeline made, a line for each value."""
    table = Table(show_header=False, box=None)
    for name, value in result.model_dump().items():
        table.add_row(name, Text(_told(value)))
    console.print(table, highlight=False)


def _told(value: object) -> str:
    if isinstance(value, dict):
        return _numbers(value) if value else "none"
    if isinstance(value, list):
        return "\n".join(map(_told, value))
    return str(value)


def _numbers(values: Mapping[str, object]) -> str:
    """On one line; of a list only how long it is: what was sampled, say, is in the artifacts."""
    told = []
    for name, value in values.items():
        match value:
            case float():
                told.append(f"{name} {value:.4g}")
            case dict():
                told.append(f"\n{name}: {_numbers(value)}")
            case list():
                told.append(f"{name}: {len(value)}")
            case _:
                told.append(f"{name}: {value!s}")
    return "  ".join(told).removeprefix("\n")
