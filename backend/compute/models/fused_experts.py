"""Experts whose matrices are two tensors of a layer in the files: gate and up as one, and down. No JAX."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy.typing as npt

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.family import LANGUAGE_MODEL, Tensors
from tinkerflow.backend.compute.weights.files import MadeTensor, Tensor


def with_separate_experts(
    cfg: ModelConfig, tensors: Tensors, module: str = f"{LANGUAGE_MODEL.layer}mlp.experts."
) -> Tensors:
    """The tensors with a matrix for each expert instead of those of all, gate before up.

    A tensor of all experts is [E, outputs, inputs], or [E, inputs, outputs] as Qwen3-VL-MoE is published. transformers
    reads both, too, and distinguishes them by their shapes.

    cfg: the model. tensors: by name. module: the prefix of the names of experts' tensors, with a {} for the layer.
    """
    assert cfg.mixture is not None
    separate, width = dict(tensors), cfg.mixture.width
    parts = {
        "gate": ("gate_up", slice(0, width), (2 * width, cfg.hidden)),
        "up": ("gate_up", slice(width, None), (2 * width, cfg.hidden)),
        "down": ("down", slice(None), (cfg.hidden, width)),
    }
    for layer in range(cfg.layers):
        experts = module.format(layer)
        for name, (source, rows, usual) in parts.items():
            fused = tensors.get(f"{experts}{source}_proj")
            if fused is None or len(fused.shape) != 3 or fused.shape[0] != cfg.experts:
                continue  # the loader reports the experts' matrices as missing
            separate.pop(f"{experts}{source}_proj", None)
            inputs_first = fused.shape[1:] != usual and fused.shape[:0:-1] == usual
            outputs, inputs = usual if inputs_first else fused.shape[1:]
            shape = (len(range(outputs)[rows]), inputs)
            for expert in range(cfg.experts):
                made = partial(_of_expert, fused, expert, rows, inputs_first)
                separate[f"{experts}{expert}.{name}_proj.weight"] = MadeTensor(shape, fused.dtype, made)
    return separate


def _of_expert(fused: Tensor, expert: int, rows: slice, inputs_first: bool, dtype: Any) -> npt.NDArray[Any]:
    matrix = fused.view(dtype)[expert]
    return (matrix.T if inputs_first else matrix)[rows]
