"""Names of topologies, and the flops of a token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.accelerators.models import config
from tests.compute.shapes import QWEN3_4B, config_like

from tinkerflow.backend.compute.planning.roofline import training_bound, useful_flops
from tinkerflow.backend.compute.planning.topologies import DEVICES, parse_topology
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec

CFG = config_like(QWEN3_4B)


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("v6e:2x4", "v6e", 8),
        ("v5p:2x2x1", "v5p", 4),
        ("H100:2x8", "h100", 16),
        ("l4", "l4", 1),
        ("RTX-3090:2", "rtx3090", 2),
    ],
)
def test_a_topology_is_a_device_and_a_shape(text: str, name: str, count: int) -> None:
    topology = parse_topology(text)
    assert (topology.device, topology.count) == (DEVICES[name], count)
    assert parse_topology(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9:2x2", "topology 'v9:2x2': device 'v9' is unknown: must be one of v5e, v5p"),
        ("v6e:2x", "topology 'v6e:2x': shape '2x': must be positive numbers with an x between them"),
        ("h100:0", "topology 'h100:0': shape '0': must be positive"),
        ("h100:2x2x2", "topology 'h100:2x2x2': shape '2x2x2': GPUs have at most two numbers"),
        ("v6e:2x4x4", "topology 'v6e:2x4x4': shape '2x4x4': a slice of v6e has at most 2 dimensions"),
        ("h100:99999999999", "topology 'h100:99999999999': shape '99999999999': must have at most 65536 devices"),
    ],
)
def test_unknown_topology_is_refused_with_its_name(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_topology(text)
    assert caught.value.message.startswith(message)


def test_a_token_of_qwen3_4b_has_17_gflop_at_rank_32() -> None:
    plain, adapted = useful_flops(CFG, None, 1024), useful_flops(CFG, LoraSpec(32), 1024)
    assert plain == pytest.approx(4 * 4.02e9 + 6 * 36 * 4096 * 1024, rel=0.001)
    assert adapted - plain == pytest.approx(6 * 71e6, rel=0.01)


@pytest.mark.parametrize(("fsdp", "expert"), [(8, 1), (1, 8), (2, 4)])
def test_devices_send_the_experts_or_the_tokens_of_a_mixture(fsdp: int, expert: int) -> None:
    """Tokens move along the expert axis. Along fsdp, experts move if the tokens of all devices are more bytes."""
    cfg, slow = config("30B-A3B"), replace(DEVICES["h100"], link=1e6)
    group = GroupConfig("", "bfloat16", fsdp, 1, 1024, 0, 64, 8, "", expert=expert)
    experts = 48 * 128 * 3 * 2048 * 768
    weights = 2 * (experts + 48 * 2 * 2048 * (4096 + 512) + 151936 * 2048)

    def sent(tokens: int) -> float:
        bound = training_bound(cfg, group, slow, spec=LoraSpec(32), weights=weights, tokens=tokens, kept=0)
        assert bound.limit == "links"
        return bound.seconds * 1e6

    split, token = (fsdp - 1) / fsdp, 48 * 2048 * 6
    others = (weights - 2 * experts) / expert * split
    assert sent(1024) == pytest.approx(2 * (others + 1024 * token * 7 / 8))
    gathered = 2 * experts / expert * split
    assert sent(2**20) == pytest.approx(2 * (others + gathered + 2**20 / fsdp * token * (1 - 1 / expert)))
