"""gpt-oss: experts with biases and clamped SwiGLU, attention sinks, windows in every other layer, MXFP4 weights.

Its files have the experts of a layer as one tensor, gate and up in turn. Here, and in adapters, each expert has its own
matrices.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count, windows
from tinkerflow.backend.compute.models.family import TEXT_MODEL, Family, Tensors
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import Attention, DecoderLayer, Experts, RMSNorm, SoftmaxRouter
from tinkerflow.backend.compute.models.rope import FULL, SLIDING
from tinkerflow.backend.compute.weights.files import MadeTensor, Tensor
from tinkerflow.backend.compute.weights.mxfp4 import dequantised

# Our matrix, its tensor in the files, and which of that tensor's outputs are its own.
_PARTS = (
    ("gate", "gate_up_proj", slice(0, None, 2)),
    ("up", "gate_up_proj", slice(1, None, 2)),
    ("down", "down_proj", slice(None)),
)


def _gpt_oss(fields: ConfigFields) -> ModelConfig:
    fields.refuse_others(hidden_act="silu", mlp_bias=False, attention_bias=True)
    norm, count = RMSNorm.read(fields), fields.size("num_local_experts")
    attention = Attention.read(
        fields.without("attention_bias"), rope_theta=150_000.0, biases=("q", "k", "v", "o"), sinks=True
    )
    # A softmax over the scores of the chosen experts alone.
    router = SoftmaxRouter(fields.size("num_experts_per_tok"), normalized=True, bias=True, module="mlp.router")
    clamp = float(fields.get("swiglu_limit") or 7.0)
    experts = Experts(attention.hidden, count, fields.size("intermediate_size"), router, clamp=clamp, biases=True)
    usual = [FULL if layer % 2 else SLIDING for layer in range(layer_count(fields))]
    layers = [DecoderLayer(replace(attention, window=window), experts, norm) for window in windows(fields, usual)]
    return decoder(fields, norm, layers)


def _unpack(cfg: ModelConfig, tensors: Tensors) -> Tensors:
    """The tensors with one matrix and bias for each expert in place of the fused ones, quantised or not."""
    assert cfg.mixture is not None
    separate = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in range(cfg.layers):
        experts = f"{TEXT_MODEL.layer.format(layer)}mlp.experts."
        for name, fused, rows in _PARTS:
            sizes = (cfg.hidden, cfg.mixture.width)
            outputs, inputs = sizes if name == "down" else sizes[::-1]
            if bias := tensors.get(f"{experts}{fused}_bias"):
                made = partial(_of_outputs, bias, rows)
                separate[f"{experts}{name}_proj.bias"] = MadeTensor((bias.shape[0], outputs), bias.dtype, made)
            matrices, blocks, scales = (tensors.get(f"{experts}{fused}{end}") for end in ("", "_blocks", "_scales"))
            for expert in range(cfg.experts):
                into = f"{experts}{expert}.{name}_proj.weight"
                if blocks and scales:
                    made = partial(_of_blocks, blocks, scales, expert, rows)
                    separate[into] = MadeTensor((outputs, inputs), "F32", made)
                elif matrices:
                    made = partial(_of_expert, matrices, expert, rows)
                    separate[into] = MadeTensor((outputs, inputs), matrices.dtype, made)
    return separate


def _of_outputs(fused: Tensor, rows: slice, dtype: Any) -> npt.NDArray[Any]:
    return fused.view(dtype)[..., rows]


def _of_expert(fused: Tensor, expert: int, rows: slice, dtype: Any) -> npt.NDArray[Any]:
    return fused.view(dtype)[expert, :, rows].T


def _of_blocks(blocks: Tensor, scales: Tensor, expert: int, rows: slice, _: Any) -> npt.NDArray[Any]:
    return dequantised(blocks.view(np.uint8)[expert, rows], scales.view(np.uint8)[expert, rows])


def _plain(_: ModelConfig, tensors: Tensors) -> Tensors:
    """The tensors with the experts' matrices [E, inputs, outputs] in bfloat16, which holds all that MXFP4 holds."""
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
        matrix[...] = dequantised(blocks.view(np.uint8)[expert], scales.view(np.uint8)[expert]).T
    return whole


FAMILY = Family(model_type="gpt_oss", title="gpt-oss", parse=_gpt_oss, unpack=_unpack, plain=_plain)
