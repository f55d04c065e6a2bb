"""Compiled programs go with the shapes of adapters that are not used any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from tinkerflow.backend.commands import CreateAdapter, DropAdapter, LoraSpec
from tinkerflow.backend.compute import executor as executor_module
from tinkerflow.backend.compute import train_programs
from tinkerflow.backend.compute.train import Steps
from tinkerflow.backend.compute.train_programs import StepsByShape


def make() -> Steps:
    one, two, three, four = (jax.jit(lambda x, power=power: x**power) for power in range(4))
    return Steps(one, two, three, four)  # type: ignore[arg-type]


def programs() -> int:
    """How many programs this process holds."""
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LoraSpec]]:
    monkeypatch.setattr(train_programs, "_UNUSED_SHAPES", 2)
    yield [LoraSpec(rank) for rank in range(1, 7)]


def test_shapes_without_adapters_lose_their_programs(shapes: list[LoraSpec]) -> None:
    steps, before = StepsByShape(make, lambda: 0.0), programs()
    for spec in shapes:
        steps.of(spec).optimize(np.ones(spec.rank))  # type: ignore[call-arg, arg-type]
    assert steps.trim(shapes) == [] and programs() == before + 6
    kept = steps.of(shapes[0])
    assert steps.trim({shapes[1]}) == shapes[2:5]  # of the five others the last used two stay
    assert programs() == before + 3
    assert steps.of(shapes[0]) is kept


def test_while_memory_maps_are_few_shapes_with_adapters_lose_theirs(shapes: list[LoraSpec]) -> None:
    used = iter((0.9, 0.8, 0.7))
    steps = StepsByShape(make, lambda: next(used))
    for spec in shapes:
        steps.of(spec)
    assert steps.trim(shapes) == shapes[:2]
    alone = StepsByShape(make, lambda: 1.0)
    alone.of(shapes[0])
    assert alone.trim(shapes) == []


def test_the_executor_forgets_the_shapes_of_dropped_adapters(qwen3, shapes, examples, forward, monkeypatch) -> None:
    monkeypatch.setattr(executor_module, "memory_maps_used", lambda: 0.0)  # other tests leave programs here
    executor = qwen3.executor()
    for spec in shapes[:4]:
        executor.execute(CreateAdapter("a", spec, 0))
        forward(executor, "a", examples((9,)), backward=False)
        executor.execute(DropAdapter("a"))
    assert [*executor._steps._steps] == shapes[2:4]
    assert {spec for _, spec, _ in executor._announced} == set(shapes[2:4])
