"""Experts that files store as two tensors per layer: gate and up in one, and down. No JAX."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy.typing as npt

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.family import LANGUAGE_MODEL, Tensors, check_shape, with_parts
from tinkerflow.backend.compute.weights.files import MadeTensor, Tensor


def with_separate_experts(
    cfg: ModelConfig, tensors: Tensors, module: str = f"{LANGUAGE_MODEL.layer}mlp.experts."
) -> Tensors:
    """The tensors with a matrix for each expert instead of fused tensors, in which gate precedes up.

    A fused tensor is [E, outputs, inputs], or [E, inputs, outputs] in the published Qwen3-VL-MoE. The shape shows which
    of the two it is, as in transformers.

    cfg: the model. tensors: by name. module: the prefix of experts' tensor names, with a {} for the layer.
    """
    assert cfg.mixture is not None
    width, count = cfg.mixture.width, cfg.mixture.count
    sources = {
        "gate": ("gate_up", slice(0, width), (2 * width, cfg.hidden)),
        "up": ("gate_up", slice(width, None), (2 * width, cfg.hidden)),
        "down": ("down", slice(None), (cfg.hidden, width)),
    }
    fused: set[str] = set()
    parts: dict[str, Tensor] = {}
    for layer in range(cfg.layers):
        experts = module.format(layer)
        for name, (source, rows, usual) in sources.items():
            key = f"{experts}{source}_proj"
            if key not in tensors:
                continue
            tensor = tensors[key]
            check_shape(key, tensor, (count, *usual), (count, *usual[::-1]))
            inputs_first = tensor.shape[1:] != usual
            shape = (len(range(usual[0])[rows]), usual[1])
            fused.add(key)
            for expert in range(count):
                made = partial(_of_expert, tensor, expert, rows, inputs_first)
                parts[f"{experts}{expert}.{name}_proj.weight"] = MadeTensor(shape, tensor.dtype, made)
    return with_parts(tensors, fused, parts)


def _of_expert(fused: Tensor, expert: int, rows: slice, inputs_first: bool, dtype: Any) -> npt.NDArray[Any]:
    matrix = fused.view(dtype)[expert]
    return (matrix.T if inputs_first else matrix)[rows]
