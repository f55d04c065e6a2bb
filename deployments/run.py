"""`tinkerflow run`: run a pipeline now, in this process, with a progress bar."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module, resources
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tinkerflow.backend.core.errors import ServerError, TinkerflowError, UserError
from tinkerflow.backend.core.log_levels import logging_at
from tinkerflow.backend.core.prefect_access import PrefectAccess, page_command, server_for_clients
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.backend.service import last_owner, read_owner
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.automations import automations, ensure_automations
from tinkerflow.deployments.config import import_beside, read_config
from tinkerflow.deployments.data_check import check_code, check_first_rows, check_server, parameters_of
from tinkerflow.deployments.options import settings_with
from tinkerflow.tasks.pipelines.parameters import AnyParameters, JudgeParameters, PipelineParameters, SamplingParameters
from tinkerflow.tasks.pipelines.server_address import server_from_environment

_LABELS = {"first": "first tenth", "last": "last tenth"}  # parts of the steps; a result contains their means
_EXAMPLE_MODEL = (
    "the example's model is tiny and began with random weights: it learns the training rows by heart, but does not\n"
    "generalize. The samples are its answers to held-out rows, which are worded differently: most of them are wrong"
)
LINE_SECONDS = 10.0  # seconds between lines of progress without a terminal

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
    """Run a pipeline and show its result. Returns whether the run completed.

    console: where to print. pipeline: its name. config: a YAML file with its parameters; the service at TINKER_BASE_URL
    does the work. example: instead of `config`, use our example on a service that is started for it. changes: values
    that replace those of the file, as `training.steps=10`. data_dir: the data dir of a service and a Prefect server
    that are started; default: a scratch folder for the example, else the setting.

    UserError: both or neither of config and example are given.
    """
    if example == (config is not None):
        raise UserError("run: give either --config FILE or --example")
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")  # read when Prefect is imported; errors are shown below
    if config is None:
        return _run_example(console, pipeline, changes, data_dir)
    settings = settings_with(data_dir=data_dir)
    import_beside(config)
    values = read_config(config, changes)
    parameters = parameters_of(pipeline, values)
    block = parameters.connection  # a Prefect block with the service's address
    url, key = ("", "") if block else server_from_environment(settings)
    source = "TINKER_BASE_URL" if "TINKER_BASE_URL" in os.environ else f"data dir {settings.data_dir}"
    print_line(console, f"service: as Prefect's block {block!r} names it" if block else f"service: {url} ({source})")
    check_code(parameters)
    check_first_rows(parameters)
    if not block:
        check_server(parameters, url, key)
        if warning := other_data_dir(parameters, settings, url):
            print_line(console, warning)
    with prefect_api(console, settings) as (prefect, starts):
        words = ["tinkerflow", "run", pipeline, "--config", str(config)]
        for change in changes:
            words += [] if change.startswith("resume=") else ["--set", change]
        again = shlex.join([*words, *(("--data-dir", str(data_dir)) if data_dir else ())]) + " --set resume="
        again = again if isinstance(parameters, PipelineParameters) else ""  # other pipelines start over
        page, completed = run_and_show(
            console, find(pipeline), values, prefect, again, url.rstrip("/"), stays=not starts
        )
    _print_page(console, page, prefect, settings.data_dir, ends=starts)
    return completed


def _print_page(console: Console, page: str, prefect: PrefectAccess, data_dir: Path | None, *, ends: bool) -> None:
    """Print a link to a run's page in Prefect; if the server ends with this command, how to see the page again."""
    print_line(console, see_again(page, data_dir) if ends else f"see it in Prefect: {prefect.link(page, time.time())}")


def other_data_dir(parameters: AnyParameters, settings: Settings, url: str) -> str:
    """A warning if the service at `url` is on this machine, but is not that of the run's data dir; else "".

    Also "" if the pipeline writes nothing that the service reads.
    """
    if not isinstance(parameters, (JudgeParameters, SamplingParameters)):
        return ""
    owner, address = read_owner(settings.data_dir), urlsplit(url)
    own = urlsplit(owner.api_url) if owner is not None else None
    local = address.hostname in ("localhost", "127.0.0.1", "::1")
    if not local or parameters.work or settings.pipelines or (own is not None and own.port == address.port):
        return ""
    return (
        f"warning: the service at {url} does not use the data dir {settings.data_dir}, so it does not find "
        "the rollouts, evaluations and champions of this run: give the --data-dir of its `tinkerflow up`, or set "
        "TINKERFLOW_PIPELINES for both"
    )


def _run_example(console: Console, name: str, changes: Sequence[str], data_dir: Path | None) -> bool:
    from tinkerflow.deployments.local import running_stack

    parameters_of(name, read_config(example_file(f"{name}.yaml"), changes))
    Thread(target=_import, daemon=True).start()  # while other processes start
    with running_stack(data_dir, dim_lines(console)) as stack:
        values = read_config(example_file(f"{name}.yaml"), changes)
        values.setdefault("work", stack.settings.pipelines_url)
        prefect = wait_for_prefect(lambda: stack.prefect, stack.settings.start_deadline)
        if find(name).example_teacher and "teacher" not in values:
            _make_student_and_teacher(console, values, prefect)
        page, completed = run_and_show(console, find(name), values, prefect)
    if completed and name in ("sft", "dpo"):
        print_line(console, _EXAMPLE_MODEL)
    _print_page(console, page, prefect, data_dir, ends=stack.settings.prefect == "embedded")
    return completed


def dim_lines(console: Console) -> Callable[[str], None]:
    """A function that prints the lines of a service's parts dimmed."""
    return lambda line: console.print(f"  {line}", style="dim", highlight=False)


def quiet_client() -> AbstractContextManager[None]:
    """Hide the SDK's warnings in the block: the SDK logs one for every slow answer."""
    return logging_at(logging.ERROR, "tinker")


@contextmanager
def logs_in_prefect() -> Iterator[None]:
    """Send the log lines of flow and task runs to Prefect in the block, even if the console hides them."""
    names = ("prefect.flow_runs", "prefect.task_runs")
    in_console = logging.getLogger(names[0]).isEnabledFor(logging.INFO)  # then the user wants the lines there, too
    with nullcontext() if in_console else logging_at(logging.INFO, *names, propagate=False):
        try:
            yield
        finally:
            for handler in [handler for name in names for handler in logging.getLogger(name).handlers]:
                handler.flush()  # the server may end with the run


def print_line(console: Console, line: str) -> None:
    """Print a line for copying, without folds and colors."""
    console.print(Text(line), soft_wrap=True)


def find(name: str) -> Pipeline:
    """The pipeline with this name. UserError: there is no such pipeline."""
    from tinkerflow.flows.pipelines import pipelines

    if name not in pipelines():
        raise UserError(f"pipeline {name!r}: must be one of {', '.join(pipelines())}{did_you_mean(name, pipelines())}")
    return pipelines()[name]


def example_file(name: str) -> Path:
    return Path(str(resources.files("tinkerflow.deployments").joinpath("examples", name)))


@contextmanager
def prefect_api(console: Console, settings: Settings) -> Iterator[tuple[PrefectAccess, bool]]:
    """Yields the Prefect server at PREFECT_API_URL, or that of the data dir, or one that is started for the block.

    Also yields whether it was started for the block.
    """
    if (prefect := server_for_clients(settings.data_dir, os.environ)) is not None:
        yield prefect, False
        return
    from tinkerflow.flows.prefect.server import listen, start_server

    line = f"  no Prefect server runs for data dir {settings.data_dir}: one is started for this run"
    console.print(line, style="dim", highlight=False, soft_wrap=True)
    if "TINKER_BASE_URL" in os.environ:
        fix = "  if the service runs on this machine, name its data dir with --data-dir to use its Prefect server"
        console.print(fix, style="dim", highlight=False, soft_wrap=True)
    with asyncio.run(listen(0)) as listener:
        server = asyncio.run(start_server(settings.data_dir, listener))
        try:
            yield server.access, True
        finally:
            asyncio.run(server.stop())


def see_again(page: str, data_dir: Path | None) -> str:
    """How to see a run's page after this command, and the Prefect server that it started, have ended.

    page: the path of the run's page. data_dir: where the server keeps its database; None: in a scratch folder. If it
    has never been served, this machine is probably only a client.
    """
    if data_dir is None:
        return "this page and the run end with this command: to keep them, run it again with --data-dir DIR"
    if last_owner(data_dir) is None:
        own = "`prefect server start`, and set PREFECT_API_URL=http://127.0.0.1:4200/api"
        return f"its page in Prefect ends with this command; to keep the pages of later runs, start {own}"
    return (
        f"this page ends with this command; to see the run again: tinkerflow up --data-dir {shlex.quote(str(data_dir))}"
        f"\nand open the link that this prints: {page_command(page, data_dir)}"
    )


def wait_for_prefect(find: Callable[[], PrefectAccess | None], seconds: float) -> PrefectAccess:
    """Wait until the Prefect server from `find` answers, and return it: the service may be ready before Prefect.

    ServerError: no answer within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while (prefect := find()) is None or not answers(prefect.api_url):
        if time.monotonic() > deadline:
            where = "" if prefect is None else f" at {prefect.api_url}"
            raise ServerError(f"run: Prefect{where} did not answer within {seconds:.0f} s (start_deadline)")
        time.sleep(0.2)
    return prefect


def answers(url: str) -> bool:
    """Whether a Prefect API answers."""
    try:
        return httpx.get(f"{url}/health", timeout=2.0).is_success
    except httpx.TransportError:
        return False


def _import() -> None:
    """Import the modules that a run needs, which takes some seconds."""
    for module in ("tinkerflow.flows.pipelines.sft", "tinker", "transformers.tokenization_utils_tokenizers"):
        import_module(module)


def _make_student_and_teacher(console: Console, values: dict[str, Any], prefect: PrefectAccess) -> None:
    """Train the models of an example with `example_teacher`: a briefly trained student, and a teacher."""
    lesson = read_config(example_file("sft.yaml")) | {"work": values["work"], "samples": {"rows": 0}}
    del lesson["held_out"]  # this result is not shown, so fewer programs are compiled
    short = lesson | {"name": "student", "training": lesson["training"] | {"steps": 8}}
    student = _run(console, find("sft"), short, prefect)
    start = values.setdefault("model", {})["start_from"] = _result(student)["state"]
    lesson["model"] |= {"start_from": start}
    teacher = _run(console, find("sft"), lesson | {"name": "teacher"}, prefect)
    values["teacher"] = {"weights": _result(teacher)["weights"]}


def _result(state: State[BaseModel]) -> dict[str, Any]:
    """The result of a run; raises the error of a failed run."""
    return asyncio.run(state.aresult()).model_dump()


def run_and_show(
    console: Console,
    pipeline: Pipeline,
    values: Mapping[str, Any],
    prefect: PrefectAccess,
    again: str = "",
    server: str = "",
    *,
    stays: bool = True,
) -> tuple[str, bool]:
    """Run the pipeline and show its result. Returns the path of the run's page in Prefect, and whether it completed.

    again: the command that resumes a run, up to the run's name; "" = there is none. server: the address of the service,
    for a link to the run's page in the console; "" = the service ends with this command, or its address is unknown.
    stays: whether the Prefect server stays after this command.
    """
    from tinkerflow.tasks.pipelines.artifacts import has_lasting_page, training_runs

    made: list[str] = []
    token, page_token = training_runs.set(made), has_lasting_page.set(stays)
    try:
        state = _run(console, pipeline, values, prefect, again)
    finally:
        training_runs.reset(token)
        has_lasting_page.reset(page_token)
    newest = made[-1] if made else ""
    if state.is_completed():
        result = _result(state)
        console.print(result_table(result), highlight=False)
        newest = result.get("training_run", newest)  # resuming a finished run makes no model
    else:
        show_failure(console, pipeline.name, state)
        if again and state.is_cancelled():
            print_line(console, f"to continue: {again}{values.get('resume') or state.state_details.flow_run_id}")
    if server and newest:
        print_line(console, f"see it in the console: {server}/training_runs/{newest}")
    return f"/runs/flow-run/{state.state_details.flow_run_id}", state.is_completed()


_PREFECTS_WORDS = re.compile(r"^(?:Flow|Task) run encountered an exception:? ")


def _class_names(error: type[TinkerflowError] = TinkerflowError) -> Iterator[str]:
    yield error.__name__
    for kind in error.__subclasses__():
        yield from _class_names(kind)


def show_failure(console: Console, name: str, state: State[BaseModel]) -> None:
    """Print the error of a run in a line, with the traceback unless a person can fix it."""
    error = state.data if isinstance(state.data, Exception) else None
    if error is not None and not isinstance(error, TinkerflowError):
        console.print(Text("".join(traceback.format_exception(error))))
    if isinstance(error, TinkerflowError):
        reason = error.message
    else:
        reason = _PREFECTS_WORDS.sub("", state.message or "")
        kind, separator, text = reason.partition(": ")
        reason = text if separator and kind in _class_names() else reason
    console.print(Text(f"{name}: {state.name}: {reason}"), soft_wrap=True)  # no emoji for :b: in module:b: of a reward


def _run(
    console: Console, pipeline: Pipeline, values: Mapping[str, Any], prefect: PrefectAccess, again: str = ""
) -> State[BaseModel]:
    """Run the pipeline with a progress bar. Returns its final state. UserError: a parameter is wrong.

    again: as for `run_and_show`; the command is also printed when the run begins.
    """
    from prefect.runtime import flow_run
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_UI_URL, temporary_settings

    from tinkerflow.tasks.pipelines.artifacts import follower, notes, phases

    parameters = parameters_of(pipeline.name, values)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("{task.fields[metrics]}"), console=console)
    server = {
        PREFECT_API_URL: prefect.api_url,
        PREFECT_UI_URL: prefect.pages_url,
        PREFECT_API_AUTH_STRING: prefect.credential or None,
    }
    bar.disable = not console.is_terminal
    with temporary_settings(server), quiet_client(), logs_in_prefect(), bar:
        shown, next_line = bar.add_task(f"{pipeline.name}: starting", total=None, metrics=""), time.monotonic()
        begun = False

        def show_phase(text: str) -> None:
            nonlocal begun
            if again and not begun:
                print_line(console, f"to continue if it is interrupted: {again}{values.get('resume') or flow_run.id}")
            begun = True
            bar.update(shown, description=f"{pipeline.name}: {text}")
            if bar.disable:
                print_line(console, f"{pipeline.name}: {text}")

        def follow(step: int, steps: int, metrics: Mapping[str, float]) -> None:
            nonlocal next_line
            bar.update(shown, description=pipeline.name, completed=step, total=steps, metrics=as_text(metrics))
            if bar.disable and (step == steps or time.monotonic() >= next_line):
                print_line(console, f"{pipeline.name}: step {step} of {steps}  {as_text(metrics)}")
                next_line = time.monotonic() + LINE_SECONDS

        async def state() -> State[BaseModel]:
            try:
                await ensure_automations(automations())
            except httpx.HTTPError as error:  # for example, the account may not create automations
                why = f"no automation could be created: {str(error).splitlines()[0]}"
                print_line(console, f"if this run is killed, Prefect may show it as Running, because {why}")
            call: Callable[..., Awaitable[State[BaseModel]]] = pipeline.flow
            return await call(parameters, return_state=True)

        token, phase_token = follower.set(follow), phases.set(show_phase)
        note_token = notes.set(lambda text: print_line(console, f"{pipeline.name}: {text}"))
        try:
            return asyncio.run(state())
        except KeyboardInterrupt:  # before the first step, or the second Ctrl-C
            print_line(console, f"{pipeline.name}: interrupted; steps since the last saved state are not kept")
            raise
        finally:
            follower.reset(token)
            phases.reset(phase_token)
            notes.reset(note_token)


def result_table(result: Mapping[str, Any]) -> Table:
    """A table of a result's values that are not empty, by name."""
    table = Table(show_header=False, box=None)
    for name, value in result.items():
        if value not in ("", [], None):
            table.add_row(_LABELS.get(name, name), Text(as_text(value)))
    return table


def as_text(value: object) -> str:
    """A value of a result for people: a mapping's entries on one line, with only the lengths of its lists."""
    match value:
        case Mapping() if not value:
            return "none"
        case Mapping():
            present = [(name, entry) for name, entry in value.items() if entry is not None]
            shown = [(name, entry) for name, entry in present if entry or name not in ("wanted", "parts")]
            return "  ".join(_entry(name, entry) for name, entry in shown).removeprefix("\n")
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
