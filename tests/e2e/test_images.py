"""Images through the SDK and through OpenAI's client, with a tiny vision model, even after its worker is killed."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tinker
from family import IMAGE_TOKEN, make_family, png
from PIL import Image
from test_cookbook import metrics_of
from tinker import types

pytestmark = pytest.mark.thorough

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


CLASSIFIER = """
import sys
from pathlib import Path
from tinker_cookbook.recipes.vlm_classifier.train import ExperimentConfig, run_experiment

model, log, _ = sys.argv[1:]
run_experiment(ExperimentConfig(
    experiment_dir=log, model_name=model, renderer_name="qwen3_vl_instruct",
    behavior_if_log_dir_exists="raise", learning_rate=2e-2, lora_rank=8, num_epochs=1, batch_size=4,
    examples_per_class=8, eval_every=4, save_every=4, n_eval=2, max_tokens=4, run_nll_evaluator=True))
(metrics,) = Path(log).glob("*/metrics.jsonl")
metrics.rename(Path(log) / metrics.name)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, start_server: Any) -> Iterator[Any]:
    """A server of a random Qwen3-VL with the tiny model's tokenizer."""
    folder = make_family(tmp_path_factory.mktemp("models") / "sees", "qwen3_vl")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with start_server(tmp_path_factory.mktemp("server"), "--base-model", str(folder), prefect="off") as found:
        yield found


def shown(data: bytes, after: list[int]) -> types.ModelInput:
    image = types.ImageChunk(data=data, format="png", expected_tokens=6)
    return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[9, 8]), image, types.EncodedTextChunk(tokens=after)])


def test_prompts_with_images(server: Any) -> None:
    first, second = png(1), png(2)
    with server.client() as service:
        trainer = service.create_lora_training_client(base_model=server.base_model, rank=4, seed=1).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        drawn = types.SamplingParams(max_tokens=40, temperature=1.0, seed=3, stop=[])
        before = sampler.sample(shown(first, [5, 6, 7]), 2, drawn).result()
        tokens = before.sequences[0].tokens
        assert len(tokens) == 40
        # The sampler's log probabilities equal those of training.
        whole = [5, 6, 7, *tokens]
        targets = np.array([8, *[IMAGE_TOKEN] * 6, *whole, 0])
        inputs = {"target_tokens": targets, "weights": np.ones(len(targets), np.float32)}
        datum = types.Datum(model_input=shown(first, whole), loss_fn_inputs=inputs)
        (trained,) = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs
        expected = np.asarray(trained["logprobs"].data)
        np.testing.assert_allclose(before.sequences[0].logprobs, expected[10:-1], atol=1e-5)
        scored = sampler.compute_logprobs(shown(first, whole)).result()
        np.testing.assert_allclose(np.array(scored[1:], np.float32), expected[:-1], atol=1e-5)
        # The location of an uploaded image replaces it in prompts, and, as the data of an ImageChunk, in training.
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
        # Another image is another prompt, even if the first is cached.
        other = sampler.compute_logprobs(shown(second, whole)).result()
        assert np.abs(np.array(other[8:]) - np.array(scored[8:])).max() > 0.01
        # A killed worker changes no token.
        going = sampler.sample(shown(first, [5, 6, 7]), 2, drawn)
        server.kill()
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
        assert said.prompt_token_ids == [9, 8, *[IMAGE_TOKEN] * 6]  # type: ignore[attr-defined]
        assert said.choices[0].token_ids == told  # type: ignore[attr-defined]
        with pytest.raises(tinker.TinkerError, match="expected_tokens is 5: must be 6"):
            wrong = types.ImageChunk(data=first, format="png", expected_tokens=5)
            sampler.sample(types.ModelInput(chunks=[wrong]), 1, greedy).result()


def test_the_cookbooks_classifier_learns_and_is_evaluated(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is the cookbook's. A local folder with the data set's name replaces the data set."""
    for split, count in (("train", 8), ("test", 2)):
        for label, colour in enumerate(("red", "blue")):
            folder = tmp_path / "dpdl-benchmark" / "caltech101" / split / colour
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.random.default_rng(number).integers(0, 60, (16, 24, 3)).astype(np.uint8)
                pixels[..., 2 * label] += 190
                Image.fromarray(pixels).save(folder / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    metrics = metrics_of(CLASSIFIER, server, tmp_path / "log", "record", "-o", str(tmp_path / "classifier.cassette"))
    nll = [line["train_mean_nll"] for line in metrics if "train_mean_nll" in line]
    assert len(nll) == 4 and nll[-1] < nll[0]
    evaluated = [line for line in metrics if "accuracy" in line]
    assert len(evaluated) == 1 and 0 < evaluated[0]["test/nll"] < 20
