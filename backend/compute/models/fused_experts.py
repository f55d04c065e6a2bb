"""Experts whose matrices are two tensors of a layer in the files: gate and up as one, and down. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy.typing as npt

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import VISION_TEXT
from tinkerflow.backend.compute.weights.files import MadeTensor, Tensor


def with_experts_apart(
    cfg: ModelConfig, tensors: Mapping[str, Tensor], module: str = f"{VISION_TEXT}mlp.experts."
) -> Mapping[str, Tensor]:
    """The tensors with a matrix for each expert in place of those of all, gate before up.

    A tensor of all experts is [E, outputs, inputs], or [E, inputs, outputs] as Qwen3-VL-MoE is published; transformers
    reads both, too, and tells them by their shapes.

    cfg: the model. tensors: by name. module: what names of experts' tensors begin with, with a {} for the layer.
    """
    found = dict(tensors)
    parts = {
        "gate": ("gate_up", slice(0, cfg.mlp), (2 * cfg.mlp, cfg.hidden)),
        "up": ("gate_up", slice(cfg.mlp, None), (2 * cfg.mlp, cfg.hidden)),
        "down": ("down", slice(None), (cfg.hidden, cfg.mlp)),
    }
    for layer in range(cfg.layers):
        experts = module.format(layer)
        for name, (source, own, usual) in parts.items():
            whole = tensors.get(f"{experts}{source}_proj")
            if whole is None or len(whole.shape) != 3 or whole.shape[0] != cfg.experts:
                continue  # the experts' matrices are missing, and named as such
            found.pop(f"{experts}{source}_proj", None)
            inputs_first = whole.shape[1:] != usual and whole.shape[:0:-1] == usual
            outputs, inputs = usual if inputs_first else whole.shape[1:]
            shape = (len(range(outputs)[own]), inputs)
            for expert in range(cfg.experts):
                made = partial(_of_expert, whole, expert, own, inputs_first)
                found[f"{experts}{expert}.{name}_proj.weight"] = MadeTensor(shape, whole.dtype, made)
    return found


def _of_expert(fused: Tensor, expert: int, own: slice, inputs_first: bool, dtype: Any) -> npt.NDArray[Any]:
    matrix = fused.view(dtype)[expert]
    return (matrix.T if inputs_first else matrix)[own]
