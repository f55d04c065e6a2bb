"""gpt-oss: experts with biases and clamped SwiGLU, attention sinks, windows in every other layer, MXFP4 weights.

Its files have the experts of a layer as one tensor, gate and up in turn. Here, and in adapters, each expert has its own
matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import (
    FULL,
    SLIDING,
    TEXT,
    LayerTensor,
    decoder_config,
    decoder_tensors,
    windowed,
)
from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.weights.files import MadeTensor, Tensor
from tinkerflow.backend.compute.weights.mxfp4 import dequantised

# Our matrix, its tensor in the files, and which of that tensor's outputs are its own.
_PARTS = (
    ("gate", "gate_up_proj", slice(0, None, 2)),
    ("up", "gate_up_proj", slice(1, None, 2)),
    ("down", "down_proj", slice(None)),
)


def _parse(fields: ConfigFields) -> ModelConfig:
    config = decoder_config(fields, qkv_bias=True, rope_theta=150_000.0, computed=("attention_bias",))
    fields.refuse_others(attention_bias=True)
    config = replace(
        config,
        experts=fields.size("num_local_experts"),
        experts_per_token=fields.size("num_experts_per_tok"),
        norm_topk=True,  # a softmax over the chosen experts' scores
        clamped=float(fields.get("swiglu_limit") or 7.0),
    )
    return windowed(fields, config, [FULL if layer % 2 else SLIDING for layer in range(config.layers)])


def _tensors(cfg: ModelConfig) -> dict[str, LayerTensor]:
    sizes = {"gate": cfg.mlp, "up": cfg.mlp, "down": cfg.hidden}
    return (
        decoder_tensors(cfg)
        | {
            "sinks": LayerTensor(f"{TEXT}self_attn.sinks", (cfg.heads,), split=True),
            "o_bias": LayerTensor(f"{TEXT}self_attn.o_proj.bias", (cfg.hidden,)),
            "router": LayerTensor(f"{TEXT}mlp.router.weight", (cfg.experts, cfg.hidden)),
            "router_bias": LayerTensor(f"{TEXT}mlp.router.bias", (cfg.experts,)),
        }
        | {
            f"{name}_bias": LayerTensor(f"{TEXT}mlp.experts.{name}_proj.bias", (cfg.experts, size))
            for name, size in sizes.items()
        }
    )


def _unpack(cfg: ModelConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors with one matrix and bias for each expert in place of the fused ones, quantised or not."""
    found = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in range(cfg.layers):
        experts = f"{TEXT.format(layer)}mlp.experts."
        for name, fused, own in _PARTS:
            outputs = cfg.hidden if name == "down" else cfg.mlp
            inputs = cfg.mlp if name == "down" else cfg.hidden
            if bias := tensors.get(f"{experts}{fused}_bias"):
                made = partial(_of_outputs, bias, own)
                found[f"{experts}{name}_proj.bias"] = MadeTensor((bias.shape[0], outputs), bias.dtype, made)
            whole, blocks, scales = (tensors.get(f"{experts}{fused}{end}") for end in ("", "_blocks", "_scales"))
            for expert in range(cfg.experts):
                into = f"{experts}{expert}.{name}_proj.weight"
                if blocks and scales:
                    made = partial(_of_blocks, blocks, scales, expert, own)
                    found[into] = MadeTensor((outputs, inputs), "F32", made)
                elif whole:
                    found[into] = MadeTensor((outputs, inputs), whole.dtype, partial(_of_expert, whole, expert, own))
    return found


def _of_outputs(fused: Tensor, own: slice, dtype: Any) -> npt.NDArray[Any]:
    return fused.view(dtype)[..., own]


def _of_expert(fused: Tensor, expert: int, own: slice, dtype: Any) -> npt.NDArray[Any]:
    return fused.view(dtype)[expert, :, own].T


def _of_blocks(blocks: Tensor, scales: Tensor, expert: int, own: slice, _: Any) -> npt.NDArray[Any]:
    return dequantised(blocks.view(np.uint8)[expert, own], scales.view(np.uint8)[expert, own])


def _plain(_: ModelConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors with the experts' matrices [E, inputs, outputs] in bfloat16, which holds all that MXFP4 holds."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        fused = name.removesuffix("_blocks")
        blocks, scales = found.pop(name), found.pop(f"{fused}_scales")
        experts, outputs, count, half = blocks.shape
        shape = (experts, count * 2 * half, outputs)
        found[fused] = MadeTensor(shape, "BF16", partial(_of_all_blocks, blocks, scales, shape))
    return found


def _of_all_blocks(blocks: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    whole = np.empty(shape, dtype)
    for expert, matrix in enumerate(whole):
        matrix[...] = dequantised(blocks.view(np.uint8)[expert], scales.view(np.uint8)[expert]).T
    return whole


FAMILY = Family(model_type="gpt_oss", title="gpt-oss", parse=_parse, tensors=_tensors, unpack=_unpack, plain=_plain)
