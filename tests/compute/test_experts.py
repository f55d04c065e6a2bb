"""Qwen3-MoE: logprobs, gradients of every adapter and the export, against Hugging Face transformers and PEFT."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
from tests.compute.closeness import close, close_logprobs
from tests.compute.conftest import add_adapter, build, examples, forward, gradients

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.layers import Experts, SoftmaxRouter
from tinkerflow.backend.compute.models.layers.step import training_expert_axes
from tinkerflow.backend.compute.models.lora_weights import from_peft, to_peft
from tinkerflow.backend.compute.models.params import count, load_params
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import LORA_ALPHA, ExportAdapter, ImportAdapter
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG, adapter_config

LENGTHS = (1, 7, 30)


@pytest.fixture(scope="module")
def executor(moe):
    executor = moe.executor()
    add_adapter(executor, "a", train_unembed=False)
    return executor


def adapted_weights(model, weights, scale=lambda rank: LORA_ALPHA / rank):
    """The model's parameters plus the updates of an adapter, in torch, differentiable by `weights`.

    scale(rank): the scale of an update of that rank.
    """
    named = dict(model.named_parameters())
    for name in sorted(n for n in weights if n.endswith(".lora_A.weight")):
        target = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        B, A = weights[name.replace("lora_A", "lora_B")], weights[name]
        update = B @ A * scale(A.shape[0])
        found = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj", target)
        if found is None:
            named[f"{target}.weight"] = named[f"{target}.weight"] + update
            continue
        experts, number, part = found[1], int(found[2]), found[3]
        fused = f"{experts}.down_proj" if part == "down" else f"{experts}.gate_up_proj"
        whole = torch.zeros(named[fused].shape[1:])
        if part == "down":
            whole = whole + update
        else:
            half = whole.shape[0] // 2
            rows = torch.arange(half) + (half if part == "up" else 0)
            whole = whole.index_add(0, rows, update)
        named[fused] = named[fused].index_add(0, torch.tensor([number]), whole[None])
    return named


@pytest.mark.parametrize("architecture", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.thorough)])
def test_gradients_of_every_adapter_as_torch_has_them(request, tmp_path, architecture):
    """qwen3_moe has only routed experts. deepseek_v3 also has latent attention, shared experts and a dense layer."""
    if architecture == "qwen3_moe":
        moe, executor = (request.getfixturevalue(name) for name in ("moe", "executor"))
    else:
        moe = build(tmp_path, architecture, tied=False)
        executor = moe.executor()
        add_adapter(executor, "a", train_unembed=False)
    state = executor.execute(ExportAdapter("a", optimizer=False))
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in state.weights.items()}
    named = adapted_weights(moe.model, weights)
    data = examples(LENGTHS, targets=2)
    result = forward(executor, "a", data, backward=True)
    loss = torch.zeros(())
    for example, found in zip(data, result.logprobs, strict=True):
        ids = torch.tensor(example.tokens_T[None].astype(np.int64))
        logits = torch.func.functional_call(moe.model, named, (ids,)).logits[0]
        scored = torch.log_softmax(logits, -1).gather(1, torch.tensor(example.targets_TK.astype(np.int64)))
        close_logprobs(found, scored.detach().numpy())
        loss = loss - (scored * torch.tensor(example.weights_TK)).sum()
    assert result.loss_sum == pytest.approx(float(loss.detach()), rel=1e-4)
    loss.backward()
    found = gradients(executor, "a")
    assert sorted(found) == sorted(weights)
    assert sum(np.abs(array).max() > 1e-3 for name, array in found.items() if ".experts." in name) > 40
    for name, array in found.items():
        wanted = weights[name].grad.numpy()
        assert np.abs(array - wanted).max() < 2e-3 * max(1.0, np.abs(wanted).max()), name


def test_expert_training_repeats_bit_for_bit_and_does_not_recompile(executor):
    state = executor.execute(ExportAdapter("a", optimizer=False))
    sums, slopes = [], []
    forward(executor, "a", examples(LENGTHS, seed=1), backward=True)
    before = executor.compiles
    for adapter_id in ("once", "twice"):
        executor.execute(ImportAdapter(adapter_id, state))
        sums.append(forward(executor, adapter_id, examples(LENGTHS, seed=2), backward=True).loss_sum)
        slopes.append(gradients(executor, adapter_id))
    assert executor.compiles == before
    assert sums[0] == sums[1]
    assert all(np.array_equal(slopes[0][name], slopes[1][name]) for name in slopes[0])


@pytest.mark.parametrize("own", [None, 1, 2, 3], ids="rank {}".format)
def test_peft_loads_the_exported_adapter(moe, executor, tmp_path, own):
    """The rank of experts is that of other matrices (8) or lower, with a power of two as the quotient or not."""
    import peft  # here, because the import takes seconds in each process that collects tests

    add_adapter(executor, "b", 8, train_unembed=False, expert_rank=own)
    state = executor.execute(ExportAdapter("b", optimizer=False))
    (tmp_path / ADAPTER_CONFIG).write_bytes(adapter_config("base", state.spec, state.weights))
    safetensors.numpy.save_file(dict(state.weights), tmp_path / ADAPTER)
    (example,) = examples((20,))
    (found,) = forward(executor, "b", (example,)).logprobs
    with warnings.catch_warnings():
        # PEFT doubles the rank of the fused gate_up_proj, and then looks for a module, but it is a parameter.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        model = peft.PeftModel.from_pretrained(moe.model, str(tmp_path))
    try:
        adapted = type(moe)(moe.folder, model).logprobs(example)[:, 0]
    finally:
        model.unload().requires_grad_(True)  # PEFT froze it
    assert np.abs(adapted - moe.logprobs(example)[:, 0]).max() > 0.1
    close_logprobs(found, adapted)


def test_export_gives_equal_logprobs_with_one_lora_scale(moe, executor):
    """vLLM uses the config's alpha and rank for every matrix, regardless of the matrix's own rank."""
    add_adapter(executor, "c", 8, train_unembed=False, expert_rank=2)
    state = executor.execute(ExportAdapter("c", optimizer=False))
    assert {w.shape[0] for name, w in state.weights.items() if "lora_A" in name} == {2, 8}
    named = adapted_weights(moe.model, {name: torch.tensor(w) for name, w in state.weights.items()}, lambda _: 32 / 8)
    (example,) = examples((20,))
    ids = torch.tensor(example.tokens_T[None].astype(np.int64))
    logits = torch.func.functional_call(moe.model, named, (ids,)).logits[0].detach()
    scored = torch.log_softmax(logits, -1).gather(1, torch.tensor(example.targets_TK.astype(np.int64)))
    close_logprobs(forward(executor, "c", (example,)).logprobs[0], scored[:, 0].numpy())


@pytest.mark.thorough
def test_mesh_of_eight_devices_equals_one_device(moe, tmp_path):
    """Compares values, gradients and adapters by row, with experts, rows, widths and scales split over devices.

    In NF4, a device's part of a matrix may end inside a block (6 of 8 inputs).
    """
    worker, numbers = str(Path(__file__).with_name("expert_worker.py")), tmp_path / "numbers.json"
    command = [sys.executable, worker, str(moe.folder), str(numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(numbers.read_text())
    assert found["int8 1x1x1 holds"] == [2, 8, 32, 24]
    assert found["int8 2x2x2 holds"] == [2, 2, 32, 12]  # experts are split over expert and fsdp, widths over tensor
    assert found["int8 3x1x2 holds"] == [2, 8, 32, 4]  # fsdp does not divide the experts, so both axes split widths
    # A device computes attention, logits and losses of its own rows only. The loop over blocks of rows counts once.
    assert found["1x8x1 flops"] < found["1x1x1 flops"] / 6
    assert found["nf4 2x2x2 holds"] == [2, 2, 16, 12]
    for kind in ("int8", "nf4"):
        assert len(found[f"{kind} 1x1x1"]) == 2 + 1 + 6  # by row, summed; gradients of the input and of three pairs
        for mesh in ("2x2x2", "3x1x2"):
            for one, other in zip(found[f"{kind} {mesh}"], found[f"{kind} 1x1x1"], strict=True):
                assert np.abs(other).max() > 0.01
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-3)
    np.testing.assert_allclose(found["in place"], found["own"], rtol=1e-4, atol=1e-5)
    for slopes in ("slopes in place", "slopes of gathered"):
        for one, other in zip(found[slopes], found["own slopes"], strict=True):
            assert np.abs(other).max() > 0.01
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-3)


def test_weights_and_names(moe, executor):
    cfg = load_config(moe.folder)
    params = load_params(cfg, moe.folder, make_mesh(1, 1), "float32")
    assert count(params) == sum(p.numel() for p in moe.model.parameters())
    experts = moe.model.model.layers[1].mlp.experts
    assert np.array_equal(params.layers["up"][1, 5], experts.gate_up_proj[5, 24:].detach().numpy().T)
    assert np.array_equal(params.layers["down"][1, 5], experts.down_proj[5].detach().numpy().T)
    state = executor.execute(ExportAdapter("a", optimizer=False))
    name = "base_model.model.model.layers.1.mlp.experts.5.down_proj.lora_B.weight"
    assert state.weights[name].shape == (cfg.hidden, 4)
    lora = from_peft(cfg, state.spec, lambda name, shape: state.weights[name])
    assert lora.layers["gate"].A.shape == (cfg.layers, 8, 4, cfg.hidden)
    again = to_peft(cfg, lora)
    assert sorted(again) == sorted(state.weights)
    assert all(np.array_equal(again[name], array) for name, array in state.weights.items())


@pytest.mark.parametrize(
    ("fsdp", "numbers", "axes"),
    [(4, 9215, ("expert", "fsdp")), (4, 9216, ("expert",)), (3, 1, ("expert",)), (1, 1, ("expert",))],
)
def test_devices_send_tokens_if_these_are_fewer_bytes_than_experts(fsdp, numbers, axes):
    """A token and its result take eight bytes for each number. The experts take 8 x 9,216 bytes."""
    mesh = type("Mesh", (), {"shape": {"fsdp": fsdp, "expert": 1, "tensor": 1}})()
    sizes = {"gate": (8, 32, 24), "up": (8, 32, 24), "down": (8, 24, 32)}
    experts = {name: np.zeros(shape, np.float32) for name, shape in sizes.items()}
    assert training_expert_axes(mesh, numbers, experts) == axes


def test_an_axis_that_does_not_divide_the_experts_is_refused(moe, qwen3):
    for reference, said in ((moe, "8 experts, expert_parallel 3"), (qwen3, "0 experts, expert_parallel 2")):
        mesh = type("Mesh", (), {"shape": {"expert": int(said[-1])}})()
        with pytest.raises(UserError, match=said):
            load_params(load_config(reference.folder), reference.folder, mesh, "float32")


def test_clamped_parts_at_their_bounds_get_the_whole_slope():
    clamped = Experts(hidden=4, count=2, width=2, router=SoftmaxRouter(1, normalized=True), clamp=7.0)
    both = [np.float32([7.0, 7.0, 6.5, 8.0, -9.0]), np.float32([7.0, -7.0, 8.0, -8.0, 0.5])]
    gate, up = (torch.tensor(part, requires_grad=True) for part in both)
    bounded = torch.where(gate > 7.0, 7.0, gate)  # clamp has the slope 0 at its bounds since torch 2.14
    up_bounded = torch.where(up.abs() > 7.0, up.detach().clamp(-7.0, 7.0), up)
    (bounded * torch.sigmoid(1.702 * bounded) * (up_bounded + 1)).sum().backward()
    for found, part in zip(jax.grad(lambda *x: clamped._gated(*x).sum(), (0, 1))(*both), (gate, up), strict=True):
        close(found, part.grad.numpy())
