"""Training of all parameters: equal to a torch loop, and saved and restored bit for bit."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from tests.compute.conftest import add_adapter, examples, forward, gradients

from tinkerflow.backend.compute.planning import training_memory
from tinkerflow.backend.core.errors import AllocationError, UserError
from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.commands import (
    AdapterState,
    CreateAdapter,
    DropAdapter,
    ExportAdapter,
    FetchState,
    ImportAdapter,
    LoraSpec,
    OptimStep,
    StoredState,
    WriteState,
)
from tinkerflow.backend.spec.optimizers.adamw import AdamParams

ALL = LoraSpec(0)
STEP = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01)
FILES = {"part-00000.safetensors": Digest.of(b"")}
STORED = StoredState(ALL, 2, "adamw", "runs/r/recovery/n/a", FILES)


def bits(state: AdapterState) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in (state.weights | state.moments).items()}


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])  # tied unembedding; biases and a separate unembedding
def test_ten_full_training_steps_equal_torch(family, request, executor):
    reference = request.getfixturevalue(family)
    executor = executor if family == "qwen3" else reference.executor()
    model = copy.deepcopy(reference.model)
    executor.execute(CreateAdapter("m", ALL, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    data = examples((9, 14))
    for _ in range(10):
        ours = forward(executor, "m", data, backward=True).loss_sum
        executor.execute(OptimStep("m", STEP))
        theirs = sum(loss_of(model, example) for example in data)
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
        assert ours == pytest.approx(theirs.item(), rel=1e-4)
    after = executor.execute(ExportAdapter("m", optimizer=False))
    assert after.step == 10
    trained = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    assert after.weights.keys() == trained.keys()
    for name, tensor in trained.items():
        np.testing.assert_allclose(after.weights[name], tensor, rtol=1e-3, atol=2e-4, err_msg=name)


def loss_of(model: Any, example: Any) -> torch.Tensor:
    logits = model(input_ids=torch.tensor(example.tokens_T[None].astype(np.int64))).logits[0]
    targets = torch.tensor(example.targets_TK.astype(np.int64))
    picked = torch.log_softmax(logits, -1).gather(1, targets)
    return -(picked * torch.tensor(example.weights_TK)).sum()


def test_full_state_resumes_bit_for_bit_from_pieces_and_from_an_export(executor):
    executor.execute(CreateAdapter("a", ALL, 0))
    for _ in range(2):
        forward(executor, "a", examples((9, 14)), backward=True)
        executor.execute(OptimStep("a", STEP))
    forward(executor, "a", examples((9,), seed=4), backward=True)
    executor.execute(ExportAdapter("a", optimizer=True, keep="folder"))
    pieces = executor.take_kept(WriteState("a", "folder"))
    assert {name.partition("/")[0] for name in pieces} == {"weights", "mu", "nu", "grad"}
    shapes = {name: piece.shape for name, piece in pieces.items()}
    assert sorted(executor.needed_tensors(STORED, shapes)) == sorted(pieces)
    exported = executor.execute(ExportAdapter("a", optimizer=True))
    executor.keep_fetched(FetchState("b", STORED), dict(pieces))
    executor.execute(ImportAdapter("b", STORED))
    executor.execute(ImportAdapter("c", exported))
    executor.keep_fetched(FetchState("d", STORED), exported.weights | exported.moments)
    executor.execute(ImportAdapter("d", STORED))
    ends = []
    for name in ("a", "b", "c", "d"):
        assert bits(executor.execute(ExportAdapter(name, optimizer=True))) == bits(exported)
        forward(executor, name, examples((9,), seed=5), backward=True)
        executor.execute(OptimStep(name, STEP))
        ends.append(bits(executor.execute(ExportAdapter(name, optimizer=True))))
    assert all(end == ends[0] for end in ends[1:])


def test_full_training_does_not_change_adapters_or_the_base_model(executor):
    add_adapter(executor, "beside")
    before = forward(executor, "beside", examples((9,))).loss_sum
    executor.execute(CreateAdapter("w", ALL, 0))
    forward(executor, "w", examples((9,)), backward=True)
    executor.execute(OptimStep("w", STEP))
    assert forward(executor, "beside", examples((9,))).loss_sum == before
    executor.execute(CreateAdapter("again", ALL, 0))
    forward(executor, "again", examples((9,)), backward=True)
    executor.execute(OptimStep("again", STEP))
    states = [executor.execute(ExportAdapter(name, optimizer=True)) for name in ("w", "again")]
    assert bits(states[0]) == bits(states[1])


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_other_losses_also_train_all_parameters(executor, loss):
    executor.execute(CreateAdapter("l", ALL, 0))
    forward(executor, "l", examples((9, 14)), loss=loss, backward=True)
    found = gradients(executor, "l")
    assert "model.norm.weight" in found
    assert all(np.isfinite(array).all() and array.any() for array in found.values())


def test_full_optimizer_starts_fresh_without_moments_and_invalid_tensors_are_named(executor):
    executor.execute(CreateAdapter("s", ALL, 0))
    state = executor.execute(ExportAdapter("s", optimizer=False))
    executor.execute(ImportAdapter("t", state.copy_with(step=0)))
    assert bits(executor.execute(ExportAdapter("t", optimizer=False))) == bits(state)
    name = "model.layers.1.mlp.down_proj.weight"
    without = {key: array for key, array in state.weights.items() if key != name}
    wrongs = {
        f"{name}' is missing": without,
        "has shape": state.weights | {name: np.zeros((2, 2), np.float32)},
        "is not part": state.weights | {"other.bias": np.zeros(2, np.float32)},
    }
    for message, weights in wrongs.items():
        with pytest.raises(UserError, match=message):
            executor.execute(ImportAdapter("bad", state.copy_with(weights=weights)))


def test_unsupported_options_of_full_training_are_refused(executor):
    with pytest.raises(UserError, match=r"rank 0 trains all parameters.* dimuon steps the matrices of adapters alone"):
        executor.execute(CreateAdapter("x", ALL, 0, "dimuon"))
    with pytest.raises(UserError, match=r"rank 0 trains all parameters: train_attn, train_mlp and train_unembed must"):
        executor.execute(CreateAdapter("x", LoraSpec(0, train_attn=False), 0))


def test_memory_is_counted_and_leaves_room_for_adapters(qwen3):
    executor = qwen3.executor(device_memory=0.05)
    many = executor.plan.full // training_memory.adapter_bytes(executor._cfg, executor._config, ALL, "adamw")
    assert many > 0
    for number in range(many):
        executor.execute(CreateAdapter(str(number), ALL, 0))
    rule = r"lora rank 0: training all parameters takes \S+ GB .* GB for that \(.* \S+ GB of it\): must be 1 or more"
    with pytest.raises(AllocationError, match=rule):
        executor.execute(CreateAdapter("one more", ALL, 0))
    executor.execute(CreateAdapter("an adapter", LoraSpec(8), 0))
    executor._quota._plan = replace(executor.plan, full=1000)
    with pytest.raises(UserError, match=r"takes \S+ GB of each device, and this group has 1e-06 GB for that: must be"):
        executor.execute(CreateAdapter("never", ALL, 0))


def test_loading_a_state_takes_at_most_the_counted_memory(executor, monkeypatch):
    def held() -> dict[int, jax.Array]:
        gc.collect()
        return {one.unsafe_buffer_pointer(): one for one in jax.live_arrays()}  # reading makes another one

    before, found = held(), []  # `before` keeps older arrays alive, so that their memory is not reused

    def count() -> int:
        return sum(one.nbytes for place, one in held().items() if place not in before)

    executor.execute(CreateAdapter("l", ALL, 0))
    state = executor.execute(ExportAdapter("l", optimizer=True))
    store, keep = executor._adapters, executor._adapters.set
    monkeypatch.setattr(store, "set", lambda *given: (found.append(count()), keep(*given)))
    executor.execute(ImportAdapter("l", state))
    counted = training_memory.adapter_bytes(executor._cfg, executor._config, ALL, "adamw")
    counts = 2 * 4  # of steps, int32
    assert counted / 2 < found[0] <= counted + counts
    executor.execute(DropAdapter("l"))


def test_models_find_room_again_in_any_order(qwen3):
    made, again = qwen3.executor(device_memory=0.05), qwen3.executor(device_memory=0.05)
    each = training_memory.adapter_bytes(made._cfg, made._config, ALL, "adamw")
    plan = replace(made.plan, full=each)  # memory for one, and for adapters
    made._quota._plan = again._quota._plan = plan
    made.execute(CreateAdapter("all", ALL, 0))
    adapter = training_memory.adapter_bytes(made._cfg, made._config, LoraSpec(32), "adamw")
    beside = (plan.uses.adapters - each) // adapter
    adapters = [f"adapter {number}" for number in range(beside)]
    for name in adapters:
        made.execute(CreateAdapter(name, LoraSpec(32), 0))
    for name in reversed(("all", *adapters)):
        state = made.execute(ExportAdapter(name, optimizer=True))
        again.execute(ImportAdapter(name, state))
    with pytest.raises(
        AllocationError, match=r"32: the adapter takes .* for adapters \(models that train all .* GB of it\): must"
    ):
        again.execute(CreateAdapter("one more", LoraSpec(32), 0))
