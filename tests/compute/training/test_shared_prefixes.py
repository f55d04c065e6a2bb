"""Examples with equal prefixes are trained as a tree, and give the same results as each example alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.compute.closeness import close, close_logprobs
from tests.compute.conftest import VOCAB, add_adapter, build, forward, gradients, seeing

from tinkerflow.backend.compute.training import forward_backward as passes
from tinkerflow.backend.compute.training.packing import pack
from tinkerflow.backend.spec.commands import CreateAdapter, Example, LoraSpec
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.backend.spec.packing import micro_batches
from tinkerflow.backend.spec.prefix_trees import Branch, prefix_trees

SFT, PPO = LOSSES["cross_entropy"], LOSSES["ppo"]


def branches(seed: int, sizes: list[tuple[int, int]], *, targets: int = 1) -> list[Example]:
    """Examples that share a prefix with an earlier one. sizes: the shared and the other tokens of each example.

    The first token after the prefix differs, so exactly the tokens before the last shared one have equal targets.
    Advantages are 0 in the prefix, and one number after it.
    """
    rng = np.random.default_rng(seed)
    made: list[np.ndarray] = []
    examples = []
    for shared, more in sizes:
        before = made[rng.integers(len(made))][:shared] if made else np.empty(0, np.int32)
        tokens = np.concatenate([before, rng.integers(0, VOCAB, more + 1).astype(np.int32)])
        made.append(tokens)
        shape = (len(tokens) - 1, targets)
        inputs = {
            "logprobs": rng.uniform(-6, -2, shape).astype(np.float32),
            "advantages": np.full(shape, rng.normal(), np.float32),
        }
        inputs["advantages"][: len(before)] = 0
        targets_TK = np.repeat(tokens[1:, None], targets, 1) + np.arange(targets, dtype=np.int32)
        weights_TK = rng.uniform(-1, 2, shape).astype(np.float32)
        examples.append(Example(tokens[:-1], targets_TK % VOCAB, weights_TK, targets == 1, inputs))
    return examples


def placed(examples: list[Example], branch_tokens: int = 1, **how: object) -> int:
    """The tokens that micro-batches of the examples compute, without padding."""
    batches = pack(examples, microbatch_tokens=256, branch_tokens=branch_tokens, **how)
    return sum(len(place.columns) - place.shared for batch in batches for place in batch.places)


def forests() -> Iterator[list[Example]]:
    """Examples of a fixed tree, and of a random one. All have more than 64 tokens, so alone they have one program."""
    yield branches(1, [(0, 90), (60, 20), (60, 30), (80, 9), (0, 70), (40, 40), (40, 40)])
    sizes = np.random.default_rng(6).integers((20, 1), (90, 70), (7, 2))
    yield branches(6, [(0, 90), *((int(shared), int(more)) for shared, more in sizes)])


@pytest.mark.parametrize(
    ("family", "loss"),
    [
        ("qwen3", "ppo"),
        ("gpt_oss", "cross_entropy"),
        ("qwen3_5", "importance_sampling"),
        pytest.param("qwen3", "gspo", marks=pytest.mark.thorough),
        pytest.param("glm4_moe_lite", "cross_entropy", marks=pytest.mark.thorough),
        pytest.param("qwen3_next", "cross_entropy", marks=pytest.mark.thorough),
        pytest.param("gemma4_text", "ppo", marks=pytest.mark.thorough),
    ],
)
def test_a_tree_gives_the_log_probabilities_and_gradients_of_its_examples(family, loss, tmp_path):
    executor = build(tmp_path, family, tied=True).executor()
    for name in ("tree", "alone"):
        add_adapter(executor, name)
    for data in forests():
        assert placed(data, executor.branch_tokens, loss=LOSSES[loss].of_pass) < sum(len(one.tokens_T) for one in data)
        together = forward(executor, "tree", tuple(data), loss, backward=True)
        alone = [forward(executor, "alone", (example,), loss, backward=True) for example in data]
        for found, one in zip(together.logprobs, alone, strict=True):
            close_logprobs(found, one.logprobs[0], ulps=64)
        assert together.loss_sum == pytest.approx(sum(one.loss_sum for one in alone), rel=1e-4, abs=1e-3)
        expected = gradients(executor, "alone")  # of all forests so far
        for name, found in gradients(executor, "tree").items():
            close(found, expected[name], ulps=8192)
    assert max(np.abs(gradient).max() for gradient in expected.values()) > 1e-2


def test_setting_disables_shared_prefixes(tmp_path, monkeypatch):
    data = branches(1, [(0, 90), (60, 20), (60, 30), (80, 9)])
    made = []
    monkeypatch.setattr(passes, "pack", lambda *args, **how: made.append(pack(*args, **how)) or made[-1])
    model, computed, logprobs = build(tmp_path, "qwen3", tied=True), [], []
    for shared in (True, False):
        executor = model.executor(share_prefixes=shared)
        add_adapter(executor, "a")
        made.clear()
        logprobs.append(forward(executor, "a", tuple(data)).logprobs)
        places = [place for batches in made for batch in batches for place in batch.places]
        computed.append(sum(len(place.columns) - place.shared for place in places))
    assert computed[0] < computed[1] - 100 and computed[1] == sum(len(one.tokens_T) for one in data)
    for found, expected in zip(*logprobs, strict=True):
        close_logprobs(found, expected, ulps=64)


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [4, 0])
def test_equal_images_are_shared_and_other_images_are_not(rank, tmp_path):
    executor = build(tmp_path, "qwen3_vl", tied=True).executor()
    data = [seeing(one, (8, 2, 3), (30, 3, 2)) for one in branches(2, [(0, 90), (60, 20), (60, 30)])]
    other = data[2].images[1]
    data[2] = replace(data[2], images=(data[2].images[0], replace(other, pixels_HWC=255 - other.pixels_HWC)))
    assert [branch.shared for branch in prefix_trees(data, SFT)[0][1:]] in ([59, 30], [30, 59], [30, 30])
    for name in ("tree", "alone"):
        executor.execute(CreateAdapter(name, LoraSpec(rank), 0))
    together = forward(executor, "tree", tuple(data), backward=True)
    alone = [forward(executor, "alone", (example,), backward=True) for example in data]
    for found, one in zip(together.logprobs, alone, strict=True):
        close_logprobs(found, one.logprobs[0], ulps=64)
    expected = gradients(executor, "alone")
    for name, found in gradients(executor, "tree").items():
        close(found, expected[name], ulps=8192)


sizes = st.lists(st.tuples(st.integers(0, 80), st.integers(1, 60)), min_size=1, max_size=12)


@given(
    sizes,
    st.integers(0, 99),
    st.sampled_from([64, 256]),
    st.sampled_from([1, 2]),
    st.sampled_from([SFT, PPO]),
    st.sampled_from([1, 32]),
)
def test_each_example_keeps_its_tokens_and_its_loss(sizes, seed, budget, multiple, loss, chunk):
    data = branches(seed, sizes, targets=2)
    how = {"microbatch_tokens": budget, "row_multiple": multiple, "branch_tokens": chunk}
    batches = pack(data, **how, loss=loss)
    assert sorted(place.example for batch in batches for place in batch.places) == list(range(len(data)))
    lengths = [len(example.tokens_T) for example in data]
    assert micro_batches(lengths, **how, trees=lambda: prefix_trees(data, loss, chunk)) == len(batches)
    total = 0.0
    for batch in batches:
        columns = np.arange(batch.tokens_BT.shape[1])
        for place in batch.places:
            example, here = data[place.example], (place.row, place.columns)
            assert (batch.tokens_BT[here] == example.tokens_T).all()
            assert (batch.positions_BT[here] == np.arange(len(place.columns))).all()
            assert (batch.targets_BTK[here] == example.targets_TK).all()
            earlier, own = columns <= place.columns[:, None], np.isin(columns, place.columns)
            seen = earlier & (place.columns[:, None] < batch.ends_BT[place.row])
            assert (seen == earlier & own).all()  # a token sees its example up to itself
            assert (batch.parents_BT[here] == [-1, *place.columns[:-1]]).all()
            trained = np.logical_and.reduce([(example.inputs | {"weights": example.weights_TK})[m] for m in loss.masks])
            for name in loss.names[1:3]:
                assert (batch.inputs_BTK[name][here] == example.inputs[name])[trained].all()
            total += example.weights_TK[trained].sum()
        if batch.shares and chunk > 1:
            check_states(batch, chunk)
    assert sum(batch.inputs_BTK["weights"].sum() for batch in batches) == pytest.approx(total, rel=1e-4, abs=1e-3)


def check_states(batch, chunk):
    """Assert that a branch continues the state of the chunk before it, or the last state that was kept."""
    for parents in batch.parents_BT:
        entries = parents[::chunk]
        branching = [(turn, entry) for turn, entry in enumerate(entries) if entry >= 0 and entry != turn * chunk - 1]
        assert all(entry % chunk == chunk - 1 for _, entry in branching)
        for turn, entry in branching:
            assert entry == max(kept for _, kept in branching if kept < turn * chunk)


def test_tokens_that_two_examples_train_differently_are_not_shared():
    one, other = branches(0, [(0, 60), (50, 20)])
    assert prefix_trees([one, other], PPO) in ([(Branch(0, 0), Branch(1, 49))], [(Branch(1, 0), Branch(0, 49))])
    advantages = other.inputs["advantages"].copy()
    advantages[30] = 1.0
    other = replace(other, inputs=other.inputs | {"advantages": advantages})
    ((_, second),) = prefix_trees([one, other], PPO)
    assert second.shared == 30
    ((_, second),) = prefix_trees([one, other], SFT)  # which reads no advantages
    assert second.shared == 49


def test_prefixes_are_not_shared_where_they_save_no_rows():
    data = branches(0, [(0, 40), (20, 50)])
    assert placed(data) == sum(len(one.tokens_T) for one in data)


def test_tree_longer_than_a_row_is_divided():
    data = branches(0, [(0, 150), *[(100, 50)] * 7])
    batches = pack(data, microbatch_tokens=256, branch_tokens=1)
    assert all(batch.tokens_BT.size <= 256 for batch in batches)
    assert sum(place.shared == 0 for batch in batches for place in batch.places) == len(batches) < len(data)
