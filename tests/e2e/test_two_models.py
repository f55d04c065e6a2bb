"""Two base models in one deployment: a worker group each, trained and sampled side by side."""

from __future__ import annotations

import json

import pytest
from tinker import types

from tinkerflow.deployments.tiny_model import make_tiny

pytestmark = pytest.mark.thorough


def test_each_base_model_has_a_worker_group(tmp_path, start_server, make_datum):
    folders = [str(make_tiny(tmp_path / name)) for name in ("first", "second")]
    shorter = tmp_path / "second" / "config.json"
    shorter.write_text(json.dumps({**json.loads(shorter.read_text()), "max_position_embeddings": 512}))
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    with start_server(data_dir, "--base-model", folders[0], "--base-model", folders[1], prefect="off") as server:
        served = server.rest().get_server_capabilities().result().supported_models
        contexts = {one.model_name: one.max_context_length for one in served}
        assert contexts == {folders[0]: 8192, folders[1]: 512}
        assert len(server.workers()) == 2
        with server.client() as service:
            models = [service.create_lora_training_client(base_model=name, rank=8, seed=1) for name in folders]
            data = [make_datum([17, 45, 99, 23, 7, 81])]
            passed = [model.result().forward_backward(data, "cross_entropy") for model in models]
            losses = [one.result().metrics["loss:sum"] for one in passed]
            assert losses[0] == losses[1] > 0
            for name in folders:
                sampler = service.create_sampling_client(base_model=name).result()
                asked = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
                assert len(sampler.sample(data[0].model_input, 1, asked).result().sequences[0].tokens) == 3
