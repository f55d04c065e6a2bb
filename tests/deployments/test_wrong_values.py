"""A wrong value is refused before anything starts, in one line that names the place, the value and a fix."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.supervise.processes import free_port
from tinkerflow.deployments import cli
from tinkerflow.deployments.commands import every_command
from tinkerflow.deployments.config import read_config
from tinkerflow.deployments.data_check import (
    check_code,
    check_files,
    check_first_rows,
    check_server,
    parameters_of,
    sources_of,
)
from tinkerflow.deployments.options import database_of
from tinkerflow.deployments.overview import MODULES, overview
from tinkerflow.deployments.run import example_file
from tinkerflow.tasks.pipelines.parameters import PARAMETERS
from tinkerflow.tasks.pipelines.server_address import offered_name

ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
REQUIRED = {"grid": {"seed": [0, 1]}, "champion": "best", "reward": "m:f"}
CHANGES: list[tuple[str, str, Any, str]] = [  # pipeline, parameter, value, the line's text
    ("sft", "training.stepz", 3, r"training.stepz: is not a parameter (did you mean 'steps'?)"),
    ("sft", "trainig", {}, "trainig: is not a parameter (did you mean 'training'?)"),
    ("sft", "data.colums", {}, "data.colums: is not a parameter (did you mean 'columns'?)"),
    ("sft", "held_out.urll", "x", "held_out.urll: is not a parameter (did you mean 'url'?)"),
    ("sft", "model.ranks", 3, "model.ranks: is not a parameter (did you mean 'rank'?)"),
    ("sft", "max_bad_fraction", 0.2, "max_bad_fraction: is not a parameter (did you mean 'data.max_bad_fraction'?)"),
    ("sft", "samples.row", 3, "samples.row: is not a parameter (did you mean 'rows'?)"),
    ("sft", "training.steps", 0, "training.steps: 0: Input should be greater than or equal to 1"),
    ("sft", "training.steps", "many", "training.steps: 'many': Input should be a valid integer"),
    ("sft", "training.batch_size", -1, "training.batch_size: -1: "),
    ("sft", "training.learning_rate", 2, "training.learning_rate: 2: "),
    ("sft", "training.schedule", "cosin", "training.schedule: 'cosin': Input should be 'constant', 'linear' or"),
    ("sft", "training", [1], "training: must be a section with names such as steps, batch_size, learning_rate"),
    ("sft", "name", "My Run", "name: 'My Run': must be lowercase letters and digits, with dashes between them"),
    ("sft", "model.start_from", "a/b", "model.start_from: 'a/b': must be the tinker:// path of a checkpoint"),
    ("sft", "model.format", "chatml", "model.format: 'chatml': Input should be 'chat' or 'text'"),
    ("sft", "resume", "a b", "resume: 'a b': must be at most 128 letters, digits, dots, dashes and underscores"),
    ("sft", "data", "rows.jsonl", "data: must be a section: write data: {url: rows.jsonl}"),
    ("sft", "data.url", "", "data.url: "),
    ("sft", "data.url", "rows.jsn", "does not exist (did you mean 'rows.jsonl'?)"),
    ("sft", "data.url", "/no/such/folder", "data.url '/no/such/folder': does not exist"),
    ("sft", "data.url", "rows.xml", "rows.xml: must end in .jsonl"),
    ("sft", "data.url", "empty.jsonl", "empty.jsonl': is empty: it contains no rows"),
    ("sft", "data.url", "bad.jsonl", "2 of 3 rows are wrong, at most 2.0% may be left out (data.max_bad_fraction); "
     "first: bad.jsonl:1: line: "),
    ("sft", "data.url", "broken.parquet", "broken.parquet cannot be read"),
    ("sft", "data.kind", "sharegtp", "data.kind: 'sharegtp': Input should be 'auto', 'chat'"),
    ("sft", "data.columns", {"promt": "q"}, "data.columns.promt: no form has this field; must be one of"),
    ("sft", "data.columns", {"messages": "msgs"}, "data.columns.messages: 'msgs': the column is missing"),
    ("sft", "data.max_bad_fraction", 2, "data.max_bad_fraction: 2: "),
    ("sft", "data.special_tokens", "keep", "data.special_tokens: 'keep': Input should be 'text' or 'tokens'"),
    ("sft", "tracking", "wanbd", "tracking: 'wanbd': must be one of mlflow, tensorboard, trackio, wandb (did"),
    ("sft", "tracking", 3, "tracking: 3: Input should be a valid list"),
    ("dpo", "beta", 0, "beta: 0: Input should be greater than 0"),
    ("dpo", "data.url", "rows.jsonl", "schema chat: dpo needs preference"),
    ("rl", "reward", "a.b", "reward: 'a.b': write module:function, as in rewards:vowels"),
    ("rl", "reward", "rewardz:vowels", "reward 'rewardz:vowels': there is no module 'rewardz'"),
    ("rl", "reward", "os:getcwdb", "reward 'os:getcwdb': too many positional arguments; it is called with the row's"),
    ("rl", "reward", "math:pi", "reward 'math:pi': must be a function or a class"),
    ("rl", "environment", "m:E", "parameters of rl: give reward or environment, not both; `--set reward=` "),
    ("rl", "loss", "cross_entropy", "loss: 'cross_entropy': Input should be 'importance_sampling', 'ppo', 'cispo', "),
    ("distill", "teacher.weight", "x", "teacher.weight: is not a parameter (did you mean 'weights'?)"),
    ("evaluate", "weights", "a/b", "weights: 'a/b': must be the tinker:// path of a checkpoint, which `t"),
    ("nightly", "metric", "accuracy", "metric: 'accuracy': Input should be 'loss', 'exact_match' or 'reward'"),
    ("nightly", "champion", "A B", "champion: 'A B': must be lowercase letters and digits, with dashes"),
    ("sweep", "grid.momentum", [0.9], "grid.momentum: is not a parameter"),
    ("sweep", "grid", {}, "grid: list values for at least one parameter"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    line = json.dumps(ROW) + "\n"
    for name, text in (("rows.jsonl", line * 3), ("empty.jsonl", ""), ("bad.jsonl", "x\ny\n" + line), ("rows.xml", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    return tmp_path


@pytest.mark.parametrize(("pipeline", "parameter", "value", "line"), CHANGES)
def test_invalid_parameter_path_or_row_of_a_pipeline_is_named(
    folder: Path, pipeline: str, parameter: str, value: Any, line: str
) -> None:
    rows = {"url": "rows.jsonl"}
    values: dict[str, Any] = {"data": rows} | ({} if pipeline == "evaluate" else {"held_out": dict(rows)})
    values |= {name: given for name, given in REQUIRED.items() if name in PARAMETERS[pipeline].model_fields}
    *outer, last = parameter.split(".")
    section = values
    for name in outer:
        section = section.setdefault(name, {})
    section[last] = value
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError) as error:
        parameters = parameters_of(pipeline, read_config(folder / "run.yaml"))
        check_code(parameters)
        check_first_rows(parameters)
    assert line in error.value.message and "\n" not in error.value.message


BROKEN: list[tuple[str, str]] = [  # YAML, and the end of the line
    (
        "data: {url: x\ntraining:\n  steps: 3",
        "line 2, column 9: expected ',' or '}', but got ':'; a bracket is not closed",
    ),
    ("name: a: b", "line 1, column 8: mapping values are not allowed here; a value that contains ': ' needs quotes"),
    ("name: 'a", "line 1, column 9: found unexpected end of stream; a quote is not closed"),
    ("data:\n\turl: x", "line 2, column 1: found character '\\t' that cannot start any token; indent with spaces"),
    ("name: a\nname: b", "line 2, column 1: the name 'name' appears twice"),
]


@pytest.mark.parametrize(("text", "line"), BROKEN)
def test_a_broken_yaml_file_is_refused_with_its_place_and_problem(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        read_config(tmp_path / "run.yaml")
    assert error.value.message.startswith(f"config {tmp_path / 'run.yaml'}: {line}")


def test_a_field_to_ignore_may_be_written_without_a_list(folder: Path) -> None:
    parameters = parameters_of("sft", {"data": {"url": "rows.jsonl", "ignore": "*"}})
    assert parameters.data.ignore == ["*"]


class NoCheckpoint(BaseHTTPRequestHandler):
    """A server that offers one base model and has no checkpoints."""

    def do_GET(self) -> None:
        self.answer(200, {"supported_models": [{"model_name": "tinkerflow/tiny"}]})

    def do_POST(self) -> None:
        path = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["tinker_path"]
        self.answer(404, {"detail": f"checkpoint {path!r}: there is none"})

    def answer(self, status: int, values: dict[str, Any]) -> None:
        body = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name in the standard library
        """Write no log."""


@pytest.mark.parametrize(
    ("pipeline", "parameter"),
    [("sft", "model.start_from"), ("distill", "teacher.weights"), ("evaluate", "weights"), ("evaluate", "against")],
)
def test_missing_checkpoint_is_refused_before_a_run(pipeline: str, parameter: str) -> None:
    *outer, last = parameter.split(".")
    values: dict[str, Any] = {last: "tinker://run/weights/final"}
    for name in outer:
        values = {name: values}
    with ThreadingHTTPServer(("127.0.0.1", 0), NoCheckpoint) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            with pytest.raises(
                UserError, match=f"{parameter}: checkpoint 'tinker://run/weights/final': there is none; "
            ):
                check_server(parameters_of(pipeline, {"data": {"url": "rows.jsonl"}} | values), url, "tml-x")
        finally:
            server.shutdown()


def test_unreachable_server_is_named() -> None:
    parameters = parameters_of("sft", read_config(example_file("sft.yaml")))
    with pytest.raises(UserError, match=r"no server answers at http.*: start it with `tinkerflow up`"):
        check_server(parameters, f"http://127.0.0.1:{free_port()}", "tml-x")


def test_base_models_are_found_by_name_and_by_alias() -> None:
    folder = "/data/models/tinkerflow/tiny-qwen3"
    assert offered_name("tinkerflow/tiny", ["other", folder]) == folder
    assert offered_name("other", ["other", folder]) == "other"
    with pytest.raises(UserError, match=r"model.base_model 'othre': the server offers .*did you mean 'other'"):
        offered_name("othre", ["other", folder])


def test_data_check_needs_no_model_on_disk_and_names_its_tokenizer(tmp_path: Path) -> None:
    rows, home = tmp_path / "rows.jsonl", tmp_path / "home"
    rows.write_text('{"prompt": "2 + 2?", "completion": "4"}\n')
    checked = CliRunner().invoke(every_command(), ["data", "check", str(rows), "--data-dir", str(home)])
    assert checked.exit_code == 0, checked.output
    assert "with the tokenizer of tinkerflow/tiny" in checked.output and "2 + 2?" in checked.output
    assert not home.exists()


def test_a_check_of_data_imports_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2?"}\n')
    (tmp_path / "broken_reward.py").write_text("def reward(row, answer)\n")
    config = tmp_path / "rl.yaml"
    config.write_text("name: a\nreward: broken_reward:reward\ndata: {url: rows.jsonl}\n")
    words = ["data", "check", "--config", str(config), "--data-dir", str(tmp_path / "home")]
    refused = CliRunner().invoke(every_command(), words)
    assert isinstance(refused.exception, UserError)
    assert refused.exception.message.startswith("reward 'broken_reward:reward': ")


def test_import_without_an_adapter_creates_no_model(tmp_path: Path) -> None:
    words = ["checkpoint", "import", str(tmp_path), "--base-model", "tinkerflow/tiny"]
    refused = CliRunner().invoke(every_command(), [*words, "--data-dir", str(tmp_path / "home")])
    assert isinstance(refused.exception, UserError)
    assert refused.exception.message.startswith(f"{tmp_path}: adapter_config.json cannot be read")
    assert not (tmp_path / "home").exists()


USAGE: list[tuple[str, str]] = [  # a command line, and the line
    ("up --prot 1", "up: no option --prot (did you mean '--port'?); `tinkerflow up --help` explains it"),
    ("up --port http", "up: --port 'http': Input should be a valid integer"),
    ("up extra", "up: got unexpected extra argument(s) (extra); `tinkerflow up --help` explains it"),
    ("worker --group a:1 --processes=0", "worker: --processes '0': Input should be greater than or equal to 1"),
    ("key lst", "key: no such command 'lst'. Did you mean 'list'?; `tinkerflow key --help` explains it"),
    ("key revoke", "key revoke: missing argument 'key'; `tinkerflow key revoke --help` explains it"),
    ("plan --base-weights=int4", "plan: --base-weights 'int4': 'int4' is not one of 'full', 'int8'"),
    ("quickstart --steps 1", "quickstart: --steps '1': Input should be greater than or equal to 2"),
    ("data check rows.jsonl --format chatml", "data check: --format 'chatml': 'chatml' is not one of 'chat', 'text'"),
    ("checkpoint gc --older-than soon", "checkpoint gc: --older-than 'soon': Input should be a valid number"),
]


@pytest.mark.parametrize(("command", "line"), USAGE)
def test_invalid_command_line_is_a_one_line_error(
    command: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tinkerflow", *command.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"tinkerflow {line}") and shown.count("\n") == 1


def tinkerflow(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    command = [sys.executable, "-m", "tinkerflow", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=os.environ | env)


COMMANDS: list[tuple[list[str], dict[str, str], str]] = [
    (["upp"], {}, "no command 'upp' (did you mean 'up'?)"),
    (["run", "sftt", "--config", "run.yaml"], {}, "config run.yaml: does not exist"),
    (
        ["up"],
        {"TINKERFLOW_POTR": "1"},
        "unknown setting TINKERFLOW_POTR in the environment (did you mean 'TINKERFLOW_PORT'?)",
    ),
    (["up", "--processes", "0"], {}, "processes: 0: Input should be greater than or equal to 1"),
    (["up", "--port", "1", "--host", "203.0.113.7"], {}, "port 1 of 203.0.113.7: "),
    (["up", "--host", "\udcff"], {}, r"host is '\udcff': must be a name or an address"),
    (["up", "--group", "nowhere"], {}, "group: 'nowhere' must be HOST:PORT"),
    (["worker", "--group", "127.0.0.1"], {}, "--group '127.0.0.1' must be HOST:PORT"),
    (["worker", "--group", "127.0.0.1:7000"], {}, "group.secret'): copy the file from the driver's host"),
    (
        ["worker", "--group", "127.0.0.1:7000", "--secret-file", ""],
        {},
        "group.secret'): copy the file from the driver's host",
    ),
    (["key", "revoke", "key-nope"], {}, "data: does not exist"),
    (["champion", "list"], {}, "data: does not exist"),
    (["key", "create", " "], {}, "name is '': must have 1 to"),
    (["key", "create", "me", "--project", ""], {}, "project is '': must have 1 to"),
    (
        ["limit", "set", "team", "max_live_model=1"],
        {},
        "limit 'max_live_model': must be one of max_sampling_requests, max_queued_tokens, ",
    ),
    (["limit", "set", "team", f"max_live_models={'9' * 5000}"], {}, "must be NAME=VALUE with a number or `default`"),
    (["limit", "set", " ", "max_live_models=2"], {}, "project is '': must have 1 to"),
    (["plan", "tinkerflow/tiny", "--topology", "h1000:8"], {}, "topology 'h1000:8': device 'h1000' is unknown"),
    (
        ["run", "sft", "--config", example_file("sft.yaml").as_posix()],
        {"TINKER_BASE_URL": "localhost:1"},
        "no server answers at localhost:1 (Request URL is missing an 'http://' or 'https://' protocol.): start it with",
    ),
    (["models", "make-tiny", "/proc/x"], {}, "folder '/proc/x': cannot be written (No such file or directory)"),
    (["restore", "/no/such/file"], {}, "backup /no/such/file: cannot be restored"),
    (["restore", __file__], {}, "test_wrong_values.py: cannot be restored (file could not be opened successfully)"),
    (
        ["serve", "--file", "nofile.yaml"],
        {},
        "serve nofile.yaml: must be a prefect.yaml with deployments ([Errno 2] No such file or directory",
    ),
    (["up", "--store", "s3://x", "--port", "0"], {}, "store 's3://x': scheme 's3' is not supported"),
    (["up", "--store", "gs://", "--port", "0"], {}, "store 'gs://': the bucket is missing"),
    (["up", "--base-model", "./no", "--port", "0"], {}, "base model './no': there is no folder"),
    (["up", "--base-model", "no/such", "--port", "0"], {}, "base model 'no/such': not a folder, "),
    (["up", "--base-model", "a b", "--port", "0"], {}, "base model 'a b': neither a folder nor a hub id ("),
    (["up", "--base-model", "/proc", "--port", "0"], {}, "base model '/proc': there is no /proc/config.json"),
    (
        ["up", "--port", "0"],
        {"JAX_PLATFORMS": "gpuu"},
        "JAX_PLATFORMS: 'gpuu': must be names of cpu, cuda, gpu, ",
    ),
    (["up", "--port", "0"], {"JAX_PLATFORMS": "cuda,cpuu"}, "JAX_PLATFORMS: 'cpuu': must be names of cpu, cuda, "),
    (
        ["up", "--launcher", "rya", "--port", "0"],
        {},
        "launcher 'rya': must be one of kubernetes, local, ray, slurm (did you mean",
    ),
    (["up", "--port", "0"], {"TINKERFLOW_TRACKERS": '["mlfow"]'}, "tracker 'mlfow': must be one of mlflow, "),
    (["up", "--port", "0"], {"TINKERFLOW_TRACKERS": "mlfow"}, "tracker 'mlfow': must be one of mlflow, "),
    (
        ["doctor"],
        {"TINKERFLOW_ALLOWED_HOSTS": '["gpu-box"'},
        "TINKERFLOW_ALLOWED_HOSTS: '[\"gpu-box\"': must be names with commas between them, as in a,b, or a JSON list",
    ),
    (["status"], {"TINKERFLOW_BASE_MODELS": "[1]"}, "TINKERFLOW_BASE_MODELS.0: 1: Input should be a valid string"),
    (
        ["run", "sft", "--config", example_file("sft.yaml").as_posix()],
        {"TINKERFLOW_MAX_LIVE_MODELS": "two"},
        "TINKERFLOW_MAX_LIVE_MODELS: 'two': Input should be a valid integer",
    ),
    (["up", "--store", __file__, "--port", "0"], {}, f"store {__file__!r}: cannot be written (Not a directory)"),
    (["up", "--store", "file:///proc/x", "--port", "0"], {}, "store 'file:///proc/x': cannot be written (No such file"),
    (
        ["up", "--database-url", "sqlite:////proc/x.db", "--port", "0"],
        {},
        "database '/proc/x.db': cannot be created (",
    ),
    (["up", "--host", "1.2.3.4.5", "--port", "0"], {}, "port 0 of 1.2.3.4.5: "),
    (
        ["up", "--port", "0"],
        {"PREFECT_API_URL": "localhost:4200"},
        "PREFECT_API_URL: 'localhost:4200': must begin with http:// or https://, as in http://127.0.0.1:4200/api",
    ),
    (
        ["up"],
        {"TINKERFLOW_LOG_LEVEL": "loud"},
        "unknown setting TINKERFLOW_LOG_LEVEL in the environment; docs/settings.md lists them",
    ),
    (["data", "check", __file__, "--max-tokens", "0"], {}, "--max-tokens '0': Input should be greater than or equal"),
    (["run", "sft", "--config", "/tmp"], {}, "config /tmp: is a folder; give a YAML file in it"),
    (
        ["explain", "tinker://a:train:0/weights/b"],
        {"TINKER_BASE_URL": "http://127.0.0.1:1"},
        "no server answers at http://127.0.0.1:1 (",
    ),
    (
        ["track"],
        {},
        "track: the settings TINKERFLOW_TRACKERS and TINKERFLOW_OPENLINEAGE_URL are empty; docs/trackers.md lists ",
    ),
    (["up", "--port", "65536"], {}, "port: 65536: Input should be less than or equal to 65535"),
    (["up"], {"TINKERFLOW_PROCESSES": "two"}, "TINKERFLOW_PROCESSES: 'two': Input should be a valid integer"),
    (["up"], {"TINKERFLOW_DTYPE": "fp16"}, "TINKERFLOW_DTYPE: 'fp16': Input should be 'auto', 'float32' or 'bfloat16'"),
    (["prefect"], {}, "no Prefect server runs for data dir"),
    (["backup", "x.tar"], {}, "does not exist"),
    (["data", "check", "no.jsonl"], {}, "data.url 'no.jsonl': does not exist"),
    (["data", "check", __file__, "--column", "a"], {}, "--column 'a': must be FIELD=COLUMN"),
    (["data", "check"], {}, "give either a file, folder or URL, or --config FILE"),
    (
        ["checkpoint", "merge", "tinker://a/weights/b", "--to", "x"],
        {"TINKERFLOW_STORE": "memory://m"},
        "tinker://a/weights/b",
    ),
]


@pytest.mark.parametrize(
    ("words", "env", "line"), COMMANDS, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_invalid_option_or_variable_of_a_command_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    env: dict[str, str],
    line: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["tinkerflow", *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # `up` would change this process
    monkeypatch.setattr(os, "umask", lambda _: 0o022)  # `worker` would, too
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "CRITICAL")  # `run` would set this variable
    for name, value in {**env, "TINKERFLOW_DATA_DIR": str(tmp_path / "data")}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err if end.value.code == 2 else str(end.value.code)
    assert line in said and "\n" not in said.strip(), said


def test_password_of_an_invalid_url_is_hidden(tmp_path: Path) -> None:
    done = tinkerflow("up", "--database-url", "mysql://x:secret@y/z", TINKERFLOW_DATA_DIR=str(tmp_path))
    assert done.returncode == 1
    shown = [text for text in done.stderr.splitlines() if "moved to the environment" not in text]
    assert len(shown) == 1 and "must start with sqlite:/// or postgresql" in shown[0], done.stderr
    assert "secret@" not in done.stderr


def test_the_overview_has_every_command_and_loads_nothing() -> None:
    from tinkerflow.deployments.commands import every_command

    app = every_command()
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names | {group.name for group in app.registered_groups} == set(MODULES)
    assert all(f"  {name} " in overview() for name in MODULES)
    code = "import sys; sys.argv = ['tinkerflow']; from tinkerflow.deployments.cli import main; main(); "
    code += "print(sorted({'typer', 'pydantic', 'httpx'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_a_database_password_is_moved_out_of_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[tuple[list[str], str]] = []

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        executed.append((command[3:], environment["TINKERFLOW_DATABASE_URL"]))

    monkeypatch.setattr(cli.os, "execve", execve)
    url = "postgresql://me:secret@db/tinkerflow"
    for words in (["up", "--database-url", url, "--port", "0"], ["up", f"--database-url={url}", "--port", "0"]):
        cli.hide_password(words)
    cli.hide_password(["up", "--database-url", "postgresql://me@db/tinkerflow"])
    cli.hide_password(["up", "--database-url", "sqlite:////tmp/a.db"])
    cli.hide_password(["cassette", "record", "-o", "c", "--", "python", "loop.py", "--database-url", url])
    assert executed == [(["up", "--port", "0"], url)] * 2
    assert cli.has_password("postgresql:///x?host=db&password=secret")
    for url in ("postgresql:///x?host=db&password=secret", "postgresql://me:secret@db/x"):
        assert "secret" not in database_of(Settings(database_url=url))


def test_a_check_for_no_pipeline_names_the_columns_that_most_pipelines_refuse(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,prompt,completion\n1,a,b\n2,c,d\n")
    options: dict[str, Any] = {"kind": "auto", "column": [], "ignore": [], "max_tokens": 64, "format": "chat"}
    for pipeline, ignore, noted in (("", [], True), ("", ["id"], False), ("sft", ["id"], False)):
        sources = sources_of(str(tmp_path / "rows.csv"), None, pipeline, options | {"ignore": ignore})
        console = Console(file=io.StringIO(), width=300)
        assert check_files(console, Settings(data_dir=tmp_path), sources, "", 0)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("not used: id: rl gives them" in text and "--pipeline sft, or add: --ignore id" in text) is noted


@pytest.mark.parametrize("pipeline", PARAMETERS)
def test_pipeline_of_a_file_is_recognized_by_its_parameters(pipeline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = example_file(f"{pipeline}.yaml")
    found, wanted = sources_of(None, file, "", {}), sources_of(None, file, pipeline, {})
    assert [one.use for one in found] == [one.use for one in wanted]
