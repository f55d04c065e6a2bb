"""Every command reports an unusable data dir in one line, and `backup` an impossible backup."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.docs.generate import command_line, parameters

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments import cli
from tinkerflow.deployments.commands import one_line, paths_of
from tinkerflow.deployments.data_dir import make_data_dir
from tinkerflow.deployments.options import existing, writing
from tinkerflow.deployments.parts import open_journal

GIVEN = {
    "path": "tinker://a:train:0/weights/b",
    "pipeline": "sft",
    "url": __file__,
    "file": __file__,
    "step": "1",
    "limits": "max_sessions=1",
    "command": "sess-0123456789abcdef:train:0",
}
WITH_DATA_DIR = {  # `verify` needs a receipt first
    path: command
    for path, command in command_line().items()
    if any(parameter.name == "data_dir" for parameter in parameters(command)) and path != "tinkerflow verify"
}
READ_IT = (
    *("champion list", "champion show best", "checkpoint list", "checkpoint verify", "checkpoint gc"),
    *(f"checkpoint export {GIVEN['path']} --to x", "backup x.tar", "checkpoint rebuild-index"),
    *("key list", "key revoke me", "limit list", "checkpoint shares", "checkpoint unshare share-1"),
    f"checkpoint share {GIVEN['path']}",
)
MAKE_IT = ("key create me", "limit set team max_sessions=1", "models fetch", "up")


def line_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a command that fails, and return the only line of its error."""
    monkeypatch.setattr(sys, "argv", ["tinkerflow", *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("TINKERFLOW_DATA_DIR", "PREFECT_LOGGING_LEVEL"):  # `serve` and `run` would set these variables
        monkeypatch.setenv(name, "CRITICAL")
    with pytest.raises(SystemExit) as end:
        cli.main()
    line = str(end.value.code)
    assert "\n" not in line, line
    return line.removeprefix("tinkerflow: ")


@pytest.mark.parametrize("path", WITH_DATA_DIR)
def test_every_command_refuses_a_file_as_data_dir(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    words = path.split()[1:]
    for one in parameters(WITH_DATA_DIR[path]):
        if one.required or one.name == "url":
            option = [one.opts[0]] if one.param_type_name == "option" else []
            words += [*option, GIVEN.get(one.name, "x")]
    if path == "tinkerflow run":
        words += ["--config", __file__]
    line = line_of([*words, "--data-dir", str(file / "below")], monkeypatch)
    assert line == f"data_dir: must be a folder, and '{file}' is a file"


@pytest.mark.parametrize("command", READ_IT)
def test_a_data_dir_that_does_not_exist(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "dta"
    assert line_of([*command.split(), "--data-dir", str(missing)], monkeypatch) == f"data dir {missing}: does not exist"
    assert not missing.exists()


PATHS = [
    (path, one)
    for path, command in command_line().items()
    for one in parameters(command)
    if one.name in paths_of(command.callback)
]


@pytest.mark.parametrize(("path", "parameter"), PATHS, ids=lambda value: getattr(value, "name", value))
def test_every_empty_path_is_refused(
    path: str, parameter: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `--to "$UNSET"`. Typer reads it as the current folder."""
    words = path.split()[1:]
    for one in parameters(command_line()[path]):
        if one.required or one.name == parameter.name:
            option = [one.opts[0]] if one.param_type_name == "option" else []
            words += [*option, "" if one.name == parameter.name else GIVEN.get(one.name, "x")]
    assert line_of(words, monkeypatch) == "2"
    place = parameter.opts[-1] + " ''" if parameter.param_type_name == "option" else parameter.name.upper()
    assert capsys.readouterr().err == f"{path}: {place}: must name a file or a folder; . is the current folder\n"


def test_a_path_that_is_too_long_or_not_utf_8_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "path '{0}…' cannot be used (File name too long): give a shorter name"
    assert line_of(["key", "list", "--data-dir", f"/tmp/{'x' * 300}"], monkeypatch) == line.format(f"/tmp/{'x' * 35}")
    words = ["receipt", "run-\udcff:train:0"]
    assert line_of(words, monkeypatch) == r"'run-\udcff:train:0' cannot be used: must be UTF-8"


@pytest.mark.parametrize("words", [("--data-dir", ""), ("--data-dir=",)])
def test_an_empty_data_dir_is_not_the_current_folder(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line_of(["key", "list", *words], monkeypatch) == "2"
    line = "tinkerflow key list: --data-dir '': must name a folder; . is the current one\n"
    assert capsys.readouterr().err == line
    with pytest.raises(ValidationError, match="must name a folder"):
        Settings.model_validate({"data_dir": ""})


def test_a_store_outside_of_a_missing_data_dir_is_accepted(tmp_path: Path) -> None:
    missing = Settings(data_dir=tmp_path / "data")
    neighbor = (tmp_path / "data2").as_uri()
    assert existing(missing, neighbor) == neighbor
    for inside in (missing.data_dir.as_uri(), f"{missing.data_dir.as_uri()}/store"):
        with pytest.raises(UserError, match="does not exist"):
            existing(missing, inside)


@pytest.mark.parametrize("command", MAKE_IT)
def test_a_data_dir_that_cannot_be_made(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_of([*command.split(), "--data-dir", "/proc/x"], monkeypatch)
    assert line.startswith("data_dir '/proc/x': cannot be written (") and line.endswith("choose another --data-dir")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space, or choose another --data-dir"),
        (errno.EROFS, "choose another --data-dir"),
        (errno.EACCES, "run as its owner, or choose another --data-dir"),
    ],
)
def test_error_advice_matches_the_fault(
    number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = OSError(number, os.strerror(number), "x")
    line = f"cannot be written ({os.strerror(number)}): {advice}"
    either = line.replace("be", "be read or", 1) if number == errno.EACCES else line
    assert one_line(fault) == f"the file 'x' {either}"

    def fails(_: Path) -> None:
        raise fault

    monkeypatch.setattr("tinkerflow.deployments.data_dir.make_folder", fails)
    with pytest.raises(Exception, match="cannot be written") as error:
        make_data_dir(tmp_path)
    assert str(error.value) == f"data_dir '{tmp_path}': {line}"


def test_folder_of_another_user_has_a_suggested_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert line_of(["key", "list", "--data-dir", str(tmp_path)], monkeypatch) == "2"
    assert capsys.readouterr().err.endswith(f"'{tmp_path}' is not readable: run as its owner\n")


def test_backup_refuses_an_empty_source_and_a_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    data.mkdir()
    words = ["backup", str(tmp_path / "no" / "b.tar"), "--data-dir", str(data)]
    line = f"data dir {data}: has no database {data / 'journal.db'}: check --data-dir"
    assert line_of(words, monkeypatch) == line
    with open_journal(Settings(data_dir=data)):
        pass
    line = f"backup {words[1]}: cannot be written in its folder (No such file or directory)"
    assert line_of(words, monkeypatch) == line
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_backup_names_the_file_that_a_full_disk_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fills_the_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_journal(Settings(data_dir=tmp_path)):
        pass
    monkeypatch.setattr("tinkerflow.deployments.backup._add_all", fills_the_disk)
    words = ["backup", str(tmp_path / "b.tar"), "--data-dir", str(tmp_path)]
    assert line_of(words, monkeypatch) == f"backup '{words[1]}': cannot be written (No space left on device)"


def test_an_error_of_another_file_is_not_one_of_the_output(tmp_path: Path) -> None:
    beside = PermissionError(errno.EACCES, "denied", str(tmp_path / "model" / "config.json"))
    missing = FileNotFoundError(errno.ENOENT, "none", "/models/a")
    for fault in (BrokenPipeError(errno.EPIPE, "closed"), missing, beside):
        with pytest.raises(type(fault)), writing("--to", tmp_path / "x"):
            raise fault
