"""A snapshot is renamed over another snapshot that is being sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import ask, result_of, run_all
from tests.compute.sampler.conftest import prompt, random_lora
from tests.compute.sampler.device_model import answers, modeled_sampler

from tinkerflow.backend.compute.compiles import CompileCounter
from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.spec.commands import LoraSpec, SampleStep


def test_running_requests_use_the_moved_weights_from_the_next_chunk(qwen: Any) -> None:
    # The adapters have only an unembedding, so both snapshots have the same cache, and the expected result is exact.
    sampler, spec = qwen.sampler(decode_chunk=8), LoraSpec(8, train_attn=False, train_mlp=False)
    for seed, name in enumerate(("shared", "newer", "same")):
        sampler.publish(name, random_lora(qwen.cfg, spec, min(seed, 1)), spec, step=5 + seed)
    # There are always at least two requests, so that few shapes are compiled.
    start, bystander = prompt(20), ask("bystander", prompt(20, 1), 40)
    running = ask("running", start, 40, snapshot_id="shared")
    undisturbed = run_all(sampler, running, bystander)
    before = undisturbed["running"].sequences[0]
    sampler.step(SampleStep(admit=(running, bystander)))  # prefill, and the first chunk
    sampler.step(SampleStep())
    compiled = CompileCounter()
    sampler.rename_snapshot("newer", "shared")
    sampler.step(SampleStep())
    assert compiled.count == 0
    late = [ask(f"late {tokens}", start, tokens, snapshot_id="shared") for tokens in (4, 5)]
    results = run_all(sampler, *late, ask("gone", start, 5, snapshot_id="newer"))
    one = results["running"].sequences[0]
    np.testing.assert_array_equal(one.tokens_T[:16], before.tokens_T[:16])
    expected = run_all(
        sampler,
        ask("rest", [*start, *one.tokens_T[:16].tolist()], 24, snapshot_id="same"),
        ask("late", start, 5, snapshot_id="same"),
    )
    rest = expected["rest"].sequences[0]
    np.testing.assert_array_equal(one.tokens_T[16:], rest.tokens_T)
    close_logprobs(one.logprobs_T[16:], rest.logprobs_T, ulps=128)
    assert one.tokens_T[16:].tolist() != before.tokens_T[16:].tolist()
    assert (before.weights, one.weights, results["late 4"].sequences[0].weights) == (
        ((0, 5),),
        ((0, 5), (16, 6)),
        ((0, 6),),
    )
    assert not results["bystander"].sequences[0].weights, "a base model"
    others = [(results["bystander"], undisturbed["bystander"]), (results["late 5"], expected["late"])]
    for result, same in others:
        np.testing.assert_array_equal(result.sequences[0].tokens_T, same.sequences[0].tokens_T)
    assert "'newer'" in (results["gone"].error or "")
    with pytest.raises(NotFoundError):
        sampler.rename_snapshot("newer", "shared")


@pytest.mark.parametrize("recompute", [False, True])
def test_keys_and_values_of_the_old_weights_are_kept_or_computed_again(recompute: bool, qwen: Any) -> None:
    sampler, spec = qwen.sampler(decode_chunk=8, prefill_budget=64, sample_slots=4), LoraSpec(8)
    for step, name in enumerate(("shared", "newer", "same")):
        sampler.publish(name, random_lora(qwen.cfg, spec, min(step, 1)), spec, step=step)
    start, long = prompt(20), prompt(500)
    base = ask("base", start, 40)
    undisturbed = result_of(sampler, base).sequences[0]
    sampler.step(
        SampleStep(admit=(ask("decodes", start, 40, snapshot_id="shared", num_samples=2, temperature=1.0), base))
    )
    sampler.step(SampleStep(admit=(ask("prefills", long, 4, snapshot_id="shared", prompt_logprobs=True),)))
    assert [name for name, _ in sampler.decoding] == ["decodes", "decodes", "base"], "the other is amid its prompt"
    sampler.rename_snapshot("newer", "shared", recompute=recompute)
    found = run_all(sampler)
    assert not sampler.pages.used
    np.testing.assert_array_equal(found["base"].sequences[0].tokens_T, undisturbed.tokens_T)
    apart = []
    for one in found["decodes"].sequences:
        (_, old), (begun, new) = one.weights
        assert (old, new) == (0, 1) and 0 < begun < 40
        text = [*start, *one.tokens_T.tolist()]
        fresh = result_of(sampler, ask("scored", text, 1, snapshot_id="same", prompt_logprobs=True))
        apart.append(np.abs(fresh.prompt_logprobs_T[len(start) + begun :] - one.logprobs_T[begun:]).max())
    fresh = result_of(sampler, ask("fresh", long, 4, snapshot_id="same", prompt_logprobs=True))
    apart.append(np.abs(fresh.prompt_logprobs_T[1:] - found["prefills"].prompt_logprobs_T[1:]).max())
    assert max(apart) < 1e-4 if recompute else min(apart) > 1e-2


def test_requests_are_answered_if_their_tokens_before_a_move_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler: Any = modeled_sampler(monkeypatch, ahead=True, chunk=4)
    for name in ("shared", "newer"):
        sampler.snapshots.publish(name)

    def fail(name: str, _: Any) -> None:
        assert name == "read"
        raise RuntimeError("INTERNAL: the devices failed")

    running, later = ask("running", range(9), 4, snapshot_id="shared"), ask("later", range(9), 4, snapshot_id="shared")
    sampler.step(SampleStep(admit=(running,)))
    sampler._model.on_event = fail
    sampler.rename_snapshot("newer", "shared")
    sampler._model.on_event = lambda *_: None
    found = run_all(sampler, later)
    assert "the sampler's batch failed (RuntimeError: INTERNAL" in str(found["running"].error)
    assert [one.tokens_T.tolist() for one in found["later"].sequences] == answers(later, 4)
    assert not sampler.pages.used
