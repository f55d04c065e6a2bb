"""Training of all parameters through the SDK: kills change no bit, and transformers loads the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import transformers
from tinker import types

from tinkerflow.backend.catalog.merging import merge
from tinkerflow.backend.store import Store

pytestmark = pytest.mark.thorough

STEP = types.AdamParams(learning_rate=1e-3, weight_decay=0.01)
TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]


def train(client: tinker.TrainingClient, data: list[tinker.Datum], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        passed = client.forward_backward(data, "cross_entropy")
        client.optim_step(STEP).result()
        losses.append(passed.result().metrics["loss:sum"])
    return losses


def test_full_training_survives_kills_and_its_checkpoint_loads_in_transformers(
    tmp_path: Path, start_server: Any, make_datum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PREFECT": "off", "SNAPSHOT_STEPS": "2"}.items():
        monkeypatch.setenv(f"TINKERFLOW_{name}", value)
    data = [make_datum(TEXT)]
    with start_server(tmp_path) as server:
        store = Store.open(f"file://{tmp_path / 'store'}")

        def run(*, disturbed: bool) -> tuple[tinker.TrainingClient, list[float], str]:
            client = server.client().create_lora_training_client(server.base_model, rank=0).result()
            losses = train(client, data, 3)
            if disturbed:
                server.kill()
            losses += train(client, data, 2)
            if disturbed:
                server.kill("engine")
            losses += train(client, data, 1)
            return client, losses, client.save_state("done").result().path

        client, losses, path = run(disturbed=True)
        _, undisturbed, other = run(disturbed=False)
        assert losses == undisturbed
        assert losses[-1] < 0.9 * losses[0]
        states = [store.load(one)[0] for one in (path, other)]
        for one, another in ((states[0].weights, states[1].weights), (states[0].moments, states[1].moments)):
            assert one.keys() == another.keys()
            assert all(array.tobytes() == another[name].tobytes() for name, array in one.items())

        info = client.get_info()
        assert (info.is_lora, info.lora_rank) == (False, 0)
        resumed = server.client().create_training_client_from_state_with_optimizer(path).result()
        assert train(resumed, data, 2) == train(client, data, 2)
        with pytest.warns(FutureWarning, match="load_state"):
            client.load_state(path).result()
        output = client.forward(data, "cross_entropy").result().loss_fn_outputs[0]
        merge(Path(server.base_model), store.load(path, optimizer=False)[0], tmp_path / "model")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
        tokens = torch.tensor([TEXT])
        with torch.no_grad():
            scored = torch.log_softmax(model(tokens[:, :-1]).logits[0], -1).gather(1, tokens[0, 1:, None])[:, 0]
        np.testing.assert_allclose(scored.numpy(), output["logprobs"].data, atol=2e-3)
        exported = client.save_weights_external("out").result().path
        assert list(store.find(exported).files) == ["model.safetensors"]
        unnamed = client.save_weights_and_get_sampling_client().result()
        named = client.save_weights_for_sampler("named").result().path
        train(client, data, 1)  # no sampler may see this step
        asked = types.ModelInput.from_ints(TEXT)

        def tokens_of(sampler: tinker.SamplingClient) -> tuple[list[int], list[float]]:
            params = types.SamplingParams(max_tokens=8, seed=5)
            found = sampler.sample(asked, num_samples=1, sampling_params=params).result().sequences[0]
            return list(found.tokens), list(found.logprobs or [])

        scored = unnamed.compute_logprobs(asked).result()[1:]
        np.testing.assert_allclose(scored, output["logprobs"].data, atol=1e-5)
        sampled = tokens_of(unnamed)
        server.kill()
        for sampler in (
            unnamed,
            server.client().create_sampling_client(model_path=named).result(),
            server.client().create_sampling_client(model_path=path).result(),
        ):
            tokens, logprobs = tokens_of(sampler)
            assert tokens == sampled[0]
            np.testing.assert_allclose(logprobs, sampled[1], atol=1e-5)
        base = server.client().create_sampling_client(base_model=server.base_model).result()
        assert tokens_of(base)[1][0] != sampled[1][0]
        with pytest.raises(tinker.TinkerError, match=r"lora_config.rank 0 trains all parameters: train_attn"):
            server.client().create_lora_training_client(server.base_model, rank=0, train_mlp=False).result()
