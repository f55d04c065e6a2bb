"""The pytest fixture `cassette` that users import."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.deployments.cassettes.file import CassetteWriter, Exchange
from tinkerflow.deployments.cassettes.play import CassetteError
from tinkerflow.deployments.cassettes.server import RECORDING

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


def test_recording_block_uses_the_service(cassette, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://service")
    monkeypatch.setenv(RECORDING, str(file))
    with cassette(file) as playing:
        assert playing.url == os.environ["TINKER_BASE_URL"] == "http://service"
    monkeypatch.setenv(RECORDING, str(file.with_name("other.cassette")))
    with pytest.raises(CassetteError), cassette(file):
        assert os.environ["TINKER_BASE_URL"] != "http://service"
