"""The front page of the console, as HTML and as JSON: facts about the server, access, and links to Prefect."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from tests.api.conftest import BASE

from tinkerflow import __version__
from tinkerflow.backend.core.prefect_access import SIGN_IN_PATH, is_valid_ticket, make_credential, record_server


def test_browser_gets_a_page_with_instructions(start: Any) -> None:
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


def test_program_gets_json_from_the_overview(server: Any) -> None:
    facts = server.http.get(server.url, headers={"Accept": "application/json"}).json()
    assert (facts["service"], facts["version"], facts["base_url"]) == ("tinkerflow", __version__, server.url)
    assert facts["api"] == "/api/v1" and server.http.get(server.url + facts["openapi"]).status_code == 200


def test_overview_of_a_keyed_server_asks_for_a_key_and_hides_its_models(start: Any) -> None:
    server = start(host="0.0.0.0", public_url="https://tune.example/<ours>/", prefect="off")
    page = server.http.get(server.url).text
    assert "TINKER_BASE_URL=https://tune.example/&lt;ours&gt;\n" in page
    assert "base model" not in page and "Prefect" not in page and "tinkerflow key create" in page


def test_password_in_the_prefect_url_is_hidden(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_UI_URL", raising=False)
    monkeypatch.setenv("PREFECT_API_URL", "https://me:hunter2@prefect.example:4200/api")
    server = start(prefect="external")
    facts = server.http.get(server.url, headers={"Accept": "application/json"}).json()
    assert facts["prefect"] == "https://prefect.example:4200"
    assert "hunter2" not in server.http.get(server.url).text


def test_only_an_admin_key_opens_prefect(start: Any, browse: Any, journal: Any) -> None:
    server = start(prefect_port=4321)
    folder = server.settings.data_dir
    credential = make_credential(folder)
    anybody = browse(server)
    assert anybody.get("/prefect").status_code == 404
    record_server(folder, 4321, os.getpid())
    assert anybody.get("/prefect").status_code == 403, "an open server, which every user of the machine can reach"
    for name, admin, status in (("ann", False, 403), ("boss", True, 303)):
        key = journal.keys.create(name, name, admin=admin)[1]
        server.clock.advance(60)  # so that the server looks for keys again
        browser = browse(server)
        assert browser.sign_in(key).status_code == 303
        answer = browser.get("/prefect")
        assert answer.status_code == status
        assert ('href="/prefect"' in browser.get("/").text) is admin
    flow_run = "7d0b8a5e-52bd-4a55-8d4f-4bd6e1c2f6a1"
    to_run = browser.get("/prefect", params={"flow_run": flow_run}).headers["location"]
    assert to_run.startswith(f"http://127.0.0.1:4321{SIGN_IN_PATH}?to=/runs/flow-run/{flow_run}#")
    assert browser.get("/prefect", params={"flow_run": "//elsewhere.example"}).status_code == 404
    link, _, ticket = answer.headers["location"].partition("#")
    assert link == f"http://127.0.0.1:4321{SIGN_IN_PATH}" and is_valid_ticket(credential, ticket, time.time())
    assert browse(server).get("/prefect").status_code == 401, "nobody is signed in"


def test_the_page_of_a_run_links_the_flow_run_that_shows_it(
    start: Any, browse: Any, journal: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, flow_run = start(prefect_port=4321), "7d0b8a5e-52bd-4a55-8d4f-4bd6e1c2f6a1"
    run, page = server.model(), f"/runs/flow-run/{flow_run}"
    browser = browse(server)
    make_credential(server.settings.data_dir)
    record_server(server.settings.data_dir, 4321, os.getpid())
    assert "flow run</a>" not in browser.get(f"/training_runs/{run}").text, "no engine has shown it in Prefect"
    journal.models.note_flow_run(run, flow_run)
    text = browser.get(f"/training_runs/{run}").text
    assert f'href="http://127.0.0.1:4321{page}"' in text
    assert f"tinkerflow prefect --page {page} --data-dir {server.settings.data_dir}<" in text
    front = browser.get("/").text
    assert f"tinkerflow prefect --page / --data-dir {server.settings.data_dir}<" in front
    monkeypatch.setenv("TINKERFLOW_DATA_DIR", str(server.settings.data_dir))  # as in the API of `quickstart --data-dir`
    assert f"tinkerflow prefect --page / --data-dir {server.settings.data_dir}<" in browser.get("/").text
    pipeline = "1e0b8a5e-52bd-4a55-8d4f-4bd6e1c2f6a1"
    for named, shown in ((pipeline, True), ("//elsewhere.example", False)):
        text = browser.get(f"/training_runs/{server.model(flow_run=named)}").text
        assert ("flow run of the pipeline</a>" in text) is shown and "elsewhere" not in text
    key = journal.keys.create("boss", "boss", admin=True)[1]
    server.clock.advance(60)  # so that the server looks for keys again
    browser.sign_in(key)
    text = browser.get(f"/training_runs/{run}").text
    assert f'href="/prefect?flow_run={flow_run}"' in text and "tinkerflow prefect" not in text


def test_the_page_of_a_run_links_an_external_prefect(
    start: Any, journal: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.internal:4200/api")
    monkeypatch.setenv("PREFECT_UI_URL", "https://prefect.example")
    server = start(prefect="external")
    run = server.model()
    journal.models.note_flow_run(run, "1234")
    text = server.http.get(f"{server.url}/training_runs/{run}").text
    assert 'href="https://prefect.example/runs/flow-run/1234"' in text and "signs in" not in text
