"""Signed links: each opens exactly its own path, for a limited time, without a key."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import Request

from tinkerflow.api.call import Authorized
from tinkerflow.api.links import LIFETIME, Linked, link


@pytest.fixture
def linking(start: Any) -> Any:
    """Starts a server with a route that returns links, and a route that they open."""

    def begin(**settings: Any) -> Any:
        server = start(**settings)

        async def give(call: Authorized, path: str) -> str:
            return link(call, path)[0]

        async def read(name: str, services: Linked, request: Request) -> str:
            return f"{name} for whoever asks"

        server.app.add_api_route("/api/v1/give", give)
        server.app.add_api_route("/api/v1/files/{name:path}", read)
        return server

    return begin


def test_a_link_needs_no_key_and_expires(linking: Any) -> None:
    server = linking()
    url = server.get("give", params={"path": "files/a b/ü:train:0"}).json()
    assert url.startswith(f"{server.url}/api/v1/files/a%20b/%C3%BC:train:0?expires=")
    assert server.http.get(url).json() == "a b/ü:train:0 for whoever asks"
    server.clock.advance(LIFETIME.total_seconds())
    late = server.http.get(url)
    assert late.status_code == 403 and "expired" in late.json()["detail"]


def test_changed_links_are_refused(linking: Any) -> None:
    server = linking()
    url = server.get("give", params={"path": "files/mine"}).json()
    expires = url.partition("expires=")[2].partition("&")[0]
    wrong = [
        url.replace("files/mine", "files/yours"),
        url.replace("files/mine", "files/mine/"),
        url.replace(expires, str(int(expires) + 1)),
        url.replace("signature=", "signature=x"),
        url.partition("?")[0],
        f"{server.url}/api/v1/files/mine?expires=x&signature=y",
    ]
    assert [server.http.get(one).status_code for one in wrong] == [403] * len(wrong)
    assert server.http.get(url, headers={"X-API-Key": "tml-test"}).status_code == 200


def test_links_use_the_public_url_and_work_on_every_replica(linking: Any) -> None:
    server, other = linking(public_url="https://tune.example/ours/"), linking()
    url = server.get("give", params={"path": "files/x"}).json()
    assert url.startswith("https://tune.example/ours/api/v1/files/x?expires=")
    assert other.http.get(url.replace("https://tune.example/ours", other.url)).status_code == 200
