"""The parts of a prefect.yaml that `tinkerflow serve` reads, its errors before it serves, and its Prefect server."""

from __future__ import annotations

import asyncio
import inspect
import io
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import cloudpickle
import httpx
import pytest
from prefect.settings.models.flows import FlowsSettings

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.automations import automations
from tinkerflow.deployments.config import read_config
from tinkerflow.deployments.run import example_file
from tinkerflow.deployments.serve import (
    PLAIN_LOG,
    Deployment,
    alone,
    check_parameters,
    make_deployment,
    make_deployments,
    outages_in_one_line,
    read_file,
    serve,
)
from tinkerflow.flows.pipelines import Pipeline, pipelines
from tinkerflow.flows.prefect.server import listen, start_server
from tinkerflow.tasks.pipelines.environments import MAY_IMPORT, load
from tinkerflow.tasks.pipelines.rewards import is_answer


def test_deployments_with_paths_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prefect.yaml"
    file.write_text(
        "deployments:\n"
        "  - {name: a, entrypoint: m.f, parameters: {parameters: {data: {url: rows.jsonl}}}, work_pool: {name: p}}\n"
        "  - {name: b, entrypoint: m.f, schedules: [{cron: 0 2 * * *}], paused: true}\n"
        "tag_limits: {nightly: 2}\n"
    )
    served = read_file(file)
    first, second = served.deployments
    assert first.parameters == {"parameters": {"data": {"url": str(tmp_path / "rows.jsonl")}}}
    assert (second.schedules, second.paused, second.tags) == ([{"cron": "0 2 * * *"}], True, [])
    assert served.tag_limits == {"nightly": 2}


def test_parameters_of_a_schedule_are_read_like_those_of_its_deployment(tmp_path: Path) -> None:
    entry = """deployments:
  - name: a
    entrypoint: tinkerflow.flows.pipelines.rl.rl
    parameters: {parameters: {data: {url: rows.jsonl}, reward: 'm:f'}}
    schedules: [{interval: 9}, {cron: 0 2 * * *, parameters: {parameters: {data: {url: n.jsonl}, reward: 'm:night'}}}]
"""
    (tmp_path / "prefect.yaml").write_text(entry)
    served = read_file(tmp_path / "prefect.yaml")
    (deployment,) = served.deployments
    _, override = deployment.parameter_sets
    assert override["parameters"]["data"] == {"url": str(tmp_path / "n.jsonl")}
    assert served.allowed_code == ["m:f", "m:night"]
    check_parameters(deployment)
    (tmp_path / "prefect.yaml").write_text(entry.replace("reward: 'm:night'", "rewards: 'm:night'"))
    with pytest.raises(UserError, match=r"^deployment 'a': rewards: is not a parameter"):
        check_parameters(read_file(tmp_path / "prefect.yaml").deployments[0])


@pytest.mark.parametrize("text", ["name: x", "deployments: [", "- a", ""])
def test_a_file_without_deployments_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "prefect.yaml").write_text(text)
    with pytest.raises(UserError, match=r"must be a prefect\.yaml with deployments"):
        read_file(tmp_path / "prefect.yaml")
    with pytest.raises(UserError, match=r"must be a prefect\.yaml with deployments"):
        read_file(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", ["a/b", "''", "100%"])
def test_a_name_that_prefect_refuses_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "prefect.yaml").write_text(f"deployments: [{{name: {name}, entrypoint: m.f}}]")
    with pytest.raises(UserError, match=r"deployments\[0\]: name: .*: must have no / % & < >, and not be empty$"):
        read_file(tmp_path / "prefect.yaml")


def test_two_deployments_of_a_flow_have_different_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from prefect import flow\n@flow(name='train')\ndef f() -> None: ...\n@flow\ndef g() -> None: ...\n"
    (tmp_path / "trains_twice.py").write_text(code + "@flow(name='train')\ndef h() -> None: ...\n")
    monkeypatch.syspath_prepend(tmp_path)

    def made(*entries: str) -> list[str]:
        listed = ", ".join(f"{{name: {name}, entrypoint: trains_twice.{flow}}}" for name, flow in entries)
        (tmp_path / "prefect.yaml").write_text(f"deployments: [{listed}]")
        return list(make_deployments(read_file(tmp_path / "prefect.yaml").deployments))

    assert made("af", "ag", "bf") == ["train/a", "g/a", "train/b"]
    for flow in "fh":  # the same flow again, and another one that Prefect takes for the same
        rule = f"entrypoint 'trains_twice.{flow}': an earlier deployment of the flow 'train' has this name"
        with pytest.raises(UserError, match=rf"^deployment 'a': {rule}"):
            made("af", "ag", f"a{flow}")


@pytest.mark.parametrize("limits", ["[nightly]", "{nightly: 0}", "{nightly: many}"])
def test_invalid_tag_limit_is_refused(tmp_path: Path, limits: str) -> None:
    (tmp_path / "prefect.yaml").write_text(f"deployments: []\ntag_limits: {limits}\n")
    with pytest.raises(UserError, match="must give a number of at least 1 for each tag"):
        read_file(tmp_path / "prefect.yaml")


@pytest.mark.parametrize(
    ("schedule", "kind"), [({"cron": "0 2 * * *", "timezone": "UTC"}, "cron"), ({"interval": 60}, "interval")]
)
async def test_a_deployment_of_a_pipeline(schedule: dict[str, Any], kind: str) -> None:
    values = read_config(example_file("sft.yaml"))
    wanted = Deployment(
        name="mine",
        entrypoint="tinkerflow.flows.pipelines.sft.sft",
        parameters={"parameters": values},
        tags=["t"],
        schedules=[schedule],
        concurrency_limit={"limit": 1, "collision_strategy": "CANCEL_NEW"},
    )
    flow, given = make_deployment(wanted)
    made = await flow.ato_deployment(**given)
    assert (made.flow_name, made.name, made.tags) == ("sft", "mine", ["t"])
    assert made.entrypoint == "tinkerflow.flows.pipelines.sft.sft"
    assert getattr(made.schedules[0].schedule, kind) is not None


def test_invalid_entry_points_and_schedules_are_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entrypoint = "tinkerflow.flows.pipelines.sft.sft"
    parameters = {"parameters": read_config(example_file("sft.yaml"))}
    with pytest.raises(UserError, match="must have cron, or interval in seconds"):
        make_deployment(
            Deployment(name="x", entrypoint=entrypoint, parameters=parameters, schedules=[{"every": "day"}])
        )
    invalid: list[dict[str, Any]] = [
        {"cron": "61 3 * * *"},
        {"cron": "1 3 * * *", "timezone": "Europe/Berlim"},
        {"interval": 60, "timezone": "Europe/Berlim"},
        {"interval": 60, "anchor_date": "yesterday"},
        {"cron": "1 3 * * *", "active": "maybe"},
    ]
    for schedule in invalid:
        with pytest.raises(
            UserError, match=r"^schedules: .*([Ii]nvalid|Unable to parse|parsed as a bool|valid date).*$"
        ):
            make_deployment(Deployment(name="x", entrypoint=entrypoint, parameters=parameters, schedules=[schedule]))
    for seconds in (0, -5, True, math.inf, math.nan):
        with pytest.raises(UserError, match=r"^schedules: {'interval': "):
            make_deployment(
                Deployment(name="x", entrypoint=entrypoint, parameters=parameters, schedules=[{"interval": seconds}])
            )
    for limit in (0, {"limit": 0}, {"limit": "many"}, {"most": 1}):
        with pytest.raises(UserError, match=r"^deployment 'x': concurrency_limit"):
            make_deployment(
                Deployment(name="x", entrypoint=entrypoint, parameters=parameters, concurrency_limit=limit)  # type: ignore[arg-type]
            )
    (tmp_path / "exits_when_imported.py").write_text("raise SystemExit('bye')")
    monkeypatch.syspath_prepend(tmp_path)
    for unknown in ("no_module.flow", "tinkerflow.flows.pipelines.sft.nightly", "exits_when_imported.flow"):
        with pytest.raises(UserError, match=f"^deployment 'x': entrypoint '{unknown}': .*$"):
            make_deployment(Deployment(name="x", entrypoint=unknown, parameters=parameters))


@pytest.mark.parametrize(
    ("pipeline", "line"),
    [
        ("nightli", "deployment 'x': pipeline 'nightli': must be one of .* (did you mean 'nightly'?)"),
        ("sft", "deployment 'x': data: Field required"),
    ],
)
def test_invalid_deployment_is_refused_before_prefect_starts(tmp_path: Path, pipeline: str, line: str) -> None:
    file, entrypoint = tmp_path / "prefect.yaml", f"tinkerflow.flows.pipelines.{pipeline}.{pipeline}"
    file.write_text(f"deployments: [{{name: x, entrypoint: {entrypoint}}}]\n")
    with pytest.raises(UserError, match=line.replace("(", r"\(").replace("?)", r"\?\)")):
        serve(file, Settings(data_dir=tmp_path), limit=1)


def test_two_schedules_of_a_deployment_have_different_slugs() -> None:
    """Prefect would answer with the status 409."""
    schedules = [{"cron": "0 2 * * *", "slug": "night"}, {"interval": 9}, {"interval": 9}]
    wanted = Deployment(name="x", entrypoint="tinkerflow.flows.pipelines.sft.sft", schedules=schedules)
    assert [one.slug for one in make_deployment(wanted)[1]["schedules"]] == ["night", None, None]
    wanted.schedules.append({"interval": 9, "slug": "night"})
    rule = r"deployment 'x': schedules\[3\]: slug is 'night': schedules\[0\] has this slug, which must be unique"
    with pytest.raises(UserError, match=rule):
        make_deployment(wanted)


def test_parameters_may_name_the_code_that_the_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prefect.yaml"
    file.write_text(
        "deployments:\n"
        "  - {name: a, entrypoint: m.f, parameters: {reward: 'os.path:exists', steps: [{environment: 'a:B'}]}}\n"
        "allowed_code: ['os.path:isdir']\n"
    )
    assert read_file(file).allowed_code == ["a:B", "os.path:exists", "os.path:isdir"]
    assert load("reward", "os:system") is os.system, "outside of serve, the person who runs a pipeline chooses its code"
    monkeypatch.setenv(MAY_IMPORT, " ".join(read_file(file).allowed_code))
    assert load("reward", "os.path:isdir") is os.path.isdir
    assert load("reward", "tinkerflow.tasks.pipelines.rewards:is_answer") is is_answer
    for path in (
        "os:system",
        "os.path:isfile",
        "os.path:exists ",
        "builtins:exec",
        "tinkerflow.tasks.pipelines.work:os",
    ):
        with pytest.raises(UserError, match=r"reward '.*': .* add the path to `allowed_code`"):
            load("reward", path)


@pytest.mark.parametrize("listed", ["os.path:isdir", "[1]", "[os]"])
def test_allowed_code_is_a_list_of_import_paths(tmp_path: Path, listed: str) -> None:
    (tmp_path / "prefect.yaml").write_text(f"deployments: []\nallowed_code: {listed}\n")
    with pytest.raises(UserError, match=r"must be a list of import paths, package\.module:name"):
        read_file(tmp_path / "prefect.yaml")


def test_flows_with_the_usual_heartbeats_do_not_count_as_silent() -> None:
    """Prefect's server may be shared with flows of `tinkerflow run` and of others."""
    (silent,) = [one for one in automations() if "heartbeat" in one.name]
    usual = FlowsSettings.model_fields["heartbeat_frequency"].default
    assert silent.trigger.within > timedelta(seconds=2 * usual), "one lost event is no crash"  # type: ignore[union-attr]


def test_flows_are_sent_to_their_processes_whole() -> None:
    """`Runner.aadd_flow` pickles them, so a pipeline must refer only to objects that can be pickled."""
    for pipeline in pipelines().values():
        flow, _ = make_deployment(_example_of(pipeline))
        copy = cloudpickle.loads(cloudpickle.dumps(flow))
        assert (copy.name, copy.isasync) == (pipeline.flow.name, True)
        assert inspect.signature(copy.fn) == inspect.signature(pipeline.flow.fn, eval_str=True)


def _example_of(pipeline: Pipeline) -> Deployment:
    values = read_config(example_file(f"{pipeline.name}.yaml"))
    return Deployment(name="mine", entrypoint=pipeline.entrypoint, parameters={"parameters": values})


def test_log_keeps_ids_and_has_no_error_for_a_cancelled_run() -> None:
    code = """
import logging
from prefect.logging.configuration import setup_logging
setup_logging()
log = logging.getLogger("prefect.flow_runs.runner")
log.error("Finished in state Cancelled()")
log.info("sess-1:train:0 [gpu]")
"""
    environment = os.environ | {
        "PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS": PLAIN_LOG,
        "PREFECT_LOGGING_TO_API_ENABLED": "0",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    cancelled, named = done.stderr.splitlines()
    assert "INFO" in cancelled and "ERROR" not in cancelled
    assert named.endswith("sess-1:train:0 [gpu]")


async def _until_logged(log: Path, text: str, seconds: float = 240) -> None:
    async with asyncio.timeout(seconds):
        while text not in log.read_text():  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(0.1)


async def _ask(server: Any, path: str, **body: object) -> Any:
    access = {"base_url": server.access.api_url, "headers": server.access.headers}
    async with httpx.AsyncClient(**access, follow_redirects=True, timeout=60) as http:
        async with asyncio.timeout(120):
            while (answer := await http.post(f"/{path}", json=body)).status_code == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # another request writes to Prefect's SQLite database
        return answer.raise_for_status().json()


async def _deploy(server: Any, name: str, **more: object) -> str:
    """Create a deployment of a flow `of-{name}` in Prefect, and return its id."""
    if "work_pool_name" in more:
        await _ask(server, "work_pools/", name=more["work_pool_name"], type="process")
    flow = await _ask(server, "flows/", name=f"of-{name}")
    return str((await _ask(server, "deployments/", name=name, flow_id=flow["id"], **more))["id"])


def test_serve_waits_for_the_end_of_another_serve_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the other one would pause the schedules that this one has just started."""
    file, url, entered = tmp_path / "prefect.yaml", "http://127.0.0.1:4200/api", Event()

    def enter() -> None:
        with alone(file, url, tmp_path):
            entered.set()

    shown = ""
    with alone(file, url, tmp_path), alone(file, f"{url}/other", tmp_path), alone(tmp_path / "other", url, tmp_path):
        other = Thread(target=enter)
        other.start()
        while "waiting" not in shown:
            shown += capsys.readouterr().out
        assert not entered.is_set()
    other.join()
    assert shown == f"another `tinkerflow serve` of {file} has not ended: waiting for its end\n"


async def test_serve_follows_the_prefect_server_of_its_data_dir_only(
    tmp_path: Path, prefect_database: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gets another address. Then a server with another data dir gets that address."""
    data, file, log, end = (tmp_path / name for name in ("data", "prefect.yaml", "serve.log", "end.log"))
    prefect_database(data)
    prefect_database(tmp_path / "restored")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    command = [sys.executable, "-m", "tinkerflow", "serve", "--file", str(file), "--data-dir", str(data)]
    with log.open("w") as output, end.open("w") as last, ExitStack() as stack:
        server = await start_server(data, stack.enter_context(await listen(0)))
        await _deploy(server, "nightly")
        await _deploy(server, "of-a-pool", work_pool_name="elsewhere")
        served = await _deploy(server, "of-another-serve")
        engines = await _ask(server, "flows/", name="training_run")
        await _ask(server, "deployments/", name="training runs of data on host", flow_id=engines["id"])
        await _ask(server, "deployments/get_scheduled_flow_runs", deployment_ids=[served])
        file.write_text("deployments: []\n")
        serving = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=asyncio.subprocess.STDOUT)
        try:
            await _until_logged(log, f"Prefect: {server.access.api_url}\n")
            named = (
                "Prefect has the deployment of-nightly/nightly, which no process serves: add it to the file, or delete"
            )
            assert named in log.read_text() and log.read_text().count("no process serves") == 1
            await server.stop()
            await _until_logged(log, f"Prefect at {server.access.api_url} does not answer")
            old, server = server, await start_server(data, stack.enter_context(listening := await listen(0)))
            assert old.access.api_url != server.access.api_url
            await _until_logged(log, url := f"Prefect: {server.access.api_url}\n")
            serving.terminate()
            assert await asyncio.wait_for(serving.wait(), 120) == 0

            sft = "{name: a, entrypoint: tinkerflow.flows.pipelines.sft.sft, parameters: {parameters: {name: a, "
            file.write_text(f"deployments:\n- {sft}data: {{url: a.jsonl}}}}}}}}\n")
            serving = await asyncio.create_subprocess_exec(*command, stdout=last, stderr=asyncio.subprocess.STDOUT)
            await _until_logged(end, url)
            serving.send_signal(signal.SIGSTOP)  # a long start of the next server would be an outage for it
            await server.stop()
            server = await start_server(tmp_path / "restored", listening)
            serving.send_signal(signal.SIGCONT)
            assert url == f"Prefect: {server.access.api_url}\n"
            assert await asyncio.wait_for(serving.wait(), 240) == 1
        finally:
            if serving.returncode is None:
                serving.kill()
            await server.stop()
    assert "Traceback" not in log.read_text(), log.read_text()
    said = end.read_text()
    line = f"Prefect at {server.access.api_url} refuses the credential of data dir {data}: start `tinkerflow serve`"
    assert line in " ".join(said.split()), said
    assert "Traceback" not in said and "Warning" not in said and said.count("refuse") == 1, said


def test_unreachable_server_prints_no_traceback_on_the_root_logger() -> None:
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    logging.getLogger().addHandler(handler)
    try:
        with outages_in_one_line():
            for name, error in (
                ("prefect.FlowRunCancellingObserver", ConnectionRefusedError(111, "refused")),
                ("asyncio", asyncio.CancelledError()),
                ("prefect.runner", KeyError("a defect")),
                ("tinkerflow.flows", ConnectionRefusedError(111, "of us")),
            ):
                logging.getLogger(name).error("%s failed", name, exc_info=error)
    finally:
        logging.getLogger().removeHandler(handler)
    assert "Observer" not in printed.getvalue() and "asyncio" not in printed.getvalue()
    assert "a defect" in printed.getvalue() and "of us" in printed.getvalue()
