"""The API process waits for a database and a base model, serves, and stops soon even while polls are held."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from tests.waiting import wait_for

from tinkerflow.backend.journal import Journal, NewModel, NewRequest, NewSession, migrate
from tinkerflow.backend.supervise.processes import free_port

CODE = """
import logging, resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
logging.basicConfig(level=logging.INFO)
from tinkerflow.api import serve
from tinkerflow.backend.settings import Settings
serve(Settings())
"""


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_server_waits_for_the_database_serves_and_stops(tmp_path: Any, settings_for: Any) -> None:
    port = free_port()
    settings = settings_for(port=port, poll_hold=25.0)
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "log"
    environment = {**os.environ, **settings.environment()}
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=out, env=environment)
    try:
        wait_for(lambda: "waiting for the journal's database" in log.read_text())
        assert not healthy(url)
        migrate(settings.journal_url)
        journal = Journal.open(settings.journal_url)
        wait_for(lambda: "waiting for the engine to register a base model" in log.read_text())
        assert not healthy(url)
        journal.base_models.register([("m", "{}")])
        wait_for(lambda: healthy(url))
        wait_for(lambda: [part.epoch for part in journal.leases.beats()] == [1])
        open_files, most = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert open_files == most > 256

        session = journal.sessions.create(NewSession("local", "0"))
        model = NewModel(f"{session}:train:0", session, "local", "m", rank=8)
        request = NewRequest("create_model", "local", b"{}", "h", model_id=model.id, seq_id=0)  # type: ignore[arg-type]
        request_id = journal.models.create(model, request)
        held = HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"X-API-Key": "tml-a", "Content-Type": "application/json"}
        held.request("POST", "/api/v1/retrieve_future", json.dumps({"request_id": request_id}), headers)
        time.sleep(2.0)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
        assert time.monotonic() - begun < 30
        assert json.load(held.getresponse())["type"] == "try_again"
        held.close()
        assert process.returncode == 0
        assert printed == b""
        journal.close()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_port_in_use_ends_the_process_with_an_error(tmp_path: Any, journal: Journal, settings_for: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = {**os.environ, **settings_for(port=taken.getsockname()[1]).environment()}
        ended = subprocess.run(
            [sys.executable, "-c", CODE], env=environment, capture_output=True, timeout=30, check=False
        )
    assert ended.returncode != 0
    assert b"address already in use" in ended.stderr


@pytest.mark.parametrize("name", ["create_app", "serve"])
def test_public_names(name: str) -> None:
    from tinkerflow import api

    assert sorted(api.__all__) == ["create_app", "serve"]
    assert callable(getattr(api, name))
