"""Images over the SDK and over OpenAI's client, with a tiny model that sees, also when its worker is killed."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tinker
import torch
from PIL import Image
from tests.compute.conftest import PROCESSOR, SHAPE, random_model
from tinker import types

from tinkerflow.deployments.tiny_model import PAD, SPECIALS, VOCAB, make_tiny

TOKEN = SPECIALS.index(PAD)
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-VL with the tiny model's tokenizer."""
    folder = make_tiny(tmp_path_factory.mktemp("models") / "sees")
    torch.manual_seed(7)
    model = random_model("qwen3_vl", {**SHAPE, "vocab_size": VOCAB, "tie_word_embeddings": True})
    model.config.image_token_id = TOKEN
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def png(seed: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 24, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


def shown(data: bytes, after: list[int]) -> types.ModelInput:
    image = types.ImageChunk(data=data, format="png", expected_tokens=6)
    return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[9, 8]), image, types.EncodedTextChunk(tokens=after)])


def test_prompts_with_images(folder: Path, tmp_path: Path, start_server: Any) -> None:
    first, second = png(1), png(2)
    with start_server(tmp_path, "--base-model", str(folder), prefect="off") as server, server.client() as service:
        trainer = service.create_lora_training_client(base_model=server.base_model, rank=4, seed=1).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        drawn = types.SamplingParams(max_tokens=40, temperature=1.0, seed=3, stop=[])
        before = sampler.sample(shown(first, [5, 6, 7]), 2, drawn).result()
        tokens = before.sequences[0].tokens
        assert len(tokens) == 40
        # What it said is what training says of it.
        whole = [5, 6, 7, *tokens]
        targets = np.array([8, *[TOKEN] * 6, *whole, 0])
        inputs = {"target_tokens": targets, "weights": np.ones(len(targets), np.float32)}
        datum = types.Datum(model_input=shown(first, whole), loss_fn_inputs=inputs)
        (trained,) = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs
        expected = np.asarray(trained["logprobs"].data)
        np.testing.assert_allclose(before.sequences[0].logprobs, expected[10:-1], atol=1e-5)
        scored = sampler.compute_logprobs(shown(first, whole)).result()
        np.testing.assert_allclose(np.array(scored[1:], np.float32), expected[:-1], atol=1e-5)
        # An uploaded image is what its location stands for, in prompts and, as the data of an ImageChunk, in training.
        with httpx.Client(base_url=f"{server.api_url}/api/v1", headers={"X-API-Key": "tml-test"}) as http:
            kept = http.post("/assets", content=first).json()
            pointer = types.ImageAssetPointerChunk(format="png", location=kept["location"], expected_tokens=6)
            pointed = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[9, 8]), pointer])
            told = sampler.sample(pointed.append(types.EncodedTextChunk(tokens=[5, 6, 7])), 2, drawn).result()
            assert [one.tokens for one in told.sequences] == [one.tokens for one in before.sequences]
            assert [one.logprobs for one in told.sequences] == [one.logprobs for one in before.sequences]
            located = types.Datum(model_input=shown(kept["location"].encode(), whole), loss_fn_inputs=inputs)
            (same,) = trainer.forward([located], "cross_entropy").result().loss_fn_outputs
            assert same["logprobs"].data == trained["logprobs"].data
            assert http.delete(f"/assets/{kept['asset_id']}").status_code == 204
        with pytest.raises(tinker.TinkerError, match=r"chunks\[1\]\.location is 'tinker://assets/asset-.*this project"):
            sampler.sample(pointed, 1, drawn).result()
        # Another image is another prompt, whatever is cached of the first.
        other = sampler.compute_logprobs(shown(second, whole)).result()
        assert np.abs(np.array(other[8:]) - np.array(scored[8:])).max() > 0.01
        # A killed worker changes no token.
        going = sampler.sample(shown(first, [5, 6, 7]), 2, drawn)
        for worker in server.workers():
            os.kill(worker, signal.SIGKILL)
        after = going.result()
        assert [one.tokens for one in after.sequences] == [one.tokens for one in before.sequences]
        # OpenAI's client, through the chat template.
        greedy = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
        base = service.create_sampling_client(base_model=server.base_model).result()
        told = base.sample(shown(first, []), 1, greedy).result().sequences[0].tokens
        text = "".join(base.get_tokenizer().convert_ids_to_tokens([9, 8]))
        url = f"data:image/png;base64,{base64.b64encode(first).decode()}"
        with openai.OpenAI(base_url=f"{server.api_url}/v1", api_key="tml-test", max_retries=0) as gpt:
            parts: Any = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
            said = gpt.chat.completions.create(
                model=server.base_model, messages=[{"role": "user", "content": parts}], max_tokens=8, temperature=0,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )  # fmt: skip
        assert said.prompt_token_ids == [9, 8, *[TOKEN] * 6]  # type: ignore[attr-defined]
        assert said.choices[0].token_ids == told  # type: ignore[attr-defined]
        with pytest.raises(tinker.TinkerError, match="expected_tokens is 5: must be 6"):
            wrong = types.ImageChunk(data=first, format="png", expected_tokens=5)
            sampler.sample(types.ModelInput(chunks=[wrong]), 1, greedy).result()
