"""Each kind of invalid content that is sent through the SDK fails only its own future, with an error that names it.

After each failure, the weights, gradients and step are unchanged bit for bit, and the next request succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import tinker
from tests.api.conftest import BASE, CONTEXT, Engine
from tests.api.test_sdk import datum, loss_of
from tinker import types

NAN, INF = float("nan"), float("inf")
PROMPT = types.ModelInput.from_ints([2, 3])
Wrong = Callable[[], Any]


def ones(value: float = 1.0, count: int = 4) -> Any:
    return np.full(count, value, np.float32)


def training(model: tinker.TrainingClient) -> dict[str, tuple[Wrong, str]]:
    """Invalid training requests, each with a pattern of its error message."""

    def data(loss: Any = "cross_entropy", config: Any = None, **inputs: Any) -> Wrong:
        return lambda: model.forward_backward([datum(**inputs)], loss, config)

    def tokens(*ids: int) -> Wrong:
        return lambda: model.forward_backward([datum(list(ids))], "cross_entropy")

    def step(**params: float) -> Wrong:
        return lambda: model.optim_step(types.AdamParams(**params))

    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=4)])
    policy = {"weights": None, "logprobs": ones(), "advantages": ones()}
    return {
        "token id": (tokens(3, 99), r"data\[0\].model_input at position 1 is 99: must be >= 0 and < 16"),
        "negative token id": (tokens(-7), r"model_input at position 0 is -7: must be >= 0"),
        "too long": (tokens(*[3] * (CONTEXT + 1)), r"data\[0\].* has 65 tokens: must be 1 to 64"),
        "target id": (data(target_tokens=np.array([1, 2, 16, 3])), r"\['target_tokens'\] at position 2 is 16: must be"),
        "fewer targets": (data(target_tokens=np.array([1])), r"\['target_tokens'\] has 1 positions: must be 4"),
        "fewer weights": (data(weights=ones(count=3)), r"weights.*3.*4"),
        "NaN weight": (data(weights=ones(NAN)), r"\['weights'\] at position 0 is nan: must be a finite number"),
        "infinite weight": (data(weights=ones(INF)), r"\['weights'\] at position 0 is inf: must be a finite number"),
        "infinite advantage": (
            data("ppo", **{**policy, "advantages": ones(-INF)}), r"\['advantages'\] at position 0 is -inf",
        ),
        "NaN logprob": (data("ppo", **{**policy, "logprobs": ones(NAN)}), r"\['logprobs'\] at position 0 is nan"),
        "no targets": (data(target_tokens=None), r"data\[0\].loss_fn_inputs lacks 'target_tokens'"),
        "no advantages": (data("ppo", **{**policy, "advantages": None}), r"loss_fn_inputs lacks 'advantages'"),
        "unknown input": (data(nonsense=ones()), r"nonsense"),
        "unknown loss": (data("nonsense"), r"loss_fn is 'nonsense': must be one of"),
        "unknown loss config": (data("ppo", {"clip": 0.1}, **policy), r"clip"),
        "NaN loss config": (data("ppo", {"clip_low_threshold": NAN}, **policy), r"clip_low_threshold"),
        "image": (
            lambda: model.forward([types.Datum(model_input=image, loss_fn_inputs={})], "cross_entropy"),
            "the model accepts no images",
        ),
        "no provenance": (data("stable_reinforce", **policy), r"data\[0\] has no provenance"),
        "NaN learning rate": (step(learning_rate=NAN), r"adam_params.learning_rate is None: must be a finite number"),
        "negative learning rate": (step(learning_rate=-1.0), r"adam_params.learning_rate is -1.0"),
        "beta1": (step(beta1=1.0), r"adam_params.beta1 is 1.0: must be a finite number >= 0 and < 1"),
        "beta2": (step(beta2=-0.5), r"adam_params.beta2 is -0.5"),
        "eps": (step(eps=0.0), r"adam_params.eps is 0.0: must be a finite number > 0"),
        "weight decay": (step(weight_decay=-1.0), r"adam_params.weight_decay is -1.0"),
        "clip norm": (step(grad_clip_norm=-1.0), r"adam_params.grad_clip_norm is -1.0"),
        "name with a way up": (lambda: model.save_state("../x"), r"path is '../x': must be 1 to 128 letters"),
        "name with a folder": (lambda: model.save_state("a/b"), r"path is 'a/b'"),
        "hidden name": (lambda: model.save_weights_for_sampler(".x"), r"path is '.x'"),
        "existing name": (lambda: model.save_state("kept"), "exists already"),
        "long name": (lambda: model.save_weights_external("x" * 129), r"path is 'xxx"),
        "no name": (lambda: model.save_state(""), r"path is ''"),
        "short ttl": (lambda: model.save_state("a", ttl_seconds=5), r"ttl_seconds is 5: must be a whole"),
    }  # fmt: skip


def making(client: tinker.ServiceClient) -> dict[str, tuple[Wrong, str]]:
    """Invalid requests for models, each with a pattern of its error message."""

    def model(**more: Any) -> Wrong:
        return lambda: client.create_lora_training_client(BASE, **more)

    def load(path: str) -> Wrong:
        return lambda: client.create_training_client_from_state(path)

    return {
        "negative rank": (model(rank=-1), r"lora_config.rank is -1: must be a whole number from 0 to 1024"),
        "huge rank": (model(rank=100_000), r"lora_config.rank is 100000: must be a whole number from 0 to 1024"),
        "all of a part": (model(rank=0, train_mlp=False), r"lora_config.rank 0 trains all parameters: train_attn,"),
        "unknown base": (lambda: client.create_lora_training_client("no/such", rank=8),
                         "base_model is 'no/such': must be one that is served here"),
        "load with a way up": (load("tinker://../weights/x"), r"'\.\.'|\.\./weights"),
        "load with a longer way": (load("tinker://a/weights/../../x"), r"must be tinker://<run id>/"),
        "load of a file": (load("file:///etc/passwd"), r"must be tinker://<run id>/"),
        "load of another kind": (load("tinker://a/nonsense/x"), r"nonsense"),
        "load of nothing": (load("tinker://a/weights/b"), r"'tinker://a/weights/b' does not exist"),
    }  # fmt: skip


def sampling(sampler: tinker.SamplingClient) -> dict[str, tuple[Wrong, str]]:
    """Invalid samples, each with a pattern of its error message."""

    def params(count: int = 1, **more: Any) -> Wrong:
        return lambda: sampler.sample(PROMPT, count, types.SamplingParams(**{"max_tokens": 2, **more}))

    def prompt(*ids: int) -> Wrong:
        return lambda: sampler.sample(types.ModelInput.from_ints(list(ids)), 1, types.SamplingParams(max_tokens=1))

    return {
        "prompt token": (prompt(3, 16), r"prompt.chunks\[0\].tokens\[1\] is 16: must be >= 0 and < 16"),
        "empty prompt": (prompt(), r"prompt has 0 tokens: must be 1 to 63"),
        "long prompt": (prompt(*[2] * CONTEXT), r"prompt has 64 tokens: must be 1 to 63"),
        "absurd max_tokens": (params(max_tokens=10**6), r"max_tokens is 1000000: must be at most 62"),
        "no max_tokens": (params(max_tokens=0), r"max_tokens is 0: must be a whole number from 1"),
        "no sequences": (params(count=0), r"num_samples is 0"),
        "too many sequences": (params(count=10**6), r"num_samples is 1000000"),
        "temperature": (params(temperature=-1.0), r"temperature is -1.0"),
        "top_p": (params(top_p=2.0), r"top_p is 2.0"),
        "top_k": (params(top_k=-5), r"top_k is -5"),
        "empty stop": (params(stop=[""]), r"sampling_params.stop is \[''\]: must be non-empty strings"),
        "too many stops": (params(stop=[str(n) for n in range(1000)]), r"stop is .*: must be a string, or"),
        "long stop": (params(stop=["x" * 100_000]), r"sampling_params.stop is .*: must be strings of at most"),
        "stop token": (params(stop=[99]), r"sampling_params.stop\[0\] is 99"),
        "too many prompt logprobs": (
            lambda: sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True,
                                   topk_prompt_logprobs=10**6),
            r"topk_prompt_logprobs is 1000000",
        ),
    }  # fmt: skip


def refused(wrong: Wrong, said: str, name: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match=said) as caught:
        future: Future[Any] = wrong()
        future.result()
    assert caught.value.category == "user", name


def test_invalid_content_fails_its_future_and_changes_nothing(client: tinker.ServiceClient, engine: Engine) -> None:
    model = client.create_lora_training_client(BASE, rank=8, seed=1).result()
    model.forward_backward([datum()], "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=0.5)).result()
    model.forward_backward([datum()], "cross_entropy").result()  # a gradient that waits for its step
    model.save_state("kept").result()
    name, loss = model.get_info().model_id, loss_of(model)

    def state() -> tuple[bytes, bytes, int]:
        return engine.tables[name].tobytes(), engine.grads[name].tobytes(), engine.steps[name]

    before = state()
    for what, (wrong, said) in training(model).items():
        refused(wrong, said, what)
        assert state() == before, what
        assert loss_of(model) == loss, what
    models = set(engine.steps)
    for what, (wrong, said) in making(client).items():
        refused(wrong, said, what)
        assert set(engine.steps) == models, what
    with pytest.raises(tinker.NotFoundError, match="no/such"):
        client.create_sampling_client(base_model="no/such").result()
    assert state() == before


def test_invalid_samples_fail_and_good_ones_keep_their_numbers(client: tinker.ServiceClient, engine: Engine) -> None:
    sampler = client.create_sampling_client(base_model=BASE).result()
    wrong = sampling(sampler)

    def good(seed: int) -> Any:
        return sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=8, seed=seed))

    alone = [[(s.tokens, s.logprobs) for s in good(n).result().sequences] for n in range(len(wrong))]
    engine.paused = True  # so that all of them wait together
    bad = [ask for ask, _ in wrong.values()]
    futures = [(good(n), ask()) for n, ask in enumerate(bad)]
    engine.paused = False
    for n, (fine, failing) in enumerate(futures):
        what, (_, said) = list(wrong.items())[n]
        refused(lambda failing=failing: failing, said, what)
        assert [(s.tokens, s.logprobs) for s in fine.result().sequences] == alone[n], what


def test_invalid_datum_does_not_change_other_calls(client: tinker.ServiceClient, engine: Engine) -> None:
    def numbers(between: Callable[[tinker.TrainingClient], Any]) -> tuple[bytes, list[float]]:
        model = client.create_lora_training_client(BASE, rank=8, seed=1).result()
        losses = []
        for _ in range(3):
            passed = model.forward_backward([datum(), datum([5, 6])], "cross_entropy")
            failing = between(model)
            stepped = model.optim_step(types.AdamParams(learning_rate=0.5))
            losses.append(passed.result().metrics["loss:sum"])
            stepped.result()
            if failing is not None:
                refused(lambda failing=failing: failing, r"data\[1\].* is 99", "among good ones")
        return engine.tables[model.get_info().model_id].tobytes(), losses

    undisturbed = numbers(lambda model: None)
    wrong = [datum(), datum([3, 99])]
    assert numbers(lambda model: model.forward_backward(wrong, "cross_entropy")) == undisturbed
