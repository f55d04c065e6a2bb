"""Latent attention: published models, their memory, and attention over latents, also with adapters."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.compute.test_routed import numbers

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import parse_config
from tinkerflow.backend.compute.models.layers import LatentAttention, RMSNorm
from tinkerflow.backend.compute.models.lora import LoraPair
from tinkerflow.backend.compute.models.rope import Rope
from tinkerflow.backend.compute.planning import memory_plan
from tinkerflow.backend.compute.planning.roofline import useful_flops
from tinkerflow.backend.compute.platforms import CUDA, compiling_for
from tinkerflow.backend.compute.sampler.latent_attention import attend_latents
from tinkerflow.backend.compute.weights.quantized import FourBit, Int8, block_scales, packed
from tinkerflow.backend.spec.commands import GroupConfig

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MOONLIGHT = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_4_7_FLASH = MOONLIGHT | {
    "model_type": "glm4_moe_lite",
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
SHAPE = LatentAttention(
    hidden=8, heads=3, rank=12, query_rank=0, plain=6, rotary=4, values=10, interleaved=True, rope=Rope(1e4, 4),
    norm=RMSNorm(1e-6),
)  # fmt: skip


@pytest.mark.parametrize("kind", ["linear", "yarn", "default"])
def test_scores_are_scaled_as_in_transformers_for_every_rope_type(kind):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 3.0, "mscale_all_dim": 1.3}
    fields = {key: value for key, value in DEEPSEEK_V3.items() if key not in ("rope_scaling", "rope_theta")}
    attention = parse_config(fields | {"rope_parameters": {**rope}}, name="m").attentions[0]
    with torch.device("meta"):
        wanted = DeepseekV3Attention(DeepseekV3Config(**fields, rope_parameters={**rope}), 0).scaling
    assert isinstance(attention, LatentAttention)
    assert attention.query_scale * (attention.plain + attention.rotary) ** -0.5 == pytest.approx(wanted, rel=1e-12)


def test_published_configs_have_the_published_parameter_counts():
    deepseek, moonlight, flash = (parse_config(one, name="m") for one in (DEEPSEEK_V3, MOONLIGHT, GLM_4_7_FLASH))
    assert 670 < numbers(DEEPSEEK_V3) < 672 and 15.5 < numbers(MOONLIGHT) < 16.5 and 29 < numbers(GLM_4_7_FLASH) < 31
    assert deepseek.latent is not None and flash.latent is not None
    assert [each.attentions[0].cached for each in (deepseek, moonlight, flash)] == [(1, 576, 0)] * 3
    assert (deepseek.latent.widths, deepseek.ropes[0].dims, deepseek.ropes[0].attention) == ((192, 128), 64, 1.0)
    assert deepseek.latent.query_scale == pytest.approx((0.1 * np.log(40) + 1) ** 2)
    assert (flash.latent.widths, flash.latent.query_scale) == ((256, 256), 1.0)
    # Each of two tokens has half of the scores and of the products with values, forward and twice backward.
    each = 3 * 128 * (192 + 128) * 61 * 2
    assert useful_flops(deepseek, None, 2) - useful_flops(deepseek, None, 0) == each


def test_the_memory_plan_counts_latents():
    config = GroupConfig(
        "m", dtype="bfloat16", fsdp=1, tensor=2, max_context=8192, microbatch_tokens=0, sample_slots=64,
        decode_chunk=16, compile_cache_dir="",
    )  # fmt: skip
    cfg = parse_config(MOONLIGHT, name="m")
    assert memory_plan._page_bytes(cfg, config) == 27 * 576 * 2 * memory_plan.PAGE  # not split over devices
    with compiling_for(CUDA):
        plan = memory_plan.plan_memory(cfg, config, 73 * 10**9)
    assert plan.context == 8192 and plan.uses is not None and plan.uses.total <= 73 * 10**9


@pytest.mark.parametrize("kind", ["full", "int8", "nf4"])
def test_absorbed_attention_equals_attention_over_heads(kind):
    """Two rows with an adapter each, in columns of one stack, and one row without."""
    rng, H, S, Q = np.random.default_rng(0), 3, 3, 5
    outputs = H * (SHAPE.plain + SHAPE.values)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    plain, turned, c, k = drawn(S, Q, H, 6), drawn(S, Q, H, 4), drawn(S, Q, 12), drawn(S, Q, 4)
    kv_b, pair = drawn(outputs, 12), LoraPair(A=drawn(8, 12), B=drawn(8, outputs))
    columns = np.array([[0, 2], [2, 8], [0, 0]], np.int32)
    whole = kv_b
    if kind == "int8":
        kv_b = Int8(jnp.asarray(rng.integers(-127, 128, (outputs, 12)), jnp.int8), jnp.abs(drawn(outputs)) / 100)
        whole = kv_b.values * kv_b.scale[:, None]
    if kind == "nf4":
        kv_b = FourBit(packed(np.asarray(kv_b), 4, "float32"), block_scales(np.asarray(kv_b), 4, "float32"))
        whole = kv_b.dense("float32")

    def seen(q: jax.Array, k: jax.Array, v: jax.Array, **_: Any) -> jax.Array:
        """Causal attention. All queries share one head of keys, or each has its own."""
        scores = jnp.einsum("sqhd,skhd->shqk", q, jnp.broadcast_to(k, (*k.shape[:2], *q.shape[2:])))
        scores = jnp.where(jnp.tri(Q, dtype=bool), scores * q.shape[-1] ** -0.5, -np.inf)
        return jnp.einsum("shqk,skhd->sqhd", jax.nn.softmax(scores, -1), jnp.broadcast_to(v, (S, Q, H, v.shape[-1])))

    found = jax.jit(partial(attend_latents, SHAPE, make_mesh(1, 1), seen, columns, 8))(plain, turned, c, k, kv_b, pair)
    for row, (start, end) in enumerate(columns):
        update = (pair.A[start:end].T @ pair.B[start:end]).T
        made = (c[row] @ (whole + update).T).reshape(Q, H, -1)
        keys = jnp.concatenate([made[..., :6], jnp.broadcast_to(k[row][:, None], (Q, H, 4))], -1)
        queries = jnp.concatenate([plain[row], turned[row]], -1)
        scores = jnp.einsum("qhd,khd->hqk", queries, keys) * 10**-0.5
        weights = jax.nn.softmax(jnp.where(jnp.tri(Q, dtype=bool), scores, -np.inf), -1)
        wanted = jnp.einsum("hqk,khd->qhd", weights, made[..., 6:])
        np.testing.assert_allclose(found[row], wanted, rtol=1e-3, atol=1e-3)
