"""Snapshots whose experts have a divided rank need a narrower stack, and sample like the trained adapter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import add_adapter, ask, forward, result_of, run_all

from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.sampler.snapshot_cache import divisor_of, usual_spec, widths_of
from tinkerflow.backend.spec.commands import Example, ExportAdapter, LoraSpec, PublishSnapshot


@pytest.mark.parametrize(
    ("per_token", "spec", "widths"),
    [
        (8, LoraSpec(32, expert_rank=4), (32, 4)),
        (8, LoraSpec(32), (32, 32)),
        (8, LoraSpec(20, expert_rank=2), (24, 3)),
        (8, LoraSpec(4, expert_rank=1), (8, 1)),
        (3, LoraSpec(8, expert_rank=2), (8, 4)),
        (3, LoraSpec(8, expert_rank=8), (8, 8)),
        (0, LoraSpec(12), (16, 16)),
    ],
)
def test_experts_have_columns_for_their_rank(per_token, spec, widths):
    assert widths_of(SimpleNamespace(experts_per_token=per_token), spec) == widths  # type: ignore[arg-type]


def test_default_adapter_follows_the_column_rule(moe):
    cfg = load_config(moe.folder)  # 3 experts for each token
    assert usual_spec(cfg, "divided") == LoraSpec(32, expert_rank=10)
    assert usual_spec(cfg, "full") == LoraSpec(32)
    assert divisor_of(cfg, LoraSpec(32, expert_rank=10)) == 2


@pytest.mark.thorough
def test_adapters_with_divided_and_full_rank_are_sampled_together(moe):
    """Compares samples alone and in one batch. The second adapter has the full rank, which widens the stack."""
    executor = moe.executor()
    for number, (name, own) in enumerate({"divided": 2, "full": None}.items()):
        add_adapter(executor, name, 8, seed=number, expert_rank=own)
        executor.execute(PublishSnapshot(name, name))
    asked = [ask(name, [1, 2, 3], 6, snapshot_id=name) for name in ("divided", "full")]
    alone = {name: result for one in asked for name, result in run_all(executor, one).items()}
    together = run_all(executor, *(replace(one, request_id=f"{one.request_id} too") for one in asked))
    for name, result in alone.items():
        (found,), (again,) = result.sequences, together[f"{name} too"].sequences
        assert (found.tokens_T == again.tokens_T).all()
    base = result_of(executor, ask("base", [1, 2, 3], 6)).sequences[0]
    assert (base.logprobs_T != alone["divided"].sequences[0].logprobs_T).all()
    for name in ("divided", "full"):
        sampled = alone[name].sequences[0]
        tokens_T = np.concatenate([[1, 2, 3], sampled.tokens_T]).astype(np.int32)
        example = Example(tokens_T[:-1], tokens_T[1:, None], np.ones((len(tokens_T) - 1, 1), np.float32))
        (scored_T,) = forward(executor, name, (example,)).logprobs
        close_logprobs(scored_T[2:], sampled.logprobs_T)
    weights = executor.execute(ExportAdapter("divided", optimizer=False)).weights
    assert {array.shape[0] for name, array in weights.items() if "experts" in name and "lora_A" in name} == {2}
