"""Routing replay: tokens train through the experts that the sampler chose for them, and agreement is measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import (
    FAMILY_SHAPE,
    add_adapter,
    ask,
    build,
    examples,
    forward,
    gradients,
    result_of,
)
from tests.compute.test_experts import adapted_weights

from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.training import train
from tinkerflow.backend.spec.commands import Example, ExportAdapter, ImportAdapter, PublishSnapshot
from tinkerflow.backend.spec.drift import AGREEMENT, FIRST_AGREEMENT

PROMPT = list(range(3, 23))
OTHERS = partial(pytest.param, marks=pytest.mark.thorough)


@pytest.fixture(scope="module")
def executor(moe: Any) -> Any:
    executor = moe.executor()
    add_adapter(executor, "a", train_unembed=False)
    executor.execute(PublishSnapshot("a", "s"))
    return executor


def datum(sequence: Any, prompt: list[int] = PROMPT) -> Example:
    """A sample as a datum with its experts."""
    whole = np.asarray([*prompt, *sequence.tokens_T], np.int32)
    routes_Tn = np.full((len(whole) - 1, sequence.routes_Tn.shape[1]), -1, np.int16)
    routes_Tn[len(prompt) - 1 :] = sequence.routes_Tn
    return Example(whole[:-1], whole[1:, None], np.ones((len(whole) - 1, 1), np.float32), routes_Tn=routes_Tn)


def sampled(executor: Any, count: int = 3, **more: Any) -> Any:
    request = ask("r", PROMPT, 30, snapshot_id="s", temperature=1.0, seed=5, num_samples=count, **more)
    return result_of(executor, request).sequences


def random_routes(example: Example, layers: int, seed: int) -> Example:
    """Three distinct experts of eight for each token and layer. Every fifth token has none."""
    rng, T = np.random.default_rng(seed), len(example.tokens_T)
    routes_TLk = rng.permuted(np.broadcast_to(np.arange(8, dtype=np.int16), (T, layers, 8)), axis=-1)[..., :3].copy()
    routes_TLk[::5] = -1
    return replace(example, routes_Tn=routes_TLk.reshape(T, -1))


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        "glm4_moe",
        *map(OTHERS, ("gpt_oss", "gemma4", "deepseek_v3", "minimax_m2")),
    ],
)
def test_replayed_own_experts_change_no_bit(moe, executor, tmp_path, family):
    """One family of each kind of router, some with a dense layer. CI tests all routers in `test_routers.py`."""
    if family != "qwen3_moe":
        moe = build(tmp_path, family, tied=False)
        executor = moe.executor()
        add_adapter(executor, "a", train_unembed=False)
        executor.execute(PublishSnapshot("a", "s"))
    cfg, dense = load_config(moe.folder), int("first_k_dense_replace" in FAMILY_SHAPE[family])
    plain = sampled(executor)
    routed = sampled(executor, routes=True)
    assert plain[0].routes_Tn is None
    assert [one.tokens_T.tolist() for one in routed] == [one.tokens_T.tolist() for one in plain]
    data = tuple(datum(one) for one in routed)
    for one in routed:
        routes_TLk = one.routes_Tn.reshape(30, cfg.layers, cfg.experts_per_token)
        assert routes_TLk.max() < cfg.experts
        assert (routes_TLk[:, dense:] >= 0).all() and (routes_TLk[:, :dense] == -1).all()
    state = executor.execute(ExportAdapter("a", optimizer=False))
    results, slopes = [], []
    for name, given in (("without", tuple(replace(one, routes_Tn=None) for one in data)), ("with", data)):
        executor.execute(ImportAdapter(name, state))
        results.append(forward(executor, name, given, backward=True))
        slopes.append(gradients(executor, name))
    without, replayed = results
    assert AGREEMENT not in without.metrics
    assert (replayed.metrics[AGREEMENT], replayed.metrics[FIRST_AGREEMENT]) == (1.0, 1.0)
    layers = cfg.layers - dense
    changed = []
    for one in data:  # each token has other experts in the last layer
        routes_Tn = one.routes_Tn.copy()
        last_Tk = routes_Tn[:, -cfg.experts_per_token :]
        last_Tk[:] = np.where(last_Tk >= 0, (last_Tk + 1) % cfg.experts, -1)
        changed.append(replace(one, routes_Tn=routes_Tn))
    by_layer = forward(executor, "with", tuple(changed)).metrics
    assert by_layer[FIRST_AGREEMENT] == (layers > 1) and by_layer[AGREEMENT] <= 1 - 0.5 / layers
    assert all(np.array_equal(*pair) for pair in zip(without.logprobs, replayed.logprobs, strict=True))
    assert all(np.array_equal(slopes[0][name], slopes[1][name]) for name in slopes[0])
    assert any(np.abs(slope).max() > 0 for slope in slopes[1].values())


def test_planted_experts_equal_torch(moe, executor):
    """Compares logprobs and gradients of every adapter with torch, where the gate takes the given experts."""
    data = tuple(random_routes(one, 2, seed) for seed, one in enumerate(examples((7, 30))))
    state = executor.execute(ExportAdapter("a", optimizer=False))
    executor.execute(ImportAdapter("planted", state))
    result = forward(executor, "planted", data, backward=True)
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in state.weights.items()}
    named, loss = adapted_weights(moe.model, weights), torch.zeros(())
    for example, found in zip(data, result.logprobs, strict=True):
        scored = planted_logprobs(moe.model, named, example)
        close_logprobs(found, scored.detach().numpy()[:, 0])
        loss = loss - (scored * torch.tensor(example.weights_TK)).sum()
    loss.backward()
    for name, array in gradients(executor, "planted").items():
        wanted = weights[name].grad.numpy()
        assert np.abs(array - wanted).max() < 2e-3 * max(1.0, np.abs(wanted).max()), name
    unplanted = forward(executor, "planted", tuple(replace(one, routes_Tn=None) for one in data))
    assert np.abs(unplanted.logprobs[1] - result.logprobs[1]).max() > 0.1
    assert result.metrics[AGREEMENT] < 0.5


def test_experts_follow_their_tokens_where_a_layer_computes_a_few_at_a_time(moe, executor, monkeypatch):
    monkeypatch.setattr(train, "tokens_at_a_time", lambda _: 8)
    data = tuple(random_routes(one, 2, seed) for seed, one in enumerate(examples((30,))))
    chunked = moe.executor()
    chunked.execute(ImportAdapter("a", executor.execute(ExportAdapter("a", optimizer=False))))
    whole, parts = forward(chunked, "a", data), forward(chunked, "a", data, backward=True)  # only backward has chunks
    close_logprobs(parts.logprobs[0], whole.logprobs[0])
    assert parts.metrics == whole.metrics


def planted_logprobs(model: Any, named: dict[str, torch.Tensor], example: Example) -> torch.Tensor:
    routes_TLk = torch.tensor(example.routes_Tn.astype(np.int64)).reshape(len(example.tokens_T), 2, 3)

    def choose(given_Tk: torch.Tensor) -> Any:
        def hook(gate: Any, _: Any, result: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            chances_TE, _, own_Tk = result
            chosen_Tk = torch.where(given_Tk >= 0, given_Tk, own_Tk)
            shares_Tk = chances_TE.gather(1, chosen_Tk)
            return chances_TE, shares_Tk / shares_Tk.sum(-1, keepdim=True), chosen_Tk

        return hook

    hooks = [
        layer.mlp.gate.register_forward_hook(choose(routes_TLk[:, number]))
        for number, layer in enumerate(model.model.layers)
    ]
    try:
        ids = torch.tensor(example.tokens_T[None].astype(np.int64))
        logits = torch.func.functional_call(model, named, (ids,)).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(example.targets_TK.astype(np.int64)))


def test_prompts_with_different_experts_are_not_merged(executor):
    """In one row with a shared prefix, each example has the logprobs that it has alone."""
    (one,) = examples((40,))
    first, second = random_routes(one, 2, 1), random_routes(one, 2, 2)
    second.routes_Tn[:20] = first.routes_Tn[:20]
    alone = [forward(executor, "a", (example,)).logprobs[0] for example in (first, second, one)]
    together = forward(executor, "a", (first, second, one)).logprobs
    for mine, found in zip(alone, together, strict=True):
        close_logprobs(found, mine)
    assert np.abs(alone[0] - alone[1])[20:].max() > 0.01
