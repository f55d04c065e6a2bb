"""Training of all parameters in models with other kinds of layers, and sampling of the trained models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.compute.conftest import ask, build, examples, forward, result_of
from tests.compute.test_parity import scores

from tinkerflow.backend.catalog.merging import merge
from tinkerflow.backend.compute.models.families import family_of, load_config
from tinkerflow.backend.compute.weights.files import open_tensors
from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.commands import (
    CreateAdapter,
    ExportAdapter,
    FetchState,
    ImportAdapter,
    LoraSpec,
    OptimStep,
    PublishSnapshot,
    StoredState,
    WriteState,
)
from tinkerflow.backend.spec.optimizers.adamw import AdamParams


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_moe",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("glm4_moe_lite", "gemma4_text", "gpt_oss")),
    ],
)
def test_layers_of_every_kind_train_whole(family, tmp_path):
    """Compares linear attention, experts of both routers, latents, heads of two widths and layer inputs with torch.

    As in transformers, corrections of routers and scalars of layers are not trained or saved, but a snapshot samples
    with them. The model is restored from shards.
    """
    reference = build(tmp_path / "base", family, tied=False)
    executor, model = reference.executor(), reference.model
    executor.execute(CreateAdapter("m", LoraSpec(0), 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01)
    data = examples((9, 14))
    step = AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.01)
    for _ in range(3):
        ours = forward(executor, "m", data, backward=True).loss_sum
        executor.execute(OptimStep("m", step))
        theirs = -sum((scores(model, one) * torch.tensor(one.weights_TK)).sum() for one in data)
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
        assert ours == pytest.approx(theirs.item(), rel=1e-4)
    after = executor.execute(ExportAdapter("m", optimizer=False))
    model.save_pretrained(tmp_path / "after")
    cfg = load_config(reference.folder)
    saved = family_of(cfg).unpack(cfg, open_tensors(tmp_path / "after", "after"))
    assert len(after.weights) > 20
    for name, array in after.weights.items():
        np.testing.assert_allclose(array, saved[name].view(np.float32), rtol=1e-2, atol=2e-4, err_msg=name)
    merge(reference.folder, after, tmp_path / "merged")
    merged = type(model).from_pretrained(tmp_path / "merged").eval()
    prompt = data[0].tokens_T.tolist()
    with torch.no_grad():
        wanted = merged.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0, 9:]
    executor.execute(PublishSnapshot("m", "m"))
    assert result_of(executor, ask("x", prompt, 5, snapshot_id="m")).sequences[0].tokens_T.tolist() == wanted.tolist()
    kept = executor.execute(ExportAdapter("m", optimizer=True, keep="folder"))
    files = {"part-00000.safetensors": Digest.of(b"")}
    stored = StoredState(kept.spec, kept.step, kept.optimizer, "folder", files)
    executor.keep_fetched(FetchState("again", stored), dict(executor.take_kept(WriteState("m", "folder"))))
    executor.execute(ImportAdapter("again", stored))
    again = executor.execute(ExportAdapter("again", optimizer=False))
    assert all(array.tobytes() == again.weights[name].tobytes() for name, array in after.weights.items())
