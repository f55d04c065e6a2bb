"""Checkpoints outside the service: the SDK's command line downloads them, and PEFT gives our logprobs with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyrage
import pytest
import tinker
import torch
import transformers
from tinker import types

TEXT = [17, 45, 99, 23, 23, 150, 7, 81, 3, 9]
# Importing the SDK takes seconds, so one process executes several commands of its command line, as `tinker` does.
RUN_COMMANDS = """
import contextlib, io, json, os, sys
from tinker.cli.__main__ import main_cli
said = []
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main_cli(["--format", "json", *command.split()], standalone_mode=False)
    said.append(out.getvalue().strip())
print(json.dumps(said), flush=True)
os._exit(0)  # the SDK's threads may abort an interpreter that ends under them
"""
BOUND = 2e-3  # nats, of each token's logprob


@pytest.fixture
def cli(server: Any, tmp_path: Path) -> Callable[..., Any]:
    """cli(*commands) runs `tinker --format json` commands in one process with an empty home; returns their output."""
    (tmp_path / "home").mkdir()
    more = {"TINKER_BASE_URL": server.api_url, "TINKER_API_KEY": "tml-test", "HOME": str(tmp_path / "home")}

    def run(*commands: str) -> list[Any]:
        command = [sys.executable, "-W", "ignore", "-c", RUN_COMMANDS, *commands]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | more, cwd=tmp_path)
        assert done.returncode == 0, f"{commands}: {done.stdout}{done.stderr}"
        return [json.loads(answer or "null") for answer in json.loads(done.stdout)]

    return run


def train(server: Any, service: tinker.ServiceClient, make_datum: Any, **parts: bool) -> tinker.TrainingClient:
    """A model whose logprobs differ from its base model's by about a nat."""
    trainer = service.create_lora_training_client(base_model=server.base_model, rank=8, seed=2, **parts).result()
    for _ in range(4):
        forward = trainer.forward_backward([make_datum(TEXT)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        forward.result()
    return trainer


def ours(trainer: tinker.TrainingClient, make_datum: Any) -> np.ndarray:
    output = trainer.forward([make_datum(TEXT)], "cross_entropy").result().loss_fn_outputs[0]
    return np.array(output["logprobs"].data)


def theirs(model: Any) -> np.ndarray:
    tokens = torch.tensor([TEXT])
    with torch.no_grad():
        scored = torch.log_softmax(model.eval()(tokens[:, :-1]).logits[0].float(), -1)
    return scored.gather(1, tokens[0, 1:, None])[:, 0].numpy()


def test_downloaded_checkpoint_gives_equal_logprobs_in_peft_and_merged(
    server: Any, service: tinker.ServiceClient, make_datum: Any, cli: Any, tmp_path: Path
) -> None:
    import peft  # here, because the import takes seconds in each process that collects tests

    trainers = [train(server, service, make_datum), train(server, service, make_datum, train_unembed=False)]
    saved = trainers[0].save_state("final").result().path
    exported = trainers[1].save_weights_external("final").result().path
    expected = [ours(trainer, make_datum) for trainer in trainers]
    before = set(service_paths(server))
    done = cli(*(f"checkpoint download {path} -o {tmp_path}" for path in (saved, exported)))
    assert set(service_paths(server)) == before  # the temporary export of the training checkpoint is deleted
    for told, wanted, head in zip(done, expected, (True, False), strict=True):
        folder = Path(told["destination"])
        assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        assert told["file_size_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == server.base_model
        base = transformers.AutoModelForCausalLM.from_pretrained(server.base_model)
        assert np.abs(theirs(base) - wanted).max() > 100 * BOUND  # otherwise the adapter would not matter
        if head:  # the tiny model's embeddings are tied
            base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.clone())
            base.config.tie_word_embeddings = False
        adapted = peft.PeftModel.from_pretrained(base, folder)
        np.testing.assert_allclose(theirs(adapted), wanted, atol=BOUND)
        np.testing.assert_allclose(theirs(adapted.merge_and_unload()), wanted, atol=BOUND)


def service_paths(server: Any) -> list[str]:
    return [found.tinker_path for found in server.rest().list_user_checkpoints(limit=1000).result().checkpoints]


def test_encrypted_export_is_downloaded_unchanged(
    server: Any, service: tinker.ServiceClient, make_datum: Any, cli: Any, tmp_path: Path
) -> None:
    identity = pyrage.x25519.Identity.generate()
    trainer = service.create_lora_training_client(base_model=server.base_model, rank=4).result()
    recipients = [str(identity.to_public())]
    path = trainer.save_weights_external("secret", ttl_seconds=3600, age_encryption_recipients=recipients).result().path
    folder = Path(cli(f"checkpoint download {path} -o {tmp_path}")[0]["destination"])
    assert sorted(file.name for file in folder.iterdir()) == [
        "adapter_config.json.age",
        "adapter_model.safetensors.age",
    ]
    config = json.loads(pyrage.decrypt((folder / "adapter_config.json.age").read_bytes(), [identity]))
    assert (config["r"], config["base_model_name_or_path"]) == (4, server.base_model)


def test_an_uploaded_adapter_trains_on(server: Any, service: tinker.ServiceClient, make_datum: Any) -> None:
    """Each file is uploaded to its link, as by SDK 0.39. The imported adapter has the exported one's logprobs."""
    trainer = train(server, service, make_datum)
    exported = trainer.save_weights_external("again", ttl_seconds=3600).result().path
    run, kind, name = exported.removeprefix("tinker://").split("/")
    with httpx.Client(base_url=server.api_url, headers={"X-API-Key": "tml-test"}, timeout=60) as http:
        links = http.get(f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls").json()["urls"]
        asked = {"base_model": server.base_model, "lora_config": {"rank": 8}}
        upload = http.post("/api/v1/external_weights_upload_start", json=asked).json()
        for file, url in upload["urls"].items():
            assert httpx.put(url, content=httpx.get(links[file]).content).status_code == 200
        body = {"upload_id": upload["upload_id"]}
        path = http.post("/api/v1/external_weights_upload_finish", json=body).json()["tinker_path"]
    imported = service.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(ours(imported, make_datum), ours(trainer, make_datum))
    imported.forward_backward([make_datum(TEXT)], "cross_entropy")
    imported.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert (ours(imported, make_datum) != ours(trainer, make_datum)).any()
