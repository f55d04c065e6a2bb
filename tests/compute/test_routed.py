"""Sigmoid routing as in transformers, and published models that use it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.compute.conftest import FAMILY_SHAPE, SHAPE, build, random_model

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config, parse_config, projections
from tinkerflow.backend.compute.models.layers import MLP
from tinkerflow.backend.compute.models.layers.step import LayerStep
from tinkerflow.backend.compute.models.params import load_params
from tinkerflow.backend.core.errors import UserError

GLM_4_5_AIR: dict[str, Any] = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
MINIMAX_M2: dict[str, Any] = {
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def numbers(values: dict[str, Any]) -> float:
    """Parameters of all matrices, in billions."""
    cfg = parse_config(values, name="m")
    sizes = (one.inputs * one.outputs * int(np.prod(one.stack or (2,))) for one in projections(cfg).values())
    return sum(sizes) / 1e9


def test_published_configs_have_the_published_parameter_counts():
    glm, minimax = (parse_config(values, name="m") for values in (GLM_4_5_AIR, MINIMAX_M2))
    assert 106 < numbers(GLM_4_5_AIR) < 108 and 228 < numbers(MINIMAX_M2) < 230
    assert (glm.ropes[0].dims, glm.ropes[0].theta, glm.norm.eps) == (64, 1e6, 1e-5)
    assert [isinstance(layer.feed_forward, MLP) for layer in glm.decoder_layers] == [True] + [False] * 45
    assert minimax.ropes[0].dims == 64 and minimax.mixture is not None and minimax.mixture.shared is None


def test_experts_and_shares_equal_transformers(tmp_path):
    torch.manual_seed(2)
    layer = random_model("glm4_moe", {**SHAPE, **FAMILY_SHAPE["glm4_moe"]}).model.layers[1].mlp
    cfg = load_config(build(tmp_path, "glm4_moe", tied=False).folder)
    y = torch.randn(40, 32)
    routes: list[Any] = []
    layer.experts.register_forward_pre_hook(lambda _, inputs: routes.append(inputs[1:]))
    with torch.no_grad():
        layer(y[None])
    experts, shares = routes[0]
    weights = {"router": layer.gate.weight, "router_correction": layer.gate.e_score_correction_bias}
    weights = {name: jnp.asarray(tensor.detach().numpy()) for name, tensor in weights.items()}
    assert cfg.mixture is not None
    router = cfg.mixture.router

    @jax.jit
    def routed(y_BTD: jax.Array, weights: dict[str, Any]) -> Any:
        return router.route(LayerStep(make_mesh(1, 1), weights, {}, {}, None, None), y_BTD)

    found, found_shares = (np.asarray(x[0]) for x in routed(jnp.asarray(y.numpy())[None], weights))
    order, wanted = np.argsort(found), np.argsort(experts.numpy())
    np.testing.assert_array_equal(np.take_along_axis(found, order, 1), np.take_along_axis(experts.numpy(), wanted, 1))
    ours, theirs = np.take_along_axis(found_shares, order, 1), np.take_along_axis(shares.numpy(), wanted, 1)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose(found_shares.sum(1), 1.5, rtol=1e-5)  # routed_scaling_factor
    # The group with the lowest scores is not chosen, and neither are its experts, however low the other scores are.
    low = np.where(np.arange(8) < 6, -3.0, -9.0).astype(np.float32)
    found, _ = routed(jnp.asarray(y.numpy())[None], {**weights, "router_correction": low})
    assert set(np.unique(np.asarray(found) // 2, axis=None).tolist()) <= {0, 1, 2}
    assert all(len(set((row // 2).tolist())) == 2 for row in np.asarray(found)[0])


def test_prediction_layers_are_skipped_and_unknown_layers_are_refused(tmp_path):
    build(tmp_path, "glm4_moe", tied=False)
    cfg, mesh, file = load_config(tmp_path), make_mesh(1, 1), tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert cfg.layers == 2
    predictor = {f"model.layers.2.{name}.weight": torch.ones(2) for name in ("eh_proj", "self_attn.q_proj")}
    save_file({**tensors, **predictor}, file)
    params = load_params(cfg, tmp_path, mesh, "float32")
    assert params.layers["router_correction"].dtype == jnp.float32
    for changed, said in (
        ({**tensors, "model.layers.2.self_attn.q_proj.weight": torch.ones(2)}, "'model.layers.2.*is not part of this"),
        ({**tensors, "model.layers.0.mlp.gate.weight": torch.ones(8, 32)}, "'model.layers.0.mlp.gate.*is not part"),
        (
            {name: one for name, one in tensors.items() if not name.endswith("score_correction_bias")},
            "'model.layers.1.mlp.gate.e_score_correction_bias' is missing",
        ),
        (
            {name: one for name, one in tensors.items() if "shared_experts.up" not in name},
            "'model.layers.1.mlp.shared_experts.up_proj.weight' is missing",
        ),
    ):
        save_file(changed, file)
        with pytest.raises(UserError, match=said):
            load_params(cfg, tmp_path, mesh, "float32")
