"""SamplingClient: sampling, scoring, and handing a sampler to another process."""

from __future__ import annotations

import logging

import pytest
import tinker
from tests.compat.conftest import TOKENS
from tests.compat.registry import exercises
from tinker import types
from tinker.lib.api_future_impl import QueueState

PROMPT = types.ModelInput.from_ints(TOKENS)


@exercises("SamplingClient.sample", "SamplingClient.sample_async")
async def test_seed_determines_the_sampled_tokens(sampler: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=8, seed=3, temperature=1.0, stop=[])
    first = sampler.sample(PROMPT, 2, params).result()
    twin = await sampler.sample_async(PROMPT, 2, params)
    assert [s.tokens for s in first.sequences] == [s.tokens for s in twin.sequences]
    assert [s.stop_reason for s in first.sequences] == ["length", "length"]
    assert first.sequences[0].tokens != first.sequences[1].tokens
    whole = types.ModelInput.from_ints([*TOKENS, *first.sequences[0].tokens])
    scored = sampler.compute_logprobs(whole).result()
    assert scored[len(TOKENS) :] == pytest.approx(first.sequences[0].logprobs, abs=2e-3)


@exercises("SamplingClient.compute_logprobs", "SamplingClient.compute_logprobs_async", "types.EncodedTextChunk")
async def test_logprobs_of_a_prompt(sampler: tinker.SamplingClient, trainer: tinker.TrainingClient) -> None:
    sync = sampler.compute_logprobs(PROMPT).result()
    assert sync == await sampler.compute_logprobs_async(PROMPT)
    assert sync[0] is None
    assert len(sync) == len(TOKENS)
    assert all(logprob < 0 for logprob in sync[1:])
    parts = [types.EncodedTextChunk(tokens=TOKENS[:4]), types.EncodedTextChunk(tokens=TOKENS[4:])]
    assert sampler.compute_logprobs(types.ModelInput(chunks=parts)).result() == sync


@exercises(
    "SamplingClient.get_base_model",
    "SamplingClient.get_base_model_async",
    "SamplingClient.get_tokenizer",
    "SamplingClient.get_telemetry",
)
async def test_sampler_has_a_base_model_and_a_tokenizer(sampler: tinker.SamplingClient, base_model: str) -> None:
    assert sampler.get_base_model() == await sampler.get_base_model_async() == base_model
    tokenizer = sampler.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("pig latin")) == "pig latin"
    assert sampler.get_telemetry() is None


@exercises("SamplingClient.get_sampler_handle", "SamplingClient.from_sampler_handle", "SamplingClient.create")
def test_sampler_can_be_opened_in_three_ways(
    sampler: tinker.SamplingClient, service: tinker.ServiceClient, base_model: str
) -> None:
    handle = sampler.get_sampler_handle()
    restored = tinker.SamplingClient.from_sampler_handle(handle, api_key="tml-test")
    expected = sampler.compute_logprobs(PROMPT).result()
    assert restored.compute_logprobs(PROMPT).result() == expected
    made = tinker.SamplingClient.create(service.holder, base_model=base_model).result()
    assert made.compute_logprobs(PROMPT).result() != expected  # the base model


@exercises("SamplingClient.on_queue_state_change")
def test_paused_queue_is_reported_to_the_user(sampler: tinker.SamplingClient, caplog: pytest.LogCaptureFixture) -> None:
    # The SDK logs one pause of a client per minute, and a slow machine may have paused the shared client already.
    fresh = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-test")
    with caplog.at_level(logging.WARNING):
        fresh.on_queue_state_change(QueueState.PAUSED_RATE_LIMIT, "the limit of this key")
    assert "the limit of this key" in caplog.text
    assert "sample" in caplog.text
