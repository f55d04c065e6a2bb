"""`tinkerflow run`: one run of a pipeline, now, in this process, with a progress bar."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
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

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.supervise.processes import free_port
from tinkerflow.deployments.local import running_stack

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from tinkerflow.flows.pipelines import Pipeline


def run(
    console: Console,
    pipeline: str,
    config: Path | None,
    *,
    example: bool,
    changes: Sequence[str],
    data_dir: Path | None,
) -> bool:
    """Run a pipeline and show its result; whether the run completed.

    console: where to print. pipeline: its name. config: a YAML file with its parameters; the service at TINKER_BASE_URL
    does the work. example: instead of `config`, use our example on a service that is started for it. changes: values
    that replace those of the file, as `training.steps=10`. data_dir: for what a started service and a started Prefect
    server store; default: a scratch folder for the example, else the setting.

    Raises UserError unless one of config and example is given.
    """
    if example == (config is not None):
        raise UserError("run: give either --config FILE or --example")
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")  # read when Prefect is imported
    if config is None:
        return _run_example(console, pipeline, changes, data_dir)
    settings = Settings(data_dir=data_dir) if data_dir else Settings()
    with prefect_api(console, settings) as (url, starts):
        sys.path.insert(0, str(config.resolve().parent))  # rewards and environments may be modules beside the file
        page, completed = run_and_show(console, find(pipeline), read_config(config, changes), url)
    if starts:
        print_line(console, see_again(page, settings.data_dir))
    return completed


def _run_example(console: Console, name: str, changes: Sequence[str], data_dir: Path | None) -> bool:
    Thread(target=_import, daemon=True).start()  # while other processes start
    with running_stack(data_dir, dim_lines(console)) as stack:
        values = read_config(example_file(f"{name}.yaml"), changes)
        values.setdefault("work", stack.settings.pipelines_url)
        prefect_url = f"{stack.prefect_url}/api"
        wait_for_prefect(prefect_url, stack.settings.start_deadline)
        if find(name).example_teacher and "teacher" not in values:
            _make_student_and_teacher(console, values, prefect_url)
        page, completed = run_and_show(console, find(name), values, prefect_url)
    if stack.settings.prefect == "embedded":
        print_line(console, see_again(page, data_dir))
    return completed


def dim_lines(console: Console) -> Callable[[str], None]:
    """Prints the lines of a service's parts, so that they stand back."""
    return lambda line: console.print(f"  {line}", style="dim", highlight=False)


def print_line(console: Console, line: str) -> None:
    """Print a line that people copy from: it is not folded, and nothing in it is coloured."""
    console.print(line, highlight=False, soft_wrap=True)


def find(name: str) -> Pipeline:
    """The pipeline of a name; UserError when there is none."""
    from tinkerflow.flows.pipelines import pipelines

    if name not in pipelines():
        raise UserError(f"pipeline {name!r}: must be one of {', '.join(pipelines())}")
    return pipelines()[name]


def example_names() -> list[str]:
    """The pipelines that have an example, which is every pipeline; told without importing any."""
    return sorted(file.stem for file in example_file("").glob("*.yaml"))


def example_file(name: str) -> Path:
    """A file of our examples."""
    return Path(str(resources.files("tinkerflow.deployments").joinpath("examples", name)))


def read_config(file: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The parameters of a YAML file; relative paths of data in the file are relative to the file.

    changes: parameters that replace those of the file, as `training.steps=10`. Raises UserError when the file cannot be
    read, or a change is not NAME.NAME=VALUE.
    """
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"config {file}: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"config {file}: must hold names and values")
    for change in changes:
        names, separator, value = change.partition("=")
        if not separator:
            raise UserError(f"--set {change!r}: must be NAME=VALUE, as in training.steps=10")
        *outer, last = names.split(".")
        section = values
        for name in outer:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise UserError(f"--set {change!r}: {name} holds no other names")
        section[last] = yaml.safe_load(value)
    make_absolute(file.resolve().parent, values)
    return values


def make_absolute(folder: Path, values: dict[str, Any]) -> None:
    """Make relative paths of data, which are the values of `url`, relative to `folder`."""
    for name, value in values.items():
        if isinstance(value, dict):
            make_absolute(folder, value)
        elif name == "url" and isinstance(value, str) and "://" not in value:
            values[name] = str(folder / value)


@contextmanager
def prefect_api(console: Console, settings: Settings) -> Iterator[tuple[str, bool]]:
    """The URL of a Prefect API: the one at PREFECT_API_URL, or the one on this machine, or one for the block only.

    Also whether it is for the block only.
    """
    local = f"http://127.0.0.1:{settings.prefect_port}/api"
    if url := os.environ.get("PREFECT_API_URL"):
        yield url, False
    elif settings.prefect_port and _answers(local):
        yield local, False
    else:
        from tinkerflow.flows import start_server

        console.print("  no Prefect server is running: one is started for this run", style="dim")
        server = asyncio.run(start_server(settings.data_dir, free_port()))
        try:
            yield server.url, True
        finally:
            asyncio.run(server.stop())


def see_again(page: str, data_dir: Path | None) -> str:
    """How to see a run's page after this command, and the Prefect server that it started, have ended.

    data_dir: where the server keeps its database; None: in a scratch folder.
    """
    if data_dir is None:
        return "this page and the run end with this command: to keep them, run it again with --data-dir DIR"
    port = Settings(data_dir=data_dir).prefect_port or "PORT"
    path = page.partition("/runs/")[2]
    return (
        f"this page ends with this command; to see the run again: tinkerflow up --data-dir {shlex.quote(str(data_dir))}"
        f"\nand open http://127.0.0.1:{port}/runs/{path}"
    )


def wait_for_prefect(url: str, seconds: float) -> None:
    """Wait until the Prefect API at `url` answers: the service is ready without it. ServerError after `seconds`."""
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
    """Import what a run needs; it takes some seconds."""
    for module in ("tinkerflow.flows.pipelines.sft", "tinker", "transformers.tokenization_utils_tokenizers"):
        import_module(module)


def _make_student_and_teacher(console: Console, values: dict[str, Any], prefect_url: str) -> None:
    """Train what an example with `example_teacher` needs: a student that has learnt a little, and a teacher."""
    lesson = read_config(example_file("sft.yaml")) | {"work": values["work"], "samples": {"rows": 0}}
    del lesson["held_out"]  # nobody looks at it: fewer programs to compile
    short = lesson | {"name": "student", "training": lesson["training"] | {"steps": 8}}
    student = _run(console, find("sft"), short, prefect_url)
    start = values.setdefault("model", {})["start_from"] = _result(student)["state"]
    lesson["model"] |= {"start_from": start}
    teacher = _run(console, find("sft"), lesson | {"name": "teacher"}, prefect_url)
    values["teacher"] = {"weights": _result(teacher)["weights"]}


def _result(state: State[BaseModel]) -> dict[str, Any]:
    """The result of a run; raises the error with which it failed."""
    return asyncio.run(state.aresult()).model_dump()


def run_and_show(console: Console, pipeline: Pipeline, values: Mapping[str, Any], prefect_url: str) -> tuple[str, bool]:
    """Run the pipeline and show its result; the run's page in Prefect, and whether the run completed."""
    state = _run(console, pipeline, values, prefect_url)
    if state.is_completed():
        table = Table(show_header=False, box=None)
        for name, value in _result(state).items():
            table.add_row(name, Text(as_text(value)))
        console.print(table, highlight=False)
    else:
        console.print(f"{pipeline.name}: {state.name}: {state.message}", markup=False, highlight=False)
    page = f"{prefect_url.removesuffix('/api')}/runs/flow-run/{state.state_details.flow_run_id}"
    print_line(console, f"see it in Prefect: {page}")
    return page, state.is_completed()


def _run(console: Console, pipeline: Pipeline, values: Mapping[str, Any], prefect_url: str) -> State[BaseModel]:
    """Run the pipeline with a progress bar; its final state. ValidationError when a parameter is wrong."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from tinkerflow.tasks.pipelines.artifacts import follower

    parameters = pipeline.parameters.model_validate(values)
    logging.getLogger("tinker").setLevel(logging.ERROR)  # it warns whenever an answer takes long
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("{task.fields[metrics]}"), console=console)
    with temporary_settings({PREFECT_API_URL: prefect_url}), bar:
        shown = bar.add_task(pipeline.name, total=None, metrics="")

        def follow(step: int, steps: int, metrics: Mapping[str, float]) -> None:
            bar.update(shown, completed=step, total=steps, metrics=as_text(metrics))

        async def state() -> State[BaseModel]:
            call: Callable[..., Awaitable[State[BaseModel]]] = pipeline.flow
            return await call(parameters, return_state=True)

        token = follower.set(follow)
        try:
            return asyncio.run(state())
        finally:
            follower.reset(token)


def as_text(value: object) -> str:
    """A value of a result for people: the entries of a mapping on one line, of lists in it only the length."""
    match value:
        case Mapping() if not value:
            return "none"
        case Mapping():
            return "  ".join(_entry(name, entry) for name, entry in value.items()).removeprefix("\n")
        case list():
            return "\n".join(map(as_text, value))
    return str(value)


def _entry(name: str, value: object) -> str:
    match value:
        case float():
            return f"{name} {value:.4g}"
        case dict():
            return f"\n{name}: {as_text(value)}"
        case list():
            return f"{name}: {len(value)}"
    return f"{name}: {value!s}"
