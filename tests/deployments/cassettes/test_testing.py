"""The pytest fixture `cassette` that users import."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.wire.tinker_pb2 import ForwardBackwardRequest
from tinkerflow.deployments.cassettes.file import CassetteWriter, Exchange
from tinkerflow.deployments.cassettes.play import CassetteError
from tinkerflow.deployments.cassettes.server import RECORDING

TUTORIALS = Path(__file__).parents[3] / "docs" / "tutorials"
LOADED = """
import sys
sys.modules.pop("torch", None)  # see tests/without_torch
from pathlib import Path
import pytest
from tinkerflow.deployments.cassettes import play, programs, record, testing
from tinkerflow.deployments.commands import cassette
play.open_replay(Path(sys.argv[1]))
print(*{name.split(".")[0] for name in sys.modules})
"""

pytest_plugins = ["tinkerflow.deployments.cassettes.testing"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with CassetteWriter(tmp_path / "a.cassette") as writer:
        for number in (1, 2):
            body = b'{"session_id": "s", "model_seq_id": %d, "rank": 4}' % number
            writer.write(Exchange(number, "POST", "/api/v1/create_model", body, 200, "application/json", b'{"m": 1}'))
        writer.close()
    return writer.path


def create(url: str, number: int, rank: int = 4) -> httpx.Response:
    body = {"session_id": "s", "model_seq_id": number, "rank": rank}
    return httpx.post(f"{url}/api/v1/create_model", json=body)


def test_a_block_is_answered_from_its_cassette(cassette, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://before")
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with cassette(file) as playing:
        assert os.environ["TINKER_BASE_URL"] == playing.url
        assert os.environ["TINKER_API_KEY"].startswith("tml-")
        assert [create(playing.url, number).json() for number in (2, 1)] == [{"m": 1}] * 2
    assert os.environ["TINKER_BASE_URL"] == "http://before"
    assert "TINKER_API_KEY" not in os.environ


def test_a_block_that_differs_fails(cassette, file: Path) -> None:
    text = r"a.cassette: request 2 \(create_model of model 2\): rank is 8, but was 4 in the recording"
    with pytest.raises(CassetteError, match=text), cassette(file) as playing:
        create(playing.url, 1)
        create(playing.url, 2, rank=8)
    text = r"request 2 \(create_model of model 2\) is in the recording, but was never made"
    with pytest.raises(CassetteError, match=text), cassette(file) as playing:
        create(playing.url, 1)
    with cassette(file, ignore=["rank"]) as playing:
        create(playing.url, 1)
        create(playing.url, 2, rank=8)


def test_an_exception_of_the_block_wins(cassette, file: Path) -> None:
    with pytest.raises(ZeroDivisionError), cassette(file):
        raise ZeroDivisionError


def test_a_missing_cassette_names_the_command(cassette) -> None:
    text = r"there is no cassette .*/cassettes/none.cassette: `tinkerflow cassette record -o"
    with pytest.raises(UserError, match=text), cassette("none.cassette"):
        raise AssertionError("nothing answers here")


def test_a_light_environment_is_enough(tmp_path: Path) -> None:
    """Everything that a replay loads comes with the packages that the tutorial installs."""
    with CassetteWriter(tmp_path / "a.cassette") as writer:
        body = ForwardBackwardRequest(model_id="s:train:0", seq_id=1).SerializeToString()
        writer.write(Exchange(1, "POST", "/api/v1/forward_backward", body, 200, "application/json", b"{}"))
        writer.close()
    done = subprocess.run(
        [sys.executable, "-c", LOADED, tmp_path / "a.cassette"], capture_output=True, text=True, check=True
    )
    found = packages_distributions() | {"google": ["protobuf"]}
    named = re.search(r"^pip install (.*tinker.*)$", (TUTORIALS / "test-without-a-model.md").read_text(), re.M)
    assert named is not None
    installed = {"setuptools", "tinkerflow", "brotli"}  # httpx loads brotli if it is installed
    for word in shlex.split(named[1]):
        add_requirements(Requirement(word), installed)
    for optional in ("uvicorn[standard]", "python-multipart"):  # uvicorn and starlette load these if installed
        add_requirements(Requirement(optional), installed)
    loaded = {canonicalize_name(one) for name in done.stdout.split() for one in found.get(name, [])}
    assert loaded - installed == set()


def add_requirements(wanted: Requirement, found: set[str]) -> None:
    """Add a package and its requirements in this environment."""
    found.add(canonicalize_name(wanted.name))
    for need in map(Requirement, distribution(wanted.name).requires or []):
        extras = wanted.extras or {""}
        needed = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras)
        if needed and canonicalize_name(need.name) not in found:
            add_requirements(need, found)


def test_recording_block_uses_the_service(cassette, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://service")
    monkeypatch.setenv(RECORDING, str(file))
    with cassette(file) as playing:
        assert playing.url == os.environ["TINKER_BASE_URL"] == "http://service"
    monkeypatch.setenv(RECORDING, str(file.with_name("other.cassette")))
    with pytest.raises(CassetteError), cassette(file):
        assert os.environ["TINKER_BASE_URL"] != "http://service"
