"""The values that a backward pass keeps change its memory, but not its gradients."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.conftest import build
from tests.compute.shapes import LAYERS, QWEN3_0_6B, QWEN3_4B, config_like

from tinkerflow.backend.compute.kernels import grouped_gpu
from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.layer_loop import groups, kept_carries
from tinkerflow.backend.compute.models.layers import EXPERT_MATRICES
from tinkerflow.backend.compute.models.long_rows import in_chunks
from tinkerflow.backend.compute.models.lora_weights import init_lora
from tinkerflow.backend.compute.models.params import load_params
from tinkerflow.backend.compute.models.transformer import Keep
from tinkerflow.backend.compute.planning import memory_plan, training_memory
from tinkerflow.backend.compute.platforms import CPU, CUDA, compiling_for
from tinkerflow.backend.compute.training import budget as budget_module
from tinkerflow.backend.compute.training import train
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.compute.training.token_losses import choose
from tinkerflow.backend.compute.training.train import DeviceBatch, make_steps
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec
from tinkerflow.backend.spec.losses import packed_inputs

GB = 10**9


@pytest.mark.parametrize(
    ("alike", "expected", "kept"),
    [
        ("f" * 36, [(0, 1, 36, 6)], 12),
        ("f" * 28, [(0, 1, 28, 4)], 11),
        ("f" * 47, [(0, 1, 42, 6), (42, 1, 5, 5)], 14),
        ("d" + "f" * 8, [(0, 1, 1, 1), (1, 1, 8, 2)], 7),
        ("sf" * 8, [(0, 2, 8, 2)], 8),
    ],
)
def test_layer_groups_keep_the_fewest_inputs(alike: str, expected: list[Any], kept: int) -> None:
    layers = tuple(LAYERS[letter] for letter in alike)
    assert list(groups(layers)) == expected
    assert kept_carries(layers) == kept


@pytest.fixture(scope="module")
def gradients(qwen3: Any) -> Any:
    return gradients_of(qwen3)


def gradients_of(reference: Any) -> Any:
    """gradients(keep, chunk): an adapter's gradients of a step that keeps `keep`, with `chunk` tokens at a time.

    again: queries, keys and values are recomputed, as on GPUs. in_place: names of matrices that are read in place.
    """
    cfg, mesh = load_config(str(reference.folder)), make_mesh(1, 1)
    params = load_params(cfg, str(reference.folder), mesh, "float32")
    rng = np.random.default_rng(0)
    lora = jax.tree.map(
        lambda leaf: rng.normal(scale=0.1, size=leaf.shape).astype(np.float32), init_lora(cfg, LoraSpec(4), 0)
    )
    ints = rng.integers(0, cfg.vocab, (2, 64, 4), np.int32)
    ints[..., 1], ints[..., 2] = np.arange(64), 1
    floats = np.ones((2, 64, len(packed_inputs()), 1), np.float32)
    batch = DeviceBatch(ints_BTI=ints, floats_BTJK=floats, choice=choose("cross_entropy", {}))

    def of(keep: Keep, chunk: int = 0, *, again: bool = False, in_place: Any = ()) -> list[Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "choose_keep", lambda *_: keep)
            patch.setattr(train, "tokens_at_a_time", lambda _: chunk)
            patch.setattr(train, "platform", lambda: CUDA if again else CPU)
            patch.setattr(train, "experts_in_place", lambda *_: frozenset(in_place))
            product = Mock(side_effect=partial(grouped_gpu.product, interpret=True))
            patch.setattr(grouped_gpu, "product", product)
            steps = make_steps(cfg, mesh, Budget(1024, 2**30))
            grads, scored = steps.backward(params, lora, jax.tree.map(jnp.zeros_like, lora), batch)
        assert float(scored.loss) > 0 and product.called == bool(in_place)
        return jax.tree.leaves(jax.device_get(grads))

    return of


def test_groups_of_layers_give_the_gradients_of_layers_that_are_computed_again(gradients: Any) -> None:
    inputs, grouped = gradients(Keep.INPUTS), gradients(Keep.GROUPS)
    assert max(np.abs(grad).max() for grad in inputs) > 0
    for one, other in zip(inputs, grouped, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(one).max())


@pytest.mark.parametrize("keep", [Keep.INPUTS, Keep.GROUPS])
def test_token_chunks_give_the_same_gradients(gradients: Any, keep: Keep) -> None:
    # The bits may differ, because an adapter's gradients are sums over tokens, which are added chunk by chunk.
    for one, other in zip(gradients(keep), gradients(keep, 32), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(one).max())


def test_recomputed_projections_give_the_same_gradients(gradients: Any) -> None:
    for one, other in zip(gradients(Keep.GROUPS, 16), gradients(Keep.GROUPS, 16, again=True), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(one).max())


@pytest.mark.parametrize(
    "architecture",
    ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gpt_oss", "deepseek_v3"))],
)
def test_experts_read_in_place_give_the_same_gradients(request: Any, tmp_path: Path, architecture: str) -> None:
    """qwen3_moe has equal layers, gpt_oss alternating layers, and deepseek_v3 a dense layer before the others."""
    alike = architecture == "qwen3_moe"
    gradients = gradients_of(request.getfixturevalue("moe") if alike else build(tmp_path, architecture, tied=False))
    for keep, chunk in ((Keep.RESULTS, 0), (Keep.GROUPS, 32)):
        sliced, in_place = gradients(keep, chunk), gradients(keep, chunk, in_place=EXPERT_MATRICES)
        for one, other in zip(sliced, in_place, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(one).max())


def test_a_chunk_has_no_more_tokens_than_it_may() -> None:
    seen: list[Any] = []

    def part(x: jax.Array, other: Any) -> Any:
        seen.append(x.shape)
        return x + 1, other

    mesh, x = make_mesh(1, 1), jnp.arange(2 * 16 * 3.0).reshape(2, 16, 3)
    made, none = in_chunks(mesh, 8, part, x, None)
    assert seen == [(2, 4, 3)] and none is None
    np.testing.assert_array_equal(made, x + 1)
    in_chunks(mesh, 32, part, x, None)
    assert seen[1:] == [(2, 16, 3)]


def test_the_plan_recomputes_groups_only_where_the_inputs_of_layers_do_not_fit() -> None:
    cfg = config_like(QWEN3_4B, max_position_embeddings=131072)
    config = GroupConfig("m", "bfloat16", 1, 1, 131072, 0, 64, 8, "")
    with compiling_for(CUDA):
        large, small = (memory_plan.plan_memory(cfg, config, limit * GB) for limit in (78, 26))
        keeps = partial(budget_module.choose_keep, cfg, 7 * 32)
        assert [keeps(tokens, "bfloat16", large.budget) for tokens in (4096, 32768)] == [Keep.RESULTS, Keep.INPUTS]
        assert keeps(131072, "bfloat16", large.budget) is Keep.GROUPS
        assert keeps(32768, "bfloat16", small.budget) is Keep.GROUPS
        assert keeps(small.budget.microbatch_tokens, "bfloat16", small.budget) is not Keep.GROUPS
        assert large.context >= 65536
        inputs, grouped = (budget_module.kept_bytes(cfg, 7 * 32, 32768, "bfloat16", keep) for keep in list(Keep)[1:])
        assert inputs == 3 * grouped


def test_memory_plan_leaves_room_for_the_step_of_full_training() -> None:
    """The step uses neither groups of layers nor chunks of tokens."""
    cfg = config_like(QWEN3_0_6B, max_position_embeddings=131072)
    config = GroupConfig("m", "bfloat16", 1, 1, 131072, 0, 64, 8, "")
    with compiling_for(CUDA):
        plan = memory_plan.plan_memory(cfg, config, 78 * GB)
        largest = partial(training_memory.largest_step, cfg, config, plan.budget, plan.context)
        assert plan.uses is not None and sum(largest(full_parameters=True)) > sum(largest())
        others = plan.uses.weights + plan.uses.reserve + plan.uses.kv_cache + plan.uses.logits + plan.uses.snapshots
        models = plan.full + (plan.full_model.size if plan.full_model else 0)
    assert plan.full > 0
    assert others + models + sum(largest(full_parameters=True)) <= 78 * GB
