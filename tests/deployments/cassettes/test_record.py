"""The recorder forwards requests, and writes no key."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import httpx
import pytest
import zstandard
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tests.api.conftest import BASE, KEY

from tinkerflow.deployments.cassettes.file import CassetteWriter, Recording, read_cassette
from tinkerflow.deployments.cassettes.record import Recorder
from tinkerflow.deployments.cassettes.replay import Replay
from tinkerflow.deployments.cassettes.server import HERE, application, serving

SECRET = "tml-secret-of-mine"


@pytest.fixture
def between(tmp_path: Path):
    """between(handler, *requests): a service's answers through a recorder, the recording, and the recorder's URL."""

    def run(handler, *requests: tuple[str, str, dict]) -> tuple[list[httpx.Response], Recording, str]:
        with serving(application(handler)) as service, CassetteWriter(tmp_path / "r.cassette") as writer:
            with serving(Recorder(f"{service}/base", writer).app()) as url, httpx.Client(timeout=10) as http:
                answers = [http.request(method, url + target, **more) for method, target, more in requests]
            writer.close()
        return answers, read_cassette(tmp_path / "r.cassette"), url

    return run


def test_no_key_is_written(record, tmp_path: Path) -> None:
    with record() as tape:
        headers = {"X-API-Key": SECRET}
        metadata = {"tags": [], "sdk_version": "0", "user_metadata": {"mine": SECRET, "theirs": "tml-other"}}
        assert httpx.post(f"{tape.url}/api/v1/create_session", json=metadata, headers=headers).status_code == 200
        assert httpx.post(f"{tape.url}/api/v1/auth/token", json={}, headers=headers).json()["jwt"].startswith("eyJ")
    found = read_cassette(tmp_path / "one.cassette")
    assert [one.target for one in found.exchanges] == ["/api/v1/create_session"]
    assert b"[key]" in found.exchanges[0].body
    everything = b"".join(one.body + one.answer for one in found.exchanges)
    assert not any(word in everything for word in (b"tml-", b"eyJ"))


def test_recorded_results_are_final_answers_only(record, recorded, engine) -> None:
    with record() as tape, httpx.Client(base_url=f"{tape.url}/api/v1", headers={"X-API-Key": KEY}, timeout=30) as http:
        session = http.post("create_session", json={"tags": [], "sdk_version": "0"}).json()["session_id"]
        engine.paused = True
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
        made = [http.post("create_model", json=body).json()["request_id"] for _ in range(2)]
        assert made[0] == made[1]
        poll = {"request_id": made[0], "allow_metadata_only": True}
        assert http.post("retrieve_future", json=poll).json()["type"] == "try_again"
        assert tape.recorder.unanswered == 1
        engine.paused = False
        while http.post("retrieve_future", json=poll).json().get("type") == "try_again":
            pass
    assert tape.recorder.unanswered == 0
    assert [one.target for one in recorded().compared] == ["/api/v1/create_session", "/api/v1/create_model"]
    assert list(recorded().results) == made[:1]


def test_links_lead_through_the_recorder(between) -> None:
    async def handler(request: Request) -> Response:
        own = str(request.base_url) + "base"
        if request.url.path.endswith("moved"):
            return Response(status_code=302, headers={"location": f"{own}/there"})
        return JSONResponse({"link": f"{own}/file", "host": request.headers["host"]})

    (first, second), found, url = between(handler, ("GET", "/list", {}), ("GET", "/moved", {}))
    assert first.json()["link"] == f"{url}/file"
    assert second.headers["location"] == f"{url}/there"
    listed, moved = found.compared
    assert f"{HERE}/file".encode() in listed.answer
    assert moved.location == f"{HERE}/there"


def test_compressed_body_is_recorded_decompressed(between) -> None:
    async def handler(request: Request) -> Response:
        return JSONResponse({"encoding": request.headers["content-encoding"], "bytes": len(await request.body())})

    packed = zstandard.ZstdCompressor().compress(b'{"a": 1}')
    more = {"content": packed, "headers": {"content-encoding": "zstd", "content-type": "application/json"}}
    (answer,), found, _ = between(handler, ("POST", "/x", more))
    assert answer.json() == {"encoding": "zstd", "bytes": len(packed)}
    assert found.compared[0].body == b'{"a": 1}'


def test_answers_that_clients_ask_for_again_are_not_recorded(between) -> None:
    statuses = iter((429, 503, 401, 404))

    async def handler(request: Request) -> Response:
        return Response(status_code=next(statuses))

    answers, found, _ = between(handler, *[("GET", "/x", {})] * 4)
    assert [one.status_code for one in answers] == [429, 503, 401, 404]
    assert [one.status for one in found.compared] == [404]


def test_poll_ends_when_its_client_leaves(tmp_path: Path) -> None:
    """Otherwise the recorder would wait for polls of a program that has ended."""
    held, let_go = threading.Event(), threading.Event()

    async def handler(request: Request) -> Response:
        held.set()
        await request.body()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        let_go.set()
        return Response()

    head = b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
    with (
        serving(application(handler)) as service,
        CassetteWriter(tmp_path / "r.cassette") as writer,
        serving(Recorder(service, writer).app()) as url,
    ):
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as client:
            client.sendall(head)
            assert held.wait(30)
        assert let_go.wait(30)


def test_unreachable_service_is_named(tmp_path: Path) -> None:
    with CassetteWriter(tmp_path / "r.cassette") as writer:
        with serving(Recorder("http://127.0.0.1:1", writer).app()) as url:
            answer = httpx.get(f"{url}/api/v1/sessions")
        writer.discard()
    assert answer.status_code == 502
    assert answer.json()["detail"].startswith("the service at http://127.0.0.1:1 does not answer: ")


def test_parts_of_a_download_are_answered_by_their_range(between) -> None:
    async def download(request: Request) -> Response:
        asked, sent = request.headers.get("range", ""), b"0123456789"
        if not asked:
            return Response(sent, 200)
        start, end = map(int, asked.removeprefix("bytes=").split("-"))
        return Response(sent[start : end + 1], 206, {"content-range": f"bytes {start}-{end}/10"})

    def part(asked: str) -> tuple[str, str, dict]:
        return "GET", "/api/v1/file", {"headers": {"range": asked} if asked else {}}

    asked = ("bytes=0-4", "bytes=5-9", "")
    live, recording, _ = between(download, *map(part, asked))
    with serving(Replay(recording).app()) as url, httpx.Client() as http:
        for i in (1, 2, 0):
            method, target, more = part(asked[i])
            again = http.request(method, url + target, **more)
            assert (again.status_code, again.content) == (live[i].status_code, live[i].content)
            assert again.headers.get("content-range") == live[i].headers.get("content-range")
        assert http.get(f"{url}/api/v1/file", headers={"range": "bytes=1-2"}).content == b"0123456789"
    assert [answer.content for answer in live] == [b"01234", b"56789", b"0123456789"]
