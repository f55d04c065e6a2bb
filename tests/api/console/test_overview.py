"""The front page has facts about the server, in HTML or JSON, and shows strangers nothing else."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from tests.api.conftest import BASE

from tinkerflow import __version__
from tinkerflow.backend.core.prefect_access import SIGN_IN_PATH, is_valid_ticket, make_credential, record_server


def test_a_browser_gets_a_page_that_says_how_to_use_the_server(start: Any) -> None:
    server = start(prefect_port=4200)
    assert "Prefect</a>" not in server.http.get(server.url).text, "another program may have the port of the settings"
    make_credential(server.settings.data_dir)
    record_server(server.settings.data_dir, 4321, os.getpid())
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


def test_only_an_admin_key_opens_prefect_signed_in(start: Any, browse: Any, journal: Any) -> None:
    server = start(prefect_port=4321)
    folder = server.settings.data_dir
    credential = make_credential(folder)
    anybody = browse(server)
    assert anybody.get("/prefect").status_code == 404
    record_server(folder, 4321, os.getpid())
    assert anybody.get("/prefect").status_code == 403, "an open server, which every user of the machine can reach"
    for name, admin, status in (("ann", False, 403), ("boss", True, 303)):
        key = journal.keys.create(name, name, admin=admin)[1]
        server.clock.advance(60)  # the server looks for keys now and then
        browser = browse(server)
        assert browser.sign_in(key).status_code == 303
        answer = browser.get("/prefect")
        assert answer.status_code == status
        assert ('href="/prefect"' in browser.get("/").text) is admin
    link, _, ticket = answer.headers["location"].partition("#")
    assert link == f"http://127.0.0.1:4321{SIGN_IN_PATH}" and is_valid_ticket(credential, ticket, time.time())
    assert browse(server).get("/prefect").status_code == 401, "nobody is signed in"
