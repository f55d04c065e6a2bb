"""A request's place in a recording, and the requests and keys that a recording omits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tinkerflow.deployments.cassettes.requests import asked, is_binary, is_unrecorded, without_secrets


def place(name: str, **fields: Any) -> tuple[str, int | None, bool, bool]:
    found = asked("POST", f"/api/v1/{name}", msgspec.json.encode(fields))
    return found.place, found.number, found.strict, found.reads


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("optim_step", {"model_id": "s:train:0", "seq_id": 3}, ("s:train:0", 3, True, False)),
        ("create_model", {"session_id": "s", "model_seq_id": 1}, ("s model_seq_id", 1, True, False)),
        ("load_weights", {"session_id": "s", "model_seq_id": 1}, ("s model_seq_id", 1, True, False)),
        ("load_weights", {"model_id": "s:train:0", "seq_id": 4}, ("s:train:0", 4, True, False)),
        ("asample", {"sampling_session_id": "s:sample:0", "seq_id": 0}, ("s:sample:0", 0, False, False)),
        ("create_session", {"tags": []}, ("create_session", None, False, False)),
        ("get_info", {"model_id": "m"}, ("POST /api/v1/get_info", None, False, True)),
        ("copy_weights", {"source_path": "p"}, ("POST /api/v1/copy_weights", None, False, False)),
    ],
)
def test_places(name: str, fields: dict[str, Any], expected: tuple[str, int | None, bool, bool]) -> None:
    assert place(name, **fields) == expected


def test_a_request_without_its_place_is_named() -> None:
    with pytest.raises(ValueError, match="optim_step: model_id is 'm' and seq_id is None: must both be given"):
        asked("POST", "/api/v1/optim_step", b'{"model_id": "m"}')


def test_tags_have_no_order() -> None:
    first, second = (
        asked("POST", "/api/v1/create_session", b'{"tags": %s}' % tags) for tags in (b'["b", "a"]', b'["a", "b"]')
    )
    assert first.content == second.content == {"tags": ["a", "b"]}


def test_polls_and_heartbeats_are_not_recorded() -> None:
    assert all(map(is_unrecorded, ("retrieve_future", "session_heartbeat", "telemetry", "sessions/a/finish")))
    assert not any(map(is_unrecorded, ("asample", "sessions/a", "sessions/search")))


def test_no_key_is_left() -> None:
    body = b'{"note": "tml-abc/d", "path": "mine", "other": "hunter22", "weights_access_token": "t", "n": 1}'
    assert msgspec.json.decode(without_secrets(body, {b"hunter22"})) == {
        "note": "[key]",
        "path": "mine",
        "other": "[key]",
        "n": 1,
    }


def test_words_that_only_resemble_a_key_are_kept() -> None:
    body = b'{"prompt": "an html-page\\ntml-abc", "model": "/models/html-coder"}'
    assert without_secrets(body, set()) == b'{"prompt": "an html-page\\n[key]", "model": "/models/html-coder"}'


def test_bodies_that_may_contain_keys_are_not_binary() -> None:
    texts = "", "application/json", "text/html; charset=utf-8", "application/x-www-form-urlencoded"
    assert not any(map(is_binary, texts))
    assert is_binary("application/x-protobuf")
