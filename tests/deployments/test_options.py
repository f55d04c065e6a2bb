"""Options that are settings."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.commands import every_command
from tinkerflow.deployments.options import plain_console, setting, settings_with


def test_the_help_is_the_description_with_the_default() -> None:
    assert setting("port").help == f"{Settings.model_fields['port'].description} (default: 8000)"
    assert setting("store").help == Settings.model_fields["store"].description
    assert setting("base_models", "may be repeated").help.endswith("; may be repeated")
    assert setting("data_dir", default="a scratch folder").help.endswith(" (default: a scratch folder)")
    shown = CliRunner().invoke(every_command(), ["up", "--help"], env={"COLUMNS": "250"}).stdout
    assert str(Settings.model_fields["host"].description) in shown and "(default: 8000)" in shown


def test_options_that_were_given_win_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERFLOW_PORT", "9000")
    monkeypatch.setenv("TINKERFLOW_HOST", "0.0.0.0")
    settings = settings_with(port=9001, host=None, data_dir=tmp_path)
    assert (settings.port, settings.host, settings.data_dir) == (9001, "0.0.0.0", tmp_path)


def test_the_console_prints_texts_as_they_are() -> None:
    said = io.StringIO()
    plain_console(file=said).print("sess-1:train:0 needs tinkerflow[gpu]")
    assert said.getvalue() == "sess-1:train:0 needs tinkerflow[gpu]\n"
