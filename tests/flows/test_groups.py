from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinkerflow.backend.errors import UserError
from tinkerflow.backend.model_card import ModelCard
from tinkerflow.backend.settings import Settings
from tinkerflow.flows.groups import group_config

CARD = ModelCard("m", "/models/m", "m", "Qwen3", 32, 128, (2,), 10, tied=False)


@pytest.mark.parametrize(
    ("processes", "tensor", "expert", "mesh"),
    [
        (1, 1, 1, (1, 1, 1)),
        (2, 1, 1, (2, 1, 1)),
        (2, 2, 1, (1, 2, 1)),
        (4, 2, 1, (2, 2, 1)),
        (1, 2, 1, (1, 2, 1)),
        (4, 1, 2, (2, 1, 2)),
        (8, 2, 2, (2, 2, 2)),
        (1, 2, 2, (1, 2, 2)),
    ],
)
def test_mesh(tmp_path: Path, processes: int, tensor: int, expert: int, mesh: tuple[int, int, int]) -> None:
    settings = Settings(data_dir=tmp_path, processes=processes, tensor_parallel=tensor, expert_parallel=expert)
    config = group_config(settings, CARD)
    assert (config.fsdp, config.tensor, config.expert) == mesh
    assert config.devices == mesh[0] * mesh[1] * mesh[2]
    assert (config.model_path, config.max_context, config.base_weights) == ("/models/m", 128, "full")


def test_the_settings_of_the_weights_reach_the_group(tmp_path: Path) -> None:
    config = group_config(Settings(data_dir=tmp_path, dtype="bfloat16", base_weights="int8"), CARD)
    assert (config.dtype, config.base_weights) == ("bfloat16", "int8")


@pytest.mark.parametrize(("processes", "tensor"), [(3, 2), (2, 3)])
def test_a_mesh_that_cannot_be_is_refused_by_name(tmp_path: Path, processes: int, tensor: Any) -> None:
    with pytest.raises(UserError, match=f"processes is {processes} and tensor_parallel is {tensor}"):
        group_config(Settings(data_dir=tmp_path, processes=processes, tensor_parallel=tensor), CARD)
