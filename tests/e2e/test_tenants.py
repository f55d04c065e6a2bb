"""Tenants cannot harm others through the SDK, by bad tokens, huge requests, dead clients and more.

The culprit gets an immediate error with its cause (PROMPTLY allows for a busy machine). A bystander's numbers stay
bitwise equal to those of a run without the culprit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import tinker
from tinker import types

pytestmark = pytest.mark.thorough

PROMPTLY = 30.0  # seconds
TOKENS = [11, 22, 33, 44, 55, 66]
ADAM = types.AdamParams(learning_rate=1e-2, weight_decay=0.1)


def lora(server, service, seed: int = 5) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=server.base_model, rank=4, seed=seed).result()


def bystander(server, service, make_datum, between: Callable[[], None] = lambda: None) -> list[bytes]:
    """Make three steps, and return all their numbers as bytes. between: called after each step."""
    client = lora(server, service)
    numbers = []
    for _ in range(3):
        forward = client.forward_backward([make_datum(TOKENS)], "cross_entropy")
        update = client.optim_step(ADAM)
        numbers.append(np.array(forward.result().loss_fn_outputs[0]["logprobs"].data).tobytes())
        numbers.append(np.array(update.result().metrics["grad_norm"]).tobytes())
        between()
    return numbers


@pytest.fixture(scope="module")
def undisturbed(server, make_datum) -> list[bytes]:
    with server.client() as service:
        return bystander(server, service, make_datum)


def raw(inputs: dict, tokens: list[int] = TOKENS) -> tinker.Datum:
    return tinker.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def targets(n: int) -> types.TensorData:
    return types.TensorData(data=list(range(1, 1 + n)), dtype="int64", shape=[n])


def floats(values: list[float]) -> types.TensorData:
    return types.TensorData(data=values, dtype="float32", shape=[len(values)])


BAD_DATA = [  # tests/wire/test_forward.py has the other offences
    (raw({"target_tokens": targets(6), "weights": floats([1.0] * 6)}, [1, 2, 3, 999_999, 5, 6]), "vocabulary"),
    (raw({"target_tokens": targets(6), "weights": floats([float("inf")] * 6)}), "weights"),
    (raw({"target_tokens": targets(1), "weights": floats([1.0])}, [1] * 40_000), "context"),
]


def test_bad_training_data_hurts_only_its_sender(server, service, make_datum, undisturbed):
    culprit = lora(server, service, seed=8)

    def offend() -> None:
        for bad, word in BAD_DATA:
            start = time.monotonic()
            with pytest.raises(tinker.RequestFailedError, match=word) as failure:
                culprit.forward_backward([bad], "cross_entropy").result()
            assert time.monotonic() - start < PROMPTLY
            assert failure.value.category == "user"

    assert bystander(server, service, make_datum, offend) == undisturbed
    # The culprit itself can continue.
    assert culprit.forward_backward([make_datum(TOKENS)], "cross_entropy").result().metrics["loss:sum"] > 0


def test_another_client_training_changes_no_bit(server, service, make_datum, undisturbed):
    other = lora(server, service, seed=3)

    def train() -> None:
        other.forward_backward([make_datum([9, 8, 7, 6, 5, 4, 3, 2])], "cross_entropy")
        other.optim_step(types.AdamParams(learning_rate=0.5, weight_decay=0.5)).result()

    assert bystander(server, service, make_datum, train) == undisturbed


def test_exploding_step_is_refused_and_affects_no_other_model(server, service, make_datum, undisturbed):
    culprit = lora(server, service, seed=4)

    def explode() -> None:
        huge = raw({"target_tokens": targets(6), "weights": floats([3e38] * 6)})
        culprit.forward_backward([huge, huge], "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError, match="gradient"):
            culprit.optim_step(ADAM).result()

    assert bystander(server, service, make_datum, explode) == undisturbed


def test_bad_samples_do_not_fail_their_neighbors(server, service):
    sampler = service.create_sampling_client(base_model=server.base_model).result()
    prompt = types.ModelInput.from_ints(TOKENS)
    good = types.SamplingParams(max_tokens=6, temperature=1.0, seed=1, stop=[])

    def burst(bad: list[Callable[[], object]]) -> list[bytes]:
        """Draw three good samples, one after the other, each concurrently with all offences."""
        answers = []
        for _ in range(3):
            future = sampler.sample(prompt, 1, good)
            start = time.monotonic()
            for offence in [offend() for offend in bad]:
                with pytest.raises(tinker.RequestFailedError) as failure:
                    offence.result()
                assert failure.value.category == "user"
            assert time.monotonic() - start < PROMPTLY
            sequence = future.result().sequences[0]
            answers.append(repr((sequence.tokens, sequence.logprobs)).encode())
        return answers

    alone = burst([])
    together = burst(
        [
            lambda: sampler.sample(types.ModelInput.from_ints([999_999]), 1, good),
            lambda: sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1_000_000)),
            lambda: sampler.sample(types.ModelInput.from_ints([1] * 40_000), 1, good),
            lambda: sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, temperature=-1.0)),
            lambda: sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, top_p=7.0)),
            lambda: sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, stop=[""])),
        ]
    )
    assert together == alone


def test_sequence_or_adapter_that_does_not_fit_the_devices_is_refused(
    start_server, tmp_path, make_datum, monkeypatch
) -> None:
    monkeypatch.setenv("TINKERFLOW_DEVICE_MEMORY", "0.25")
    with start_server(tmp_path, prefect="off") as server, server.client() as service:
        (served,) = server.rest().get_server_capabilities().result().supported_models
        fits = served.max_context_length
        assert fits == 4096, "of the 8192 of the model"
        good = lora(server, service)
        rule = rf"data\[1\].model_input has {fits + 1} tokens: must be 1 to {fits}, the most that fits this group's"
        with pytest.raises(tinker.RequestFailedError, match=rule):
            good.forward_backward([make_datum(TOKENS), make_datum([7] * (fits + 2))], "cross_entropy").result()
        plain = {"base_model": server.base_model, "seed": 5}
        with pytest.raises(tinker.TinkerError, match=r"lora rank 1024: the adapter takes .* of each device"):
            service.create_lora_training_client(rank=1024, **plain).result()
        assert good.forward_backward([make_datum(TOKENS)], "cross_entropy").result().loss_fn_outputs
