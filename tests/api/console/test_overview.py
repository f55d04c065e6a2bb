"""The front page says what the server is, in HTML or JSON, and tells a stranger nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.conftest import BASE

from tinkerflow import __version__


def test_a_browser_gets_a_page_that_says_how_to_use_the_server(start: Any) -> None:
    server = start(prefect_port=4321)
    page = server.http.get(server.url, headers={"Accept": "text/html,application/json;q=0.9"})
    assert page.headers["content-type"].startswith("text/html")
    urls = [f"{name}={server.url}" for name in ("TINKER_BASE_URL", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL")]
    for text in (__version__, *urls, f"OPENAI_BASE_URL={server.url}/v1\n", f"serves {BASE}.", "http://127.0.0.1:4321"):
        assert text in page.text
    assert "src=" not in page.text and "//cdn" not in page.text


def test_a_program_gets_json(server: Any) -> None:
    facts = server.http.get(server.url, headers={"Accept": "application/json"}).json()
    assert (facts["service"], facts["version"], facts["base_url"]) == ("tinkerflow", __version__, server.url)
    assert facts["api"] == "/api/v1" and server.http.get(server.url + facts["openapi"]).status_code == 200


def test_where_a_key_is_needed_the_page_says_so_and_counts_nothing(start: Any) -> None:
    server = start(host="0.0.0.0", public_url="https://tune.example/<ours>/", prefect="off")
    page = server.http.get(server.url).text
    assert "TINKER_BASE_URL=https://tune.example/&lt;ours&gt;\n" in page
    assert "base model" not in page and "Prefect" not in page and "tinkerflow key create" in page


def test_a_password_in_the_url_of_prefect_is_shown_to_nobody(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_UI_URL", raising=False)
    monkeypatch.setenv("PREFECT_API_URL", "https://me:hunter2@prefect.example:4200/api")
    server = start(prefect="external")
    facts = server.http.get(server.url, headers={"Accept": "application/json"}).json()
    assert facts["prefect"] == "https://prefect.example:4200"
    assert "hunter2" not in server.http.get(server.url).text
