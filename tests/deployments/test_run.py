"""`tinkerflow run`: its file, its Prefect server, its progress bar and its last lines."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from prefect.states import Completed, Failed
from rich.console import Console

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.core.prefect_access import PrefectAccess, make_credential, record_server
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.supervise.processes import free_port
from tinkerflow.deployments import run as module
from tinkerflow.deployments.automations import automations
from tinkerflow.deployments.config import read_config, read_yaml
from tinkerflow.deployments.data_check import parameters_of
from tinkerflow.deployments.data_dir import owned
from tinkerflow.deployments.run import (
    as_text,
    example_file,
    find,
    other_data_dir,
    prefect_api,
    result_table,
    run,
    run_and_show,
    see_again,
    show_failure,
    wait_for_prefect,
)
from tinkerflow.tasks.pipelines.environments import EnvironmentUnavailableError


@pytest.fixture(autouse=True)
def prefect_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` would set the variable if it is not set, and so change Prefect's level in later tests of this process."""
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "CRITICAL")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_run_needs_either_a_file_or_the_example(tmp_path: Path) -> None:
    for config, example in ((None, False), (tmp_path / "sft.yaml", True)):
        with pytest.raises(UserError, match="give either --config FILE or --example"):
            run(quiet(), "sft", config, example=example, changes=(), data_dir=None)


def test_unknown_pipeline_is_refused_with_the_list_of_pipelines() -> None:
    assert find("sft").name == "sft"
    with pytest.raises(UserError, match=r"pipeline 'stf': must be one of .*rl, sft, sweep \(did you mean 'sft'\?\)"):
        find("stf")


def test_paths_of_data_are_relative_to_the_file_and_changes_come_on_top(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        "data: {url: rows.jsonl}\nheld_out: {url: 'gs://bucket/rows.jsonl'}\ntraining: {steps: 3}\n"
        "tracking: mlflow\nresume: a\n"
    )
    changes = ["training.steps=10", "model.rank=4", "name=mine", "data.limit=null", "tracking=", "resume=null"]
    values = read_config(file, changes)
    assert values == {
        "data": {"url": str(tmp_path / "rows.jsonl")},
        "held_out": {"url": "gs://bucket/rows.jsonl"},
        "training": {"steps": 10},
        "model": {"rank": 4},
        "name": "mine",
    }


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        ("a: [", (), "config .*sft.yaml"),
        ("- a", (), "must contain names and values"),
        ("a: 1", ("steps",), "must be NAME=VALUE"),
        ("a: 1", ("a.b=2",), "a is not a section with names"),
        ("a: 1", ("b=[",), "--set 'b=\\['"),
        ("b: {a: 1, a: 2}", (), "the name 'a' appears twice"),
        ("? [a]\n: 1", (), "is not a string"),
        ("a: \xff\x00", (), "config .*sft.yaml"),
    ],
)
def test_invalid_file_or_change_is_named(tmp_path: Path, text: str, change: tuple[str, ...], message: str) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(file, change)
    with pytest.raises(UserError, match=r"config .*sftt\.yaml: does not exist \(did you mean 'sft.yaml'\?\)"):
        read_config(tmp_path / "sftt.yaml")


def test_merged_sections_are_read() -> None:
    assert read_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_the_prefect_server_is_the_named_one_that_of_the_data_dir_or_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    new = PrefectAccess("http://127.0.0.1:1/api", "a:b", "http://127.0.0.1:1")

    class Started:
        access = new

        async def stop(self) -> None:
            started.append("stopped")

    async def start_server(data_dir: Path, listener: object) -> Started:
        started.append(str(data_dir))
        return Started()

    monkeypatch.setattr("tinkerflow.flows.prefect.server.start_server", start_server)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as stranger:
        Thread(target=stranger.serve_forever, daemon=True).start()
        settings = Settings(data_dir=tmp_path, prefect_port=stranger.server_port)
        monkeypatch.setenv("TINKER_BASE_URL", "http://service")
        console = quiet()
        with prefect_api(console, settings) as (prefect, ends):  # a stranger's server on our port is not used
            lines = console.file.getvalue()  # type: ignore[attr-defined]
            assert f"no Prefect server runs for data dir {tmp_path}" in lines and "name its data dir" in lines
            assert (prefect, ends, started) == (new, True, [str(tmp_path)])
        stranger.shutdown()
    assert started == [str(tmp_path), "stopped"]
    credential = make_credential(tmp_path)
    record_server(tmp_path, 4200, os.getpid())
    with prefect_api(quiet(), settings) as (prefect, ends):
        assert (prefect.api_url, prefect.credential, ends) == ("http://127.0.0.1:4200/api", credential, False)
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api")
    with prefect_api(quiet(), settings) as (prefect, ends):
        assert (prefect.api_url, prefect.credential, ends) == ("http://elsewhere/api", "", False)


class Finished:
    """A pipeline that does nothing."""

    name = "sft"

    async def flow(self, parameters: Any, return_state: bool) -> Any:
        return Completed()


def test_killed_run_is_marked_as_crashed_although_nothing_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_database: Callable[[Path], None]
) -> None:
    prefect_database(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(module, "parameters_of", lambda *_: None)
    with prefect_api(quiet(), Settings(data_dir=tmp_path)) as (prefect, _):
        for _ in range(2):
            assert module._run(quiet(), Finished(), {}, prefect).is_completed()  # type: ignore[arg-type]
        url = f"{prefect.api_url}/automations/filter"
        found = httpx.post(url, json={}, headers=prefect.headers).raise_for_status().json()
    by_name = {one["name"]: one for one in found}
    assert sorted(one["name"] for one in found) == sorted(one.name for one in automations())
    silent = by_name["tinkerflow: flow runs without a heartbeat have crashed"]
    assert silent["enabled"] and silent["trigger"]["after"] == ["prefect.flow-run.heartbeat"]


def test_run_continues_if_prefect_refuses_automations(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(wanted: object) -> list[str]:
        raise httpx.HTTPStatusError("403 Forbidden", request=httpx.Request("POST", "http://a"), response=None)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "ensure_automations", refused)
    monkeypatch.setattr(module, "parameters_of", lambda *_: None)
    console = quiet()
    access = PrefectAccess("http://127.0.0.1:5555/api", "a:b", "http://127.0.0.1:5555")
    assert module._run(console, Finished(), {}, access).is_completed()  # type: ignore[arg-type]
    assert "may show it as Running" in console.file.getvalue()  # type: ignore[attr-defined]


def test_waiting_for_prefect_times_out() -> None:
    away = PrefectAccess(f"http://127.0.0.1:{free_port()}/api", "", "")
    with pytest.raises(ServerError, match=r"Prefect at .* did not answer within 0 s \(start_deadline\)"):
        wait_for_prefect(lambda: away, 0)
    with pytest.raises(ServerError, match=r"Prefect did not answer within 0 s \(start_deadline\)"):
        wait_for_prefect(lambda: None, 0)


def test_end_of_a_run_shows_how_to_open_its_page_again(tmp_path: Path) -> None:
    page = "/runs/flow-run/1234"
    assert "--data-dir DIR" in see_again(page, None)
    folder = tmp_path / "my data"
    assert "PREFECT_API_URL" in see_again(page, folder), "a machine that has never served, perhaps without the server"
    with owned(folder, "http://127.0.0.1:8123"):
        said = see_again(page, folder)
    assert f"tinkerflow up --data-dir '{folder}'" in said
    assert said.endswith(f"tinkerflow prefect --page {page} --data-dir '{folder}'")


@pytest.mark.parametrize("ends", [True, False])
def test_temporary_server_is_not_promised_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    @contextmanager
    def api(*_: object) -> Iterator[tuple[PrefectAccess, bool]]:
        yield access, ends

    asked: list[Any] = []
    access = PrefectAccess("http://127.0.0.1:5555/api", "a:b", "http://127.0.0.1:5555")

    def fake(
        console: Console, pipeline: Any, values: Any, prefect: PrefectAccess, again: str, server: str, *, stays: bool
    ) -> tuple[str, bool]:
        assert stays != ends
        asked.append((pipeline.name, values, prefect, again, server))
        return "/runs/flow-run/1", True

    monkeypatch.setattr(module, "prefect_api", api)
    monkeypatch.setattr(module, "run_and_show", fake)
    monkeypatch.setattr(module, "check_server", lambda *_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))  # `run` adds the folder of the configuration
    rows = example_file("colours-train.jsonl")
    (tmp_path / "sft.yaml").write_text(f"name: mine\ndata: {{url: {rows}}}")
    monkeypatch.setenv("TINKER_BASE_URL", "http://service")
    console = quiet()
    assert run(console, "sft", tmp_path / "sft.yaml", example=False, changes=["name=other"], data_dir=tmp_path)
    again = f"tinkerflow run sft --config {tmp_path}/sft.yaml --set name=other --data-dir {tmp_path} --set resume="
    assert asked == [("sft", {"name": "other", "data": {"url": str(rows)}}, access, again, "http://service")]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.startswith("service: http://service (TINKER_BASE_URL)\n")
    assert ("its page in Prefect ends with this command" in shown) == ends
    assert ("see it in Prefect" in shown) != ends, "a link of a server that has ended"


def test_results_are_formatted() -> None:
    assert as_text({}) == "none"
    assert as_text({"loss": 0.123456, "steps": 3, "samples": [1, 2]}) == "loss 0.1235  steps: 3  samples: 2"
    assert as_text({"new": {"loss": 1.0}, "old": {"loss": 2.0}}) == "new: loss 1  \nold: loss 2"
    assert as_text(["a", {"b": 1}]) == "a\nb: 1"
    assert as_text("plain") == "plain"
    assert as_text({"prompt": "a", "answer": "", "wanted": ""}) == "prompt: a  answer: "
    console = quiet()
    console.print(
        result_table(
            {
                "steps": 2,
                "first": {"loss": 2.0},
                "last": {"loss": 1.0},
                "held_out": {},
                "left_out": [],
                "left_out_episodes": None,
            }
        )
    )
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines == ["steps 2", "first tenth loss 2", "last tenth loss 1", "held_out none"]


def test_progress_is_logged_as_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tinkerflow.tasks.pipelines.artifacts import begin_phase, follower

    async def none(wanted: object) -> list[str]:
        return []

    class Fake:
        name = "sft"

        async def flow(self, parameters: Any, return_state: bool) -> Any:
            begin_phase("checking the data")
            begin_phase("step 1: new shapes are compiled first")
            for step in (1, 2, 3):
                follower.get()(step, 3, {"loss": 1.0 / step})
            assert not logging.getLogger("tinker").isEnabledFor(logging.WARNING)
            assert lines_of_runs.isEnabledFor(logging.INFO) and not lines_of_runs.propagate
            return Completed()

    lines_of_runs = logging.getLogger("prefect.flow_runs")
    caplog.set_level(logging.CRITICAL, "prefect")  # as at the start of `run`
    assert not lines_of_runs.isEnabledFor(logging.INFO)
    level = logging.getLogger("tinker").level
    monkeypatch.setattr(module, "parameters_of", lambda *_: None)
    monkeypatch.setattr(module, "ensure_automations", none)
    console = quiet()
    access = PrefectAccess("http://127.0.0.1:5555/api", "a:b", "http://127.0.0.1:5555")
    module._run(console, Fake(), {"resume": "mine"}, access, "tinkerflow run --set resume=")  # type: ignore[arg-type]
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == [
        "to continue if it is interrupted: tinkerflow run --set resume=mine",
        "sft: checking the data",
        "sft: step 1: new shapes are compiled first",
        "sft: step 1 of 3  loss 1",
        "sft: step 3 of 3  loss 0.3333",
    ]
    assert logging.getLogger("tinker").level == level, "the SDK's warnings stay hidden after the run"
    assert lines_of_runs.propagate and not lines_of_runs.isEnabledFor(logging.INFO)


def test_a_failed_run_shows_its_page_in_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinkerflow.tasks.pipelines.artifacts import training_runs

    def failed(*_: object) -> Any:
        made = training_runs.get()
        assert made is not None
        made += ["sess-1:train:0", "sess-1:train:1"]
        return Failed(message="no")

    monkeypatch.setattr(module, "_run", failed)
    console = quiet()
    access = PrefectAccess("http://127.0.0.1:5555/api", "a:b", "http://127.0.0.1:5555")
    assert not run_and_show(console, find("rl"), {}, access, server="http://service")[1]
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == ["rl: Failed: no", "see it in the console: http://service/training_runs/sess-1:train:1"]
    assert training_runs.get() is None


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Task run encountered an exception UserError: all 2 rows failed", "all 2 rows failed"),
        ("Flow run encountered an exception: EnvironmentUnavailableError: reward a:b: late", "reward a:b: late"),
        ("Flow run encountered an exception: KeyError: 'x'", "KeyError: 'x'"),
    ],
)
def test_tinkerflow_error_is_shown_without_its_class_name(message: str, shown: str) -> None:
    console = quiet()
    assert issubclass(EnvironmentUnavailableError, ServerError)
    show_failure(console, "rl", Failed(message=message))
    assert console.file.getvalue() == f"rl: Failed: {shown}\n"  # type: ignore[attr-defined]


def test_a_service_of_another_data_dir_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKERFLOW_PIPELINES", raising=False)
    parameters = parameters_of("rl", read_config(example_file("rl.yaml")))
    settings = Settings(data_dir=tmp_path)
    url = "http://localhost:8123"
    assert not other_data_dir(parameters_of("sft", read_config(example_file("sft.yaml"))), settings, url)
    assert f"8123 does not use the data dir {tmp_path}" in other_data_dir(parameters, settings, url)
    with owned(tmp_path, "http://127.0.0.1:8123"):
        assert not other_data_dir(parameters, settings, url)
    with owned(tmp_path, "http://127.0.0.1:8124"):
        assert "give the --data-dir of its `tinkerflow up`" in other_data_dir(parameters, settings, url)
    assert not other_data_dir(parameters.model_copy(update={"work": "gs://bucket"}), settings, url)
    url = "https://tinkerflow.example.com"
    assert not other_data_dir(parameters, settings, url), "it may share the folder under another path"
