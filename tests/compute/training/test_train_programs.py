"""Compiled programs are dropped with the shapes of adapters that are no longer used."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from tests.compute.conftest import examples, forward

from tinkerflow.backend.compute import adapter_programs
from tinkerflow.backend.compute.training import train_programs
from tinkerflow.backend.compute.training.train import Steps
from tinkerflow.backend.compute.training.train_programs import StepsByShape
from tinkerflow.backend.spec.commands import CreateAdapter, DropAdapter, LoraSpec


def make() -> Steps:
    one, two, three, four = (jax.jit(lambda x, power=power: x**power) for power in range(4))
    return Steps(one, two, three, four)  # type: ignore[arg-type]


def programs() -> int:
    """The number of compiled programs in this process."""
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LoraSpec]]:
    monkeypatch.setattr(train_programs, "_UNUSED_SHAPES", 2)
    yield [LoraSpec(rank) for rank in range(1, 7)]


def test_shapes_without_adapters_lose_their_programs(shapes: list[LoraSpec]) -> None:
    gone: list[LoraSpec] = []
    steps, before = StepsByShape(make, lambda: 0.0, gone.append), programs()
    for spec in shapes:
        steps.steps_of(spec).optimize(np.ones(spec.rank))  # type: ignore[call-arg, arg-type]
    steps.trim(shapes)
    assert gone == [] and programs() == before + 6
    kept = steps.steps_of(shapes[0])
    steps.trim({shapes[1]})
    assert gone == shapes[2:5]  # of the five others, the two that were used last stay
    assert programs() == before + 3
    assert steps.steps_of(shapes[0]) is kept


def test_shapes_with_adapters_lose_programs_while_memory_maps_are_scarce(shapes: list[LoraSpec]) -> None:
    used = iter((0.9, 0.8, 0.7))
    gone: list[LoraSpec] = []
    steps = StepsByShape(make, lambda: next(used), gone.append)
    for spec in shapes:
        steps.steps_of(spec)
    steps.trim(shapes)
    assert gone == shapes[:2]
    alone = StepsByShape(make, lambda: 1.0, gone.append)
    alone.steps_of(shapes[0])
    alone.trim(shapes)
    assert gone == shapes[:2]


def test_models_that_alternate_between_ranks_reuse_their_programs() -> None:
    ranks = [LoraSpec(2**power) for power in range(9)]
    steps = StepsByShape(make, lambda: 0.0, lambda spec: None)
    first = [steps.steps_of(spec) for spec in ranks]
    for spec, its in zip(ranks, first, strict=True):
        assert steps.steps_of(spec) is its
        steps.trim({spec})


def test_the_executor_forgets_the_shapes_of_dropped_adapters(qwen3, shapes, monkeypatch) -> None:
    monkeypatch.setattr(adapter_programs, "memory_maps_used", lambda: 0.0)  # other tests leave programs in this process
    executor = qwen3.executor()
    for spec in shapes[:4]:
        executor.execute(CreateAdapter("a", spec, 0))
        forward(executor, "a", examples((9,)), backward=False)
        executor.execute(DropAdapter("a"))
    assert [*executor._programs._steps._steps] == shapes[2:4]
    assert {spec for _, spec, _ in executor._programs._announced} == set(shapes[2:4])
