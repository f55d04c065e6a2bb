"""Adapters that PEFT trains on the fused experts of transformers 5: the imported weights are those that PEFT merges."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from tests.compute.closeness import close
from tests.compute.conftest import build

from tinkerflow.backend.catalog.merging import merge
from tinkerflow.backend.catalog.peft_import import import_adapter
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import LoraSpec
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
PATTERNS = {"rank_pattern": {GATE_UP: 6, "q_proj": 2}, "alpha_pattern": {"down_proj": 5}}

RSLORA, ROUTED = {"use_rslora": True}, LoraSpec(4, train_attn=False)


def saved(folder, architecture, **config):
    """A tiny model on disk, the bytes of a random adapter's files, and the adapted model in torch."""
    import peft  # here, because the import takes seconds in each process that collects tests

    base = build(folder / "base", architecture, tied=False)
    lora = peft.LoraConfig(r=4, lora_alpha=10, init_lora_weights=False, **config)
    with warnings.catch_warnings():
        # PEFT looks for a module that matches the pattern, but it is a parameter.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        adapted = peft.get_peft_model(base.model, lora)
    adapted.save_pretrained(folder / "adapter")
    return base, [(folder / "adapter" / file).read_bytes() for file in (ADAPTER_CONFIG, ADAPTER)], adapted


@pytest.mark.parametrize(
    ("architecture", "config", "spec"),
    [
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": [GATE_UP, DOWN], **PATTERNS}, LoraSpec(6)),
        # PEFT converts the modules of experts to their fused parameters, with twice the rank for gate and up.
        ("qwen3_moe", {"target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"]}, LoraSpec(8)),
        ("gpt_oss", {"target_modules": [], "target_parameters": [f"mlp.{GATE_UP}", DOWN], **RSLORA}, ROUTED),
        ("minimax_m2", {"target_modules": ["q_proj"], "target_parameters": [DOWN]}, LoraSpec(4)),
    ],
)
def test_merged_weights_equal_those_of_peft(tmp_path, architecture, config, spec):
    base, files, adapted = saved(tmp_path, architecture, **config)
    state = import_adapter(load_config(base.folder), *files)
    assert state.spec == replace(spec, train_unembed=False)
    merge(base.folder, state, tmp_path / "merged")
    found = type(base.model).from_pretrained(tmp_path / "merged").state_dict()
    for name, wanted in adapted.merge_and_unload().state_dict().items():
        close(found[name].numpy(), wanted.numpy())


def test_other_pairs_of_fused_experts_are_refused(tmp_path):
    base, files, _ = saved(tmp_path, "qwen3_moe", target_modules=[], target_parameters=[GATE_UP, DOWN])
    cfg = load_config(base.folder)
    for old, new, message in (
        (b'"experts.down_proj"', b'"experts.other"', r"target_parameters is .*: must be a list of names that end in"),
        (b'"experts.down_proj"', b'"other.down_proj"', r"tensor '.*mlp\.experts\.lora_A\.weight' is not part of an ad"),
        (b'"r": 4', b'"r": 2', r"the rank of '.*experts\.0\.gate_proj' is 2: must be 4, as in adapter_model"),
    ):
        assert old in files[0]
        with pytest.raises(UserError, match=message):
            import_adapter(cfg, files[0].replace(old, new), files[1])
    assert np.isfinite(next(iter(import_adapter(cfg, *files).weights.values()))).all()
