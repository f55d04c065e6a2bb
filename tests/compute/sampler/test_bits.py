"""Programs compiled as users run them: other requests change no bit of a result, and no large array is copied.

The other tests of the sampler compile without most optimizations, in a third of the time.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import ask, result_of, run_all
from tests.compute.sampler.conftest import VOCAB, make_tiny, prompt, random_lora
from tests.compute.sampler.test_adjustments import WISHES
from tests.compute.sampler.test_kv_cache import D, G, H, scattered
from tests.compute.sampler.test_prefix_cache import assert_same
from tests.compute.sampler.test_sampler import tokens_of

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.layer_loop import over_layers
from tinkerflow.backend.compute.models.params import by_layer
from tinkerflow.backend.compute.sampler import Sampler, kv_cache
from tinkerflow.backend.compute.sampler.decode import Rows, decode
from tinkerflow.backend.compute.sampler.kv_cache import attend_cached, empty_cache
from tinkerflow.backend.compute.sampler.pages import PAGE
from tinkerflow.backend.compute.sampler.sampling import greedy_choice
from tinkerflow.backend.compute.sampler.snapshot_cache import empty_stack
from tinkerflow.backend.spec.commands import LoraSpec, SampleRequest
from tinkerflow.backend.spec.ranks import expert_rank

EXACT = ["qwen3", "qwen3_moe"]
EXACT_TOO = ["qwen3_5", "gemma3_text", "deepseek_v3", "gpt_oss", "llama"]


def test_row_is_equal_alone_and_in_a_batch(qwen: Any) -> None:
    sampler = qwen.sampler()
    specs = {"small": LoraSpec(2), "large": LoraSpec(12, train_unembed=False)}
    for seed, (name, spec) in enumerate(specs.items()):
        sampler.publish(name, random_lora(qwen.cfg, spec, seed), spec)
    requests = [
        ask("greedy", prompt(20), 30),
        ask("warm", prompt(7), 40, temperature=1.0, seed=2**63 + 5, num_samples=3),
        ask("cut", prompt(50), 20, temperature=0.8, top_k=20, top_p=0.9, seed=-1, snapshot_id="small"),
        ask("adapted", prompt(20), 30, snapshot_id="large"),
        ask("scored", prompt(70), 10, temperature=1.2, seed=3, snapshot_id="small", prompt_logprobs=True),
    ]
    together = run_all(sampler, *requests)
    for request in requests:
        alone = result_of(sampler, request)
        crowd = together[request.request_id]
        assert [tokens_of(s) for s in alone.sequences] == [tokens_of(s) for s in crowd.sequences]
        for one, other in zip(alone.sequences, crowd.sequences, strict=True):
            close_logprobs(one.logprobs_T, other.logprobs_T, ulps=128)
    assert tokens_of(together["greedy"].sequences[0]) != tokens_of(together["adapted"].sequences[0])
    samples = {tuple(tokens_of(s)) for s in together["warm"].sequences}
    assert len(samples) == 3, "each sample has its own random numbers"


@pytest.mark.parametrize("family", [*EXACT, *(pytest.param(name, marks=pytest.mark.thorough) for name in EXACT_TOO)])
def test_batch_invariant_sample_does_not_depend_on_other_requests(family: str, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, family)
    rng = np.random.default_rng(len(family))
    experts = "divided" if tiny.cfg.experts else "full"
    specs = {
        f"rank {rank}": LoraSpec(rank, expert_rank=expert_rank(rank, tiny.cfg.experts_per_token, experts))
        for rank in ((4, 40, 20) if tiny.cfg.experts else (4, 40, 20, 150))  # the third has the columns from 96 on
    }
    specs["full experts"] = LoraSpec(8)
    loras = {name: random_lora(tiny.cfg, spec, seed) for seed, (name, spec) in enumerate(specs.items())}

    def sampler(**changes: Any) -> Sampler:
        made = tiny.sampler(batch_invariant=True, **changes)
        for name, spec in specs.items():
            made.publish(name, loras[name], spec)
        return made

    def request(number: int) -> SampleRequest:
        return ask(
            str(number),
            rng.integers(0, VOCAB, rng.choice([100, 250])).tolist(),  # the pieces of these prompts have one size
            int(rng.choice([25, 60])),
            num_samples=int(rng.choice([1, 3])),
            temperature=float(rng.choice([0.0, 1.0])),
            seed=number,
            snapshot_id=[*specs, None][number % (len(specs) + 1)],
            top_k=int(rng.choice([-1, 20])),
            topk_sample=0 if tiny.cfg.experts else 3,  # each choice is another set of programs
            routes=tiny.cfg.experts > 0,
        )

    requests = [request(number) for number in range(12)]
    alone = {each.request_id: result_of(sampler(), each) for each in requests}
    for free_pages in (None, 5):
        crowd = run_all(sampler(free_pages=free_pages), *requests)
        for name, result in crowd.items():
            assert_same(result, alone[name])


def test_youngest_requests_wait_for_memory_and_results_do_not_change(qwen: Any) -> None:
    requests = [ask(str(i), prompt(20, i), 150 + i, temperature=1.0, seed=i) for i in range(6)]
    plenty = run_all(qwen.sampler(), *requests)
    scarce = run_all(qwen.sampler(free_pages=7), *requests)
    for name, result in plenty.items():
        assert tokens_of(scarce[name].sequences[0]) == tokens_of(result.sequences[0])
        close_logprobs(scarce[name].sequences[0].logprobs_T, result.sequences[0].logprobs_T, ulps=128)


def test_rows_without_adjustments_do_not_change(qwen: Any) -> None:
    """Adjusted rows have the same tokens alone and in a batch. Other rows are unchanged bit for bit."""
    sampler = qwen.sampler()
    requests = [ask("plain", prompt(9), 25, temperature=1.0, seed=8), ask("greedy", prompt(40), 25)]
    requests += [
        ask(name, prompt(12), 25, num_samples=2, temperature=0.9, seed=3, min_p=0.02, adjustments=asked)
        for name, asked in WISHES.items()
    ]
    together = run_all(sampler, *requests)
    unadjusted = run_all(sampler, *(replace(request, adjustments=None, min_p=0.0) for request in requests))
    for request in requests:
        (alone,) = run_all(sampler, request).values()
        for one, other in zip(alone.sequences, together[request.request_id].sequences, strict=True):
            assert one.tokens_T.tolist() == other.tokens_T.tolist(), request.request_id
    for name in ("plain", "greedy"):  # the same slots, but another program
        (one,), (other,) = together[name].sequences, unadjusted[name].sequences
        np.testing.assert_array_equal(one.logprobs_T, other.logprobs_T)


def test_turns_of_a_conversation_continue_from_the_cache_bit_for_bit(qwen: Any, computed_sizes: Any) -> None:
    # Each turn extends the previous one. Their caches have two lengths.
    whole = prompt(480)
    turns = [ask("turn", whole[:length], 6, temperature=1.0, seed=length) for length in (100, 129, 300, 480)]
    cold, computed = [], []
    for turn in turns:
        cold.append(run_all(qwen.sampler(), turn)["turn"])
        computed.append(computed_sizes())
    assert computed == [(128,), (128,), (128, 128, 64), (128, 128, 128, 64, 32)]
    warm, hits = qwen.sampler(), []
    for turn, expected, whole_pieces in zip(turns, cold, computed, strict=True):
        for again in (False, True):
            result = run_all(warm, turn)["turn"]
            assert_same(result, expected)
            known = result.prompt_cache_hit_tokens
            hits.append(known)
            assert computed_sizes() == (() if again else whole_pieces[known // 128 :])
    assert hits == [0, 99, 0, 128, 128, 299, 256, 479]


@pytest.mark.thorough
def test_states_of_linear_attention_do_not_depend_on_the_batch(hybrid: Any) -> None:
    """With few pages, the youngest requests are preempted and recomputed from their tokens."""
    asked = [ask(str(seed), prompt(20 + 10 * seed, seed), 30) for seed in range(4)]
    alone = {one.request_id: result_of(hybrid.sampler(page=32), one) for one in asked}
    for pages in (40, 7):
        sampler = hybrid.sampler(page=32, pages=pages)
        together = run_all(sampler, *asked)
        for name, result in together.items():
            assert result.sequences[0].tokens_T.tolist() == alone[name].sequences[0].tokens_T.tolist()
        assert sampler.pages.used == 0


@pytest.mark.thorough
def test_grouped_attention_equals_attention_over_all_rows_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [160, 150, 129, 128, 97, 96, 65, 64, 63, 40, 33, 32, 31, 2, 1, 1]

    def attended() -> np.ndarray[Any, Any]:
        rng = np.random.default_rng(7)
        cache, tables_SW = scattered(lengths, rng)
        q, k, v = (jnp.asarray(rng.standard_normal((len(lengths), 1, heads, D)), jnp.float32) for heads in (H, G, G))
        start_S = jnp.asarray(lengths, jnp.int32) - 1
        _, o = attend_cached(make_mesh(1, 1), cache, jnp.int32(0), tables_SW, start_S, q, k, v)
        return np.asarray(o)

    grouped = attended()
    monkeypatch.setattr(kv_cache, "_TOGETHER", len(lengths))
    np.testing.assert_array_equal(grouped, attended())


@pytest.mark.parametrize(
    "apart", [pytest.param(True, id="by layer", marks=pytest.mark.thorough), pytest.param(False, id="stacked")]
)
def test_neither_the_cache_nor_a_weight_is_copied(qwen: Any, apart: bool) -> None:
    slots, pages, chunk = 4, 50, 8
    rows = Rows(
        tokens_S=np.zeros(slots, np.int32),
        positions_S=np.zeros(slots, np.int32),
        tables_SW=np.zeros((slots, 4), np.int32),
        columns_S2=np.zeros((slots, 2), np.int32),
        uniform_CS=np.zeros((chunk, slots), np.float32),
        choice=greedy_choice(slots),
    )
    params = by_layer(qwen.cfg, qwen.params) if apart else qwen.params
    assert params.unstacked == apart
    cache = empty_cache(qwen.cfg, qwen.mesh, pages, PAGE, "float32", apart)
    stack = empty_stack(qwen.cfg, qwen.mesh, (32, 32), "float32", apart, False)
    lowered = decode.lower(qwen.cfg, qwen.mesh, chunk, 0, params, stack, cache, rows, np.int32(chunk))
    text = lowered.compile().as_text()
    copied = [tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]\S* copy\(", text)]
    assert copied, "the pattern must match the copies of another program"
    parts = {part.size for part in jax.tree.leaves(cache)}
    weights = {np.prod(leaf.shape) for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    forbidden = parts | weights
    assert not [shape for shape in copied if np.prod(shape) in forbidden]
    assert "sort(" not in text


@pytest.mark.parametrize("separate", [True, False], ids=["separate layers", "stacked layers"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # the second repeats several kinds of layers
def test_each_layer_gets_its_adapters_in_the_blocks_of_a_batch_invariant_stack(
    family: str, separate: bool, tmp_path: Path
) -> None:
    tiny, seen = make_tiny(tmp_path, family), set[int]()
    stack = empty_stack(tiny.cfg, tiny.mesh, (96, 96), "float32", separate, True)

    def layer(kind: Any, carry: Any, given: Any) -> Any:
        seen.update(pair.blocks for pair in given[2].values())
        return carry

    over_layers(tiny.cfg, layer, jnp.zeros(()), ({},) * tiny.cfg.layers if separate else {}, stack.layers)
    assert seen == {3}
