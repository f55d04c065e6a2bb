"""The traps of docs/protocol.md, as handwritten requests that the SDK cannot be made to send."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard

from tinkerflow.backend.wire import tinker_pb2 as pb

KEY = "tml-test"
ADAM = {"adam_params": {"learning_rate": 0.1}, "type": "optim_step"}


def chunk(model: str, seq: int, target: int = 2) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1], np.int32).tobytes()
    for key, values, dtype in (("target_tokens", np.array([target]), 2), ("weights", np.ones(1, np.float32), 1)):
        datum.loss_fn_inputs[key].dense, datum.loss_fn_inputs[key].dtype = values.tobytes(), dtype
    return message.SerializeToString()


def post_chunk(server: Any, body: bytes, **headers: str) -> httpx.Response:
    everything = {"X-API-Key": KEY, "Content-Type": "application/x-protobuf", **headers}
    return server.http.post(f"{server.url}/api/v1/forward_backward", content=body, headers=everything)


def failure(server: Any, response: httpx.Response) -> str:
    """The error of an operation whose submit was accepted."""
    assert response.status_code == 200
    answer = server.result(response.json()["request_id"])
    assert answer.status_code == 200
    assert answer.json()["category"] == "user"
    return str(answer.json()["error"])


def test_02_no_chunk_is_refused(server: Any, engine: Any) -> None:
    model = server.model()
    assert "model 'nobody:train:0' does not exist" in failure(server, post_chunk(server, chunk("nobody:train:0", 1)))
    assert "not a ForwardBackwardRequest" in failure(server, post_chunk(server, b"\xff\xff\xff"))
    assert "seq_id 0: must both be given" in failure(server, post_chunk(server, chunk(model, 0)))
    assert "model_id is ''" in failure(server, post_chunk(server, b""))
    assert "Content-Encoding is 'br'" in failure(server, post_chunk(server, b"", **{"Content-Encoding": "br"}))
    assert "one complete zstd frame" in failure(server, post_chunk(server, b"abc", **{"Content-Encoding": "zstd"}))
    good = post_chunk(server, chunk(model, 1))
    assert good.json()["model_id"] == model
    assert server.result(good.json()["request_id"]).headers["content-type"] == "application/x-protobuf"
    assert "seq_id 1 of model" in failure(server, post_chunk(server, chunk(model, 1, target=3)))


def test_02_a_body_too_large_is_named_before_and_after_decompression(start: Any, engine: Any) -> None:
    server = start(max_body_bytes=2**16)
    assert "must have at most 65536 bytes" in failure(server, post_chunk(server, bytes(2**17)))
    bomb = zstandard.ZstdCompressor().compress(bytes(2**26))
    assert len(bomb) < 2**16
    text = failure(server, post_chunk(server, bomb, **{"Content-Encoding": "zstd"}))
    assert "67108864 bytes when decompressed: must have at most 65536" in text
    refused = server.post("optim_step", {"pad": "x" * 2**17})
    assert (refused.status_code, "max_body_bytes" in refused.text) == (413, True)


def test_zstd_bodies(server: Any, engine: Any) -> None:
    model = server.model()
    body = zstandard.ZstdCompressor().compress(chunk(model, 1))
    sent = post_chunk(server, body, **{"Content-Encoding": "zstd"})
    # a replay is the same request, compressed or not
    assert post_chunk(server, chunk(model, 1)).json() == sent.json()
    assert server.result(sent.json()["request_id"]).headers["content-type"] == "application/x-protobuf"


def test_03_polled_later_chunks_wait_for_the_first(server: Any, engine: Any) -> None:
    model = server.model()
    later = [post_chunk(server, chunk(model, seq)).json()["request_id"] for seq in (3, 2)]
    with ThreadPoolExecutor(2) as pool:
        polls = [pool.submit(server.result, request_id) for request_id in later]
        time.sleep(0.3)
        assert not any(poll.done() for poll in polls)
        post_chunk(server, chunk(model, 1))
        assert all(poll.result().headers["content-type"] == "application/x-protobuf" for poll in polls)
    assert [seq for _, seq in engine.executed] == [0, 1, 2, 3]


def test_05_and_06_answers_hold_no_null_and_ids_are_strings(server: Any, engine: Any) -> None:
    session = server.session()
    model = server.model()
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/bigram"}
    answers = [
        server.post("optim_step", {"model_id": model, "seq_id": 1, **ADAM}),
        server.post("get_info", {"model_id": model}),
        server.post("create_sampling_session", sampler),
        server.get(f"samplers/{session}:sample:0"),
        server.get(f"training_runs/{model}"),
        server.get("training_runs"),
        server.get("checkpoints"),
        server.get(f"training_runs/{model}/checkpoints"),
    ]
    answers.append(server.result(answers[0].json()["request_id"]))
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert "null" not in answer.text
        assert "error" not in answer.json()
    assert isinstance(answers[0].json()["request_id"], str)


def test_07_a_poll_without_an_answer_is_held(start: Any, engine: Any) -> None:
    server = start(poll_hold=0.5)
    model = server.model()
    engine.paused = True
    request_id = server.post("optim_step", {"model_id": model, "seq_id": 1, **ADAM}).json()["request_id"]
    begun = time.monotonic()
    answer = server.post("retrieve_future", {"request_id": request_id})
    assert time.monotonic() - begun > 0.3, "three quarters of poll_hold at least"
    assert answer.json() == {"type": "try_again", "request_id": request_id, "queue_state": "active"}


def test_07_and_22_held_polls_are_answered_immediately_and_may_overlap_or_vanish(server: Any, engine: Any) -> None:
    model = server.model()
    engine.paused = True
    request_id = server.post("optim_step", {"model_id": model, "seq_id": 1, **ADAM}).json()["request_id"]
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(
            f"{server.url}/api/v1/retrieve_future",
            json={"request_id": request_id},
            headers={"X-API-Key": KEY},
            timeout=0.2,
        )
    with ThreadPoolExecutor(2) as pool:
        polls = [pool.submit(server.result, request_id) for _ in range(2)]
        time.sleep(0.2)
        engine.paused = False
        begun = time.monotonic()
        answers = [poll.result().json() for poll in polls]
    assert time.monotonic() - begun < 20
    assert answers[0] == answers[1] == server.result(request_id).json()
    assert answers[0]["metrics"]["optimizer_step"] == 1.0


def test_08_unknown_id_is_final(server: Any) -> None:
    answer = server.result("req-none")
    assert answer.status_code == 404
    assert "req-none" in answer.json()["detail"]
    assert server.result("refused-%%%").status_code == 404


def test_09_errors_have_a_body_and_a_content_length(server: Any) -> None:
    for answer in (
        server.post("optim_step", {"seq_id": 1}),
        server.post("optim_step", [1]),
        server.post("create_session", {"tags": []}),
        server.post("session_heartbeat", {"session_id": 3}),
        server.post("asample", {}),
    ):
        assert answer.status_code == 400
        assert int(answer.headers["content-length"]) == len(answer.content) > 0
        assert answer.json()["detail"]
    assert "sdk_version" in server.post("create_session", {"tags": []}).json()["detail"]


def test_10_user_error_never_has_a_retried_status(server: Any, engine: Any) -> None:
    model = server.model()
    first = server.post("optim_step", {"model_id": model, "seq_id": 1, **ADAM})
    other = server.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 9.0}})
    assert (first.status_code, other.status_code) == (200, 422)
    assert "used before for another request" in other.json()["detail"]
    assert server.post("optim_step", {"model_id": "none:train:0", "seq_id": 1, **ADAM}).status_code == 404
    assert server.post("get_info", {"model_id": "none"}).status_code == 404
    assert server.post("create_model", {"session_id": "none", "model_seq_id": 0, "base_model": "m"}).status_code == 404
    assert server.get("samplers/none").status_code == 404
    assert server.get("training_runs/none").status_code == 404
    assert server.get("no_such_endpoint").status_code == 404


def test_12_replays_get_the_first_answer(server: Any, engine: Any) -> None:
    model = server.model()
    body = {"model_id": model, "seq_id": 1, **ADAM}
    assert server.post("optim_step", body).json() == server.post("optim_step", dict(reversed(body.items()))).json()
    save = {"model_id": model, "seq_id": 2, "kind": "snapshot", "sampling_session_seq_id": 1}
    first = server.post("save_weights_for_sampler", save)
    again = server.post("save_weights_for_sampler", {**save, "sampling_session_seq_id": 5})
    assert first.json() == again.json()
    opened = server.result(first.json()["request_id"]).json()
    assert opened["sampling_session_id"] == model.replace(":train:0", ":sample:1")
    named = server.post("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "path": "a"})
    assert named.status_code == 422
    create = {"session_id": model.split(":")[0], "model_seq_id": 1, "base_model": "tiny/bigram"}
    assert server.post("create_model", create).json() == server.post("create_model", create).json()
    assert server.post("create_model", {**create, "base_model": "else"}).status_code == 422


def test_12_a_replayed_sampler_of_a_deleted_checkpoint_is_the_same_sampler(server: Any, engine: Any) -> None:
    model = server.model()
    saved = server.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "a"}).json()["request_id"]
    path, session = server.result(saved).json()["path"], model.split(":")[0]
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    opened = server.post("create_sampling_session", sampler)
    assert opened.status_code == 200
    server.journal.checkpoints.delete(path, "local")
    assert server.post("create_sampling_session", sampler).json() == opened.json()
    for other in ({"sampling_session_seq_id": 1}, {"model_path": f"{path}b"}):
        assert server.post("create_sampling_session", {**sampler, **other}).status_code == 404


def test_12_a_replayed_sample_without_a_seed_is_the_same_sample(server: Any, engine: Any) -> None:
    session = server.session()
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/bigram"}
    opened = server.post("create_sampling_session", sampler).json()["sampling_session_id"]
    assert server.post("create_sampling_session", sampler).json()["sampling_session_id"] == opened
    body = {
        "sampling_session_id": opened,
        "seq_id": 3_000_000_000,  # needs 64 bits
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3]}]},
        "sampling_params": {"max_tokens": 4},
    }
    engine.paused = True
    first, again = server.post("asample", body).json(), server.post("asample", body).json()
    engine.paused = False
    assert first == again
    assert len(set(first["sample_sequence_ids"])) == 2
    response = pb.SampleResponse.FromString(server.result(first["request_id"]).content)
    assert len(response.sequences) == 2
    assert server.post("asample", {**body, "num_samples": 3}).status_code == 422
    assert server.post("asample", {**body, "sampling_session_id": "none"}).status_code == 404


def test_13_creation_from_a_missing_path_fails(server: Any, engine: Any) -> None:
    body = {"session_id": server.session(), "model_seq_id": 0, "path": "tinker://a/weights/b", "optimizer": True}
    submitted = server.post("load_weights", body)
    assert submitted.json()["model_id"] == f"{body['session_id']}:train:0"
    assert "tinker://a/weights/b" in failure(server, submitted)
    later = server.post("optim_step", {"model_id": submitted.json()["model_id"], "seq_id": 1, **ADAM})
    assert "tinker://a/weights/b" in failure(server, later)


def test_legacy_load_reaches_the_engine(server: Any, engine: Any) -> None:
    model = server.model()
    body = {"model_id": model, "seq_id": 1, "path": "tinker://a/weights/b", "optimizer": False}
    engine.next_outcome = None
    engine._load_weights = lambda request: request.done(b'{"type":"load_weights"}', "json")
    assert server.result(server.post("load_weights", body).json()["request_id"]).json() == {"type": "load_weights"}
    assert "checkpoint path 'x'" in failure(server, server.post("load_weights", {**body, "seq_id": 2, "path": "x"}))


def test_20_finished_session_is_reported_and_its_requests_are_answered(server: Any, engine: Any) -> None:
    model = server.model()
    session = model.split(":")[0]
    assert server.post("session_heartbeat", {"session_id": session}).json() == {"type": "session_heartbeat"}
    ended = {"reason": {"type": "success"}, "detail": None}
    for _ in range(2):
        assert server.post(f"sessions/{session}/finish", ended).status_code == 200
    assert server.post("session_heartbeat", {"session_id": session}).status_code == 410
    assert server.post("session_heartbeat", {"session_id": "none"}).status_code == 404
    assert "is finished" in failure(server, server.post("optim_step", {"model_id": model, "seq_id": 1, **ADAM}))


def test_24_nulls_count_as_omitted(server: Any, engine: Any) -> None:
    model = server.model()
    body = {"model_id": model, "seq_id": 1, "path": "a", "ttl_seconds": None, "user_metadata": None, "overwrite": None}
    saved = server.result(server.post("save_weights", body).json()["request_id"])
    assert saved.json()["path"] == f"tinker://{model}/weights/a"


def test_11_telemetry_of_any_shape_is_accepted(server: Any) -> None:
    headers = {"x-api-key": "tml-secret"}
    events = [{"event": "GENERIC_EVENT", "event_data": {"headers": headers}, "severity": "INFO"}, {"event": "X"}]
    assert server.post("telemetry", {"events": events, "session_id": "sessionless-1"}).json() == {"status": "accepted"}


def test_11_keys_in_telemetry_are_not_logged(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "tinkerflow.api")
    event = {"event": "UNHANDLED_EXCEPTION", "error_type": "E", "error_message": "key tml-sec-ret_1 and eyJhbGci.abc"}
    server.post("telemetry", {"events": [event], "session_id": "s"})
    assert "UNHANDLED_EXCEPTION" in caplog.text
    assert "sec-ret" not in caplog.text
    assert "hbGci" not in caplog.text


def test_deleting_removes_row_and_files(server: Any, engine: Any) -> None:
    model = server.model()
    saved = server.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}).json()["request_id"]
    server.result(saved)
    headers = {"X-API-Key": KEY}
    url = f"{server.url}/api/v1/training_runs/{model}/checkpoints/weights/a"
    assert server.http.delete(url, headers=headers).status_code == 204
    assert server.http.delete(url, headers=headers).status_code == 404
    assert server.http.delete(url.replace("weights", "nothing"), headers=headers).status_code in (400, 404, 422)


def test_23_hundreds_of_held_polls_are_answered_together(start: Any, engine: Any) -> None:
    server = start(poll_hold=15.0)
    model = server.model()
    engine.paused = True
    ids = [
        server.post("optim_step", {"model_id": model, "seq_id": seq, **ADAM}).json()["request_id"]
        for seq in range(1, 101)
    ]
    with ThreadPoolExecutor(100) as pool:
        polls = [pool.submit(server.result, request_id) for request_id in ids]
        time.sleep(0.5)
        engine.paused = False
        assert [poll.result().json()["metrics"]["optimizer_step"] for poll in polls] == list(range(1, 101))


def test_concurrent_submits_of_one_request_are_one_request(server: Any, engine: Any) -> None:
    model = server.model()
    body = json.dumps({"model_id": model, "seq_id": 1, **ADAM}).encode()
    gate = threading.Barrier(8)

    def send() -> str:
        gate.wait()
        answer = server.http.post(f"{server.url}/api/v1/optim_step", content=body, headers={"X-API-Key": KEY})
        return str(answer.json()["request_id"])

    with ThreadPoolExecutor(8) as pool:
        assert len({task.result() for task in [pool.submit(send) for _ in range(8)]}) == 1
