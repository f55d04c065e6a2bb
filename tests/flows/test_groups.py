from __future__ import annotations

from pathlib import Path

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.settings import Settings
from tinkerflow.flows.groups import group_config

CARD = ModelCard("m", "/models/m", "m", "Qwen3", 32, 128, (2,), 10, tied=False)


def test_a_group_gets_the_axes_that_are_set_and_finds_the_rest_itself(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, processes=3, tensor_parallel=4, expert_parallel=2, platform="cuda")
    config = group_config(settings, CARD.path, CARD.max_context, experts=True)
    assert (config.fsdp, config.tensor, config.expert, config.platform) == (0, 4, 2, "cuda")
    assert group_config(settings, CARD.path, CARD.max_context, experts=False).expert == 1
    split = Settings(data_dir=tmp_path, context_parallel=8)
    assert group_config(split, CARD.path, 128, experts=False).context_parallel == 8
    assert (config.model_path, config.max_context, config.base_weights) == ("/models/m", 128, "full")


def test_the_settings_of_the_weights_reach_the_group(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, dtype="bfloat16", base_weights="int8")
    config = group_config(settings, CARD.path, CARD.max_context, experts=False)
    assert (config.dtype, config.base_weights) == ("bfloat16", "int8")
