"""`tinkerflow cassette record` and `serve` around programs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tinkerflow.backend.core.errors import UserError
from tinkerflow.deployments.cassettes.file import read_cassette
from tinkerflow.deployments.cassettes.play import play
from tinkerflow.deployments.cassettes.programs import record_program, serve_cassette
from tinkerflow.deployments.cassettes.server import application, serving

PROGRAM = """
import json, os, sys, time, urllib.request as u
url, rate, end = os.environ["TINKER_BASE_URL"] + "/api/v1/", *sys.argv[1:]
def post(name, **body):
    request = u.Request(url + name, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(u.build_opener(u.ProxyHandler({})).open(request))
answer = post("optim_step", model_id="s:train:0", seq_id=1, adam_params={"learning_rate": float(rate)})
print(post("retrieve_future", request_id=answer["request_id"]), flush=True)
if end == "wait":
    time.sleep(60)
sys.exit(int(end))
"""


async def handler(request: Request) -> Response:
    """A service for PROGRAM."""
    retrieves = request.url.path.endswith("retrieve_future")
    return JSONResponse({"metrics": {}} if retrieves else {"request_id": "r1"})


def test_servers_name_the_protocol_of_their_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise asyncio, which the client uses, delays each small answer by 40 ms."""
    protocols: list[int] = []
    run = uvicorn.Server.run

    def noted(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        protocols.extend(listener.proto for listener in sockets)
        run(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "run", noted)
    with serving(application(handler)) as url:
        assert httpx.get(url).json() == {"request_id": "r1"}
    assert protocols == [socket.IPPROTO_TCP]


@pytest.fixture
def service() -> Iterator[str]:
    with serving(application(handler)) as url:
        yield url


def program(rate: float = 0.1, end: str = "0") -> list[str]:
    return [sys.executable, "-S", "-c", PROGRAM, str(rate), end]


def record(service: str, file: Path, *command: str) -> tuple[int, list[str]]:
    said: list[str] = []
    return record_program(command or program(), file, service, report=said.append), said


def replay(file: Path, *command: str) -> tuple[int, list[str]]:
    said: list[str] = []
    status = serve_cassette(file, command, port=0, ignore=(), partial=False, report=said.append)
    return status, said


def test_a_program_is_recorded_and_replayed(service: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.cassette"
    status, (said,) = record(service, file)
    assert status == 0
    assert said.startswith(f"recorded 1 requests in {file}: ")
    assert replay(file, *program())[0] == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first == second == "{'metrics': {}}"
    status, (*_, said) = replay(file, *program(rate=0.2))
    assert status == 1
    assert said == "request 1 (optim_step of model 0): adam_params.learning_rate is 0.2, but was 0.1 in the recording"
    assert "adam_params.learning_rate is 0.2" in capfd.readouterr().out


def test_recorder_returns_the_exit_status_of_its_program(service: str, tmp_path: Path) -> None:
    status, said = record(service, tmp_path / "a.cassette", *program(end="3"))
    assert (status, said[-1]) == (3, "the program ended with status 3, as its replay will")
    assert replay(tmp_path / "a.cassette", *program(end="3"))[0] == 3


@pytest.mark.parametrize(
    ("server", "command", "message"),
    [
        ("", [sys.executable, "-S", "-c", ""], "ended with status 0 and made no request through TINKER_BASE_URL"),
        ("", ["/no/such/program"], "/no/such/program cannot be started: No such file or directory"),
        ("http://127.0.0.1:1", ["true"], "no service answers at http://127.0.0.1:1: start it with `tinkerflow up`"),
        ("localhost", ["true"], "the URL of the service is 'localhost': must be an http or https URL"),
    ],
)
def test_failed_recording_leaves_no_file(
    server: str, command: list[str], message: str, service: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        record(server or service, tmp_path / "a.cassette", *command)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(service: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a.cassette cannot be written: No such file or directory"):
        record(service, tmp_path / "nowhere" / "a.cassette")


def test_a_killed_recorder_leaves_its_requests(service: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinkerflow", "cassette", "record", "-o", "a.cassette", "--server", service, "--"]
    with subprocess.Popen(
        [*command, *program(end="wait")], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as recorder:
        assert recorder.stdout is not None
        assert recorder.stdout.readline() == "{'metrics': {}}\n"
        recorder.kill()
        recorder.wait()
        _end(recorder.pid)
    found = read_cassette(tmp_path / "a.cassette.part", partial=True)
    assert ([one.target for one in found.compared], list(found.results)) == (["/api/v1/optim_step"], ["r1"])


def test_an_interrupted_recorder_keeps_the_part(service: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinkerflow", "cassette", "record", "-o", "a.cassette", "--server", service]
    with subprocess.Popen(
        [*command, *program(end="wait")], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as recorder:
        assert recorder.stdout is not None
        recorder.stdout.readline()
        recorder.send_signal(signal.SIGTERM)
        said = recorder.stdout.read()
    assert recorder.returncode == 130
    assert said == "interrupted: a.cassette.part contains 1 requests\n"


def _end(group: int) -> None:
    """Kill the program of a killed recorder, and wait for its end."""
    os.killpg(group, signal.SIGKILL)
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)


def test_a_path_may_be_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no cassette"), play(f"{tmp_path}/a.cassette"):
        pass


def test_an_interrupted_program_may_save_before_it_ends(service: str, tmp_path: Path) -> None:
    """Ctrl-C of the recorder reaches the program as SIGINT, without a SIGTERM before the program has ended."""
    save = """
import signal
def interrupted(*_):
    time.sleep(1)
    post("save_weights", model_id="s:train:0", seq_id=2, path="mine")
    sys.exit(0)
signal.signal(signal.SIGINT, interrupted)
"""
    code = PROGRAM.replace("answer =", save + "answer =", 1)
    # Otherwise the recorder ignores SIGINT if a shell started us with &.
    reset = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{reset}; from tinkerflow.deployments.cli import main; main()"
    command = [sys.executable, "-c", start, "cassette", "record", "-o", "a.cassette", "--server", service, "--"]
    with subprocess.Popen(
        [*command, sys.executable, "-S", "-c", code, "0.1", "wait"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as recorder:  # fmt: skip
        assert recorder.stdout is not None
        recorder.stdout.readline()
        recorder.send_signal(signal.SIGINT)
        said = recorder.stdout.read()
    assert (recorder.returncode, said) == (130, "interrupted: a.cassette.part contains 2 requests\n")
    found = read_cassette(tmp_path / "a.cassette.part", partial=True)
    assert [one.target for one in found.compared] == ["/api/v1/optim_step", "/api/v1/save_weights"]
