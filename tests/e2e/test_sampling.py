"""All options of a sampler through the real SDK. Each answer is compared with numbers computed in another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tinker
import torch
from family import make_family
from tinker import types
from tinker.types.provenance_spans import PromptProvenanceSpan, SampledProvenanceSpan

TOKENS = [17, 45, 99, 23, 23, 150, 7, 81, 140, 3]
PROMPT = types.ModelInput.from_ints(TOKENS)
CLOSE = {"rel": 1e-3, "abs": 2e-3}  # logprobs: sampling and training sum in different orders
NEXT = types.SamplingParams(max_tokens=1, temperature=1.0, seed=1)


@pytest.fixture(scope="module")
def trainer(server, make_datum) -> tinker.TrainingClient:
    """A model after one step, so that it differs from the base model."""
    made = server.client().create_lora_training_client(base_model=server.base_model, rank=8, seed=1).result()
    learn(made, make_datum, [5, 6, 7, 8])
    return made


@pytest.fixture(scope="module")
def sampler(trainer) -> tinker.SamplingClient:
    return trainer.save_weights_and_get_sampling_client().result()


def learn(trainer, make_datum, tokens):
    """Make a large step towards a repetition of these tokens."""
    step = trainer.forward_backward([make_datum(tokens * 10)], "cross_entropy")
    trainer.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    step.result()


def greedy(sampler, length=12):
    params = types.SamplingParams(max_tokens=length, temperature=0.0, stop=[])
    return sampler.sample(PROMPT, 1, params).result().sequences[0].tokens


def test_tokens_are_among_the_most_likely_ones_of_their_filter(sampler):
    params = types.SamplingParams(max_tokens=12, temperature=1.0, top_k=5, seed=2, stop=[])
    plain = sampler.sample(PROMPT, 2, params).result()
    listed = sampler.sample(PROMPT, 2, params, topk_sample_logprobs=5).result()
    for one, same in zip(listed.sequences, plain.sequences, strict=True):
        assert one.tokens == same.tokens and same.topk_logprobs is None
        for token, logprob, row in zip(one.tokens, one.logprobs, one.topk_logprobs, strict=True):
            assert len(row) == 5 and [value for _, value in row] == sorted((v for _, v in row), reverse=True)
            assert dict(row)[token] == pytest.approx(logprob, abs=1e-6)
    params = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[])
    one, _ = sampler.sample(PROMPT, 2, params, topk_sample_logprobs=5).result().sequences
    assert one.tokens == [row[0][0] for row in one.topk_logprobs]


def test_prompt_scores_equal_compute_logprobs_and_training(sampler, trainer, make_datum):
    own = np.array(TOKENS[1:])
    ids = np.stack([own, np.where(np.arange(len(own)) % 2, 11, -1)], axis=1)
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 4}  # few combinations, as each is compiled
    dense = sampler.sample(PROMPT, 1, NEXT, **asked, target_prompt_logprobs=types.TensorData.from_numpy(ids)).result()
    scored = sampler.compute_logprobs(PROMPT).result()
    assert scored[0] is None and dense.prompt_logprobs[1:] == pytest.approx(scored[1:], **CLOSE)
    targets = dense.target_prompt_logprobs.to_numpy()
    assert targets[:, 0].tolist() == pytest.approx(scored[1:], **CLOSE)
    forward = trainer.forward([make_datum(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    assert targets[:, 0].tolist() == pytest.approx(forward.to_numpy().tolist(), **CLOSE)
    # The scores of token 11 as every second target equal those of prompts that contain it there.
    assert [value == 0.0 for value in targets[:, 1]] == [cell == -1 for cell in ids[:, 1]]
    for place in (1, len(own) - 1 - len(own) % 2):
        altered = types.ModelInput.from_ints([*TOKENS[: place + 1], 11])
        assert targets[place, 1] == pytest.approx(sampler.compute_logprobs(altered).result()[-1], **CLOSE)
    sparse = types.TensorData.from_torch_sparse(torch.tensor(ids), pad_value=-1)
    again = sampler.sample(PROMPT, 1, NEXT, **asked, target_prompt_logprobs=sparse).result().target_prompt_logprobs
    assert again.sparse_crow_indices == sparse.sparse_crow_indices
    np.testing.assert_allclose(again.to_numpy(), targets, atol=2e-3)
    assert dense.topk_prompt_logprobs[0] is None
    for token, logprob, row in zip(TOKENS[1:], scored[1:], dense.topk_prompt_logprobs[1:], strict=True):
        assert dict(row).get(token, logprob) == pytest.approx(logprob, **CLOSE)
        assert token in dict(row) or logprob <= row[-1][1] + 2e-3


def test_last_prompt_scores_are_the_tail_of_all_scores(sampler):
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 4, "prompt_alt_tokens_k": 2}
    whole = sampler.sample(PROMPT, 1, NEXT, **asked).result()
    tail = sampler.sample(PROMPT, 1, NEXT, **asked, prompt_logprobs_last_n=4).result()
    before = len(TOKENS) - 4
    assert tail.prompt_logprobs[:before] == [None] * before and tail.topk_prompt_logprobs[:before] == [None] * before
    assert tail.prompt_logprobs[before:] == pytest.approx(whole.prompt_logprobs[before:], **CLOSE)
    for row, full in zip(tail.topk_prompt_logprobs[before:], whole.topk_prompt_logprobs[before:], strict=True):
        assert [token for token, _ in row] == [token for token, _ in full]
        assert [value for _, value in row] == pytest.approx([value for _, value in full], **CLOSE)


def test_alternatives_have_the_logprobs_of_the_prompt_they_would_make(sampler, trainer, make_datum):
    asked = {"topk_prompt_logprobs": 4, "prompt_alt_tokens_k": 2}
    drawn = sampler.sample(PROMPT, 1, NEXT, **asked).result().prompt_alt_tokens
    tokens, logprobs = drawn.tokens.to_numpy(), drawn.logprobs.to_numpy()
    assert tokens.shape == logprobs.shape == (len(TOKENS) - 1, 2)
    altered = [make_datum([*TOKENS[: row + 1], int(token)]) for row, cells in enumerate(tokens) for token in cells]
    outputs = trainer.forward(altered, "cross_entropy").result().loss_fn_outputs
    assert logprobs.ravel().tolist() == pytest.approx([o["logprobs"].to_numpy()[-1] for o in outputs], **CLOSE)
    again = sampler.sample(PROMPT, 1, NEXT, **asked).result().prompt_alt_tokens
    assert again.tokens.to_numpy().tolist() == tokens.tolist(), "the seed decides"
    cold = types.SamplingParams(max_tokens=1, temperature=0.0)
    likely = sampler.sample(PROMPT, 1, cold, **asked).result()
    assert likely.prompt_alt_tokens.tokens.to_numpy().tolist() == [
        [row[0][0]] * 2 for row in likely.topk_prompt_logprobs[1:]
    ]


def rollout(sequence, advantage, logprobs=None):
    """A sequence as a datum with the provenance of each token. With logprobs, the prompt has no advantages."""
    whole, sampled, name = [*TOKENS, *sequence.tokens], len(sequence.tokens), sequence.sequence_id
    n = len(TOKENS)
    inputs = {
        "target_tokens": whole[1:],
        "advantages": np.full(len(whole) - 1, advantage, np.float32),
        "logprobs": np.full(len(whole) - 1, -9.0, np.float32),  # the recorded logprobs are used instead
    }
    if logprobs is not None:
        inputs["logprobs"][n - 1 :], inputs["advantages"][: n - 1] = logprobs, 0
    datum = types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)

    def span(kind, offset, length):
        return kind(sequence_id=name, offset=offset, length=length)

    return datum.with_provenance(
        [span(PromptProvenanceSpan, 0, n), span(SampledProvenanceSpan, 0, sampled - 1)],
        [span(PromptProvenanceSpan, 1, n - 1), span(SampledProvenanceSpan, 0, sampled)],
    )


def test_stable_reinforce_weighs_by_recorded_sampling_probabilities(server):
    service = server.client()
    trainer = service.create_lora_training_client(base_model=server.base_model, rank=8, seed=4).result()
    recording = trainer.save_weights_and_get_sampling_client(record_stability_info=True).result()
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3, stop=[])
    good, bad = recording.sample(PROMPT, 2, params).result().sequences
    n, beta, drift = len(TOKENS) - 1, 0.5, []

    def loss(config):
        """The loss of a pass over both sequences, and each one's logprobs now and when it was sampled."""
        result = trainer.forward_backward([rollout(good, 1.0), rollout(bad, -1.0)], "stable_reinforce", config).result()
        drift.append(result.metrics["kl_sample_train:mean"])
        now = [output["logprobs"].to_numpy()[n:].astype(np.float64) for output in result.loss_fn_outputs]
        return result.metrics["loss:sum"], zip(now, (np.array(one.logprobs) for one in (good, bad)), strict=True)

    first, ((g, g_then), (b, b_then)) = loss({"kl_coeff": beta})
    assert g.tolist() == pytest.approx(g_then.tolist(), **CLOSE)  # on policy: neither taper nor penalty
    assert first == pytest.approx(b.sum() - g.sum(), rel=1e-3, abs=0.02)
    moved = trainer.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
    assert moved.metrics["grad_norm"] > 0
    second, ((g, g_then), (b, b_then)) = loss({"kl_coeff": beta})
    assert g.sum() > g_then.sum() and b.sum() < b_then.sum(), "it learned to say the good one and not the bad one"
    k3 = [float((np.exp(now - then) - 1 - (now - then)).sum()) for now, then in ((g, g_then), (b, b_then))]
    assert drift == pytest.approx([0.0, sum(k3) / 16], rel=1e-3, abs=1e-6), "a mean over what was sampled"
    taper = math.exp(min(0.0, float((b - b_then).sum())))
    assert taper < 0.9
    assert second == pytest.approx(taper * b.sum() - g.sum() + beta * sum(k3), rel=2e-3, abs=0.05)

    silent = trainer.save_weights_and_get_sampling_client().result().sample(PROMPT, 1, params).result().sequences[0]
    stranger = server.client().create_sampling_client(base_model=server.base_model, record_stability_info=True)
    foreign = stranger.result().sample(PROMPT, 1, params).result().sequences[0]
    for one in (silent, foreign):
        with pytest.raises(tinker.TinkerError, match=one.sequence_id):
            trainer.forward_backward([rollout(one, 1.0)], "stable_reinforce").result()


def test_inflight_sampler_takes_later_weights_and_a_snapshot_does_not(server, make_datum):
    trainer = server.client().create_lora_training_client(base_model=server.base_model, rank=8, seed=5).result()
    learn(trainer, make_datum, [5, 6, 7, 8])
    old = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    fixed = trainer.save_weights_and_get_sampling_client().result()
    before = greedy(old)
    assert before == greedy(fixed)
    spanning = old.sample(PROMPT, 2, types.SamplingParams(max_tokens=100, temperature=1.0, seed=1, stop=[]))
    for _ in range(2):
        learn(trainer, make_datum, [30, 31, 32, 33])
    new = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    now = trainer.save_weights_and_get_sampling_client().result()
    assert greedy(old) == greedy(new) == greedy(now) != before
    assert greedy(fixed) == before
    assert [len(one.tokens) for one in spanning.result().sequences] == [100] * 2


@pytest.mark.thorough
def test_tokens_train_through_the_experts_of_their_samples(tmp_path, start_server, monkeypatch):
    monkeypatch.setenv("TINKERFLOW_ROUTING_REPLAY", "true")
    folder = make_family(tmp_path / "qwen3_moe", "qwen3_moe")
    (data_dir := tmp_path / "data").mkdir()
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3, stop=[])
    with start_server(data_dir, "--base-model", str(folder), prefect="off") as server, server.client() as service:
        trainer = service.create_lora_training_client(str(folder), rank=8, seed=4).result()
        recording = trainer.save_weights_and_get_sampling_client(record_stability_info=True).result()
        sequences = recording.sample(PROMPT, 2, params).result().sequences
        for loss in ("stable_reinforce", "importance_sampling"):
            result = trainer.forward_backward([rollout(one, 1.0) for one in sequences], loss).result()
            assert result.metrics["routing_agreement:mean"] > 0.9, "bfloat16 or float32, but the same weights"
        silent = trainer.save_weights_and_get_sampling_client().result().sample(PROMPT, 1, params).result().sequences
        with pytest.raises(tinker.TinkerError, match=silent[0].sequence_id):
            trainer.forward_backward([rollout(silent[0], 1.0)], "importance_sampling").result()


@pytest.mark.thorough
def test_ratios_use_the_supports_of_the_samples(tmp_path, start_server, monkeypatch):
    """This also holds after a step, and a repeated request uses the same supports. Without records, a request fails."""
    (data_dir := tmp_path / "data").mkdir()
    monkeypatch.setenv("TINKERFLOW_SUPPORT_REPLAY", "true")
    params = types.SamplingParams(max_tokens=8, temperature=1.0, top_k=5, top_p=0.7, seed=3, stop=[])
    with start_server(data_dir, prefect="off") as server, server.client() as service:
        trainer = service.create_lora_training_client(server.base_model, rank=8, seed=4).result()
        recording = trainer.save_weights_and_get_sampling_client(record_stability_info=True).result()
        sequences = recording.sample(PROMPT, 2, params).result().sequences
        data = [rollout(one, 1.0, one.logprobs) for one in sequences]
        result = trainer.forward_backward(data, "importance_sampling").result()
        assert result.metrics["loss:sum"] == pytest.approx(-16, rel=1e-3)
        assert result.metrics["support_replay:mean"] == 1
        assert result.metrics["kl_sample_train:max"] < 1e-3
        trainer.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
        again = [trainer.forward(data, "importance_sampling").result() for _ in range(2)]
        assert again[0].metrics == again[1].metrics
        full = sum(
            np.exp(np.asarray(found["logprobs"].to_numpy())[-8:] - one.logprobs).sum()
            for one, found in zip(sequences, again[0].loss_fn_outputs, strict=True)
        )
        assert abs(full + again[0].metrics["loss:sum"]) > 0.01, "the supports have become more probable"
        silent = trainer.save_weights_and_get_sampling_client().result().sample(PROMPT, 1, params).result().sequences
        with pytest.raises(tinker.TinkerError, match=silent[0].sequence_id):
            trainer.forward_backward([rollout(silent[0], 1.0)], "importance_sampling").result()
