"""Adapters are exported and imported again. The error for a state of another model names the tensor."""

from __future__ import annotations

import numpy as np
import pytest
from tests.compute.conftest import examples, forward

from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.lora_weights import from_peft, init_lora, to_peft
from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.spec.commands import CreateAdapter, ExportAdapter, ImportAdapter, LoraSpec, OptimStep
from tinkerflow.backend.spec.optimizers.adamw import AdamParams

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def state(executor):
    executor.execute(CreateAdapter("source", LoraSpec(4), 3))
    return executor.execute(ExportAdapter("source", optimizer=True))


def test_names_and_back(qwen3, state):
    assert state.weights[NAME].shape == (4, 32)
    assert state.weights["base_model.model.lm_head.lora_B.weight"].shape == (96, 4)
    assert all(array.flags.c_contiguous for array in (*state.weights.values(), *state.moments.values()))
    cfg = load_config(qwen3.folder)
    again = to_peft(cfg, from_peft(cfg, state.spec, lambda name, shape: state.weights[name]))
    assert all((array == state.weights[name]).all() for name, array in again.items())


def test_initial_adapter_part_does_not_depend_on_other_adapted_parts(qwen3):
    cfg = load_config(qwen3.folder)
    whole, part = (to_peft(cfg, init_lora(cfg, LoraSpec(4, train_mlp=mlp), seed=9)) for mlp in (True, False))
    assert len(part) < len(whole)
    assert all((array == whole[name]).all() for name, array in part.items())
    bound = 1 / np.sqrt(32)
    assert 0.8 * bound < np.abs(whole[NAME]).max() <= bound


def test_training_leaves_an_imported_state_alone(executor, state):
    before = {name: array.copy() for name, array in state.weights.items()}
    executor.execute(ImportAdapter("copy", state))
    forward(executor, "copy", examples((9,)), backward=True)
    executor.execute(OptimStep("copy", AdamParams(learning_rate=0.1)))
    assert all((array == before[name]).all() for name, array in state.weights.items())


def test_optimizer_starts_fresh_without_moments(executor, state):
    """The step restarts at 0, too, because AdamW corrects its moments by it."""
    ends = []
    executor.execute(ImportAdapter("late", state.copy_with(moments={}, step=100)))
    for name in ("late", "later"):
        forward(executor, name if name == "late" else "later", examples((9,)), backward=True)
        executor.execute(OptimStep(name, AdamParams(learning_rate=0.1)))
        after = executor.execute(ExportAdapter(name, optimizer=True))
        if name == "late":
            assert after.step == 1
            executor.execute(ImportAdapter("later", after))
            forward(executor, "late", examples((9,)), backward=True)
            executor.execute(OptimStep("late", AdamParams(learning_rate=0.1)))
            after = executor.execute(ExportAdapter("late", optimizer=True))
        ends.append(after)
    assert ends[0].step == ends[1].step == 2
    assert all((array == ends[1].weights[name]).all() for name, array in ends[0].weights.items())


@pytest.mark.parametrize("moments", [False, True])
def test_a_tensor_that_does_not_fit_is_named(executor, state, moments):
    end = ".mu" if moments else ""
    held = dict(state.moments if moments else state.weights)
    without = {name: array for name, array in held.items() if name != NAME + end}
    wrongs = {
        "is missing": without,
        r"has shape \(5, 32\); .* rank 4 need \(4, 32\)": held | {NAME + end: np.zeros((5, 32), np.float32)},
        "is not part": held | {"other.lora_A.weight" + end: np.zeros((4, 32), np.float32)},
    }
    for message, tensors in wrongs.items():
        bad = state.copy_with(**{"moments" if moments else "weights": tensors})
        with pytest.raises(UserError, match=message):
            executor.execute(ImportAdapter("refused", bad))
        with pytest.raises(NotFoundError):
            executor.execute(ExportAdapter("refused", optimizer=False))
