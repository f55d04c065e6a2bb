"""Bodies of submits. Their hashes equal those of earlier versions, so that repeats are detected after an upgrade."""

from __future__ import annotations

import pytest
from tests.api.conftest import BASE, Running

from tinkerflow.api.submit import content_hash
from tinkerflow.backend.wire import parse

STEP = (
    rb'{"model_id":"m","seq_id":1,"adam_params":{"learning_rate":1e-4,"beta1":null},'
    rb'"x":[1,2.0,"\u00e9"],"a":{"b":1,"a":2}}'
)
SAMPLE = (
    b'{"sampling_session_id":"s","seq_id":18446744073709551616,"prompt":{"chunks":[{"tokens":[1,2]}]},'
    b'"sampling_params":{}}'
)
SAVE = b'{"path":"a","sampling_session_seq_id":%d,"model_id":"m","seq_id":3}'
RENUMBERED = ("sampling_session_seq_id",)


@pytest.mark.parametrize(
    ("body", "without", "stored"),
    [
        (STEP, (), "3f544b2ddc3143ffe1a3620004e2d40e190cd72973998b7714932022d247b254"),
        (SAMPLE, (), "860c0dac5e49a9d058ba1b2a97f8aafe012feebce0e08b733ede5bcde3d60ac1"),
        (SAVE % 4, RENUMBERED, "2bf3ed7ef124567dfad77d51e7993ec699c5080047a4f0ede7d4887db4163b63"),
        (SAVE % 5, RENUMBERED, "2bf3ed7ef124567dfad77d51e7993ec699c5080047a4f0ede7d4887db4163b63"),
    ],
)
def test_body_hash_is_stable(body: bytes, without: tuple[str, ...], stored: str) -> None:
    assert content_hash(parse(body), without) == stored


@pytest.mark.parametrize("depth", [300, 1020])
def test_a_body_that_nests_too_deeply_is_refused_and_the_next_one_is_not(server: Running, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    model, session = server.model(), server.session()
    bodies = {
        "optim_step": f'{{"model_id":"{model}","seq_id":1,"adam_params":{{"learning_rate":1}},"x":{deep}}}',
        "save_weights": f'{{"model_id":"{model}","seq_id":{deep}}}',
        "load_weights": f'{{"model_id":"{model}","seq_id":1,"path":"p","weights_access_token":"t","x":{deep}}}',
        "create_model": f'{{"session_id":"{session}","model_seq_id":0,"base_model":"{BASE}","user_metadata":{deep}}}',
        "create_custom_loss": f'{{"session_id":"{session}","custom_loss_seq_id":1,"x":{deep}}}',
    }
    for path, body in bodies.items():
        refused = server.http.post(f"{server.url}/api/v1/{path}", content=body, headers={"X-API-Key": "tml-test"})
        assert refused.status_code == 400, (path, refused.text)
    assert server.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}).status_code == 200


@pytest.mark.parametrize(("path", "more"), [("create_model", {}), ("load_weights", {"path": "tinker://a/weights/b"})])
@pytest.mark.parametrize("name", ["a\0b", "a" * 1025])
def test_the_row_of_a_refused_model_has_no_name_that_cannot_be_stored(
    server: Running, path: str, more: dict[str, str], name: str
) -> None:
    body = {"session_id": server.session(), "model_seq_id": 0, "base_model": name, **more}
    made = server.post(path, body).json()
    assert server.journal.models.get(made["model_id"], None).base_model == ""  # Postgres stores no NUL
    error = server.result(made["request_id"]).json()
    assert (error["category"], error["error"][:13]) == ("user", "base_model is")
