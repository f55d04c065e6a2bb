"""The real openai client and the whole service: streams equal the SDK's samples, and a kill repeats no token."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import tinker
from tinker import types

pytestmark = pytest.mark.thorough

TOKENS = [17, 45, 99, 23, 23, 150, 7, 81, 140, 3]


@pytest.fixture(scope="module")
def trained(server, make_datum) -> str:
    """The path of weights that were trained to repeat 5, 6, 7, 8."""
    trainer = server.client().create_lora_training_client(base_model=server.base_model, rank=8, seed=1).result()
    step = trainer.forward_backward([make_datum([5, 6, 7, 8] * 10)], "cross_entropy")
    trainer.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    step.result()
    return str(trainer.save_weights_for_sampler("said").result().path)


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.api_url}/v1", api_key="tml-test", max_retries=0)


def streamed(client, model, length, seed, on_part=lambda: None):
    """The tokens and logprobs of a stream, and the times at which its parts came."""
    tokens, logprobs, came = [], [], []
    parts = client.completions.create(
        model=model, prompt=TOKENS, max_tokens=length, seed=seed, stream=True, logprobs=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    for part in parts:
        (choice,) = part.choices
        tokens += choice.token_ids
        logprobs += choice.logprobs.token_logprobs
        came.append(time.monotonic())
        on_part()
    return tokens, logprobs, came


def sampled(server, length, seed, **weights):
    sampler = server.client().create_sampling_client(**weights).result()
    params = types.SamplingParams(max_tokens=length, seed=seed, stop=[])
    (one,) = sampler.sample(types.ModelInput.from_ints(TOKENS), 1, params).result().sequences
    return one.tokens, one.logprobs


def test_stream_equals_the_sdk_sample_for_base_model_and_adapter(server, client, trained):
    assert {server.base_model, trained} <= {model.id for model in client.models.list()}
    base = streamed(client, server.base_model, 40, 3)
    adapter = streamed(client, trained, 40, 3)
    of_run = streamed(client, trained.removeprefix("tinker://").split("/")[0], 40, 3)
    assert base[:2] == tuple(map(list, sampled(server, 40, 3, base_model=server.base_model)))
    assert adapter[:2] == tuple(map(list, sampled(server, 40, 3, model_path=trained)))
    assert adapter[:2] == of_run[:2] != base[:2]
    assert len(streamed(client, trained, 300, 3)[2]) > 2, "it comes in parts; a short one may be whole when it is read"


def test_killed_worker_neither_repeats_nor_loses_streamed_tokens(server, client, trained):
    sampler, lengths = server.client().create_sampling_client(model_path=trained).result(), [400] + [60] * 63
    params = [types.SamplingParams(max_tokens=most, seed=seed, stop=[]) for seed, most in enumerate(lengths)]
    asked = [sampler.sample(types.ModelInput.from_ints(TOKENS), 1, one) for one in params]
    expected = [list(one.result().sequences[0].tokens) for one in asked]
    begun, killed = set(), threading.Event()

    def kill(seed):
        begun.add(seed)
        if len(begun) >= 16 and not killed.is_set():
            killed.set()
            server.kill()

    with ThreadPoolExecutor(64) as threads:
        said = list(
            threads.map(lambda seed: streamed(client, trained, lengths[seed], seed, lambda: kill(seed)), range(64))
        )
    assert killed.is_set()
    assert [tokens for tokens, _, _ in said] == expected
    assert [len(logprobs) for _, logprobs, _ in said] == lengths


def test_64_streams_lose_nothing_beside_a_client_that_does_not_read(server, client, trained):
    sampler = server.client().create_sampling_client(model_path=trained).result()
    params = [types.SamplingParams(max_tokens=60, seed=seed, stop=[]) for seed in range(64)]
    asked = [sampler.sample(types.ModelInput.from_ints(TOKENS), 1, one) for one in params]
    expected = [list(one.result().sequences[0].tokens) for one in asked]
    unread = client.completions.create(
        model=trained, prompt=TOKENS, max_tokens=100, n=8, seed=1, stream=True, logprobs=20,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    with ThreadPoolExecutor(64) as threads:
        said = list(threads.map(lambda seed: streamed(client, trained, 60, seed)[0], range(64)))
    assert said == expected
    read = [0] * 8
    for part in unread:
        for choice in part.choices:
            read[choice.index] += len(choice.token_ids)
    assert read == [100] * 8


def test_leaving_client_frees_its_place(server, client):
    parts = client.completions.create(
        model=server.base_model, prompt=TOKENS, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(parts))
    parts.close()
    tokens, _, _ = streamed(client, server.base_model, 8, 1)
    assert len(tokens) == 8
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    with pytest.raises(openai.BadRequestError, match="frobnicate"):
        client.completions.create(model=server.base_model, prompt="a", extra_body={"frobnicate": 1})
