"""Command-line options and environment variables that set settings."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field, ValidationError
from typer.testing import CliRunner

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.commands import every_command
from tinkerflow.deployments.options import explain, plain_console, setting, settings_with, write_output
from tinkerflow.deployments.setting_help import _fields, describe


def test_the_help_is_the_description_with_the_default() -> None:
    assert setting("port").help == f"{Settings.model_fields['port'].description} (default: 8000)"
    assert setting("store").help == Settings.model_fields["store"].description
    assert setting("base_models", "may be repeated").help.endswith("; may be repeated")
    assert setting("data_dir", default="a scratch folder").help.endswith(" (default: a scratch folder)")
    shown = " ".join(CliRunner().invoke(every_command(), ["up", "--help"]).stdout.split())
    assert str(Settings.model_fields["host"].description) in shown and "(default: 8000)" in shown


def test_settings_have_the_descriptions_of_pydantic() -> None:
    for name, field in Settings.model_fields.items():
        assert _fields()[name][1] in ("", field.description)
    for name in ("warm_up", "processes", "base_models", "command_deadline"):
        assert describe(name) == (Settings.model_fields[name].description, Settings.model_fields[name].default)


def test_the_help_of_every_command_loads_no_large_library() -> None:
    code = """
import sys
import typer
from tinkerflow.deployments.commands import every_command
from tinkerflow.deployments.usage import help_of
def show(command, path):
    assert help_of(whole, [*path, "--help"]).startswith(" ".join(["Usage: tinkerflow", *path]))
    for name, child in getattr(command, "commands", {}).items():
        show(child, [*path, name])
whole = typer.main.get_command(every_command())
show(whole, [])
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    large = "aiohttp alembic fastapi httpx jax numpy orjson prefect pydantic rich sqlalchemy tinker transformers yaml"
    assert not set(large.split()) & set(done.stdout.split())


def test_options_that_were_given_win_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERFLOW_PORT", "9000")
    monkeypatch.setenv("TINKERFLOW_HOST", "0.0.0.0")
    settings = settings_with(port=9001, host=None, data_dir=tmp_path)
    assert (settings.port, settings.host, settings.data_dir) == (9001, "0.0.0.0", tmp_path)
    with pytest.raises(UserError, match=r"^port: -1: Input should be .*; TINKERFLOW_PROCESSES: 'two': Input"):
        monkeypatch.setenv("TINKERFLOW_PROCESSES", "two")
        settings_with(port=-1)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("mlflow", ("mlflow",)),
        ("mlflow, wandb,", ("mlflow", "wandb")),
        ('["a,b", "c"]', ("a,b", "c")),
        (' ["a"]', ("a",)),
    ],
)
def test_a_variable_with_names_is_a_list_or_json(
    text: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKERFLOW_TRACKERS", text)
    settings = Settings()
    assert settings.trackers == names
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert Settings() == settings


class WithObject(Settings):
    shares: dict[str, int] = Field(default_factory=dict)


@pytest.mark.parametrize("text", ["a", "a=1", "{"])
def test_a_variable_with_an_object_is_json(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERFLOW_SHARES", '{"a": 1}')
    assert WithObject().shares == {"a": 1}
    monkeypatch.setenv("TINKERFLOW_SHARES", text)
    with pytest.raises(ValidationError, match="must be a JSON object, as in") as error:
        WithObject()
    assert explain(error.value).startswith(f"shares: {text!r}: must be a JSON object")


def test_console_prints_text_without_markup() -> None:
    said = io.StringIO()
    plain_console(file=said).print("sess-1:train:0 needs tinkerflow[gpu]")
    assert said.getvalue() == "sess-1:train:0 needs tinkerflow[gpu]\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("key", "list"), "no keys: `tinkerflow key create NAME` creates one\n"),
        (("champion", "list"), "no champions: the pipeline `nightly` promotes them\n"),
        (("checkpoint", "shares"), "no tokens: `tinkerflow checkpoint share PATH` creates one\n"),
    ],
)
def test_an_empty_list_is_one_line(tmp_path: Path, words: tuple[str, ...], line: str) -> None:
    done = CliRunner().invoke(every_command(), [*words, "--data-dir", str(tmp_path)], catch_exceptions=False)
    assert done.stdout == line


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for file, reason in ((tmp_path / "none" / "card.md", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError) as error:
            write_output(file, "text")
        assert error.value.message == f"--output {str(file)!r}: cannot be written ({reason})"
