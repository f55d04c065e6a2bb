"""Samples of models with all parameters trained: logprobs, batches with other requests, and changes of weights."""

from __future__ import annotations

import numpy as np
import pytest
from tests.compute.conftest import Reference, add_adapter, ask, examples, forward, run_all

from tinkerflow.backend.compute.executor import Executor
from tinkerflow.backend.core.errors import ConflictError, NotFoundError, UserError
from tinkerflow.backend.spec.commands import (
    CreateAdapter,
    DropSnapshot,
    Example,
    ExportAdapter,
    LoadSnapshot,
    LoraSpec,
    MoveSnapshot,
    OptimStep,
    PublishSnapshot,
    SampledSequence,
    SampleRequest,
    SampleStep,
)
from tinkerflow.backend.spec.optimizers.adamw import AdamParams

ALL = LoraSpec(0)
STEP = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01)
# more than a page, so the next request finds it in the prefix cache
PROMPT = np.random.default_rng(0).integers(0, 90, 140).tolist()


@pytest.fixture(scope="module")
def executor(qwen3: Reference) -> Executor:
    """An executor with snapshots of model `w` after one step (`one`) and two (`two`), and of an adapter (`beside`)."""
    executor = qwen3.executor()
    executor.execute(CreateAdapter("w", ALL, 0))
    for snapshot in ("one", "two"):
        forward(executor, "w", examples((9, 14)), backward=True)
        executor.execute(OptimStep("w", STEP))
        held = executor.execute(PublishSnapshot("w", snapshot))
        assert held.on_host and held.host_bytes == 4 * executor.parameters
    add_adapter(executor, "a")
    assert not executor.execute(PublishSnapshot("a", "beside")).on_host
    return executor


def served(executor: Executor, *requests: SampleRequest) -> dict[str, SampledSequence]:
    """Admit all requests in one step, and return the first sequence of each."""
    found = run_all(executor, *requests)
    assert not [result.error for result in found.values() if result.error]
    return {name: result.sequences[0] for name, result in found.items()}


def bits(found: SampledSequence) -> tuple[bytes, bytes]:
    return found.tokens_T.tobytes(), found.logprobs_T.tobytes()


def assert_same(one: SampledSequence, other: SampledSequence) -> None:
    """Assert equality up to rounding, because the batches have different sizes."""
    assert one.tokens_T.tolist() == other.tokens_T.tolist()
    np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=1e-5)


def test_tokens_have_the_logprobs_that_training_gives_them(executor: Executor) -> None:
    found = served(executor, ask("x", PROMPT[:20], 12, snapshot_id="two"))["x"]
    tokens_T = np.asarray([*PROMPT[:20], *found.tokens_T], np.int32)
    inputs = {name: np.zeros((len(tokens_T) - 1, 1), np.float32) for name in ("logprobs", "advantages")}
    weights_TK = np.ones((len(tokens_T) - 1, 1), np.float32)
    example = Example(tokens_T[:-1], tokens_T[1:, None], weights_TK, flat=True, inputs=inputs)
    scored = forward(executor, "w", (example,)).logprobs[0].reshape(-1)
    np.testing.assert_allclose(found.logprobs_T, scored[-12:], atol=1e-5)


def test_models_in_one_batch_get_the_results_they_get_alone(executor: Executor) -> None:
    asked = {
        name: [ask(f"{name} {number}", PROMPT, 6, snapshot_id=name, temperature=1.0, seed=number) for number in (0, 1)]
        for name in (None, "one", "beside", "two")
    }
    without = served(executor, *asked[None], *asked["beside"])
    together = served(executor, *(request for requests in asked.values() for request in requests))
    assert {name: bits(together[name]) for name in without} == {name: bits(each) for name, each in without.items()}
    for name in ("two", "one"):
        for request in asked[name]:
            alone = served(executor, request)[request.request_id]
            assert_same(together[request.request_id], alone)
    first = [float(together[f"{name} 0"].logprobs_T[0]) for name in asked]
    assert len(set(first)) == 4, "four different models"


def test_stored_state_samples_like_the_published_one(executor: Executor) -> None:
    state = executor.execute(ExportAdapter("w", optimizer=False))
    executor.execute(LoadSnapshot("stored", state))
    executor.execute(LoadSnapshot("stored", state))  # the snapshot exists already
    found = served(executor, ask("x", PROMPT, 6, snapshot_id="stored"), ask("y", PROMPT, 6, snapshot_id="two"))
    assert_same(found["x"], found["y"])


def test_running_requests_continue_with_replaced_weights(executor: Executor) -> None:
    executor.execute(LoadSnapshot("moved", executor.execute(ExportAdapter("w", optimizer=False))))
    executor.execute(CreateAdapter("base", ALL, 0))
    executor.execute(PublishSnapshot("base", "first"))
    alone = {name: served(executor, ask("x", PROMPT, 12, snapshot_id=name))["x"] for name in ("first", "moved")}
    executor.execute(SampleStep((ask("x", PROMPT, 12, snapshot_id="first"),)))
    progress = executor.execute(SampleStep())
    assert progress.active == 1
    executor.execute(MoveSnapshot("moved", "first"))
    found = served(executor, ask("later", PROMPT, 12, snapshot_id="first"))
    assert_same(found["later"], alone["moved"])
    ours, theirs = found["x"].tokens_T, alone["first"].tokens_T
    begun = next(place for place in range(12) if ours[place] != theirs[place])
    assert 0 < begun < 12
    (first, step), (start, newer) = found["x"].weights
    assert (first, step, newer) == (0, 0, alone["moved"].weights[0][1]) and 0 < start <= begun and newer > 0
    with pytest.raises(NotFoundError, match="'moved' is not in"):
        executor.execute(MoveSnapshot("moved", "first"))
    executor.execute(DropSnapshot("first"))
    (late,) = executor.execute(SampleStep((ask("z", PROMPT, snapshot_id="first"),))).finished
    assert "snapshot 'first' is not" in late.error


def test_queued_request_can_be_cancelled_or_sent_again(executor: Executor) -> None:
    one, two, three = (ask(name, PROMPT, 8, snapshot_id=name[:3]) for name in ("one", "two", "two again"))
    progress = executor.execute(SampleStep((one, two, three)))
    assert not progress.finished and progress.active + progress.waiting == 3
    sent = executor.execute(SampleStep((two,), cancel=("two again",)))
    assert {*(result.request_id for result in sent.finished), *served(executor)} == {"one", "two"}


def finished(executor: Executor, *steps: SampleStep) -> list[str]:
    """The ids of requests in the order of their answers."""
    found: list[str] = []
    for step in [*steps, *[SampleStep()] * 500]:
        progress = executor.execute(step)
        assert not [result.error for result in progress.finished if result.error]
        found += [result.request_id for result in progress.finished]
        if not (step.admit or progress.active or progress.waiting):
            return found
    raise AssertionError("requests are never answered")


def test_owner_does_not_wait_for_all_requests_of_another_owner(executor: Executor) -> None:
    many = [ask(f"many {number}", PROMPT, 6, snapshot_id="one", owner="a") for number in range(12)]
    few = [ask(f"few {number}", PROMPT, 6, snapshot_id="two", owner="b") for number in range(2)]
    order = finished(executor, SampleStep(tuple(many)), SampleStep(tuple(few)))
    assert sorted(order) == sorted(one.request_id for one in (*many, *few))
    assert max(order.index(one.request_id) for one in few) < 6, "one batch of four is served first"


def test_request_sent_twice_is_answered_once(executor: Executor) -> None:
    asked = tuple(ask(name, PROMPT, 8, snapshot_id=name) for name in ("one", "two"))
    for again in (SampleStep(asked), SampleStep(asked, cancel=("one", "two"))):
        assert sorted(finished(executor, SampleStep(asked), again)) == ["one", "two"]


def test_unsampleable_full_model_is_refused_with_its_reason(executor: Executor, qwen3: Reference) -> None:
    with pytest.raises(ConflictError, match="'one' exists already"):
        executor.execute(PublishSnapshot("w", "one"))
    state = executor.execute(ExportAdapter("w", optimizer=False))
    name = "model.norm.weight"
    broken = state.copy_with(weights=state.weights | {name: np.full_like(state.weights[name], np.nan)})
    with pytest.raises(UserError, match="'nan': a weight of its model is not finite"):
        executor.execute(LoadSnapshot("nan", broken))
    narrow = qwen3.executor(device_memory=0.007)
    assert narrow.plan.full_model is None and narrow.plan.full > 0
    with pytest.raises(UserError, match=r"sampling: the devices of this group have no room .* checkpoint merge"):
        narrow.execute(LoadSnapshot("x", state))
