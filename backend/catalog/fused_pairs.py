"""Adapters of fused experts in PEFT's files (`target_parameters`), divided into a pair for each expert's matrix.

transformers 5 keeps all experts of a layer in two parameters, `gate_up_proj` and `down_proj`, and PEFT adapts each with
one A [E * r, inputs] and one B [outputs, r * E]. The pairs of both have almost the same name, because PEFT wraps one
parameter around the other, but they have different shapes. An expert's gate and up have the same A.

Letters: E experts, D hidden, F width of an expert, r rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from tinkerflow.backend.catalog.peft_config import targets_parameter
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import family_of
from tinkerflow.backend.compute.models.peft_names import PEFT, pair_names
from tinkerflow.backend.store.peft import Floats

_A = re.compile(rf"{re.escape(PEFT)}((.+\.layers\.\d+\.)(?:\w+\.)?experts)\.(?:base_layer\.)*lora_A\.weight")


def with_separate_pairs(
    cfg: ModelConfig, tensors: Mapping[str, Floats], targets: Collection[str]
) -> tuple[Mapping[str, Floats], Mapping[str, str]]:
    """Divide the pairs of fused experts.

    Returns the tensors, with a pair for each matrix of an expert, and the parameter that contains each of these
    matrices, by the name of its module.

    cfg: the base model. tensors: by the names in the files. targets: the config's `target_parameters`. A pair of a
    parameter that is not targeted, that has a wrong shape, or that occurs twice stays as it is.
    """
    if not targets or cfg.mixture is None:
        return tensors, {}
    E, F, names = cfg.mixture.count, cfg.mixture.width, cfg.mixture.names
    gate, up = (slice(0, None, 2), slice(1, None, 2)) if family_of(cfg).interleaved else (slice(0, F), slice(F, None))
    parts: dict[tuple[int, int], tuple[str, tuple[tuple[str, slice], ...]]] = {
        (cfg.hidden, 2 * F): ("gate_up_proj", ((names[0], gate), (names[1], up))),
        (F, cfg.hidden): ("down_proj", ((names[2], slice(None)),)),
    }
    found, parameters = dict(tensors), dict[str, str]()
    for name, A in tensors.items():
        where, B = _A.fullmatch(name), tensors.get(name.replace(".lora_A.", ".lora_B."))
        if where is None or B is None or A.ndim != 2 or B.ndim != 2 or len(A) != B.shape[1] or len(A) % E:
            continue
        parameter, matrices = parts.get((A.shape[1], len(B)), ("", ()))
        if not targets_parameter(targets, f"{where[1]}.{parameter}"):
            continue
        A_Eri, B_orE = A.reshape(E, -1, A.shape[1]), B.reshape(len(B), -1, E)
        pairs: dict[str, Floats] = {}
        for expert in range(E):
            for matrix, rows in matrices:
                module = f"{where[2]}{cfg.mixture.module.format(expert)}{matrix}"
                pairs |= zip(pair_names(module), (A_Eri[expert], B_orE[rows, :, expert]), strict=True)
                parameters[module] = f"{where[1]}.{parameter}"
        if found.keys().isdisjoint(pairs):
            del found[name], found[name.replace(".lora_A.", ".lora_B.")]
            found |= pairs
    return found, parameters
