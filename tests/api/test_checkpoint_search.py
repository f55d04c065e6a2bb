"""Searches for checkpoints over HTTP: filters alone and combined, pages and access."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.api.conftest import BASE, Running

from tinkerflow.api.routes import weights
from tinkerflow.backend.journal import CheckpointKind, CheckpointSaved, Journal, database

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def put(journal: Journal, number: int, owner: str = "local", **changes: Any) -> str:
    run = f"copy-{number}:train:0"
    plain = {
        "path": f"tinker://{run}/weights/c", "run_id": run, "kind": CheckpointKind.WEIGHTS, "name": "c", "owner": owner,
        "base_model": BASE, "rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": True, "step": 1,
        "size_bytes": 10, "created_at": BEGIN + timedelta(minutes=number),
    }  # fmt: skip
    label = changes.pop("label", None)
    if kind := changes.get("kind"):
        changes["path"] = f"tinker://{run}/{kind}/c"
    saved = CheckpointSaved(**{**plain, **changes})
    return journal.imports.record_copy(f"copy-{number}", saved, "tinker://a/weights/c", project_id=label)


def found(server: Running, **query: Any) -> list[str]:
    answer = server.post("checkpoints/search", query)
    assert answer.status_code == 200, answer.text
    return [one["tinker_path"] for one in answer.json()["checkpoints"]]


def test_search_filters_work_alone_and_combined(server: Running, journal: Journal) -> None:
    plain = put(journal, 1)
    sampler = put(journal, 2, kind=CheckpointKind.SAMPLER_WEIGHTS, base_model="other")
    tagged = put(journal, 3, user_metadata={"a": "b", "c": "d"}, label="mine")
    foreign = put(journal, 4, owner="team")
    assert found(server) == [tagged, sampler, plain]
    assert found(server, owner={"type": "accessible"}) == [foreign, tagged, sampler, plain]  # an admin's view
    assert found(server, owner={"type": "user", "owner_urns": ["team"]}) == [foreign]
    assert found(server, checkpoint_type="sampler") == [sampler]
    assert found(server, base_models=["other", "none"]) == [sampler]
    assert found(server, base_models=[]) == []
    assert found(server, user_metadata={"a": "b"}) == [tagged]
    assert found(server, user_metadata={"a": "b", "c": "x"}) == []
    assert found(server, project_ids=["mine"]) == [tagged]
    assert found(server, project_ids=["mine"], checkpoint_type="sampler") == []
    assert server.post("checkpoints/search", {"project_ids": ["nobodys"]}).status_code == 404
    details = server.post("checkpoints/search", {"checkpoint_type": "sampler"}).json()["checkpoints"]
    assert [one["base_model"] for one in details] == ["other"]
    assert [one["base_model"] for one in server.get("checkpoints").json()["checkpoints"]] == [BASE, "other", BASE]


@pytest.mark.parametrize("metadata", [{}, {"a": "b"}])
def test_pages_contain_each_checkpoint_once(server: Running, journal: Journal, metadata: dict[str, str]) -> None:
    """All checkpoints have the same time, so that time alone cannot separate the pages."""
    paths = [put(journal, n, created_at=BEGIN, user_metadata={"a": "b"}) for n in range(5)]
    seen, query = [], {"limit": 2, "user_metadata": metadata}
    while True:
        page = server.post("checkpoints/search", query).json()
        seen += [one["tinker_path"] for one in page["checkpoints"]]
        if "next_cursor" not in page:
            break
        query["cursor"] = page["next_cursor"]
    assert sorted(seen) == sorted(paths) and len(seen) == 5


def test_list_of_a_run_is_complete_or_refused(
    server: Running, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = "copy-0:train:0"
    for n in range(6):
        path = f"tinker://{run}/weights/c{n}"
        put(journal, n, run_id=run, name=f"c{n}", path=path, user_metadata={"a": "b" * 300})
    monkeypatch.setattr(database, "PAGE_BYTES", 1000)
    listed = server.get(f"training_runs/{run}/checkpoints").json()["checkpoints"]
    assert [one["checkpoint_id"] for one in listed] == [f"weights/c{n}" for n in reversed(range(6))]
    monkeypatch.setattr(weights, "_MOST_PAGES", 2)
    refused = server.get(f"training_runs/{run}/checkpoints")
    assert refused.status_code == 400 and "has 6 checkpoints with long metadata" in refused.json()["detail"]


@pytest.mark.parametrize(
    "query",
    [
        *({"limit": 0}, {"limit": 201}, {"checkpoint_type": "x"}, {"cursor": {"last_created_at": "2026-01-01"}}),
        *({"project_ids": ["x"] * 1001}, {"base_models": ["x"] * 1001}),
    ],
)
def test_invalid_search_queries_are_refused(server: Running, query: dict[str, Any]) -> None:
    assert server.post("checkpoints/search", query).status_code == 400
