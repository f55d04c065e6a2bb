"""Searches for sessions, runs and audit entries, through the SDK."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

BASE = "tiny/bigram"


@pytest.fixture
def people(server: Any, journal: Any) -> Iterator[Callable[[str], Any]]:
    """people(name): `ann` and `ada` share a project, `bob` has his own, and `root` is an admin in a third project."""
    projects = {"ann": "team-a", "ada": "team-a", "bob": "team-b", "root": "team-c"}
    secrets = {name: journal.keys.create(name, team, admin=name == "root")[1] for name, team in projects.items()}
    server.clock.advance(1.0)  # so that the server looks for keys again

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tinker.lib.experimental.ExperimentalWarning)
        yield lambda name: Person(server, secrets[name])


class Person:
    """A key, and SDK clients that use it."""

    def __init__(self, server: Any, secret: str) -> None:
        self.server, self.secret = server, secret
        self.rest = tinker.RestClient(base_url=server.url, api_key=secret)

    def session(self, **more: Any) -> str:
        body = {"sdk_version": "0.38.0", "tags": [], **more}
        return str(self.server.post("create_session", body, self.secret).json()["session_id"])

    def finish(self, session: str, reason: str, detail: str | None = None) -> None:
        body = {"reason": {"type": reason}, "detail": detail}
        assert self.server.post(f"sessions/{session}/finish", body, self.secret).is_success

    def log(self, *asked: Any, **more: Any) -> list[types.AuditLogEntry]:
        admin = tinker.AdminClient(base_url=self.server.url, api_key=self.secret)
        return admin.get_audit_log(*asked, **more).result().entries

    def search(self, **filters: Any) -> list[str]:
        return [one.session_id for one in self.page(**filters).sessions]

    def page(self, **filters: Any) -> types.SessionSearchResponse:
        return self.rest.search_sessions(types.SessionSearchRequest(**filters)).result()


def test_lists_cover_one_project_or_all_for_an_admin(people: Any) -> None:
    ann, ada, bob, root = map(people, ("ann", "ada", "bob", "root"))
    mine = [ann.session() for _ in range(3)]
    theirs = bob.session(display_name="secret", user_metadata={"k": "v"})
    assert ada.rest.list_sessions().result().sessions == mine[::-1]
    assert ada.rest.list_sessions(limit=1, offset=1).result().sessions == [mine[1]]
    assert ann.rest.list_sessions(access_scope="accessible").result().sessions == mine[::-1]
    assert root.rest.list_sessions().result().sessions == []
    assert root.rest.list_sessions(access_scope="accessible").result().sessions == [theirs, *mine[::-1]]
    found = root.rest.get_session(theirs, access_scope="accessible").result()
    assert (found.display_name, found.user_metadata) == ("secret", {"k": "v"})
    for person, scope in ((root, "owned"), (ann, "owned"), (ann, "accessible")):
        with pytest.raises(tinker.NotFoundError, match=f"session '{theirs}' does not exist"):
            person.rest.get_session(theirs, access_scope=scope).result()


def test_search_filters_sessions_by_name_and_metadata(people: Any) -> None:
    ann = people("ann")
    nightly = ann.session(display_name="Nightly Größe run", user_metadata={"team": "x", 'q"': "1"})
    other = ann.session(display_name="nightly", user_metadata={"team": "x"})
    plain = ann.session(user_metadata={"n": 3})
    assert ann.search() == [plain, other, nightly]
    assert ann.search(display_name="NIGHTLY") == [other, nightly]
    assert ann.search(display_name="grÖSSE nightly") == ann.search(display_name="run") == [nightly]
    assert ann.search(display_name="run", session_id=plain) == [plain, nightly]
    assert ann.search(session_id=other) == [other]
    assert ann.search(user_metadata={"team": "x"}) == [other, nightly]
    assert ann.search(user_metadata={"team": "x", 'q"': "1"}) == [nightly]
    assert ann.search(user_metadata={"n": "3"}) == [plain]
    assert ann.search(user_metadata={"team": "y"}) == ann.search(session_id="sess-none") == []


def test_search_by_owner_and_project(people: Any) -> None:
    ann, bob, root = map(people, ("ann", "bob", "root"))
    default, labeled, foreign = ann.session(), ann.session(project_id="p1"), bob.session(project_id="p1")
    assert ann.search(project_ids=["p1"]) == [labeled]
    assert ann.search(project_ids=["team-a", "p1"]) == [labeled, default]
    everybody = types.AccessibleSearchOwner()
    assert ann.search(owner=everybody) == [labeled, default]
    assert root.search(owner=everybody, project_ids=["p1"]) == [foreign, labeled]
    assert root.search(owner=types.UserSearchOwner(owner_urns=["team-b", "team-x"])) == [foreign]
    assert ann.search(owner=types.UserSearchOwner(owner_urns=["team-b"])) == root.search() == []
    for unknown in ("team-b", "p2"):
        with pytest.raises(tinker.NotFoundError, match=f"project '{unknown}' does not exist"):
            ann.search(project_ids=["p1", unknown])


def test_search_by_status(people: Any, journal: Any) -> None:
    ann = people("ann")
    active, well, badly = ann.session(), ann.session(), ann.session()
    ann.finish(well, "success")
    ann.finish(badly, "errored", "out of luck")
    assert ann.search(statuses=[{"type": "active"}]) == [active]
    assert ann.search(statuses=[{"type": "client_finished"}]) == [badly, well]
    said = [{"type": "client_finished", "reasons": ["errored", "interrupted"]}]
    assert ann.search(statuses=said) == [badly]
    assert ann.search(statuses=[*said, {"type": "active"}]) == [badly, active]
    status = ann.page(session_id=badly).sessions[0].status
    assert (status.type, status.reason.type, status.detail) == ("client_finished", "errored", "out of luck")
    journal.sessions.expire(-1)  # every session counts as silent, because the limit is in the future
    (silent,) = ann.page(statuses=[{"type": "cancelled"}]).sessions
    assert (silent.session_id, silent.status.type) == (active, "cancelled")
    assert "no heartbeat since" in silent.status.detail
    assert ann.search(statuses=[{"type": "failed"}, {"type": "active"}]) == []


def test_pages_have_no_gaps_or_repetitions(people: Any) -> None:
    ann = people("ann")
    made = [ann.session(user_metadata={"even": str(i % 2 == 0)}) for i in range(7)]
    for filters, expected in (({}, made[::-1]), ({"user_metadata": {"even": "True"}}, made[::-2])):
        found, cursor, pages = [], None, 0
        while pages == 0 or cursor is not None:
            page = ann.page(limit=2, cursor=cursor, **filters)
            found += [one.session_id for one in page.sessions]
            cursor, pages = page.next_cursor, pages + 1
        assert found == expected
        assert pages == (len(expected) + 1) // 2


def test_session_summary_counts_checkpoints_and_stored_bytes(client: tinker.ServiceClient, server: Any) -> None:
    model = client.create_lora_training_client(BASE, rank=8).result()
    rest, session = tinker.RestClient(base_url=server.url), model.model_id.split(":")[0]
    for name in ("a", "b"):
        model.save_state(name).result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search = rest.search_sessions(types.SessionSearchRequest(session_id=session))
    (found,) = search.result().sessions
    sizes = [one.size_bytes for one in rest.list_checkpoints(model.model_id).result().checkpoints]
    assert (found.checkpoints_count, found.checkpoint_storage_bytes) == (2, sum(sizes))
    assert (found.owner, found.project_id, found.user_metadata) == ("local", "local", {})
    assert abs((datetime.now(UTC) - found.created_at).total_seconds()) < 60


def test_a_session_moves_between_labels(people: Any) -> None:
    ann, bob, root = map(people, ("ann", "bob", "root"))
    session = ann.session()
    ann.rest.assign_session_project(session, "p1").result()
    root.rest.assign_session_project(session, "p2").result()
    (found,) = ann.page(project_ids=["p2"]).sessions
    assert (found.session_id, found.owner, found.project_id) == (session, "team-a", "p2")
    with pytest.raises(tinker.NotFoundError):
        bob.rest.assign_session_project(session, "p3").result()
    with pytest.raises(tinker.BadRequestError, match="project_id"):
        ann.rest.assign_session_project(session, "").result()
    moves = [one.event_details for one in ann.log("projects") if one.event == "project_session_assigned"]
    assert [(one["previous_project_id"], one["project_id"]) for one in moves] == [(None, "p1"), ("p1", "p2")]
    assert [one["session_id"] for one in moves] == [session] * 2
    assert moves[0]["key_id"] != moves[1]["key_id"]


def test_runs_by_scope_and_project(server: Any, engine: Any, people: Any) -> None:
    ann, bob, root = map(people, ("ann", "bob", "root"))
    mine, theirs = server.model(ann.secret), server.model(bob.secret)
    ann.rest.assign_session_project(mine.split(":")[0], "p1").result()

    def listed(person: Any, **filters: Any) -> list[str]:
        answer = person.rest.list_training_runs(**filters).result()
        assert answer.cursor.total_count == len(answer.training_runs)
        return [run.training_run_id for run in answer.training_runs]

    assert listed(ann) == listed(ann, access_scope="accessible") == listed(ann, project_id="p1") == [mine]
    assert listed(ann, project_id="team-a") == listed(bob, project_id="p1") == listed(root) == []
    assert listed(root, access_scope="accessible") == [theirs, mine]
    assert root.rest.get_training_run(mine, access_scope="accessible").result().model_owner == "team-a"
    for person, scope in ((bob, "owned"), (bob, "accessible"), (root, "owned")):
        with pytest.raises(tinker.NotFoundError):
            person.rest.get_training_run(mine, access_scope=scope).result()


def test_audit_log_filters_by_project_day_and_resource(people: Any, server: Any, engine: Any) -> None:
    ann, ada, bob, root = map(people, ("ann", "ada", "bob", "root"))
    ann.rest.assign_session_project(ann.session(), "p1").result()
    service = tinker.ServiceClient(base_url=server.url, api_key=ann.secret)
    model = service.create_lora_training_client(BASE, rank=8).result()
    path = model.save_state("kept").result().path
    service.close("success").result()
    (saved,) = ann.log("checkpoints")
    assert (saved.event, saved.tinker_path, saved.model_id) == ("checkpoint_saved", path, model.model_id)
    assert saved.event_details["tinker_path"] == path and saved.event_details["kind"] == "weights"
    events = [one.event for one in ann.log()]
    assert {"project_session_assigned", "checkpoint_saved"} <= set(events)
    assert ann.log("teams") == ann.log(day=date(2025, 1, 15)) == []
    assert "checkpoint_saved" not in [one.event for one in bob.log()]
    times = [one.timestamp for one in root.log()]
    assert len(times) >= len(events) and times == sorted(times)
    with pytest.warns(FutureWarning):
        assert ann.rest.get_audit_log("checkpoints").result().entries == [saved]
    who = {
        one.event_details["name"]: one.event_details["key_id"]
        for one in root.log("projects")
        if "name" in one.event_details
    }
    ann.rest.publish_checkpoint_from_tinker_path(path).result()
    ada.rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    ada.rest.delete_checkpoint_from_tinker_path(path).result()
    changed = [(one.event, one.event_details["key_id"]) for one in ann.log("checkpoints")[1:]]
    assert changed == [
        ("checkpoint_published", who["ann"]),
        ("checkpoint_ttl_set", who["ada"]),
        ("checkpoint_deleted", who["ada"]),
    ]


@pytest.mark.parametrize(
    "body",
    [
        {"limit": 201},
        {"limit": 0},
        {"statuses": []},
        {"statuses": [{"type": "active"}] * 101},
        {"statuses": [{"type": "client_finished", "reasons": ["success"] * 101}]},
        {"project_ids": ["x"] * 1001},
        {"statuses": [{"type": "asleep"}]},
        {"statuses": [{"type": "client_finished", "reasons": []}]},
        {"owner": {"type": "user", "owner_urns": []}},
        {"owner": {"type": "user", "owner_urns": ["x"] * 11}},
        {"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "s"}},
        {"display_name": ""},
    ],
)
def test_invalid_search_is_refused_with_its_field(server: Any, body: dict[str, Any]) -> None:
    answer: httpx.Response = server.post("sessions/search", body)
    assert answer.status_code == 400
    assert next(iter(body)) in answer.json()["detail"]
