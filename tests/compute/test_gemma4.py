"""Configs of Gemma 4 in the published sizes: parameters, the cache of a token, and refused settings."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tinkerflow.backend.compute.models.families import (
    layer_input_tensors,
    layer_tensors,
    layers_with,
    parse_config,
    projections,
)
from tinkerflow.backend.compute.models.layers import GLOBAL
from tinkerflow.backend.core.errors import UserError

PLAIN = {"model_type": "gemma4_text", "final_logit_softcapping": 30.0, "num_attention_heads": 8, "head_dim": 256}
NO_INPUTS = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "sliding_window": 1024}


def types(layers: int, every: int) -> list[str]:
    return ["sliding_attention" if number % every else "full_attention" for number in range(1, layers + 1)]


E2B = PLAIN | {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "layer_types": types(35, 5),
}
E4B = PLAIN | {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
}
DENSE_31B = (
    PLAIN
    | NO_INPUTS
    | {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    }
)
MOE_26B = (
    PLAIN
    | NO_INPUTS
    | {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    }
)


def billions(values: dict[str, Any]) -> float:
    cfg = parse_config(values, name="m")
    matrices = sum(math.prod((*one.stack, one.inputs, one.outputs)) for one in projections(cfg).values())
    homes = layers_with(cfg)
    tensors = sum(len(homes[name]) * math.prod(one.shape) for name, one in layer_tensors(cfg).items())
    return (matrices + tensors + sum(math.prod(shape) for _, shape in layer_input_tensors(cfg).values())) / 1e9


@pytest.mark.parametrize(
    ("values", "size", "cell"),
    [
        (E2B, 4.65, 2 * (12 * 256 + 3 * 512)),
        (E4B, 7.5, 2 * 2 * (20 * 256 + 4 * 512)),
        (DENSE_31B, 30.7, 2 * (50 * 16 * 256 + 10 * 4 * 512)),
        (MOE_26B, 25.2, 2 * (25 * 8 * 256 + 5 * 2 * 512)),
    ],
)
def test_gemma4_parameters_and_cache_widths_match_the_config(values: dict[str, Any], size: float, cell: int) -> None:
    """Layers that share keys and values have no cache. The cache of all other layers has the widths of their heads."""
    assert billions(values) == pytest.approx(size, rel=0.02)
    cfg = parse_config(values, name="m")
    assert cfg.cached_cell == cell
    assert cfg.split_heads == values.get("num_global_key_value_heads", values["num_key_value_heads"])


def test_last_layers_share_keys_and_values_with_an_earlier_layer_of_their_kind() -> None:
    cfg = parse_config(E2B, name="m")
    assert {layer.shares for layer in cfg.decoder_layers[:15]} == {None}
    assert [layer.shares for layer in cfg.decoder_layers[15:]] == [13, 13, 13, 13, 14] * 4
    assert cfg.place(14) == cfg.place(34) == len(cfg.numbers(GLOBAL)) - 1 == 2
    assert layers_with(cfg)["k@global"] == cfg.numbers(GLOBAL)


def newer(values: dict[str, Any]) -> dict[str, Any]:
    """The config as transformers 5.24 writes it: the sizes of layers with full attention in `per_layer_config`."""
    count, own = values["num_hidden_layers"], {"head_dim": 512}
    if values.get("attention_k_eq_v"):
        own["num_key_value_heads"] = values["num_global_key_value_heads"]
    kinds = values.get("layer_types", types(count, 6))
    layers = {f"{number:02}": own for number, kind in enumerate(kinds) if kind == "full_attention"}
    kept = {key: value for key, value in values.items() if key != "num_global_key_value_heads"}
    return kept | {"layer_types": kinds, "per_layer_config": layers}


@pytest.mark.parametrize("values", [E2B, E4B, DENSE_31B, MOE_26B])
def test_sizes_of_single_layers_are_read_as_newer_transformers_write_them(values: dict[str, Any]) -> None:
    assert parse_config(newer(values), name="m") == parse_config(values, name="m")
    narrow = parse_config(values | {"per_layer_config": {}}, name="m")
    assert {layer.attention.head_dim for layer in narrow.decoder_layers} == {256}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"04": {"head_dim": 512, "sliding_window": 7}}, "may only change head_dim, in the same way"),
        ({"04": {"num_key_value_heads": 2}}, "may only change head_dim, in the same way"),
        ({"34": {"head_dim": 128}}, "in the same way for all layers of full_attention"),
        ({"00": {"head_dim": 512}}, "in the same way for all layers of full_attention"),
        ({"00": 7}, "in the same way for all layers of full_attention"),
    ],
)
def test_other_differences_between_layers_are_refused(changed: dict[str, Any], text: str) -> None:
    values = newer(E2B)
    with pytest.raises(UserError, match=f"base model 'm': per_layer_config .* is not supported; .*{text}"):
        parse_config(values | {"per_layer_config": values["per_layer_config"] | changed}, name="m")
