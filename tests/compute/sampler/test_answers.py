"""Answers in the prefix cache: the next turn of a conversation prefills only its new tokens, with the same bits."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.compute.conftest import ask, result_of, run_all
from tests.compute.sampler.conftest import prompt, random_lora
from tests.compute.sampler.test_images import asked, assert_same, example, executor, looks, sampler, sees
from tests.compute.sampler.test_prefix_cache import SPEC

from tinkerflow.backend.compute.platforms import CPU, CUDA
from tinkerflow.backend.compute.sampler import Sampler
from tinkerflow.backend.compute.sampler.answers import shared_border
from tinkerflow.backend.compute.sampler.model import SamplerModel
from tinkerflow.backend.compute.sampler.pages import PAGE, pages_for
from tinkerflow.backend.compute.sampler.shapes import prefill_pieces
from tinkerflow.backend.spec.commands import PromptWishes, SampleRequest, SampleResult, SampleStep

__all__ = ["executor", "looks", "sampler", "sees"]  # fixtures


def rest(sampler: Sampler) -> int:
    """Let the sampler prefill answers until none waits. Returns the number of steps."""
    for steps in range(100):
        progress = sampler.step(SampleStep(idle=True))
        assert not (progress.active or progress.waiting or progress.finished)
        if not progress.answers:
            assert not sampler.pages.used
            return steps
    raise AssertionError("answers wait forever")


def next_turn(request: SampleRequest, result: SampleResult, new: Sequence[int], **changes: Any) -> SampleRequest:
    (sequence,) = result.sequences
    prompt_T = np.concatenate([request.prompt_T, sequence.tokens_T, np.asarray(new, np.int32)])
    return replace(request, prompt_T=prompt_T, **changes)


@given(
    sizes=st.sampled_from([CPU.prefill_tokens, CUDA.prefill_tokens]),
    tokens=st.integers(0, 20_000),
    more=st.integers(0, 5000),
)
def test_longer_prompts_share_the_piece_borders_of_an_answer(sizes: tuple[int, ...], tokens: int, more: int) -> None:
    def borders(length: int) -> list[int]:
        return [0, *accumulate(prefill_pieces(sizes, length, pages_for(length, PAGE) * PAGE))]

    border = shared_border(sizes, tokens)
    assert tokens - border < max(sizes[-2], sizes[-1] if border * 4 >= sizes[-1] else 0)
    own, longer = borders(border), borders(max(tokens, 1) + more)
    assert own[-1] == border and longer[: len(own)] == own


@pytest.mark.parametrize("model", ["qwen", "hybrid"])
def test_a_conversation_prefills_its_new_tokens_alone(
    model: str, request: pytest.FixtureRequest, computed_sizes: Any
) -> None:
    tiny = request.getfixturevalue(model)
    warm, turn = tiny.sampler(max_context=1024), ask("turn", prompt(100), 110, temperature=1.0, seed=5, owner="one")
    hits, waited = [], []
    for number in range(5):
        cold = result_of(tiny.sampler(max_context=1024), turn)
        pieces = computed_sizes()
        result = result_of(warm, turn)
        assert_same(result.sequences[0], cold.sequences[0])
        hits.append(result.prompt_cache_hit_tokens)
        assert computed_sizes() == pieces[hits[-1] // 128 :]
        waited.append(rest(warm))
        assert computed_sizes() == (128,) * waited[-1]
        turn = next_turn(turn, result, prompt(20, number))
    assert hits == [0, 128, 256, 384, 512]
    assert waited == [1, 1, 1, 1, 1]


def test_waiting_answers_keep_no_results(modeled: Any) -> None:
    """Lists of tokens and scores of 64 requests could take most of a worker's memory."""
    sampler, length = modeled(), 150
    wishes = PromptWishes(targets_TK=np.zeros((length - 1, 1), np.int32))
    request = replace(ask("a", [1] * length, 140, topk_sample=3, prompt_logprobs=True), prompt=wishes)
    result = run_all(sampler, request)["a"]
    kept = [weakref.ref(each) for each in (result.prompt_logprobs_T, result.sequences[0].top, wishes)]
    assert sampler._answers.waiting
    del request, result, wishes
    assert all(each() is None for each in kept)


def test_answers_of_prompts_with_images(sampler: Sampler, looks: Any) -> None:
    first = asked("first", example(), 70)
    result = result_of(sampler, first)
    second = next_turn(first, result, prompt(10))
    assert rest(sampler) == 1
    looks.clear()
    found = result_of(sampler, second)
    assert (found.prompt_cache_hit_tokens, looks) == (256, [])
    sampler.clear()
    assert_same(found.sequences[0], result_of(sampler, second).sequences[0])


def test_cached_answers_are_separate_by_project_and_weights(qwen: Any) -> None:
    sampler = qwen.sampler()
    for seed, name in enumerate(("mine", "newer")):
        sampler.publish(name, random_lora(qwen.cfg, SPEC, seed), SPEC)
    first = ask("a", prompt(100), 40, snapshot_id="mine", owner="one")
    second = next_turn(first, result_of(sampler, first), prompt(9))
    assert rest(sampler) == 1
    for other in ({"owner": "two"}, {"snapshot_id": None}, {"snapshot_id": "newer"}):
        assert result_of(sampler, replace(second, **other)).prompt_cache_hit_tokens == 0
    assert result_of(sampler, second).prompt_cache_hit_tokens == 128
    sampler.rename_snapshot("newer", "mine")  # the adapter is updated between turns
    rest(sampler)
    updated = result_of(sampler, second)
    assert updated.prompt_cache_hit_tokens == 0
    fresh = qwen.sampler()
    fresh.publish("mine", random_lora(qwen.cfg, SPEC, 1), SPEC)
    assert_same(updated.sequences[0], result_of(fresh, second).sequences[0])


def test_dropped_weights_are_not_held_by_answers(qwen: Any, computed_sizes: Any) -> None:
    sampler = qwen.sampler()
    sampler.publish("mine", random_lora(qwen.cfg, SPEC, 0), SPEC)
    first = ask("a", prompt(100), 40, snapshot_id="mine")
    result_of(sampler, first)
    sampler.drop_snapshot("mine")
    sampler.publish("mine", random_lora(qwen.cfg, SPEC, 0), SPEC)
    sampler.step(SampleStep(admit=(first,)))
    sampler.drop_snapshot("mine")  # while the request decodes
    while sampler.step(SampleStep()).active:
        pass
    assert not sampler._answers._answers
    computed_sizes()
    assert rest(sampler) == 0 and computed_sizes() == ()


def test_few_answers_are_prefilled_for_projects_that_never_continue(modeled: Any) -> None:
    sampler, prompts = modeled(context=600), np.random.default_rng(0).integers(0, 90, (40, 100))

    def talk(owner: str, turns: int) -> int:
        """The number of steps that prefill the answers of a conversation."""
        request, steps = ask("a", next(unused), 130, owner=owner), 0
        for _ in range(turns):
            result = result_of(sampler, request)
            steps += rest(sampler)
            request = next_turn(request, result, [1])
        return steps

    unused = iter(prompts.tolist())
    single = [talk("one", 1) for _ in range(30)]
    assert sum(map(bool, single)) == 8 and not any(single[-9:])
    assert [talk("two", 3) for _ in range(10)] == [3] * 10


def test_answer_pages_are_evicted_before_a_request_waits(qwen: Any, computed_sizes: Any) -> None:
    sampler = qwen.sampler(free_pages=5)
    first = ask("a", prompt(100), 300)
    second = next_turn(first, result_of(sampler, first), prompt(5))
    assert sampler.step(SampleStep(idle=True)).answers  # the first of three pieces
    other = ask("b", prompt(450, 7), 100)  # it needs all pages
    assert sampler.step(SampleStep((other,), idle=True)).active, "a request goes before answers"
    run_all(sampler)
    computed_sizes()
    found = result_of(sampler, second)
    assert (found.prompt_cache_hit_tokens, computed_sizes()) == (0, (128, 128, 128, 32))
    assert_same(found.sequences[0], result_of(qwen.sampler(free_pages=5), second).sequences[0])


def test_a_turn_that_comes_first_computes_the_answer_itself(qwen: Any) -> None:
    sampler = qwen.sampler()
    first = ask("a", prompt(100), 40)
    second = next_turn(first, result_of(sampler, first), prompt(5))
    assert result_of(sampler, replace(second, max_tokens=2)).prompt_cache_hit_tokens == 0
    assert rest(sampler) == 0


def test_failed_group_caches_no_answer(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    sampler = qwen.sampler()
    first = ask("a", prompt(200), 100)
    second = next_turn(first, result_of(sampler, first), prompt(5), max_tokens=8)
    with monkeypatch.context() as patch:
        patch.setattr(SamplerModel, "prefill_piece", broken)
        progress = sampler.step(SampleStep(idle=True))
    assert not (progress.finished or progress.answers), "no request is blamed"
    cold = result_of(sampler, second)
    assert cold.prompt_cache_hit_tokens == 0
    assert rest(sampler) == 0  # the answer of 8 tokens crosses no border
    sampler.clear()
    assert_same(result_of(sampler, second).sequences[0], cold.sequences[0])
