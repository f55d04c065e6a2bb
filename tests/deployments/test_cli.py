"""The command line as a person uses it: its output and its errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinkerflow.backend.settings import Settings
from tinkerflow.deployments import cli, commands
from tinkerflow.deployments.commands import every_command
from tinkerflow.deployments.parts import open_journal, with_base_models


def tinkerflow(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinkerflow", *words]
    more = {"COLUMNS": "160", "HF_HUB_OFFLINE": "1"} | env
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=os.environ | more)


def test_doctor_finds_a_fresh_machine_healthy(tmp_path):
    ports = {"TINKERFLOW_PORT": "1", "TINKERFLOW_PREFECT_PORT": "1"}
    done = tinkerflow("doctor", "--data-dir", str(tmp_path), COLUMNS="300", **ports)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("cpu", "writable", "there is no database yet", "not running", "embedded tiny model"):
        assert word in done.stdout.lower(), word
    assert not (tmp_path / "journal.db").exists()


def test_doctor_names_a_missing_model_folder(tmp_path):
    done = tinkerflow("doctor", "--data-dir", str(tmp_path), TINKERFLOW_BASE_MODELS='["/no/such/folder"]')
    assert done.returncode == 1
    assert "/no/such/folder" in done.stdout


@pytest.mark.parametrize(("own", "used"), [({}, "1"), ({"DO_NOT_TRACK": "0"}, "0")])
def test_commands_disable_prefect_telemetry_unless_the_user_decides(monkeypatch, own, used):
    environment = dict(own)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(sys, "argv", ["tinkerflow", "status"])
    at_start: list[str | None] = []
    monkeypatch.setattr(commands, "run", lambda _module: at_start.append(environment.get("DO_NOT_TRACK")))
    cli.main()
    assert at_start == [used]


def test_keys_are_shown_once(tmp_path):
    runner, where = CliRunner(), ["--data-dir", str(tmp_path)]
    made = runner.invoke(every_command(), ["key", "create", "laptop", *where]).stdout
    key_id, secret = made.strip().split(": ")
    assert secret.startswith("tml-")
    listed = runner.invoke(every_command(), ["key", "list", *where]).stdout
    assert "laptop" in listed
    assert secret not in listed
    assert runner.invoke(every_command(), ["key", "revoke", key_id, *where]).stdout == "revoked laptop\n"
    runner.invoke(every_command(), ["key", "create", "boss", "--project", "ops", "--admin", *where])
    ops = runner.invoke(every_command(), ["key", "list", "--project", "ops", *where]).stdout
    assert "boss" in ops and "yes" in ops and "laptop" not in ops
    with open_journal(Settings(data_dir=tmp_path)) as journal:
        kept = journal.keys.all()
        assert [(key.project, key.admin) for key in kept] == [("default", False), ("ops", True)]
        assert [one.event for one in journal.audit.entries(None)] == [
            "project_key_created",
            "project_key_revoked",
            "project_key_created",
        ]


def test_limits_of_a_project_are_set_and_listed(tmp_path):
    def limit(*words):
        return CliRunner().invoke(every_command(), ["limit", *words, "--data-dir", str(tmp_path)])

    assert (
        limit("set", "search", "max_live_models=2", "max_sessions=5").stdout
        == "search: max_live_models=2, max_sessions=5\n"
    )
    assert "search has no key yet" in limit("set", "search", "max_sessions=default").stderr
    assert (
        "search (no such project yet)" in (listed := limit("list").stdout)
        and "max_live_models=2" in listed
        and "max_sessions" not in listed
    )
    for wrong in ("max_live_models", "max_live_models=two", "max_live_models=-1"):
        assert f"limit {wrong!r}: must be NAME=VALUE" in str(limit("set", "search", wrong).exception)
    CliRunner().invoke(every_command(), ["key", "create", "x", "--project", "search", "--data-dir", str(tmp_path)])
    assert "serach has no key yet (did you mean 'search'?)" in limit("set", "serach", "max_sessions=5").stderr


def test_up_names_an_invalid_base_model(tmp_path):
    done = tinkerflow("up", "--port", "0", "--data-dir", str(tmp_path), "--base-model", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert str(tmp_path / "nothing") in done.stderr
    assert "Traceback" not in done.stderr


def test_embedded_model_is_created_once(tmp_path):
    first = with_base_models(Settings(data_dir=tmp_path))
    made = Path(first.base_models[0], "model.safetensors").stat().st_mtime_ns
    assert with_base_models(Settings(data_dir=tmp_path)) == first
    assert Path(first.base_models[0], "model.safetensors").stat().st_mtime_ns == made
    assert with_base_models(Settings(data_dir=tmp_path, base_models=("a/b",))).base_models == ("a/b",)


def test_fetch_prints_the_folders_of_the_settings_models(tmp_path, monkeypatch):
    made = tinkerflow("models", "fetch", "--data-dir", str(tmp_path))
    folder = made.stdout.splitlines()[-1]
    assert (folder, made.returncode) == (str(tmp_path / "models" / "tinkerflow" / "tiny-qwen3"), 0)
    named = CliRunner().invoke(every_command(), ["models", "fetch", "--no-weights", "--base-model", folder])
    monkeypatch.setenv("TINKERFLOW_BASE_MODELS", f'["{folder}"]')
    again = CliRunner().invoke(every_command(), ["models", "fetch", "--no-weights"])
    assert again.stdout == named.stdout == f"{folder}\n"
    missing = tinkerflow("models", "fetch", TINKERFLOW_BASE_MODELS='["nobody/nothing"]', HF_HOME=str(tmp_path))
    assert missing.returncode == 1
    assert "base model 'nobody/nothing'" in missing.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("--help",), ("key", "--help")])
def test_a_closed_output_ends_a_command_without_a_traceback(words: tuple[str, ...], unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command, env = [sys.executable, "-m", "tinkerflow", *words], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_interrupted_command_ends_with_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(words: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_like_an_error(tmp_path: Path, number: int, status: int) -> None:
    """A half-restored data dir is emptied, so that the command can run again."""
    slow = (
        "import signal, time; from tinkerflow.deployments import backup, cli\n"
        "def unpack(file, folder):\n"
        "    (folder / 'store').mkdir(parents=True); print('begun', flush=True); time.sleep(600)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored if a shell started us with &
        "backup._unpack = unpack; cli.main()"
    )
    command = [sys.executable, "-c", slow, "restore", "b.tar", "--data-dir", str(tmp_path / "new")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert (process.stdout.read(), process.stderr.read()) == ("", "")
    assert process.returncode == status
    assert list((tmp_path / "new").iterdir()) == []
