"""The SDK gets the same answers from a recording as from the service. The first request that differs is named."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tests.api.conftest import BASE
from tests.api.test_sdk import datum
from tinker import types

from tinkerflow.deployments.cassettes.file import Exchange, Recording, TokenizerFiles
from tinkerflow.deployments.cassettes.replay import Replay
from tinkerflow.deployments.cassettes.server import serving

PROMPTS = [types.ModelInput.from_ints([n, n + 1]) for n in range(2, 8)]
Loop = Callable[[tinker.ServiceClient], Any]


def run(url: str, loop: Loop, **session: Any) -> Any:
    """Run a loop with a client of this server, and return its result.

    After a failure, the client's end is not awaited, because the SDK may lose it while samples arrive
    (docs/protocol.md).
    """
    service = tinker.ServiceClient(base_url=url, api_key="tml-secret-of-mine", **session)
    try:
        found = loop(service)
    except BaseException:
        service.close("errored")
        raise
    service.close("success").result(60)
    return found


@contextmanager
def replaying(recording: Recording, *ignore: str) -> Iterator[tuple[str, Replay]]:
    replay = Replay(recording, ignore)
    with serving(replay.app()) as url:
        yield url, replay


def fails(loop: Loop, recording: Recording, text: str, **session: Any) -> None:
    """Check that a loop fails on a replay with a text that matches `text` and contains the first line of the report."""
    with replaying(recording) as (url, replay), pytest.raises(tinker.RequestFailedError, match=text) as failed:
        run(url, loop, **session)
    assert replay.script.report()[0] in str(failed.value)


def params(seed: int | None = None) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=4, seed=seed, temperature=1.0)


def plain(sampled: Any) -> list[tuple[Any, ...]]:
    """The sequences of a future as comparable values."""
    return [(list(one.tokens), list(one.logprobs), one.sequence_id) for one in sampled.result().sequences]


def training(rate: float = 0.5, steps: int = 2, data: list[types.Datum] | None = None) -> Loop:
    """A loop that trains, saves, loads, samples and lists."""

    def loop(service: tinker.ServiceClient) -> dict[str, Any]:
        model = service.create_lora_training_client(BASE, rank=8, seed=1).result()
        outputs = []
        for _ in range(steps):
            passed = model.forward_backward(data or [datum(), datum([7, 8])], "cross_entropy")
            stepped = model.optim_step(types.AdamParams(learning_rate=rate))
            outputs.append((passed.result(), stepped.result().metrics))
        state = model.save_state("state").result().path
        again = service.create_training_client_from_state(state).result()
        sampler = model.save_weights_and_get_sampling_client().result()
        path = model.save_weights_for_sampler("named").result().path
        named = service.create_sampling_client(model_path=path).result()
        rest = tinker.RestClient(base_url=service.holder.shadow_config.base_url, api_key="tml-secret-of-mine")
        return {
            "info": (model.get_info(), again.get_info()),
            "metrics": [(passed.metrics, step) for passed, step in outputs],
            "logprobs": [[one["logprobs"].tolist() for one in passed.loss_fn_outputs] for passed, _ in outputs],
            "state": state,
            "sampled": plain(sampler.sample(PROMPTS[0], 2, params())),
            "scored": [client.compute_logprobs(PROMPTS[1]).result() for client in (sampler, named)],
            "runs": rest.list_training_runs().result(),
            "checkpoints": rest.list_checkpoints(model.model_id).result(),
            "served": rest.get_server_capabilities().result(),
        }

    return loop


def test_a_replay_equals_the_service(record, recorded) -> None:
    with record() as tape:
        first = run(tape.url, training())
    assert tape.recorder.unanswered == 0
    for _ in range(2):  # a replay changes nothing in the recording
        with replaying(recorded()) as (url, replay):
            assert run(url, training()) == first
        assert replay.script.report() == []


def test_different_loop_fails_with_the_field(record, recorded) -> None:
    with record() as tape:
        run(tape.url, training())
    cases = [
        (
            training(rate=0.25),
            r"request \d+ \(optim_step of model 0\): adam_params.learning_rate is 0.25, but was 0.5 in the recording",
        ),
        (
            training(data=[datum(), datum([7, 9])]),
            r"\(forward_backward of model 0\): data\[1\].model_input\[0\].encoded_text.tokens\[1\] is 9, but was 8 in",
        ),
        (
            training(data=[datum()]),
            r"\(forward_backward of model 0\): data has 1 item, but had 2 in the recording",
        ),
        (
            training(steps=1),
            r"\(forward_backward of model 0\): the operation is save_weights, but was forward_backward in",
        ),
    ]
    for loop, text in cases:
        fails(loop, recorded(), text)


def test_surplus_and_missing_requests_are_named(record, recorded) -> None:
    def steps(count: int) -> Loop:
        def loop(service: tinker.ServiceClient) -> None:
            model = service.create_lora_training_client(BASE, rank=8, seed=1).result()
            for _ in range(count):
                model.optim_step(types.AdamParams(learning_rate=0.5)).result()

        return loop

    with record() as tape:
        run(tape.url, steps(2))
    fails(steps(3), recorded(), "optim_step of model 0, number 3, is not in the recording, which has 2 of its place")
    with replaying(recorded()) as (url, replay):
        run(url, steps(0))
    (text,) = replay.script.report()
    assert "(optim_step of model 0) is in the recording, but was never made; 2 requests of the recording were" in text


def test_different_session_is_refused(record, recorded) -> None:
    with record() as tape:
        run(tape.url, lambda service: service.holder, user_metadata={"lr": "1"})
    with (
        replaying(recorded()) as (url, replay),
        pytest.raises(tinker.BadRequestError, match=r"user_metadata.lr is '2'"),
    ):
        run(url, lambda service: service.holder, user_metadata={"lr": "2"})
    with replaying(recorded(), "user_metadata.lr") as (url, replay):
        run(url, lambda service: service.holder, user_metadata={"lr": "2"})
    assert replay.script.report() == []


def test_samples_in_another_order_get_their_own_answers(record, recorded) -> None:
    def sampling(order: list[int]) -> Loop:
        def loop(service: tinker.ServiceClient) -> dict[int, Any]:
            sampler = service.create_sampling_client(base_model=BASE).result()
            futures = [sampler.sample(PROMPTS[n], 1, params(seed=n)) for n in order]  # equal ones arrive in any order
            return {n: plain(future) for n, future in zip(order, futures, strict=True)}

        return loop

    with record() as tape:
        first = run(tape.url, sampling([0, 1, 2, 3, 4, 5]))
    with replaying(recorded()) as (url, replay):
        assert run(url, sampling([3, 5, 0, 1, 4, 2])) == first
    assert replay.script.report() == []
    text = r"asample of sampler 0, number \d, is made more often than in the recording, where it is request \d "
    fails(sampling([3, 5, 0, 1, 4, 2, 0]), recorded(), text)
    text = r"\(asample of sampler 0\): sampling_params.seed is 1, but was 0 in the recording"
    fails(lambda service: _one(service, seed=1), recorded(), text)


def _one(service: tinker.ServiceClient, seed: int) -> Any:
    sampler = service.create_sampling_client(base_model=BASE).result()
    return sampler.sample(PROMPTS[0], 1, params(seed=seed)).result()


def test_clients_that_run_together_and_their_copies(record, recorded) -> None:
    """Sessions differ by their metadata and may begin in any order."""

    def loop(service: tinker.ServiceClient) -> Any:
        sampler = service.create_sampling_client(base_model=BASE).result()
        copy = pickle.loads(pickle.dumps(sampler))
        return [plain(one.sample(PROMPTS[0], 1, params())) for one in (copy, sampler, copy)]

    def all_at_once(url: str, ranks: list[int]) -> dict[int, Any]:
        found: dict[int, Any] = {}

        def work(rank: int) -> None:
            found[rank] = run(url, loop, user_metadata={"rank": str(rank)})

        threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    with record() as tape:
        first = all_at_once(tape.url, [0, 1, 2])
    assert len(first) == 3
    with replaying(recorded()) as (url, replay):
        assert all_at_once(url, [2, 1, 0]) == first
    assert replay.script.report() == []


def test_missing_tokenizer_is_unpacked_from_the_cassette() -> None:
    info = b'{"model_id": "m", "model_data": {"tokenizer_id": "/not/here"}}'
    recording = exchanges(("POST", "/api/v1/get_info", b'{"model_id": "m"}', info))
    recording.tokenizers.append(TokenizerFiles("/not/here", {"tokenizer.json": b"{}"}))
    with replaying(recording) as (url, _):
        found = httpx.post(f"{url}/api/v1/get_info", json={"model_id": "m"}).json()["model_data"]["tokenizer_id"]
        assert found != "/not/here"
        assert Path(found, "tokenizer.json").read_text() == "{}"


def test_reads_may_be_repeated_and_left_out() -> None:
    lists = [("GET", "/api/v1/sessions", b"", answer) for answer in (b"[1]", b"[2]")]
    with replaying(exchanges(*lists)) as (url, replay):
        assert [httpx.get(f"{url}/api/v1/sessions").json() for _ in range(3)] == [[1], [2], [2]]
        other = httpx.get(f"{url}/api/v1/sessions?limit=3")
        assert other.status_code == 400
        assert other.json()["detail"].startswith("GET /api/v1/sessions?limit=3 is not in the recording")
    assert len(replay.script.report()) == 1
    with replaying(exchanges(*lists)) as (_, replay):
        assert replay.script.report() == []


def test_samples_are_polled_for_one_by_one() -> None:
    recording = exchanges()
    flags = b'{"sample_use_retrieve_futures": true, "pjwt_auth_enabled": true}'
    recording.exchanges.append(Exchange(0, "POST", "/api/v1/client/config", b"{}", 200, "application/json", flags))
    with replaying(recording) as (url, replay):
        found = httpx.post(f"{url}/api/v1/client/config", json={}).json()
        assert found == {"sample_use_retrieve_futures": False, "pjwt_auth_enabled": True}
        refused = httpx.post(f"{url}/api/v1/retrieve_futures", json={})
    assert (refused.status_code, replay.script.report()) == (400, [])


def test_an_unreadable_submit_of_training_fails_its_future() -> None:
    """If the submit were refused, the client would hang."""
    with replaying(exchanges()) as (url, replay):
        sent = httpx.post(f"{url}/api/v1/forward_backward", content=b"\xff")
        assert sent.status_code == 200
        result = httpx.post(f"{url}/api/v1/retrieve_future", json=sent.json()).json()
    assert result["category"] == "user"
    assert [result["error"]] == replay.script.report()


def exchanges(*made: tuple[str, str, bytes, bytes]) -> Recording:
    """A recording of these requests: method, target, body and answer."""
    numbered = [
        Exchange(number, method, target, body, 200, "application/json", answer)
        for number, (method, target, body, answer) in enumerate(made, 1)
    ]
    return Recording(Path("made.cassette"), numbered)
