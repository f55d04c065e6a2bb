"""Prompts with images: tokens and logprobs equal those of transformers and training, and equal images share pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.compute.conftest import IMAGE_TOKEN, Reference, ask, build, inputs_of, random_example, run_all, seeing

from tinkerflow.backend.compute.compiles import CompileCounter
from tinkerflow.backend.compute.executor import Executor
from tinkerflow.backend.compute.models.vision_tower import VisionTower
from tinkerflow.backend.compute.sampler.sampler import Sampler
from tinkerflow.backend.spec.commands import (
    CreateAdapter,
    Example,
    Forward,
    LoraSpec,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SampleStep,
)

LENGTH = 200  # tokens of the longest prompt: more than a page
IMAGES = ((20, 2, 3), (120, 4, 4))  # the second image crosses the end of a page


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A vision model in torch, and its folder."""
    return build(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl", tied=True)


@pytest.fixture(scope="module")
def executor(sees: Reference) -> Executor:
    return sees.executor()


@pytest.fixture
def sampler(executor: Executor) -> Sampler:
    """A sampler without pages of earlier tests. Its programs are compiled already."""
    executor._sampler.clear()
    return executor._sampler.adapters


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every image that the tower encodes, in order."""
    seen: list[tuple[int, ...]] = []
    real = VisionTower.encode

    def watched(tower: VisionTower, image: Any) -> Any:
        seen.append(image.pixels_HWC.shape)
        return real(tower, image)

    monkeypatch.setattr(VisionTower, "encode", watched)
    return seen


def example(seed: int = 0, images: Sequence[tuple[int, int, int]] = IMAGES, length: int = LENGTH) -> Example:
    """Random text with images. Its targets are its next tokens."""
    made = seeing(random_example(np.random.default_rng(seed), length), *images)
    targets_T1 = np.append(made.tokens_T[1:], 0)[:, None].astype(np.int32)
    return replace(made, targets_TK=targets_T1, weights_TK=np.ones((length, 1), np.float32), inputs={})


def asked(name: str, shown: Example, max_tokens: int = 6, **changes: Any) -> SampleRequest:
    request: SampleRequest = ask(name, shown.tokens_T, max_tokens, images=shown.images, **changes)
    return request


def scored(executor: Executor, shown: Example, tokens: Sequence[int] = ()) -> np.ndarray[Any, Any]:
    """The training logprobs of a prompt and the tokens after it, except for the first token."""
    whole_T = np.append(shown.tokens_T, tokens).astype(np.int32)
    after = replace(
        shown,
        tokens_T=whole_T[:-1],
        targets_TK=whole_T[1:, None],
        weights_TK=np.ones((len(whole_T) - 1, 1), np.float32),
    )
    (found,) = executor.execute(Forward("plain", (after,), "cross_entropy", {}, backward=False)).logprobs
    return found[:, 0] if found.ndim > 1 else found


def assert_same(one: SampledSequence, other: SampledSequence) -> None:
    np.testing.assert_array_equal(one.tokens_T, other.tokens_T)
    np.testing.assert_array_equal(one.logprobs_T, other.logprobs_T)


def test_image_tokens_equal_transformers_and_logprobs_equal_training(
    sees: Reference, executor: Executor, sampler: Sampler, looks: Any
) -> None:
    executor.execute(CreateAdapter("plain", LoraSpec(4), 0))
    shown = example()
    request = asked("seen", shown, 40, prompt_logprobs=True, num_samples=2)
    text = ask("text", shown.tokens_T % IMAGE_TOKEN, 12)  # in the same batch
    both = run_all(sampler, request, text)
    first, second = both["seen"].sequences
    assert_same(first, second)
    assert [shape[:2] for shape in looks] == [(16, 24), (32, 32)]  # once for both samples
    with torch.no_grad():
        given = inputs_of(shown)
        generated = sees.model.generate(
            **given, attention_mask=torch.ones_like(given["input_ids"]), max_new_tokens=40, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    assert first.tokens_T.tolist() == generated[0, LENGTH:].tolist()
    expected = scored(executor, shown, first.tokens_T.tolist())
    np.testing.assert_allclose(both["seen"].prompt_logprobs_T[1:], expected[: LENGTH - 1], atol=1e-5)
    np.testing.assert_allclose(first.logprobs_T, expected[LENGTH - 1 :], atol=1e-5)
    alone = run_all(sampler, replace(text, request_id="again", owner="else"))["again"].sequences[0]
    assert alone.tokens_T.tolist() == both["text"].sequences[0].tokens_T.tolist()


@pytest.mark.thorough
def test_hybrid_model_with_images_shares_states_of_equal_images_only(tmp_path: Path, looks: Any) -> None:
    hybrid = build(tmp_path, "qwen3_5", tied=True)
    executor, shown = hybrid.executor(), example(5, ((8, 2, 3), (30, 4, 4)), 60)
    cold = run_all(executor, asked("cold", shown, 12))["cold"]
    with torch.no_grad():
        given = inputs_of(shown)
        generated = hybrid.model.generate(
            **given, attention_mask=torch.ones_like(given["input_ids"]), max_new_tokens=12, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    assert cold.sequences[0].tokens_T.tolist() == generated[0, 60:].tolist()
    looks.clear()
    warm = run_all(executor, asked("warm", shown, 12))["warm"]
    assert warm.prompt_cache_hit_tokens == 59 and not looks
    assert_same(cold.sequences[0], warm.sequences[0])
    first, second = shown.images
    darker = replace(shown, images=(replace(first, pixels_HWC=first.pixels_HWC ^ 1), second))
    assert run_all(executor, asked("other", darker, 12))["other"].prompt_cache_hit_tokens == 0


def test_prompts_share_pages_only_where_images_are_equal(sampler: Sampler, looks: Any) -> None:
    def run(name: str, shown: Example) -> SampleResult:
        result: SampleResult = run_all(sampler, asked(name, shown))[name]
        assert result.error is None
        return result

    shown = example(1)
    cold = run("cold", shown)
    assert (cold.prompt_cache_hit_tokens, len(looks)) == (0, 2)
    warm = run("warm", shown)
    assert (warm.prompt_cache_hit_tokens, len(looks)) == (LENGTH - 1, 2)
    assert_same(cold.sequences[0], warm.sequences[0])
    first, second = shown.images
    # The same tokens with another image, or with the same pixels in another shape. No page from there on is shared.
    darker = replace(second, pixels_HWC=second.pixels_HWC ^ 1)
    turned = replace(first, pixels_HWC=first.pixels_HWC.reshape(24, 16, 3))
    assert run("other", replace(shown, images=(first, darker))).prompt_cache_hit_tokens == 0
    assert run("turned", replace(shown, images=(turned, second))).prompt_cache_hit_tokens == 0
    assert run("text", replace(shown, images=())).prompt_cache_hit_tokens == 0
    late = example(2, ((150, 2, 3),))
    assert run("late", late).prompt_cache_hit_tokens == 0
    other_end = replace(late.images[0], pixels_HWC=late.images[0].pixels_HWC ^ 1)
    ended = run("ended", replace(late, images=(other_end,)))
    assert ended.prompt_cache_hit_tokens == 128  # the page of text before the image
    sampler.clear()
    assert_same(run("again", replace(late, images=(other_end,))).sequences[0], ended.sequences[0])


def test_preempted_request_sees_its_images_again(sampler: Sampler, looks: Any) -> None:
    request = asked("one", example(4, ((5, 2, 3),), 30), 12, temperature=1.0)
    (expected,) = run_all(sampler, request)["one"].sequences
    sampler.clear()
    sampler.step(SampleStep(admit=(request,)))
    (sequence,) = sampler._scheduler.slots.sequences
    sampler._scheduler.slots.remove(sequence)
    sampler._scheduler._requeue(sequence)
    sampler.pages.drop_keys(lambda scope: True)  # its pages are reused
    (found,) = run_all(sampler)["one"].sequences
    assert found.tokens_T.tolist() == expected.tokens_T.tolist()
    assert len(looks) == 3


def test_warm_up_compiles_the_programs_of_prompts_with_images(sees: Reference) -> None:
    executor = sees.executor(sample_slots=1, decode_chunk=3)  # a shape that no other test compiles
    needed = [
        one
        for one in executor._sampler.adapters.programs()
        if one.name.endswith(("32 columns, images", "copies of pages"))
    ]
    needed += [one for one in executor._sampler.adapters.programs() if one.name == "decode, 1 slots, 32 columns"]
    needed += [one for one in executor._tower.programs(512) if "256" in one.name]
    for program in needed:
        program.make()
    compiled = CompileCounter()
    result = run_all(executor, asked("seen", example(3, ((3, 2, 3),), 90)))["seen"]
    assert result.error is None
    assert compiled.count == 0
    assert len(needed) == 6
