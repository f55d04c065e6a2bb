"""Older SDKs, and the newest, get the same results from our server as the installed SDK.

pip installs each SDK into its own folder without dependencies. The installed packages must satisfy its requirements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import Distribution, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from tests.compat.conftest import Server
from tests.compat.lesson import TOKENS, lesson
from tests.conftest import WITHOUT_TORCH

BETWEEN = ("0.26.2", "0.31.0", "0.36.0")
VERSIONS = ("0.25.0", *BETWEEN, "0.38.0")
NEWEST = "newest"
OFFLINE = "(from versions: none)"  # text in pip's output when no registry answers

Install = Callable[[str], Distribution]


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """install(version) installs an SDK into its own folder, and returns its metadata."""
    offline: list[str] = []

    def pip(asked: str) -> Distribution:
        if offline:
            pytest.skip(f"SDK {asked} is not to be had, as before: {offline[0]}")
        folder = tmp_path_factory.mktemp("sdk")
        wanted = "tinker" if asked == NEWEST else f"tinker=={asked}"
        options = ["--quiet", "--no-deps", "--no-compile", "--disable-pip-version-check", "--retries", "1"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), wanted]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if ended.returncode != 0 and OFFLINE in ended.stderr:
            offline.append(ended.stderr.strip().splitlines()[-1])
            pytest.skip(f"SDK {asked} is not to be had: {offline[0]}")
        assert ended.returncode == 0, ended.stderr
        (metadata,) = folder.glob("tinker-*.dist-info")
        return Distribution.at(metadata)

    return pip


@pytest.fixture(scope="module")
def expected(server: Server) -> dict[str, Any]:
    """The results of the lesson with the installed SDK."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # newer SDKs deprecate parts of older ones
        return as_json(lesson(server.api_url, server.base_model))


def test_lesson_lowers_the_loss(expected: dict[str, Any], server: Server) -> None:
    assert expected["served"] == [server.base_model]
    first, *_, last = expected["losses"]
    assert first > last
    assert expected["losses"] == sorted(expected["losses"], reverse=True)
    assert -sum(expected["trained"]) < last
    assert expected["resumed"] == expected["trained"]
    assert expected["next_step"] == 4.0  # its optimizer had made three steps
    assert expected["scored"][0] is None
    assert expected["scored"][1:] == pytest.approx(expected["trained"][:-1], abs=2e-3)
    assert len(expected["scored"]) == len(TOKENS)
    assert expected["scored_again"] == expected["scored"]
    (first_tokens, *_), (second_tokens, *_) = expected["sampled"]
    assert first_tokens != second_tokens
    assert expected["run"] == [server.base_model, 4, {"by": "lesson"}]
    assert (expected["listed"], expected["in_session"]) == (True, True)
    assert expected["checkpoints"] == ["sampler_weights/named", "weights/kept"]
    assert expected["paths"] == ["weights/kept", "sampler_weights/named"]


@pytest.mark.parametrize(
    "asked",
    [pytest.param(one, marks=pytest.mark.thorough) if one in BETWEEN else one for one in (*VERSIONS, NEWEST)],
)
def test_another_sdk_version_gets_equal_results(
    asked: str, install: Install, expected: dict[str, Any], server: Server
) -> None:
    sdk = install(asked)
    if asked == NEWEST and sdk.version in VERSIONS:
        return  # this version is tested under its number
    lacking = [need for need in map(Requirement, sdk.requires or []) if not here(need)]
    if asked == NEWEST and lacking:
        pytest.skip(f"SDK {sdk.version} needs {lacking}, which this environment has not")
    assert lacking == []
    found = run_lesson(Path(str(sdk.locate_file(""))), server)
    assert found.pop("version") == sdk.version
    assert found == {name: value for name, value in expected.items() if name != "version"}


def here(need: Requirement) -> bool:
    """Whether the installed packages satisfy a requirement, except for extras."""
    if need.marker is not None and not need.marker.evaluate({"extra": ""}):
        return True
    return need.specifier.contains(version(need.name), prereleases=True)


def run_lesson(sdk: Path, server: Server) -> dict[str, Any]:
    """Run the lesson in a process with this SDK, and return its results."""
    script = Path(__file__).with_name("lesson.py")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    ended = subprocess.run(
        [
            sys.executable,
            "-P",
            "-X",
            "faulthandler",
            str(script),
            server.api_url,
            server.base_model,
        ],
        env=kept | {"PYTHONPATH": os.pathsep.join((str(sdk), WITHOUT_TORCH)), "TINKER_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def as_json(values: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(values)))
