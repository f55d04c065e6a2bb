"""Adapters that PEFT made with other settings than ours: imported, they have PEFT's logprobs, and train as in PEFT."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import examples, forward
from tests.compute.test_parity import ADAM, scores

from tinkerflow.backend.catalog.peft_import import import_adapter
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.spec.commands import ExportAdapter, ImportAdapter, OptimStep
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("rank", "fields"),
    [
        (4, {"target_modules": ["q_proj", "v_proj"]}),
        (6, {"target_modules": ALL, "r": 6, "use_rslora": True}),
        (4, {"target_modules": ["o_proj", "down_proj"], "layers_to_transform": [1]}),
        (4, {"target_modules": r".*layers\.1\..*(down_proj|o_proj)", "exclude_modules": ["o_proj"]}),
        (6, {"target_modules": ALL, "rank_pattern": {"o_proj": 2, "up_proj": 6}, "alpha_pattern": {"o_proj": 5}}),
        (6, {"target_modules": ALL, "rank_pattern": {"q_proj": 6, "1.mlp.up_proj": 1}, "use_rslora": True}),
    ],
)
def test_an_adapter_of_some_modules_ranks_and_scales_equals_peft(qwen3, executor, tmp_path, rank, fields):
    import peft  # here, because the import takes seconds in each process that collects tests

    adapted = peft.get_peft_model(
        qwen3.model, peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 10} | fields)
    )
    data = examples((33, 60))
    try:
        torch.manual_seed(0)
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        for parameter in trained:
            torch.nn.init.normal_(parameter, std=0.2)
        adapted.save_pretrained(tmp_path)
        with torch.no_grad():
            wanted = [scores(adapted, example)[:, 0].numpy() for example in data]
        names = {name for name, _ in adapted.named_modules() if name.endswith(".lora_A")}
    finally:
        adapted.unload().requires_grad_(True)
    state = import_adapter(
        load_config(qwen3.folder), (tmp_path / ADAPTER_CONFIG).read_bytes(), (tmp_path / ADAPTER).read_bytes()
    )
    assert state.spec.rank == rank
    executor.execute(ImportAdapter("imported", state))
    result = forward(executor, "imported", data, backward=True)
    for found, expected in zip(result.logprobs, wanted, strict=True):
        close_logprobs(found, expected)
    executor.execute(OptimStep("imported", ADAM))
    weights = executor.execute(ExportAdapter("imported", optimizer=False)).weights
    changed = {name.removesuffix(".weight") for name, array in weights.items() if array.any() and "lora_A" in name}
    assert changed == names  # PEFT trains no other modules
    # Rows beyond a module's own rank stay zero as well.
    assert sum(np.count_nonzero(array) for array in weights.values()) == sum(each.numel() for each in trained)
