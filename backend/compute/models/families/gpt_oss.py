"""gpt-oss: experts with biases and clamped SwiGLU, attention sinks, windows in every other layer, MXFP4 weights.

Its files store the experts of a layer as one tensor, with gate and up interleaved. Here, and in adapters, each expert
has its own matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count, windows
from tinkerflow.backend.compute.models.family import FP8, MXFP4, TEXT_MODEL, Family, Tensors, check_shape, with_parts
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import (
    SWIGLU_ALPHA,
    Attention,
    DecoderLayer,
    Experts,
    RMSNorm,
    SoftmaxRouter,
)
from tinkerflow.backend.compute.models.layers.mlp import refuse_other_mlps
from tinkerflow.backend.compute.models.rope import FULL, SLIDING
from tinkerflow.backend.compute.weights.files import MadeTensor, Tensor
from tinkerflow.backend.compute.weights.mxfp4 import BLOCK, dequantized

# Our matrix, its tensor in the files, and the slice of that tensor's outputs.
_PARTS = (
    ("gate", "gate_up_proj", slice(0, None, 2)),
    ("up", "gate_up_proj", slice(1, None, 2)),
    ("down", "down_proj", slice(None)),
)


_ROPE = {  # transformers' default
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def _gpt_oss(fields: ConfigFields) -> ModelConfig:
    fields = fields if fields.rope else fields.with_values(rope_parameters=_ROPE)
    refuse_other_mlps(fields)
    fields.refuse_others(attention_bias=True, swiglu_alpha=SWIGLU_ALPHA)
    norm, count = RMSNorm.read(fields, eps=1e-5), fields.size("num_local_experts")
    attention = Attention.read(
        fields.without("attention_bias"), rope_theta=150_000.0, biases=("q", "k", "v", "o"), sinks=True
    )
    # A softmax over the scores of the chosen experts alone.
    router = SoftmaxRouter(fields.chosen_experts(count), normalized=True, bias=True, module="mlp.router")
    clamp = fields.number("swiglu_limit", 7.0)
    experts = Experts(attention.hidden, count, fields.size("intermediate_size"), router, clamp=clamp, biases=True)
    usual = [FULL if layer % 2 else SLIDING for layer in range(layer_count(fields))]
    layers = [DecoderLayer(replace(attention, window=window), experts, norm) for window in windows(fields, usual)]
    return decoder(fields, norm, layers)


def _unpack(cfg: ModelConfig, tensors: Tensors) -> Tensors:
    """The tensors with one matrix and bias for each expert instead of the fused ones, quantized or not."""
    assert cfg.mixture is not None
    width, count = cfg.mixture.width, cfg.mixture.count
    sizes = {"gate_up_proj": (cfg.hidden, 2 * width), "down_proj": (width, cfg.hidden)}  # inputs, outputs
    fused: set[str] = set()
    parts: dict[str, Tensor] = {}
    for layer in range(cfg.layers):
        experts = f"{TEXT_MODEL.layer.format(layer)}mlp.experts."
        for name, source, rows in _PARTS:
            (inputs, outputs), key = sizes[source], f"{experts}{source}"
            shapes = {
                "": (count, inputs, outputs),
                "_bias": (count, outputs),
                "_blocks": (count, outputs, inputs // BLOCK, BLOCK // 2),
                "_scales": (count, outputs, inputs // BLOCK),
            }
            here = {end: tensors[f"{key}{end}"] for end in shapes if f"{key}{end}" in tensors}
            for end, tensor in here.items():
                check_shape(f"{key}{end}", tensor, shapes[end])
            own = len(range(outputs)[rows])
            if "_bias" in here:
                made = partial(_of_outputs, here["_bias"], rows)
                parts[f"{experts}{name}_proj.bias"] = MadeTensor((count, own), here["_bias"].dtype, made)
                fused.add(f"{key}_bias")
            packed = {"_blocks", "_scales"} <= here.keys()
            fused |= {f"{key}_blocks", f"{key}_scales"} if packed else {key} & tensors.keys()
            for expert in range(count):
                into = f"{experts}{expert}.{name}_proj.weight"
                if packed:
                    stored = partial(_stored, here["_blocks"], here["_scales"], expert, rows)
                    parts[into] = MadeTensor((own, inputs), "F32", partial(_of_blocks, stored), stored)
                elif "" in here:
                    parts[into] = MadeTensor((own, inputs), here[""].dtype, partial(_of_expert, here[""], expert, rows))
    return with_parts(tensors, fused, parts)


def _of_outputs(fused: Tensor, rows: slice, dtype: Any) -> npt.NDArray[Any]:
    return fused.view(dtype)[..., rows]


def _of_expert(fused: Tensor, expert: int, rows: slice, dtype: Any) -> npt.NDArray[Any]:
    return fused.view(dtype)[expert, :, rows].T


def _stored(blocks: Tensor, scales: Tensor, expert: int, rows: slice) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    own = blocks.view(np.uint8)[expert, rows]
    return own.reshape(len(own), -1), scales.view(np.uint8)[expert, rows]


def _of_blocks(stored: Callable[[], tuple[npt.NDArray[Any], npt.NDArray[Any]]], _: Any) -> npt.NDArray[Any]:
    packed, scales = stored()
    return dequantized(packed.reshape(*scales.shape, -1), scales)


def _plain(_: ModelConfig, tensors: Tensors) -> Tensors:
    """The tensors with the experts' matrices [E, inputs, outputs] in bfloat16, which represents MXFP4 exactly."""
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        fused = name.removesuffix("_blocks")
        blocks, scales = plain.pop(name), plain.pop(f"{fused}_scales")
        experts, outputs, count, half = blocks.shape
        shape = (experts, count * 2 * half, outputs)
        plain[fused] = MadeTensor(shape, "BF16", partial(_of_all_blocks, blocks, scales, shape))
    return plain


def _of_all_blocks(blocks: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    whole = np.empty(shape, dtype)
    for expert, matrix in enumerate(whole):
        matrix[...] = dequantized(blocks.view(np.uint8)[expert], scales.view(np.uint8)[expert]).T
    return whole


FAMILY = Family(
    model_type="gpt_oss",
    title="gpt-oss",
    parse=_gpt_oss,
    unpack=_unpack,
    plain=_plain,
    quantizations=(MXFP4, FP8),
    interleaved=True,
)
