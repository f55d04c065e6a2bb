"""Loops over different kinds of layers compute each layer once, in order, with its own weights."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.shapes import config_of

from tinkerflow.backend.compute.models import layer_loop as layers
from tinkerflow.backend.compute.models.layer_loop import over_layers, runs
from tinkerflow.backend.compute.models.lora import LoraPair


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("ffff", [(0, 1, 4)]),
        ("f", [(0, 1, 1)]),
        ("sf", [(0, 1, 1), (1, 1, 1)]),
        ("sfsfsf", [(0, 2, 3)]),
        ("dddfdddf", [(0, 4, 2)]),
        ("dfff", [(0, 1, 1), (1, 1, 3)]),
        ("sssssfsssssfss", [(0, 6, 2), (12, 1, 2)]),
    ],
)
def test_runs_hold_the_most_layers(pattern, expected):
    assert list(runs(config_of(pattern).decoder_layers)) == expected


@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "by layer"])
@pytest.mark.parametrize("pattern", ["ffff", "sfsfsf", "dddfdddf", "dddfdddfdd", "dfff"])
def test_each_layer_gets_its_weights_and_its_place(monkeypatch, pattern, apart):
    cfg = config_of(pattern)
    homes = {"all": tuple(range(cfg.layers))} | {
        kind.pool: cfg.numbers(kind.pool) for kind in cfg.decoder_layers if len(cfg.numbers(kind.pool)) < cfg.layers
    }
    monkeypatch.setattr(layers, "layers_with", lambda _: homes)
    stacks = {name: jnp.asarray(numbers, jnp.float32) for name, numbers in homes.items()}
    pairs: dict[str, LoraPair] = {name: LoraPair(A=stack, B=stack) for name, stack in stacks.items()}
    seen = []

    def layer(kind, carry, own):
        place, weights, lora = own
        seen.append(sorted(weights))
        assert isinstance(weights, Mapping)
        assert set(weights) == set(lora) == {name for name in ("all", kind.pool) if name in homes}
        number, done = jnp.int32(weights["all"]), carry[0]
        facts = [weights["all"], lora["all"].A, weights.get(kind.pool, weights["all"]), place, kind.window or 0]
        return done + 1, carry[1].at[done].set(jnp.stack([jnp.float32(fact) for fact in facts])), carry[2] + number

    params = stacks
    if apart:
        params = tuple(
            {name: stacks[name][homes[name].index(number)] for name in homes if number in homes[name]}
            for number in range(cfg.layers)
        )
    start = (jnp.int32(0), jnp.zeros((cfg.layers, 5)), jnp.int32(0))
    _, found, _ = over_layers(cfg, layer, start, params, pairs)
    expected = [
        (number, number, number, cfg.numbers(kind.pool).index(number), kind.window or 0)
        for number, kind in enumerate(cfg.decoder_layers)
    ]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    if not apart:
        assert (
            len(seen) <= sum(period for _, period, _ in runs(cfg.decoder_layers)) + 1
        )  # one program for each layer of a period


@pytest.mark.parametrize("pattern", ["ffff", "sfsfsf", "dfff"])
def test_a_backward_pass_keeps_no_copies_of_weights(monkeypatch, pattern):
    cfg, D = config_of(pattern), 4
    monkeypatch.setattr(layers, "layers_with", lambda _: {"all": tuple(range(cfg.layers))})
    stack = jnp.ones((cfg.layers, D, D))

    def loss(x):
        def layer(kind, x, own):
            return jnp.tanh(x @ own[1]["all"])

        return jnp.sum(over_layers(cfg, layer, x, {"all": stack}, {}, kept=jax.checkpoint))

    _, pull = jax.vjp(loss, jnp.ones((2, D)))
    shapes = [leaf.shape for leaf in jax.tree.leaves(pull)]
    assert shapes
    assert [shape for shape in shapes if shape[-2:] == (D, D) and shape != stack.shape] == []
