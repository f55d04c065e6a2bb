"""`tinkerflow serve`: run the deployments of a prefect.yaml on this machine, on their schedules, without a work pool.

The file defines the flows; the Prefect server defines only their times and parameters. The flows are loaded
from the file's entry points when `serve` starts, and run in separate processes. A run fails if its deployment was given
pull steps, another entry point or job variables on the server. Parameters can name only rewards and environments that
the file names.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tinkerflow.backend.core.disk import folder_of_url, locked, make_folder
from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.core.prefect_access import TRAINING_FLOW, PrefectAccess, find_server, server_for_clients
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.automations import automations, ensure_automations
from tinkerflow.deployments.config import make_absolute, read_yaml
from tinkerflow.deployments.data_check import parameters_of
from tinkerflow.deployments.options import explain
from tinkerflow.deployments.run import wait_for_prefect
from tinkerflow.tasks.pipelines.environments import MAY_IMPORT
from tinkerflow.tasks.pipelines.parameters import Matches

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import ConcurrencyLimitConfig
    from prefect.schedules import Schedule

HEARTBEAT_SECONDS = 30
UNPOLLED_SECONDS = 60.0  # Prefect's own limit: later, a deployment counts as not ready
WATCH_SECONDS = 2.0  # seconds between checks of the Prefect server
RESULTS = "tinkerflow-results"
PLAIN_LOG = "tinkerflow.deployments.plain_log.PlainConsoleHandler"
FOR_WORK_POOLS = ("work_pool", "version", "build", "push", "pull", "enforce_parameter_schema")
OURS = "tinkerflow.flows.pipelines."
CODE_PARAMETERS = ("reward", "environment")  # parameters that hold import paths


class Deployment(BaseModel):
    """One deployment of a prefect.yaml. `serve` ignores the fields for work pools."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Matches("[^/%&<>]+", "must have no / % & < >, and not be empty")]  # Prefect requires this
    entrypoint: str
    description: str | None = None
    parameters: dict[str, Any] = {}
    tags: list[str] = []
    schedules: list[dict[str, Any]] = []
    concurrency_limit: int | dict[str, Any] | None = None
    paused: bool = Field(False, description="whether the schedules are paused until someone resumes them")
    for_work_pools: dict[str, Any] = {}

    @property
    def parameter_sets(self) -> list[dict[str, Any]]:
        """The deployment's parameters, and those of schedules, which replace them by name in scheduled runs."""
        of_schedules = [schedule.get("parameters") for schedule in self.schedules]
        return [self.parameters, *(values for values in of_schedules if isinstance(values, dict))]


@dataclass(frozen=True)
class ServedFile:
    """The content of a prefect.yaml.

    tag_limits: tag -> how many task runs with the tag may run at the same time, over all flow runs. allowed_code: the
    import paths that parameters may name, from the file's deployments and its list `allowed_code`.
    """

    deployments: Sequence[Deployment]
    tag_limits: Mapping[str, int]
    allowed_code: Sequence[str]


def read_file(file: Path) -> ServedFile:
    """Parse a prefect.yaml. Relative paths of data in parameters are relative to the file.

    UserError: the file cannot be read or has no deployments, or a field breaks its rule.
    """
    try:
        content = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"serve {file}: must be a prefect.yaml with deployments ({reason})") from error
    if not isinstance(content, dict) or not isinstance(content.get("deployments"), list):
        raise UserError(f"serve {file}: must be a prefect.yaml with deployments")
    deployments = _deployments(file, content["deployments"])
    return ServedFile(deployments, _tag_limits(file, content), _allowed_code(file, content, deployments))


def _deployments(file: Path, entries: Sequence[object]) -> list[Deployment]:
    deployments = []
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise UserError(f"serve {file}: deployments[{i}]: {entry!r}: must contain names and values")
        pools = {name: entry[name] for name in FOR_WORK_POOLS if name in entry}
        used = {name: value for name, value in entry.items() if name not in pools}
        try:
            deployments.append(Deployment.model_validate({**used, "for_work_pools": pools}))
        except ValidationError as error:
            raise UserError(f"serve {file}: deployments[{i}]: {explain(error, Deployment)}") from error
        for values in deployments[-1].parameter_sets:
            make_absolute(file.resolve().parent, values)
    return deployments


def _tag_limits(file: Path, content: Mapping[str, Any]) -> dict[str, int]:
    limits = content.get("tag_limits", {})
    if not isinstance(limits, dict) or not all(isinstance(most, int) and most > 0 for most in limits.values()):
        raise UserError(f"serve {file}: tag_limits is {limits!r}: must give a number of at least 1 for each tag")
    return limits


def _allowed_code(file: Path, content: Mapping[str, Any], deployments: Sequence[Deployment]) -> list[str]:
    listed = content.get("allowed_code", [])
    if not isinstance(listed, list) or not all(isinstance(path, str) and ":" in path for path in listed):
        rule = "must be a list of import paths, package.module:name"
        raise UserError(f"serve {file}: allowed_code is {listed!r}: {rule}")
    return sorted({*listed, *_code([deployment.parameter_sets for deployment in deployments])})


def _code(values: object) -> Iterator[str]:
    match values:
        case dict():
            for name, value in values.items():
                if name in CODE_PARAMETERS and isinstance(value, str):
                    yield value
                yield from _code(value)
        case list():
            for value in values:
                yield from _code(value)


def serve(file: Path, settings: Settings, *, limit: int) -> None:
    """Serve until SIGTERM or Ctrl-C: at most `limit` flow runs at the same time, each in its own process.

    At the end, flow runs are cancelled, and the schedules are paused until the deployments are served again. If another
    `serve` of the file has not ended yet, this one waits until it has. The Prefect server is the one at
    PREFECT_API_URL, or else the data dir's. `start_deadline` bounds the wait for it.

    When the data dir's server moves to another address, or Prefect's runner gives up because no server answers, this
    process restarts its command, which waits for a server. ServerError: no server answers within `start_deadline`, or
    the server of another data dir has taken the address and refuses the credential.
    """
    served, before = read_file(file), dict(os.environ)
    for deployment in served.deployments:
        check_parameters(deployment)
    if server_for_clients(settings.data_dir, os.environ) is None:
        wait = f"waiting up to {settings.start_deadline:.0f} s (start_deadline) for `tinkerflow up`"
        print(f"no Prefect server runs for data dir {settings.data_dir}: {wait}", flush=True)
    prefect = wait_for_prefect(lambda: server_for_clients(settings.data_dir, os.environ), settings.start_deadline)
    os.environ |= prefect.environment | {MAY_IMPORT: " ".join(served.allowed_code)}
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", str(HEARTBEAT_SECONDS))
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS", PLAIN_LOG)
    warnings.filterwarnings("ignore", r"coroutine 'Runner\..* was never awaited")  # a task that cannot start
    os.umask(0o077)  # results and records of runs are for the owner only
    with alone(file, prefect.api_url, settings.data_dir):
        has_stopped = asyncio.run(_serve(served, settings, prefect, limit))
    if has_stopped:
        print("stopped", flush=True)
    else:
        os.execve(sys.executable, [sys.executable, "-m", "tinkerflow", *sys.argv[1:]], before)


@contextmanager
def alone(file: Path, api_url: str, data_dir: Path) -> Iterator[None]:
    """Wait until no other process is in this block, with the same file and Prefect server.

    A process that stops pauses its schedules last, so also those that the next process has just started.
    """
    name = hashlib.sha256(f"{file.resolve()} {api_url}".encode()).hexdigest()[:16]
    make_folder(data_dir)
    waits = f"another `tinkerflow serve` of {file} has not ended: waiting for its end"
    with locked(data_dir / f"serve-{name}.lock", lambda: print(waits, flush=True)):
        yield


async def _serve(content: ServedFile, settings: Settings, prefect: PrefectAccess, limit: int) -> bool:
    """Serve. Returns True after a signal, False if Prefect has moved or was away for too long.

    ServerError: Prefect refuses the credential, and the data dir has no other.
    """
    from prefect.runner import Runner

    await check_access(prefect, settings.data_dir)
    os.environ |= await ensure_results(f"{settings.pipelines_url}/results")  # the processes of flow runs inherit this
    await ensure_automations(automations())
    await ensure_tag_limits(content.tag_limits)
    runner, made = Runner(limit=limit), make_deployments(content.deployments)
    for deployment, (name, (flow, given)) in zip(content.deployments, made.items(), strict=True):
        await runner.aadd_flow(flow, **given)
        unused = ", ".join(field for field in deployment.for_work_pools if field != "work_pool")
        print(f"serving {name}{unused and f' (only for work pools, not used: {unused})'}", flush=True)
    for stale in await unserved(made):
        fix = (
            f"add it to the file, or delete it with `prefect deployment delete {stale!r}` (`tinkerflow prefect --env`)"
        )
        print(f"Prefect has the deployment {stale}, which no process serves: {fix}", flush=True)
    loop, asked, output = asyncio.get_running_loop(), asyncio.Event(), sys.stdout

    def report(line: str) -> None:
        print(line, file=output, flush=True)

    with outages_in_one_line():
        working, asking = asyncio.create_task(runner.start()), asyncio.create_task(asked.wait())
        watching = asyncio.create_task(watch_prefect(prefect, settings.data_dir, report))
        await asyncio.sleep(0)  # lets the runner set its handler first, which would raise in the middle of a step
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked.set)
        report(f"Prefect: {prefect.api_url}")
        await asyncio.wait((working, asking, watching), return_when=asyncio.FIRST_COMPLETED)
        is_away, is_refused = await asyncio.to_thread(probe_prefect, prefect)
        for task in (asking, watching):
            task.cancel()
        try:
            if runner.started and not working.done():
                await runner.astop()
            else:
                working.cancel()
            with suppress(asyncio.CancelledError):
                await working
        except Exception as error:
            if not is_away and not is_refused:
                raise
            if is_away:
                report(f"Prefect could not be reached at the end: {type(error).__name__}")
        if is_refused and not asked.is_set():
            await check_access(prefect, settings.data_dir)
    return asked.is_set()


async def watch_prefect(
    prefect: PrefectAccess, data_dir: Path, report: Callable[[str], None], seconds: float = WATCH_SECONDS
) -> None:
    """Report when the Prefect server stops answering, and when it answers again.

    Returns when the data dir's server has moved, or the server refuses the credential.
    report: gets lines for people. seconds: between two checks.
    """
    is_away = False
    while True:
        if (now := moved_to(prefect, data_dir)) is not None:
            report(f"Prefect has moved from {prefect.api_url} to {now.api_url}: serving again from there")
            return
        was_away, (is_away, is_refused) = is_away, await asyncio.to_thread(probe_prefect, prefect)
        if is_away and not was_away:
            report(f"Prefect at {prefect.api_url} does not answer: no run starts until it does")
        elif was_away and not is_away:
            report(f"Prefect at {prefect.api_url} answers again")
        if is_refused:
            return
        await asyncio.sleep(seconds)


def moved_to(prefect: PrefectAccess, data_dir: Path) -> PrefectAccess | None:
    """The data dir's Prefect server, if its address or credential differs from that of `prefect`; else None."""
    now = find_server(data_dir) if prefect.is_embedded else None
    return now if now is not None and now.environment != prefect.environment else None


def probe_prefect(prefect: PrefectAccess) -> tuple[bool, bool]:
    """Whether the Prefect server is away, and whether it refuses the credential, which `health` would not check."""
    try:
        answer = httpx.get(f"{prefect.api_url}/admin/version", headers=prefect.headers, timeout=2.0)
    except httpx.TransportError:
        return True, False
    return answer.is_server_error, answer.status_code == httpx.codes.UNAUTHORIZED


async def check_access(prefect: PrefectAccess, data_dir: Path, seconds: float = WATCH_SECONDS) -> None:
    """Raise ServerError if the Prefect server refuses the credential, and the data dir has no other server.

    seconds: how long a starting server has to write its address to the data dir.
    """
    _, is_refused = await asyncio.to_thread(probe_prefect, prefect)
    if is_refused:
        await asyncio.sleep(seconds)
        if moved_to(prefect, data_dir) is None:
            credential = f"the credential of data dir {data_dir}" if prefect.is_embedded else "PREFECT_API_AUTH_STRING"
            raise ServerError(
                f"Prefect at {prefect.api_url} refuses {credential}: start `tinkerflow serve` again with the data dir "
                "of `tinkerflow up`"
            )


class OutageFilter(logging.Filter):
    """Drops the tracebacks of Prefect's runner about a server that is away or refuses us, which `serve` reports."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to keep the record, because it is not about an outage."""
        from websockets.exceptions import WebSocketException

        error = record.exc_info[1] if record.exc_info else None
        has_given_up = isinstance(error, RuntimeError) and "error threshold" in str(error)
        away = httpx.TransportError | OSError | WebSocketException | asyncio.CancelledError
        is_refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 401
        # After a 401, Prefect's observer raises a bare Exception, and starts a task from a callback without a loop.
        is_refused |= isinstance(error and error.__cause__, WebSocketException)
        is_refused |= type(error).__name__ == "NoEventLoopError"  # older releases of anyio lack this class
        is_of_runner = record.name.split(".")[0] in ("prefect", "asyncio")
        return not is_of_runner or not (has_given_up or is_refused or isinstance(error, away))


@contextmanager
def outages_in_one_line() -> Iterator[None]:
    """In the block, drop the output of Prefect's runner about a server that is away or refuses us."""
    # Releases of Prefect attach the console to different loggers.
    handlers, outage = [*logging.getLogger("prefect").handlers, *logging.getLogger().handlers], OutageFilter()
    for handler in handlers:
        handler.addFilter(outage)
    try:
        with redirect_stdout(io.StringIO()):  # the runner prints the tracebacks of its last errors
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(outage)


async def unserved(served: Collection[str], seconds: float = UNPOLLED_SECONDS) -> list[str]:
    """The deployments without a work pool, as FLOW/NAME, that neither this process nor another one serves.

    Deployments of engines are left out: no process serves them, and they give training runs their buttons.

    served: this process's deployments. seconds: how long a deployment that no process polled counts as served.
    Unserved deployments remain after a restore, or after a change of the file. Their runs would be late forever.
    """
    from prefect.client.orchestration import get_client

    oldest = datetime.now(UTC) - timedelta(seconds=seconds)
    async with get_client() as client:
        found = [
            (f"{flow}/{one.name}", one.last_polled)
            for one in await client.read_deployments()
            if one.work_pool_name is None and (flow := (await client.read_flow(one.flow_id)).name) != TRAINING_FLOW
        ]
    return sorted(name for name, polled in found if name not in served and (polled is None or polled < oldest))


async def ensure_results(url: str) -> dict[str, str]:
    """Register a folder (a path or any fsspec URL) for the results of flows. Returns the variables that runs need.

    Each flow run writes a JSON file there. Results of tasks are not stored: see `tinkerflow.tasks.pipelines.progress`.
    """
    from prefect.filesystems import LocalFileSystem, RemoteFileSystem

    local = str(folder_of_url(url)) if url.startswith("file://") else url
    folder = RemoteFileSystem(basepath=url) if "://" in local else LocalFileSystem(basepath=local)
    await folder.asave(RESULTS, overwrite=True)
    return {
        "PREFECT_DEFAULT_RESULT_STORAGE_BLOCK": f"{folder.get_block_type_slug()}/{RESULTS}",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",
        "PREFECT_TASKS_DEFAULT_PERSIST_RESULT": "false",
    }


async def ensure_tag_limits(limits: Mapping[str, int]) -> None:
    """Make Prefect limit how many task runs with a tag run at the same time. limits: tag -> how many."""
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        for tag, most in limits.items():
            await client.create_concurrency_limit(tag, most)


def _schedule(wanted: dict[str, Any]) -> Schedule:
    """Prefect's schedule for `{cron: ..., timezone: ...}` or `{interval: SECONDS}` of a prefect.yaml."""
    from prefect.deployments.schedules import create_deployment_schedule_create
    from prefect.schedules import Cron, Interval

    try:
        match wanted:
            case {"cron": str(cron), **rest}:
                schedule = Cron(cron, **rest)
            case {"interval": int() | float() as seconds, **rest} if seconds > 0 and not isinstance(seconds, bool):
                schedule = Interval(seconds, **rest)
            case _:
                raise UserError(f"schedules: {wanted!r}: must have cron, or interval in seconds above 0")
        create_deployment_schedule_create(schedule)  # validates the schedule, which Cron and Interval do not
        return schedule
    except ValidationError as error:
        raise UserError(f"schedules: {explain(error)}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"schedules: {wanted!r}: {error}") from error


def check_parameters(wanted: Deployment) -> None:
    """Check a deployment of one of our pipelines without Prefect. UserError: no such pipeline, or a wrong parameter."""
    if wanted.entrypoint.startswith(OURS):
        pipeline = wanted.entrypoint.removeprefix(OURS).partition(".")[0]
        for values in wanted.parameter_sets:
            try:
                parameters_of(pipeline, (wanted.parameters | values).get("parameters", {}))
            except UserError as error:
                raise UserError(f"deployment {wanted.name!r}: {error.message}") from error


def make_deployments(wanted: Sequence[Deployment]) -> dict[str, tuple[Flow[..., Any], dict[str, Any]]]:
    """FLOW/NAME of each deployment -> `make_deployment`. UserError: as there, or two deployments have the same one."""
    made: dict[str, tuple[Flow[..., Any], dict[str, Any]]] = {}
    for one in wanted:
        flow, given = make_deployment(one)
        if made.setdefault(f"{flow.name}/{one.name}", (flow, given))[0] is not flow:
            rule = f"an earlier deployment of the flow {flow.name!r} has this name, and Prefect would keep only one"
            raise UserError(f"deployment {one.name!r}: entrypoint {one.entrypoint!r}: {rule}")
    return made


def make_deployment(wanted: Deployment) -> tuple[Flow[..., Any], dict[str, Any]]:
    """The flow of a deployment, and its arguments for `Runner.aadd_flow` of Prefect.

    UserError: the flow cannot be imported, or a schedule or the limit is wrong. `check_parameters` checks parameters.
    """
    from prefect.flows import load_flow_from_entrypoint
    from prefect.types.entrypoint import EntrypointType

    flow: Flow[..., Any]
    try:
        flow = load_flow_from_entrypoint(wanted.entrypoint, use_placeholder_flow=False)
    except (Exception, SystemExit) as error:  # any error of the module, which may also exit
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"deployment {wanted.name!r}: entrypoint {wanted.entrypoint!r}: {why}") from error
    return unless_changed(flow, wanted.entrypoint), {
        "name": wanted.name,
        "description": wanted.description,
        "parameters": wanted.parameters,
        "tags": wanted.tags,
        "schedules": _schedules(wanted),
        "paused": wanted.paused,
        "concurrency_limit": _concurrency_limit(wanted),
        "entrypoint_type": EntrypointType.MODULE_PATH,
    }


def _schedules(wanted: Deployment) -> list[Schedule]:
    slugs = [schedule.get("slug") for schedule in wanted.schedules]
    for i, slug in enumerate(slugs):
        if slug is not None and slug in slugs[:i]:
            rule = f"schedules[{slugs.index(slug)}] has this slug, which must be unique within a deployment"
            raise UserError(f"deployment {wanted.name!r}: schedules[{i}]: slug is {slug!r}: {rule}")
    return [_schedule(schedule) for schedule in wanted.schedules]


def _concurrency_limit(wanted: Deployment) -> int | ConcurrencyLimitConfig | None:
    """How many runs of a deployment may run at the same time, as Prefect takes it. UserError: the limit is wrong."""
    from prefect.client.schemas.objects import ConcurrencyLimitConfig

    limit = wanted.concurrency_limit
    try:
        found = ConcurrencyLimitConfig.model_validate(limit) if isinstance(limit, dict) else limit
    except ValidationError as error:
        raise UserError(f"deployment {wanted.name!r}: concurrency_limit: {explain(error)}") from error
    if found is not None and (found if isinstance(found, int) else found.limit) < 1:
        raise UserError(f"deployment {wanted.name!r}: concurrency_limit {limit!r}: must be at least 1")
    return found


def unless_changed(flow: Flow[..., Any], entrypoint: str) -> Flow[..., Any]:
    """A copy of the flow. Its runs fail if their deployment was changed on the server (`_check_deployment`)."""
    checked = flow.with_options()
    checked.fn = ServedFunction(flow, entrypoint)
    return checked


class ServedFunction:
    """The function of a served flow. The process of a run receives a copy, which imports the flow again."""

    def __init__(self, flow: Flow[..., Any], entrypoint: str) -> None:
        """entrypoint: the import path of the flow."""
        self.__name__, self.__doc__, self.__module__ = flow.fn.__name__, flow.fn.__doc__, flow.fn.__module__
        self.__signature__ = signature(flow.fn, eval_str=True)
        self._entrypoint = entrypoint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the flow's function. UserError: the deployment is not the one that `serve` made."""
        from prefect.flows import load_flow_from_entrypoint

        _check_deployment(self._entrypoint)
        flow: Flow[..., Any] = load_flow_from_entrypoint(self._entrypoint, use_placeholder_flow=False)
        return flow.fn(*args, **kwargs)


def _check_deployment(entrypoint: str) -> None:
    """Raise UserError if the deployment of this flow run is not the one that `serve` made."""
    from prefect.client.orchestration import get_client
    from prefect.runtime import deployment, flow_run

    with get_client(sync_client=True) as client:
        served, run = client.read_deployment(deployment.id), client.read_flow_run(flow_run.id)
    changes = {
        "pull_steps": served.pull_steps,
        "entrypoint": served.entrypoint if served.entrypoint != entrypoint else None,
        "job_variables": served.job_variables or run.job_variables,
    }
    if changed := [f"{name} {value!r}" for name, value in changes.items() if value]:
        raise UserError(
            f"deployment {served.name!r} was changed on the Prefect server ({'; '.join(changed)}): `tinkerflow serve` "
            f"executes only its file's entrypoint {entrypoint!r}; start it again to restore the deployment"
        )
