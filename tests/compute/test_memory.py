"""What training takes of the devices' memory: sizes that follow from the model and from what the devices say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.compute.conftest import Reference

from tinkerflow.backend.compute import memory
from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.families import load_config
from tinkerflow.backend.compute.mesh import make_mesh, replicated
from tinkerflow.backend.compute.params import count, load_params
from tinkerflow.backend.compute.transformer import Params

GB = 10**9
BFLOAT16 = Params(np.zeros((1, 1), jnp.bfloat16), {}, np.zeros(1), None)  # weights that are of that dtype


@pytest.fixture
def qwen3_4b(qwen3: Reference) -> ModelConfig:
    """The shape of Qwen3-4B."""
    shape = {"hidden": 2560, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 9728}
    return replace(load_config(qwen3.folder), **shape)


@pytest.fixture
def budget_of(qwen3_4b: ModelConfig) -> Any:
    """budget_of(limit, weights, tokens): in GB, on a GPU."""

    def budget(limit: float, weights: float, tokens: int = 0) -> memory.Budget:
        return memory.budget_for(qwen3_4b, jnp.bfloat16, 1, int(limit * GB) - int(weights * GB), tokens)

    return budget


@pytest.mark.parametrize(
    ("limit", "weights", "tokens", "again"),
    [
        (105, 8, 4096, False),  # an H200
        (30, 8, 2048, False),
        (18, 8, 1024, False),
        (12, 8, 1024, True),
    ],
)
def test_micro_batches_grow_with_memory_and_layers_are_computed_again_with_little(
    budget_of: Any, qwen3_4b: ModelConfig, limit: float, weights: float, tokens: int, again: bool
) -> None:
    budget = budget_of(limit, weights)
    assert budget.microbatch_tokens == tokens
    assert (memory.kept_bytes(qwen3_4b, 7 * 32, tokens, "bfloat16") > budget.kept_bytes) == again


def test_a_size_that_is_set_is_kept(budget_of: Any) -> None:
    assert budget_of(105, 8, 256).microbatch_tokens == 256


def test_on_cpus_sizes_do_not_depend_on_the_machine(qwen3: Reference) -> None:
    assert memory.training_budget(load_config(qwen3.folder), make_mesh(1, 1), BFLOAT16) == memory.Budget(1024, 2**30)


def test_a_device_holds_its_part_of_what_is_split(qwen3: Reference) -> None:
    mesh = make_mesh(1, 1)
    split, whole = jax.sharding.AbstractMesh((4, 1, 1), ("fsdp", "expert", "tensor")), replicated(mesh)
    arrays = [
        jax.ShapeDtypeStruct((8, 6), np.float32, sharding=NamedSharding(split, PartitionSpec("fsdp", None))),
        jax.ShapeDtypeStruct((3,), np.int8, sharding=whole),
    ]
    assert memory.held_bytes(arrays) == 2 * 6 * 4 + 3
    params = load_params(load_config(qwen3.folder), str(qwen3.folder), mesh, "float32", lambda line: None)
    assert memory.held_bytes(params) == 4 * count(params)
    assert memory.device_bytes() > memory.held_bytes(params)


def test_processes_agree_on_the_least() -> None:
    others = [5 * 2**31 + 7, 5 * 2**31 + 6, 6 * 2**31]

    def gather(mine: np.ndarray) -> np.ndarray:
        assert mine.dtype == np.int32
        return np.stack([mine, *(np.array(divmod(other, 2**31), np.int32) for other in others)])

    assert memory.least(9 * 2**31, gather) == 5 * 2**31 + 6
    assert memory.least(4, gather) == 4
    assert memory.least(9 * 2**31) == 9 * 2**31, "alone"
