"""The prefix cache: hits, their owners, and equal results with fewer computed tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.compute.conftest import ask, result_of, run_all
from tests.compute.sampler.conftest import prompt, random_lora

from tinkerflow.backend.compute.compiles import CompileCounter
from tinkerflow.backend.compute.sampler import Sampler
from tinkerflow.backend.compute.sampler.model import SamplerModel
from tinkerflow.backend.spec.commands import LoraSpec, PromptWishes, SampleRequest, SampleResult, SampleStep

SPEC = LoraSpec(4)


@pytest.fixture
def published(qwen: Any) -> Sampler:
    """A sampler with the snapshots one and two."""
    sampler: Sampler = qwen.sampler()
    for seed, name in enumerate(("one", "two")):
        sampler.publish(name, random_lora(qwen.cfg, SPEC, seed), SPEC)
    return sampler


def hit(sampler: Sampler, request: SampleRequest) -> int:
    """The number of cached prompt tokens of a request that runs alone."""
    result = result_of(sampler, request)
    assert result.error is None
    return result.prompt_cache_hit_tokens


def assert_same(result: SampleResult, other: SampleResult) -> None:
    """Assert that results are equal bit for bit."""
    assert result.error is None and len(result.sequences) == len(other.sequences) > 0
    for one, same in zip(result.sequences, other.sequences, strict=True):
        np.testing.assert_array_equal(one.tokens_T, same.tokens_T)
        np.testing.assert_array_equal(one.logprobs_T, same.logprobs_T)


def test_prompts_with_a_common_prefix_share_its_pages(qwen: Any) -> None:
    sampler, common = qwen.sampler(), prompt(200)
    assert hit(sampler, ask("a", common + prompt(100, 1), 2)) == 0
    other = ask("b", common + prompt(150, 2), 5)
    assert_same(result_of(sampler, other), result_of(qwen.sampler(), other))
    assert hit(sampler, ask("c", common + prompt(90, 3), 2)) == 128
    assert hit(sampler, ask("d", prompt(300, 4), 2)) == 0


def test_equal_long_prompts_of_a_batch_are_computed_once(qwen: Any, computed_sizes: Any) -> None:
    group = [ask(str(seed), prompt(250), 4, temperature=1.0, seed=seed) for seed in range(4)]
    results = run_all(qwen.sampler(), *group)
    assert [results[one.request_id].prompt_cache_hit_tokens for one in group] == [0, 249, 249, 249]
    assert computed_sizes() == (128, 128)
    assert len({tuple(result.sequences[0].tokens_T.tolist()) for result in results.values()}) == 4


def test_only_requests_of_the_same_weights_and_owner_share_a_prefix(published: Sampler) -> None:
    asked = ask("a", prompt(250), 2)
    for owner in ("one", "other"):
        for snapshot in (None, "one", "two"):
            mine = replace(asked, owner=owner, snapshot_id=snapshot)
            assert [hit(published, mine), hit(published, mine)] == [0, 249]


def test_cached_prefix_does_not_suppress_requested_prompt_logprobs(qwen: Any) -> None:
    tokens = prompt(300)
    plain, scored = ask("a", tokens, 2), ask("a", tokens, 2, prompt_logprobs=True)
    last = replace(scored, prompt=PromptWishes(last_n=40))
    cold = {name: run_all(qwen.sampler(), asked)["a"] for name, asked in (("scored", scored), ("last", last))}
    sampler = qwen.sampler()
    assert hit(sampler, plain) == 0
    results = {"scored": result_of(sampler, scored), "last": run_all(sampler, last)["a"]}
    assert {name: result.prompt_cache_hit_tokens for name, result in results.items()} == {"scored": 0, "last": 256}
    for name, result in results.items():
        assert_same(result, cold[name])
        assert result.prompt_logprobs_T is not None
        np.testing.assert_array_equal(result.prompt_logprobs_T, cold[name].prompt_logprobs_T)
    assert hit(sampler, plain) == 299


def test_least_recently_used_pages_are_evicted(qwen: Any) -> None:
    sampler = qwen.sampler(free_pages=5)  # two pages for each prompt, and one for its decoded tokens
    a, b, c = (ask(str(seed), prompt(250, seed), 2) for seed in range(3))
    assert [hit(sampler, one) for one in (a, b, a, c)] == [0, 0, 249, 0]
    assert [hit(sampler, one) for one in (a, c)] == [249, 249]
    assert hit(sampler, b) == 0
    small, long = qwen.sampler(free_pages=5), ask("long", prompt(500, 9), 2)
    assert [hit(small, one) for one in (long, long, a, long)] == [0, 499, 0, 256]  # a used the last of the four pages


def test_pages_are_dropped_with_their_snapshot(qwen: Any, published: Sampler) -> None:
    one = ask("a", prompt(250), 12, snapshot_id="one")
    two = replace(one, snapshot_id="two")
    expected = run_all(published, two)["a"]
    assert [hit(published, one), hit(published, two)] == [0, 249]
    published.rename_snapshot("two", "one")
    moved = result_of(published, one)
    assert moved.prompt_cache_hit_tokens == 0
    assert_same(moved, expected)
    published.drop_snapshot("one")
    published.publish("one", random_lora(qwen.cfg, SPEC, 0), SPEC)
    published.step(SampleStep(admit=(one,)))
    published.drop_snapshot("one")  # the request still decodes, finishes, and leaves no pages
    assert not run_all(published)["a"].prompt_cache_hit_tokens
    published.publish("one", random_lora(qwen.cfg, SPEC, 0), SPEC)
    assert hit(published, one) == 0


def test_prefix_of_replaced_weights_is_not_kept(qwen: Any) -> None:
    sampler = qwen.sampler(prefill_budget=128)  # one piece for each step
    for seed, name in enumerate(("shared", "newer")):
        sampler.publish(name, random_lora(qwen.cfg, SPEC, seed), SPEC)
    request = ask("a", prompt(250), 4, snapshot_id="shared")
    newer = run_all(sampler, replace(request, snapshot_id="newer"))["a"]
    sampler.step(SampleStep(admit=(request,)))
    sampler.rename_snapshot("newer", "shared")
    run_all(sampler)
    after = result_of(sampler, request)
    assert after.prompt_cache_hit_tokens == 0
    assert_same(after, newer)


def test_failed_requests_leave_no_prefix_in_the_cache(
    qwen: Any, computed_sizes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, wild = qwen.sampler(), random_lora(qwen.cfg, SPEC, 0)
    for pair in wild.layers.values():
        pair.B[...] *= 1e30
    sampler.publish("wild", wild, SPEC)
    diverged, good = ask("a", prompt(250), 4, snapshot_id="wild"), ask("b", prompt(250), 4)
    for _ in range(2):
        assert "not finite" in result_of(sampler, diverged).error
        assert computed_sizes() == (128, 128)

    def broken(*args: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    assert [hit(sampler, good), hit(sampler, good)] == [0, 249]
    with monkeypatch.context() as patch:
        patch.setattr(SamplerModel, "decode_chunk", broken)
        assert "RESOURCE_EXHAUSTED" in result_of(sampler, good).error
    assert hit(sampler, good) == 0  # the failed batch lost the pages


def test_prefix_hits_compile_nothing_after_the_first_of_each_length(qwen: Any) -> None:
    sampler, whole = qwen.sampler(), prompt(500)
    for length in (100, 129, 300, 100, 129, 300):
        hit(sampler, ask("a", whole[:length], 4))
    compiled = CompileCounter()
    hits = [hit(sampler, ask("a", whole[:length] + prompt(40, length), 4)) for length in (140, 150, 280, 333, 400)]
    assert hits == [128, 128, 256, 256, 256]
    assert compiled.count == 0
