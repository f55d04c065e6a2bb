"""The memory plan: sizes computed from the model, the mesh and the memory of a device."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.compute.conftest import Reference
from tests.compute.shapes import QWEN3_4B, config_like

from tinkerflow.backend.compute.mesh import make_mesh, replicated
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.params import count, load_params
from tinkerflow.backend.compute.planning import array_sizes, memory_plan, training_memory
from tinkerflow.backend.compute.planning.topologies import parse_topology
from tinkerflow.backend.compute.platforms import CUDA, TPU, compiling_for
from tinkerflow.backend.compute.training import budget as budget_module
from tinkerflow.backend.compute.training.adapters import AdapterStore
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec

GB = 10**9


CFG = config_like(QWEN3_4B)
QWEN3_8B = config_like(QWEN3_4B, hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False)


def budget_of(limit: int, tokens: int = 0) -> budget_module.Budget:
    """The budget on a GPU with this memory in GB. The weights take 8 GB."""
    return training_memory.budget_for(CFG, config_of(microbatch_tokens=tokens), (limit - 8) * GB)


@pytest.mark.parametrize(
    ("limit", "tokens", "again"),
    [
        (105, 4096, False),  # an H200
        (30, 2048, False),
        (18, 1024, False),
        (12, 1024, True),
    ],
)
def test_micro_batches_grow_with_memory_and_little_memory_recomputes_layers(
    limit: int, tokens: int, again: bool
) -> None:
    budget = budget_of(limit)
    assert budget.microbatch_tokens == tokens
    assert (budget_module.kept_bytes(CFG, 7 * 32, tokens, "bfloat16") > budget.kept_bytes) == again


def test_configured_size_is_kept() -> None:
    assert budget_of(105, 256).microbatch_tokens == 256


def config_of(name: str = "m", **changes: Any) -> GroupConfig:
    """Settings of a group, by default of one device with bfloat16."""
    plain = GroupConfig(name, "bfloat16", 1, 1, 32768, 0, 64, 8, "")
    return replace(plain, **changes)


def test_cpu_sizes_do_not_depend_on_the_machine(qwen3: Reference) -> None:
    plan = memory_plan.plan_group(load_config(qwen3.folder), config_of(max_context=300))
    assert plan.budget == budget_module.Budget(1024, 2**30)
    assert (plan.limit, plan.uses, plan.context, plan.rule) == (None, None, 300, "the model's context")
    by_use = plan.by_use(load_config(qwen3.folder), config_of(max_context=300))
    assert by_use.keys() == {"weights", "kv_cache"} and min(by_use.values()) > 0


@pytest.mark.parametrize("memory_gb", [24, 33.5, 64, 78.7, 140])
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 8}, {"tensor": 8}])
@pytest.mark.parametrize("weights", ["full", "int8", "nf4"])
def test_memory_uses_add_up_to_at_most_the_limit(memory_gb: float, mesh: dict[str, int], weights: str) -> None:
    limit, config = int(memory_gb * GB), config_of(base_weights=weights, **mesh)
    plan = memory_plan.plan_memory(CFG, config, limit)
    assert plan.uses is not None
    assert plan.uses.total <= limit
    assert sum(plan.by_use(CFG, config).values()) == plan.uses.total
    assert min(getattr(plan.uses, each.name) for each in fields(plan.uses)) >= 0
    assert plan.cells >= plan.context * config.fsdp, "a row of the longest sequence fits"
    assert plan.resident_adapters is not None
    assert plan.resident_adapters >= 1
    assert plan == memory_plan.plan_memory(CFG, config, limit), "it depends on sizes alone"
    more = memory_plan.plan_memory(CFG, config, 2 * limit)
    assert more.context >= plan.context
    assert more.budget.microbatch_tokens >= plan.budget.microbatch_tokens


@pytest.mark.parametrize(("kv_heads", "axes"), [(8, (1, 8)), (4, (2, 4)), (6, (4, 2)), (1, (8, 1))])
def test_key_value_heads_are_split_as_far_as_devices_divide_them_and_sequences_over_the_rest(
    kv_heads: int, axes: tuple[int, int]
) -> None:
    cfg = config_like(QWEN3_4B, num_key_value_heads=kv_heads, num_attention_heads=48)
    for mesh in ({"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"tensor": 8}):
        split = memory_plan.sampling_config(cfg, config_of(expert=2, **mesh))
        assert (split.fsdp, split.tensor, split.expert) == (*axes, 2)


def test_an_8b_model_trains_at_8k_with_sixteen_adapters_on_one_h100() -> None:
    plan = memory_plan.plan_memory(QWEN3_8B, config_of(), int(78.7 * GB))
    assert plan.context >= 8192
    assert plan.resident_adapters is not None
    assert plan.resident_adapters >= 16
    assert plan.budget.microbatch_tokens == 4096
    text = plan.describe()
    assert "weights          16.38 GB" in text
    assert plan.uses is not None and plan.uses.logits == 64 * QWEN3_8B.vocab * 20
    assert f"sequences of up to {plan.context} tokens" in text


def test_a_cache_in_float8_has_twice_as_many_positions() -> None:
    limit = parse_topology("h100:1").device.limit
    plain, small = (memory_plan.plan_memory(CFG, config_of(kv_cache=kind), limit) for kind in ("full", "float8"))
    assert plain.uses is not None and plain.uses == small.uses
    assert small.cells >= 2 * plain.cells


def test_plan_for_many_small_devices_gives_replicated_arrays_a_larger_share() -> None:
    with compiling_for(TPU):
        plan = memory_plan.plan_memory(QWEN3_8B, config_of(fsdp=16), parse_topology("v5e:4x4").device.limit)
    assert plan.context >= 4096 and plan.uses is not None and plan.resident_adapters is not None
    assert plan.resident_adapters >= 16
    step, left = plan.uses.activations + plan.uses.temporaries, plan.limit - plan.uses.weights - plan.uses.reserve
    assert 0.35 < step / left < 0.6


def test_model_that_leaves_too_little_memory_is_refused() -> None:
    with pytest.raises(UserError, match=r"base model 'big': its weights take \d\.\d GB of the 8\.0 GB"):
        memory_plan.plan_memory(CFG, config_of("big"), 8 * GB)
    large = config_of(microbatch_tokens=10**6)
    with pytest.raises(UserError, match=r"step of 1000000 tokens takes \d+\.\d\d GB .*a smaller TINKERFLOW_MICRO"):
        memory_plan.plan_memory(CFG, large, 80 * GB)
    split = config_of(fsdp=16)
    with pytest.raises(
        UserError, match=r"step of 1024 tokens takes \d\.\d\d GB and only \d\.\d\d are left\. Use more dev"
    ):
        memory_plan.plan_memory(CFG, split, 6 * GB)
    assert memory_plan.plan_memory(CFG, config_of(fsdp=4, tensor=4), 6 * GB).context, "as the error says"


def test_plan_can_be_made_for_a_given_memory(qwen3: Reference) -> None:
    cfg = load_config(qwen3.folder)
    config = config_of(dtype="float32", device_memory=0.5, max_context=300)
    plan = memory_plan.plan_group(cfg, config)
    assert plan == memory_plan.plan_memory(cfg, config, GB // 2)
    assert plan.rule == "the most that fits this group's devices with 0.5 GB each"


def test_devices_that_do_not_report_memory_need_the_setting_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling_for(CUDA), pytest.raises(UserError, match="device_memory is 0, and cpu does not report its memory"):
        memory_plan.device_limit(config_of())

    class Device:
        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 64 * GB}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    with compiling_for(CUDA):
        assert memory_plan.device_limit(config_of()) == 64 * GB
        assert memory_plan.device_limit(config_of(device_memory=40)) == 40 * GB


@pytest.mark.parametrize("weights", ["full", "int8", "nf4"])
def test_weights_and_adapters_take_the_planned_bytes(reference: Reference, weights: Any) -> None:
    folder = reference.folder
    cfg, mesh = load_config(folder), make_mesh(1, 1)
    config = config_of(str(folder), dtype="float32", base_weights=weights)
    params = load_params(cfg, str(folder), mesh, "float32", base_weights=weights)
    assert array_sizes.held_bytes(params) == array_sizes.weight_bytes(cfg, config)
    adapters, spec = AdapterStore(cfg, mesh, str(folder)), LoraSpec(4, train_mlp=False)
    adapters.create("a", spec, 0, "adamw")
    made = adapters.get("a")
    took = array_sizes.held_bytes((made.lora, made.grads, made.state.parts))
    assert took == training_memory.adapter_bytes(cfg, config, spec, "adamw")


def test_held_bytes_count_one_shard_of_split_arrays(qwen3: Reference) -> None:
    mesh = make_mesh(1, 1)
    split, whole = jax.sharding.AbstractMesh((4, 1, 1), ("fsdp", "expert", "tensor")), replicated(mesh)
    arrays = [
        jax.ShapeDtypeStruct((8, 6), np.float32, sharding=NamedSharding(split, PartitionSpec("fsdp", None))),
        jax.ShapeDtypeStruct((3,), np.int8, sharding=whole),
    ]
    assert array_sizes.held_bytes(arrays) == 2 * 6 * 4 + 3
    params = load_params(load_config(qwen3.folder), str(qwen3.folder), mesh, "float32", lambda line: None)
    assert array_sizes.held_bytes(params) == 4 * count(params)


def test_processes_agree_on_the_smallest_memory() -> None:
    others = [5 * 2**31 + 7, 5 * 2**31 + 6, 6 * 2**31]

    def gather(mine: np.ndarray) -> np.ndarray:
        assert mine.dtype == np.int32
        return np.stack([mine, *(np.array(divmod(other, 2**31), np.int32) for other in others)])

    assert memory_plan.least(9 * 2**31, gather) == 5 * 2**31 + 6
    assert memory_plan.least(4, gather) == 4
    assert memory_plan.least(9 * 2**31) == 9 * 2**31, "alone"


def test_attention_scores_without_a_gpu_kernel_are_counted() -> None:
    wide, limit = config_like(QWEN3_4B, head_dim=512, num_attention_heads=16, num_key_value_heads=4), int(80 * GB)
    with compiling_for(TPU):
        without = memory_plan.plan_memory(wide, config_of(), limit)
    with compiling_for(CUDA):
        plan = memory_plan.plan_memory(wide, config_of(), limit)
    assert without.uses is not None and plan.uses is not None
    scores = 16 * (32768 // 8) * 32768 * 12  # a block of an eighth of the queries
    assert scores > limit // 4
    assert plan.context < without.context, "the limit of longer sequences"


def test_logits_of_indivisible_slots_are_replicated() -> None:
    def rows(slots: int, **mesh: int) -> float:
        return memory_plan._logit_bytes(CFG, config_of(sample_slots=slots, **mesh)) / (CFG.vocab * 20)

    assert rows(64) == 64
    assert rows(64, tensor=8) == 8
    assert rows(60, tensor=8) == 60


def test_a_step_reads_rows_of_an_embedding_that_is_not_the_unembedding() -> None:
    table, cfg = CFG.vocab * CFG.hidden * 2, replace(CFG, tied=False)
    assert array_sizes.step_weights(replace(cfg, tied=True), config_of(), 64) == array_sizes.weight_bytes(
        replace(cfg, tied=True), config_of()
    )
    read = array_sizes.step_weights(cfg, config_of(), 64)
    assert read == pytest.approx(array_sizes.weight_bytes(cfg, config_of()) - table + 64 * CFG.hidden * 2)
