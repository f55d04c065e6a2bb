"""A training step computes each necessary matmul once. The matmuls are counted in its program."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.lora_weights import init_lora
from tinkerflow.backend.compute.models.params import load_params
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.compute.training.token_losses import choose
from tinkerflow.backend.compute.training.train import DeviceBatch, make_steps
from tinkerflow.backend.spec.commands import LoraSpec
from tinkerflow.backend.spec.losses import packed_inputs

ROWS, TOKENS, RANK = 2, 64, 4


def matmuls(jaxpr: Any, *, batched: bool) -> int:
    """Multiply-adds of all matmuls of a program with a batch dimension (attention's), or without."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), (over, _) = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            if bool(over) == batched:
                total += math.prod(eqn.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(matmuls(inner, batched=batched) for inner in jaxprs_in_params(eqn.params))
    return total


def size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def test_no_matmul_is_computed_again_for_the_backward_pass(qwen3):
    cfg, mesh = load_config(str(qwen3.folder)), make_mesh(1, 1)
    params = load_params(cfg, str(qwen3.folder), mesh, "float32", lambda line: None)
    lora = init_lora(cfg, LoraSpec(RANK), 0)
    batch = DeviceBatch(
        ints_BTI=np.ones((ROWS, TOKENS, 4), np.int32),
        floats_BTJK=np.ones((ROWS, TOKENS, len(packed_inputs()), 1), np.float32),
        choice=choose("cross_entropy", {}),
    )
    program = jax.make_jaxpr(make_steps(cfg, mesh, Budget(1024, 2**30)).backward)(params, lora, lora, batch)
    matrices = [params.layers[name] for name in ("q", "k", "v", "o", "gate", "up", "down")]
    frozen = size(matrices) + size(params.embed_VD)  # tied: the embedding is multiplied as the unembedding
    assert isinstance(lora, Lora) and params.unembed_VD is None
    # Frozen weights: the forward product and the gradient of the input. An adapter: also the gradient of its weights.
    assert matmuls(program.jaxpr, batched=False) == ROWS * TOKENS * (2 * frozen + 3 * size(lora))
    # Attention: scores and their product with v. Backward: scores again, and the gradients of weights, v, q and k.
    attention = 7 * cfg.layers * ROWS * cfg.heads * TOKENS**2 * cfg.attentions[0].widths[0]
    assert matmuls(program.jaxpr, batched=True) == attention
