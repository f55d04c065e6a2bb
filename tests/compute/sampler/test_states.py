"""The states of linear attention in the sampler: hits, forks, preemption and other requests change no token."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close
from tests.compute.conftest import ask, result_of, run_all
from tests.compute.sampler.conftest import Tiny, prompt
from tests.compute.sampler.test_prefix_cache import assert_same, hit

from tinkerflow.backend.compute.kernels import delta_gpu, delta_tpu
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.sampler import decode as decode_module
from tinkerflow.backend.compute.sampler.decode import Rows, decode
from tinkerflow.backend.compute.sampler.kv_cache import empty_cache
from tinkerflow.backend.compute.sampler.pages import PAGE, Key, PagePool, PageTable
from tinkerflow.backend.compute.sampler.sampling import greedy_choice
from tinkerflow.backend.spec.commands import SampleStep


def test_conversation_continues_from_a_cached_state_bit_for_bit(hybrid: Tiny) -> None:
    whole, warm, hits = prompt(480), hybrid.sampler(), []
    for length in (100, 129, 300, 480):
        turn = ask("turn", whole[:length], 6, temperature=1.0, seed=length)
        cold = result_of(hybrid.sampler(), turn)
        for _ in range(2):
            result = result_of(warm, turn)
            assert_same(result, cold)
            hits.append(result.prompt_cache_hit_tokens)
    assert hits == [0, 99, 0, 128, 128, 299, 256, 479]
    assert warm.pages.used == 0


def test_state_is_kept_where_two_prompts_diverge(hybrid: Tiny) -> None:
    sampler, common = hybrid.sampler(), prompt(200)
    assert hit(sampler, ask("a", common + prompt(100, 1), 2)) == 0
    assert hit(sampler, ask("b", common + prompt(150, 2), 2)) == 0  # pages are cached, but no state to continue from
    third = ask("c", common + prompt(90, 3), 5)
    result = result_of(sampler, third)
    assert result.prompt_cache_hit_tokens == 128
    assert_same(result, result_of(hybrid.sampler(), third))


def test_evicted_states_are_computed_again(hybrid: Tiny) -> None:
    sampler = hybrid.sampler()
    assert sampler.pages.states is not None
    first = ask("first", prompt(140, 99), 3)
    cold = result_of(sampler, first)
    assert hit(sampler, first) == 139
    for seed in range(sampler.pages.states.pages):
        run_all(sampler, ask("other", prompt(130, seed), 1))
    again = result_of(sampler, first)
    assert again.prompt_cache_hit_tokens == 0
    assert_same(again, cold)


def test_samples_of_one_prompt_diverge(hybrid: Tiny) -> None:
    """Each sample has its own copy of the prompt's state. Prompts are new or cached, with one token or many."""
    for length in (1, 200):
        tokens, sampler = prompt(length, length), hybrid.sampler()
        group = ask("group", tokens, 12, num_samples=3, temperature=1.0, seed=4)
        cold = result_of(sampler, group)
        assert len({tuple(one.tokens_T.tolist()) for one in cold.sequences}) == 3
        assert_same(result_of(sampler, group), cold)
        greedy = replace(group, temperature=0.0)
        alone = run_all(hybrid.sampler(), replace(greedy, num_samples=1))["group"].sequences[0]
        for one in run_all(sampler, greedy)["group"].sequences:
            assert one.tokens_T.tolist() == alone.tokens_T.tolist()


def test_equal_commands_give_equal_bits(hybrid: Tiny) -> None:
    """A restarted worker group computes the same results, with requests that arrive, end and are cancelled."""

    def played() -> list[Any]:
        sampler, done = hybrid.sampler(), []
        for number in range(8):
            tokens = prompt(40 + 37 * number, number % 3)
            cancel = (str(number - 2),) if number % 4 == 3 else ()
            step = SampleStep(admit=(ask(str(number), tokens, 9, temperature=1.0, seed=number),), cancel=cancel)
            done += sampler.step(step).finished
        while (progress := sampler.step(SampleStep())).active or progress.waiting:
            done += progress.finished
        assert sampler.pages.used == 0
        return [*done, *progress.finished]

    first, second = played(), played()
    assert len(first) > 4
    for one, same in zip(first, second, strict=True):
        assert (one.request_id, one.prompt_cache_hit_tokens) == (same.request_id, same.prompt_cache_hit_tokens)
        assert_same(one, same)


def test_a_shared_state_is_copied_before_it_is_written() -> None:
    pool, key = PagePool(4, page=32, states=6), Key("scope", b"digest")
    assert pool.states is not None
    table = PageTable(0)
    assert pool.reserve(table, 0, 20) and table.state is not None
    pool.keep_state(key, table)
    fork = pool.fork(table, 0)
    assert fork is not None and fork.state is not None and fork.state.pages == table.state.pages
    kept = list(table.state.pages)
    for one in (table, fork):
        pool.own_state(one)
        assert one.state is not None and one.state.pages != kept
    assert [copy.source for copy in pool.states.pop_copies()] == kept * 2
    other = PageTable(0)
    assert pool.find_state(key, other) and other.state is not None and other.state.pages == kept
    for one in (table, fork, other):
        pool.release(one)
        assert one.state is None
    assert pool.used == 0
    pool.drop_keys(lambda scope: scope == "scope")
    assert not pool.find_state(key, other)


def test_numbers_of_states_go_to_the_rows(hybrid: Tiny) -> None:
    plan = hybrid.sampler().pages.states
    assert plan is not None and plan.pages == 1 + 16 + 16 + 10 + 8
    assert np.all([plan.free(shard) for shard in range(plan.shards)] == np.array([plan.pages - 1]))


def test_cancelled_request_of_a_running_group_leaves_no_state(hybrid: Tiny) -> None:
    sampler = hybrid.sampler(prefill_budget=32)
    requests = [ask(str(i), prompt(100, i), 5) for i in range(16)]
    sampler.step(SampleStep(tuple(requests)))
    sampler.step(SampleStep(cancel=("0",)))
    sampler.step(SampleStep(cancel=tuple(str(i) for i in range(1, 16))))
    assert sampler.pages.used == 0
    assert result_of(sampler, ask("next", prompt(9), 3)).error is None


@pytest.mark.parametrize("kernel", [delta_gpu, pytest.param(delta_tpu, marks=pytest.mark.thorough)], ids=["GPU", "TPU"])
def test_states_updated_in_the_pool_equal_states_taken_out_of_it(
    hybrid: Tiny, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row continues from a state, a second reuses the place of a finished sequence, and one slot is empty."""
    cfg, mesh, random = hybrid.cfg, hybrid.mesh, np.random.default_rng(0)
    cache = empty_cache(cfg, mesh, 4, PAGE, "float32", False, 5)
    ended = jax.tree.map(
        lambda part: part.at[:, 1:].set(random.normal(size=part[:, 1:].shape).astype(np.float32)), cache.states
    )
    rows = Rows(
        tokens_S=np.array([5, 6, 0], np.int32),
        positions_S=np.array([40, 0, 0], np.int32),
        tables_SW=np.array([[1], [2], [0]], np.int32),
        columns_S2=np.zeros((3, 2), np.int32),
        uniform_CS=jnp.zeros((4, 3)),
        choice=greedy_choice(3),
        states_S=np.array([2, 3, 0], np.int32),
    )

    def decoded() -> Any:
        given = (hybrid.params, Lora(layers={}, unembed=None), replace(cache, states=ended), rows, np.int32(4))
        after, found = decode.__wrapped__(cfg, mesh, 4, 0, *given)
        return found.tokens_CS[:, :2], found.logprobs_CS[:, :2], after.states.conv, after.states.S

    tokens, *expected = decoded()
    monkeypatch.setattr(decode_module, "_pooled", lambda: True)
    step = Mock(wraps=partial(kernel.step, interpret=True))
    monkeypatch.setattr(delta_gpu, "step", step)
    same, *found = decoded()
    assert step.called
    np.testing.assert_array_equal(same, tokens)
    for one, other in zip(found, expected, strict=True):
        close(one, other, ulps=4096)
    others = [0, 1, 4]
    np.testing.assert_array_equal(found[-1][:, others], ended.S[:, others])
