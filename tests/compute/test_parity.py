"""Logprobs, and the adapter's effect and gradients, against Hugging Face transformers and PEFT in torch."""

from __future__ import annotations

import numpy as np
import peft
import pytest
import safetensors.numpy
import torch
from tests.compute.closeness import close_logprobs

from tinkerflow.backend.commands import CreateAdapter, ExportAdapter, LoraSpec
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG, adapter_config

LENGTHS = (1, 7, 33, 60)


def test_logprobs_of_the_base_model(reference, examples, forward):
    executor = reference.executor()
    executor.execute(CreateAdapter("fresh", LoraSpec(4), 0))
    data = examples(LENGTHS)
    for example, found in zip(data, forward(executor, "fresh", data).logprobs, strict=True):
        close_logprobs(found, reference.logprobs(example)[:, 0])


@pytest.mark.parametrize(
    ("model", "parts"),
    [("qwen3", {}), ("qwen3", {"train_attn": False}), ("qwen2", {})],
)
def test_adapter_and_its_gradients_as_peft_has_them(
    request, model, tmp_path, examples, adapter, forward, gradients, parts
):
    """train_unembed on a tied model is left to tests/store/test_peft.py: PEFT wraps its lm_head in its own way."""
    parts = {**parts, "train_unembed": False}
    base = request.getfixturevalue(model)
    executor = base.executor()
    adapter(executor, "a", **parts)
    state = executor.execute(ExportAdapter("a", optimizer=False))
    (tmp_path / ADAPTER_CONFIG).write_bytes(adapter_config("base", state.spec, state.weights))
    safetensors.numpy.save_file(dict(state.weights), tmp_path / ADAPTER)
    model = peft.PeftModel.from_pretrained(base.model, str(tmp_path), is_trainable=True)
    try:
        data = examples(LENGTHS, targets=2)
        result = forward(executor, "a", data, backward=True)
        loss = torch.zeros(())
        for example, found in zip(data, result.logprobs, strict=True):
            logits = model(torch.tensor(example.tokens_T[None].astype(np.int64))).logits[0]
            scored = torch.log_softmax(logits, -1).gather(1, torch.tensor(example.targets_TK.astype(np.int64)))
            close_logprobs(found, scored.detach().numpy())
            loss = loss - (scored * torch.tensor(example.weights_TK)).sum()
        assert result.loss_sum == pytest.approx(float(loss.detach()), rel=1e-4)
        loss.backward()
        expected = {
            n.replace(".default.", "."): p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None
        }
        found = gradients(executor, "a")
        assert sorted(found) == sorted(expected)
        for name, gradient in expected.items():
            assert np.abs(found[name] - gradient).max() < 2e-3 * max(1.0, np.abs(gradient).max()), name
    finally:
        model.unload()


def test_bfloat16_is_close(qwen3, examples, forward):
    executor = qwen3.executor(dtype="bfloat16")
    executor.execute(CreateAdapter("fresh", LoraSpec(4), 0))
    data = examples((30,))
    found = forward(executor, "fresh", data).logprobs[0]
    assert np.abs(found - qwen3.logprobs(data[0])[:, 0]).mean() < 0.1
