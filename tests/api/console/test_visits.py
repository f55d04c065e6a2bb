"""Access to the console: sign-in and sign-out, projects, and requests from other sites."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.console.conftest import of_checkpoint
from tests.api.test_auth import routes_of

from tinkerflow.api.console.visit import COOKIE

PAGES = ("/sessions", "/training_runs", "/compare", "/samples", "/checkpoints", "/pool", "/usage", "/keys")


@pytest.fixture
def people(server: Any, journal: Any, furnish: Any, browse: Any) -> dict[str, Any]:
    """Browsers of ann, bob and an admin, all signed in, and the objects of each."""
    found: dict[str, Any] = {}
    for name, admin in (("ann", False), ("bob", False), ("boss", True)):
        _, secret = journal.keys.create(name, f"team-{name}", admin=admin)
        server.clock.advance(2.0)
        found[name] = browse(server)
        assert found[name].sign_in(secret).status_code == 303
        found[f"{name}'s"] = furnish(secret)
    return found


def test_signing_in_opens_the_requested_page(start: Any, journal: Any, browse: Any) -> None:
    browser = browse(start(host="0.0.0.0"))
    for path in PAGES:
        page = browser.get(path)
        assert page.status_code == 401 and "Sign in" in page.text and path in page.text
    for wrong, text in (("tml-wrong", "unknown or revoked"), ("", "must start with"), ("sk-1", "must start with")):
        refused = browser.sign_in(wrong, "/pool?x=1")
        assert refused.status_code == 401 and text in refused.text and COOKIE not in refused.cookies
        assert 'name="next" value="/pool?x=1"' in refused.text, "the next try leads there, too"
    key, secret = journal.keys.create("ann", "team")
    answer = browser.sign_in(secret, "/pool?x=1")
    assert (answer.status_code, answer.headers["location"]) == (303, "/pool?x=1")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and secret not in cookie
    assert "ann · team" in browser.get("/pool").text
    for elsewhere in ("//evil.example", "https://evil.example", "/\\evil.example", "/a\r\nb: c"):
        assert browser.sign_in(secret, elsewhere).headers["location"] == "/"
    journal.keys.revoke(key.id)
    browser.server.clock.advance(6.0)
    assert browser.get("/pool").status_code == 401, "the sign-in ends with its key"


def test_sign_in_lasts_twelve_hours_or_until_sign_out(server: Any, journal: Any, browse: Any) -> None:
    _, secret = journal.keys.create("ann", "team")
    server.clock.advance(2.0)
    browser = browse(server)
    browser.sign_in(secret)
    server.clock.advance(11 * 3600)
    assert browser.get("/pool").status_code == 200
    server.clock.advance(3600)
    assert browser.get("/pool").status_code == 401
    browser.sign_in(secret)
    assert browser.send("/sign-out").status_code == 303
    assert browser.get("/pool").status_code == 401


def test_signing_out_ends_the_session_on_the_server_and_is_logged(server: Any, journal: Any, browse: Any) -> None:
    key, secret = journal.keys.create("ann", "team")
    server.clock.advance(2.0)
    browser, other = browse(server), browse(server)
    for one in (browser, other):
        one.sign_in(secret)
    stolen = browser.http.cookies[COOKIE]
    exchanged = server.post("auth/token", {}, stolen).json()["jwt"]
    assert server.get("sessions", stolen).status_code == server.get("sessions", exchanged).status_code == 200
    assert browser.send("/sign-out").status_code == 303
    for token in (stolen, exchanged):
        refused = server.get("sessions", token)
        assert refused.status_code == 401 and "signed out" in refused.json()["detail"]
    assert server.get("sessions", secret).status_code == 200 and other.get("/pool").status_code == 200
    browser.sign_in("tml-wrong")
    entries = [(entry.event, entry.owner, entry.actor) for entry in journal.audit.entries(None)][1:]
    signed_in, signed_out = ("project_signed_in", "team", key.id), ("project_signed_out", "team", key.id)
    refusals = [("project_key_refused", "", "unknown key")] * 3
    assert sorted(entries) == sorted([signed_in, signed_in, signed_out, *refusals])


def test_admin_reads_of_samples_are_in_the_log_of_their_project(people: dict[str, Any], server: Any) -> None:
    boss = next(key.id for key in server.journal.keys.all() if key.name == "boss")
    sample, run = people["ann's"].sample, people["ann's"].run

    def looks(owner: str) -> list[tuple[str, Any]]:
        found = [entry for entry in server.journal.audit.entries(owner) if entry.event == "project_sample_read"]
        return [(entry.actor, entry.details["samples"]) for entry in found]

    for path in (f"/samples/{sample}", f"/training_runs/{run}", "/samples"):
        before = looks("team-ann")
        assert people["ann"].get(path).status_code == people["boss"].get(path).status_code == 200
        assert looks("team-ann") == [*before, (boss, [sample])], path
    assert len(looks("team-bob")) == 1 and looks("team-boss") == []


def test_cookie_is_secure_behind_an_https_proxy(start: Any, journal: Any, browse: Any) -> None:
    browser = browse(start(host="0.0.0.0", public_url="https://tune.example/ours/"))
    _, secret = journal.keys.create("ann", "team")
    answer = browser.sign_in(secret, "/pool")
    assert answer.headers["location"] == "/ours/pool"
    cookie = answer.headers["set-cookie"]
    assert "Secure" in cookie and "Path=/ours" in cookie


def test_pages_of_another_project_return_404(people: dict[str, Any], server: Any) -> None:
    things = people["ann's"]
    run, kind, name = things.sampler_weights.removeprefix("tinker://").split("/")
    values = {"session_id": things.session, "run_id": run, "kind": kind, "name": name, "request_id": things.sample}
    keys = {key.name: key.id for key in server.journal.keys.all()}
    before = server.journal.checkpoints.get(things.sampler_weights, None)
    tried = 0
    for method, path, _ in routes_of(server.app):
        if path.startswith(("/api/", "/v1/", "/openapi", "/console/", "/docs")) or "{" not in path:
            continue
        tried += 1
        where = path.format(**values, key_id=keys["ann"])
        bob = people["bob"]
        theirs = bob.get(where) if method == "GET" else bob.send(where, {"public": "yes", "ttl": "1 h"})
        assert theirs.status_code == 404, (method, where, theirs.text)
        if method == "GET":
            mine = people["ann"].get(where)
            assert mine.status_code in (200, 302), (where, mine.text)
    assert tried >= 11
    assert server.journal.checkpoints.get(things.sampler_weights, None) == before
    assert {key.id for key in server.journal.keys.all() if key.revoked_at} == set()
    for query in (f"/compare?run={run}", f"/curves?run={run}"):
        assert people["bob"].get(query).status_code == 404
        assert people["ann"].get(query).status_code == 200


def test_lists_show_a_project_its_own_objects_and_an_admin_all(people: dict[str, Any]) -> None:
    ids = {name: (people[f"{name}'s"].session, f"team-{name}") for name in ("ann", "bob")}
    for path in ("/", "/sessions", "/training_runs", "/checkpoints", "/samples", "/usage", "/pool", "/keys"):
        bobs, all_of_it = people["bob"].get(path).text, people["boss"].get(path).text
        assert not any(text in bobs for text in ids["ann"]), path
        assert path == "/pool" or any(text in all_of_it for text in ids["ann"]), path
    assert people["bob"].send("/keys", {"name": "x", "project": "team-ann"}).status_code == 404


def test_admin_reads_all_projects_and_changes_none(people: dict[str, Any], server: Any) -> None:
    where = of_checkpoint(people["ann's"].sampler_weights)
    page = people["boss"].get(where)
    assert page.status_code == 200 and "Publish" not in page.text
    assert people["boss"].send(f"{where}/delete").status_code == 404


def test_a_published_checkpoint_is_read_by_all_and_changed_by_its_project(people: dict[str, Any], server: Any) -> None:
    where = of_checkpoint(people["ann's"].sampler_weights)
    assert people["ann"].send(f"{where}/publish", {"public": "yes"}).status_code == 303
    page = people["bob"].get(where)
    assert page.status_code == 200 and "Delete" not in page.text and "Download" in page.text
    assert people["bob"].get(f"{where}/download").status_code == 302
    assert people["bob"].get(f"{where}/delete").status_code == 404
    assert people["bob"].send(f"{where}/delete").status_code == 404


def test_cross_site_forms_change_nothing(people: dict[str, Any], server: Any) -> None:
    where = of_checkpoint(people["ann's"].sampler_weights)
    ann, mark = people["ann"], people["ann"].mark()
    assert ann.post(f"{where}/delete").status_code == 403
    assert ann.post(f"{where}/delete", {"csrf": people["bob"].mark()}).status_code == 403
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
        assert ann.post(f"{where}/delete", {"csrf": mark}, headers=headers).status_code == 403
        assert ann.post("/sign-in", {"key": "tml-x"}, headers=headers).status_code == 403
    assert server.journal.checkpoints.get(people["ann's"].sampler_weights, None)
    assert ann.post(f"{where}/delete", {"csrf": mark}, headers={"Origin": server.url}).status_code == 303


def test_open_server_answers_only_to_its_own_host_names(browser: Any) -> None:
    port = browser.server.url.rsplit(":", 1)[1]
    for host, status in ((f"localhost:{port}", 200), (f"127.0.0.1:{port}", 200), (f"rebound.example:{port}", 403)):
        assert browser.get("/sessions", headers={"Host": host}).status_code == status


def test_unknown_pages_return_an_html_404(browser: Any) -> None:
    for path in ("/sessions/none", "/training_runs/none", "/samples/none", "/checkpoints/none/weights/x"):
        page = browser.get(path)
        assert page.status_code == 404 and "<h1>Page not found</h1>" in page.text
    assert browser.get("/checkpoints/none/other/x").status_code == 404
    assert browser.get("/training_runs?offset=-1").status_code == 404
    assert browser.get("/sessions?after=yesterday").status_code == 400
    assert browser.get("/sessions?after=0001-01-01T00:00:00%2B14:00 x").status_code == 400
    assert browser.get("/sessions/a%00b").status_code == 404


def test_static_files_are_cached_and_other_files_are_not_served(browser: Any) -> None:
    for name, kind in (("console.css", "text/css"), ("console.js", "text/javascript")):
        found = browser.get(f"/console/{name}")
        assert found.headers["content-type"].startswith(kind) and "immutable" in found.headers["cache-control"]
    assert browser.get("/console/visit.py").status_code == 404
