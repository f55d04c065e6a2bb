"""Results over HTTP: announced sizes, the poller of a sampling session, copies of a client, and cancelled samples."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import pytest
import tinker
from tests.api.conftest import BASE, Running
from tests.waiting import wait_for
from tinker import types

from tinkerflow.backend.journal import Kind
from tinkerflow.backend.journal.results import FIRST_SHOWN

PROMPT = types.ModelInput.from_ints([2, 3])
PARAMS = types.SamplingParams(max_tokens=4, seed=1)


def sampler(server: Running) -> str:
    body = {"session_id": server.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    return str(server.post("create_sampling_session", body).json()["sampling_session_id"])


def sample(server: Running, name: str, seq: int, **params: Any) -> str:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [2, 3]}]}
    params = {"max_tokens": 4, **params}
    body = {"sampling_session_id": name, "seq_id": seq, "prompt": prompt, "sampling_params": params}
    return str(server.post("asample", body).json()["request_id"])


def poll(server: Running, name: str, cursor: int, clone: int = 0, **more: Any) -> Any:
    target = {"type": "sampling_session", "sampling_session_id": name, "cloned_sampler_id": clone}
    return server.post("retrieve_futures", {"target": target, "prev_cursor": cursor, **more})


def calls_of(server: Running) -> list[str]:
    """A list that receives the path of each later request."""
    seen: list[str] = []
    stack = server.app.middleware_stack

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seen.append(scope["path"].removeprefix("/api/v1/"))
        await stack(scope, receive, send)

    server.app.middleware_stack = noting
    return seen


# ------------------------------------------------------------------ the real SDK
def test_a_hundred_samples_come_through_one_poller(client: Any, server: Running) -> None:
    sampling = client.create_sampling_client(base_model=BASE).result()
    seen = calls_of(server)
    futures = [sampling.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, seed=n)) for n in range(100)]
    results = [future.result() for future in futures]
    again = sampling.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, seed=7)).result()
    assert again.sequences[0].tokens == results[7].sequences[0].tokens
    assert len({tuple(one.sequences[0].tokens) for one in results}) > 1
    # each result is fetched once, after the poller has reported it
    assert seen.count("retrieve_future") == 101
    assert 1 <= seen.count("retrieve_futures") < 101


def test_acknowledged_results_release_their_bytes(client: Any, server: Running) -> None:
    sampling = client.create_sampling_client(base_model=BASE).result()
    for _ in range(FIRST_SHOWN + 3):
        sampling.sample(PROMPT, 1, PARAMS).result()

    def completions() -> Any:
        return poll(server, sampling._sampling_session_id, 0, timeout=0).json()["completions"]

    assert len(completions()) == FIRST_SHOWN + 3
    wait_for(lambda: {one["state"] for one in completions()[FIRST_SHOWN:]} == {"failed"})
    assert "acknowledged" in server.result(completions()[-1]["request_id"]).json()["error"]


def test_copies_of_a_sampling_client_share_its_session(client: Any, server: Running, journal: Any) -> None:
    sampling = client.create_sampling_client(base_model=BASE).result()
    seen = calls_of(server)
    handle = sampling.get_sampler_handle()
    copies = [pickle.loads(pickle.dumps(sampling)), tinker.SamplingClient.from_sampler_handle(handle)]
    futures = [one.sample(PROMPT, 2, PARAMS) for one in (sampling, *copies, sampling, *copies)]
    tokens = [[s.tokens for s in future.result().sequences] for future in futures]
    assert all(one == tokens[0] for one in tokens)
    assert sorted(copy._cloned_sampler_id for copy in copies) == [1, 2]
    assert seen.count("join_sampling_session") == 2
    for copy in copies:
        copy.holder.close()


def test_abandoned_sample_is_cancelled_on_the_server(client: Any, server: Running, engine: Any, journal: Any) -> None:
    sampling = client.create_sampling_client(base_model=BASE).result()
    engine.paused = True
    given_up, kept = sampling.sample(PROMPT, 1, PARAMS), sampling.sample(PROMPT, 1, PARAMS)
    # the SDK cancels only requests whose ids it has, so wait until it polls both
    wait_for(lambda: (poller := sampling._futures_poller) is not None and len(poller._events) == 2)
    waiting = journal.requests.pending_samples(10)
    given_up.future().cancel()
    wait_for(lambda: len(journal.requests.pending_samples(10)) == 1)
    answers = [server.result(one.id).json() for one in waiting if journal.results.get(one.id, "local") is not None]
    assert answers == [{"error": "cancelled by the client", "category": "user"}]
    engine.paused = False
    assert len(kept.result().sequences[0].tokens) <= 4
    assert len(sampling.sample(PROMPT, 1, PARAMS).result().sequences) == 1


def test_a_large_result_is_announced_by_its_size_and_then_downloaded(start: Any, engine: Any) -> None:
    server = start(metadata_only_over=10, poll_hold=15.0)
    with tinker.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(base_model=BASE, rank=8).result()
        seen = calls_of(server)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([2, 3, 4]),
            loss_fn_inputs={"target_tokens": [3, 4, 5], "weights": [1.0, 1.0, 1.0]},
        )
        out = training.forward_backward([datum], "cross_entropy").result()
        assert out.loss_fn_outputs[0]["logprobs"].shape == [3]
        assert seen.count("retrieve_future") == 2  # the size, and then the bytes
        sampling = service.create_sampling_client(base_model=BASE).result()
        assert sampling.sample(PROMPT, 1, PARAMS).result().sequences


# ------------------------------------------------------------------ the protocol
def test_result_size_is_announced_only_to_clients_that_want_it(start: Any, engine: Any) -> None:
    server = start(metadata_only_over=10)
    request = sample(server, sampler(server), 0)
    told = server.result(request).json()
    whole = server.post("retrieve_future", {"request_id": request, "allow_metadata_only": False})
    assert told["status"] == "complete_metadata"
    assert told["response_payload_size"] == len(whole.content) > 10
    assert whole.headers["content-type"] == "application/x-protobuf"


def test_poll_is_held_until_an_answer_arrives(start: Any, engine: Any) -> None:
    server = start(poll_hold=15.0)
    engine.paused = True
    name = sampler(server)
    request = sample(server, name, 0)
    began = time.monotonic()
    assert poll(server, name, 0, timeout=0.0).json() == {"completions": [], "cursor": 0}
    assert time.monotonic() - began < 20
    threading.Timer(0.3, lambda: setattr(engine, "paused", False)).start()
    found = poll(server, name, 0).json()
    assert 0.25 < time.monotonic() - began < 20
    (row,) = found["completions"]
    size = row.pop("response_payload_uncompressed_size")
    assert row == {"state": "finished", "request_id": request}
    assert size == len(server.post("retrieve_future", {"request_id": request}).content)
    assert poll(server, name, found["cursor"], timeout=0.5).json() == {"completions": [], "cursor": found["cursor"]}
    assert poll(server, name, 0, clone=1, timeout=0).json()["completions"] == []


def test_cursors_are_valid_on_every_replica(start: Any, engine: Any) -> None:
    first, second = start(), start()
    name = sampler(first)
    cursor, seen = 0, []
    expected = []
    for seq in range(6):
        expected.append(sample(first, name, seq))
        found = poll((first, second)[seq % 2], name, cursor).json()
        seen += [one["request_id"] for one in found["completions"]]
        cursor = found["cursor"]
    assert seen == expected


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"target": {"sampling_session_id": "none"}}, 404),
        ({"target": {"sampling_session_id": "none", "cloned_sampler_id": -1}}, 400),
        ({"target": {"sampling_session_id": "none"}, "prev_cursor": -1}, 400),
        ({"target": {"sampling_session_id": "none"}, "timeout": -1}, 400),
        ({}, 400),
    ],
)
def test_invalid_poll_has_an_error_with_its_reason(server: Running, body: Any, status: int) -> None:
    answer = server.post("retrieve_futures", body)
    assert answer.status_code == status
    assert any(
        word in answer.json()["detail"] for word in ("'none' does not exist", "target", "prev_cursor", "timeout")
    )


def test_training_request_cannot_be_cancelled(server: Running, engine: Any) -> None:
    engine.paused = True
    model = server.model()
    request = server.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}).json()["request_id"]
    refused = server.post("cancel_future", {"request_id": request})
    assert refused.status_code == 400
    assert "only samples can be cancelled" in refused.json()["detail"]
    assert server.post("cancel_future", {"request_id": "req-none"}).status_code == 404
    engine.paused = False
    assert "metrics" in server.result(request).json()
    assert (Kind.OPTIM_STEP, 1) in engine.executed


def test_poll_takes_few_queries(start: Any, engine: Any, statements: Any) -> None:
    """A held poll makes no queries. A check takes one query, and an answer two, because its first read is stored."""
    server = start(recheck_seconds=600.0)  # no rechecks, which would query for all followed samplers
    name = sampler(server)
    request = sample(server, name, 0)
    server.result(request)

    def queries(path: str, body: Any) -> int:
        server.get("healthz")
        with statements() as made:
            assert server.post(path, body).status_code == 200
        return sum("pending" not in one and "api_key" not in one for one in made)

    target = {"type": "sampling_session", "sampling_session_id": name, "cloned_sampler_id": 0}
    assert queries("retrieve_future", {"request_id": request}) == 1
    assert queries("retrieve_futures", {"target": target, "prev_cursor": 0}) == 2
    assert queries("retrieve_futures", {"target": target, "prev_cursor": 1, "timeout": 0}) == 1
    engine.paused = True
    waiting = sample(server, name, 1)
    assert (
        queries("retrieve_future", {"request_id": waiting}) <= 1 + 3
    )  # held for 2 s, with one shared check per second
