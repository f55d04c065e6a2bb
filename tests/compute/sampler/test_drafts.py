"""Drafts change neither tokens nor logprobs, stay within their owner, and stop if too few are accepted."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import ask, result_of, run_all
from tests.compute.sampler.conftest import VOCAB, make_tiny, prompt
from tests.compute.sampler.test_prefix_cache import assert_same

from tinkerflow.backend.compute.sampler import Sampler
from tinkerflow.backend.compute.sampler import drafts as drafts_module
from tinkerflow.backend.compute.sampler import sampler as sampler_module
from tinkerflow.backend.compute.sampler.chunks import TokensOf
from tinkerflow.backend.compute.sampler.drafts import Drafts, DraftTexts, PromptTexts
from tinkerflow.backend.compute.sampler.model import SamplerModel
from tinkerflow.backend.compute.sampler.requests import ActiveRequest, ActiveSequence
from tinkerflow.backend.compute.sampler.sampling import UniformStream
from tinkerflow.backend.compute.sampler.shapes import make_shapes
from tinkerflow.backend.compute.sampler.stops import StopDetector
from tinkerflow.backend.spec.commands import Adjustments, SampleRequest, SampleStep

FAMILIES = [
    "qwen3_moe",
    "deepseek_v3",  # latent attention
    *(
        pytest.param(name, marks=pytest.mark.thorough)
        for name in ("qwen3", "gemma3_text", "gpt_oss", "mistral", "gemma4_text")
    ),
]


@pytest.fixture
def one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """All decode dispatches have 16 rows, so drafts change no bit."""
    monkeypatch.setattr(
        sampler_module, "make_shapes", lambda *sizes, **how: replace(make_shapes(*sizes, **how), slots=sizes[:1])
    )


def requests(seed: int, count: int) -> list[SampleRequest]:
    """Random requests that often repeat text: periodic prompts, low temperatures, several samples of a prompt."""
    chance = np.random.default_rng(seed)
    asked = []
    for number in range(count):
        period = chance.integers(0, VOCAB, int(chance.integers(1, 9)))
        prompt = np.resize(period, int(chance.integers(4, 60))).tolist()
        choice: dict[str, Any] = {"temperature": float(chance.choice([0.0, 0.05, 0.3, 1.0])), "seed": int(number)}
        if chance.random() < 0.3:
            choice |= {"top_k": int(chance.integers(1, 40)), "top_p": float(chance.uniform(0.5, 1))}
        if chance.random() < 0.3:
            choice["stop_tokens"] = tuple(int(token) for token in chance.integers(0, VOCAB, 20))
        if chance.random() < 0.15:
            choice["topk_sample"] = 3
        if chance.random() < 0.1:
            choice["adjustments"] = Adjustments(presence=0.5)
        choice["num_samples"] = int(chance.integers(1, 4))
        asked.append(ask(f"{seed}.{number}", prompt, int(chance.integers(1, 60)), **choice))
    return asked


def compare(plain: Sampler, drafting: Sampler, batches: list[list[SampleRequest]]) -> None:
    """Assert that results are equal bit for bit, and that some tokens come from drafts."""
    for batch in batches:
        expected, found = run_all(plain, *batch), run_all(drafting, *batch)
        for request in batch:
            assert_same(found[request.request_id], expected[request.request_id])
            for one, other in zip(
                found[request.request_id].sequences, expected[request.request_id].sequences, strict=True
            ):
                assert one.stop_reason == other.stop_reason
                if one.top is not None and other.top is not None:
                    np.testing.assert_array_equal(one.top.logprobs_Nk, other.top.logprobs_Nk)
    assert drafting.drafts is not None and 0 < drafting.drafts.accepted < drafting.drafts.drafted
    assert drafting.pages.used == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_bit(family: str, tmp_path: Path, one_size: None) -> None:
    model = make_tiny(tmp_path / family, family)
    batches = [requests(seed, 5) for seed in range(6)]
    compare(model.sampler(page=32), model.sampler(page=32, drafts=True), [*batches, batches[0]])


def test_a_quantized_cache_and_few_pages_change_nothing(qwen: Any, one_size: None) -> None:
    batches = [requests(seed, 5) for seed in range(4)]
    shape: dict[str, Any] = {"page": 32, "kv_cache": "float8", "pages": 14}
    compare(qwen.sampler(**shape), qwen.sampler(**shape, drafts=True), batches)


@pytest.mark.thorough
def test_ten_thousand_requests(qwen: Any, one_size: None) -> None:
    batches = [requests(seed, 10) for seed in range(1000)]
    compare(qwen.sampler(), qwen.sampler(drafts=True), batches)


def reachable(logprobs_V: np.ndarray, request: SampleRequest, uniform: float, moved: float) -> set[int]:
    """The tokens that `uniform` may draw if each logprob [V] moves by at most `moved`, in float64."""
    if request.temperature == 0:
        return set(np.flatnonzero(logprobs_V >= logprobs_V.max() - 2 * moved))
    weights_V = np.exp((logprobs_V - logprobs_V.max()) / request.temperature)
    slack, found = 2 * moved / request.temperature, set[int]()
    for room in (1 - slack, 1 + slack):
        kept_V = weights_V
        if request.top_k >= 0:
            kept_V = np.where(kept_V >= np.sort(kept_V)[-request.top_k] * room, kept_V, 0)
        if request.top_p < 1:
            falling = np.sort(kept_V)[::-1]
            last = int(np.searchsorted(np.cumsum(falling), request.top_p * falling.sum() / room))
            kept_V = np.where(kept_V >= falling[min(last, len(falling) - 1)] * room, kept_V, 0)
        folded = np.arange(-(-VOCAB // 128) * 128).reshape(-1, 128).T.ravel()  # the order in which `invert` sums
        order = folded[folded < VOCAB]
        ends = np.cumsum(kept_V[order])
        wanted, near = uniform * ends[-1], slack * ends[-1]
        here = (ends - kept_V[order] - near <= wanted) & (wanted <= ends + near) & (kept_V[order] > 0)
        found |= set(order[here])
    return found


def test_larger_steps_change_only_tied_tokens(qwen: Any) -> None:
    """A step with drafts has more rows, which changes the last bits. These decide between equally likely tokens.

    DRAFT_REQUESTS is the number of compared requests (`pytest -s` prints the counts).
    """
    count = int(os.environ.get("DRAFT_REQUESTS", "40"))
    plain, drafting = qwen.sampler(), qwen.sampler(drafts=True)
    moved, others, usual = 0.0, list[tuple[SampleRequest, int, int, Any, Any]](), []
    for seed in range(-(-count // 5)):
        batch = [replace(one, adjustments=None) for one in requests(seed, 5)]
        expected, found = run_all(plain, *batch), run_all(drafting, *batch)
        for request in batch:
            pairs = zip(*(by_id[request.request_id].sequences for by_id in (expected, found)), strict=True)
            for index, (one, other) in enumerate(pairs):
                most = min(len(one.tokens_T), len(other.tokens_T))
                same = one.tokens_T[:most] == other.tokens_T[:most]
                equal = most if same.all() else int(same.argmin())
                far = np.abs(one.logprobs_T[:equal] - other.logprobs_T[:equal])
                moved = max(moved, float(far.max(initial=0.0)))
                close_logprobs(one.logprobs_T[:equal], other.logprobs_T[:equal], ulps=128)
                if equal < most:
                    others.append((request, index, equal, one.tokens_T, other.tokens_T))
                else:
                    assert len(one.tokens_T) == len(other.tokens_T)
        usual.append((request, index, max(0, equal - 1), one.tokens_T, other.tokens_T))
    # If both draw the same token, it is reachable and few others are, so `reachable` does not allow everything.
    for request, index, equal, one, other in [*others, *usual]:
        before = np.concatenate([request.prompt_T, one[:equal]]).tolist()
        top = result_of(plain, ask("at", before, 1, topk_sample=VOCAB)).sequences[0].top
        logprobs_V = np.empty(VOCAB)
        logprobs_V[top.tokens_Nk[0]] = top.logprobs_Nk[0]
        uniform = float(UniformStream(request.seed, index).draw(equal + 1)[equal])
        near = reachable(logprobs_V, request, uniform, 2 * moved)
        where = f"{request.request_id}, sample {index}, token {equal}"
        assert {int(one[equal]), int(other[equal])} <= near and len(near) < 4, where
    print(f"{len(others)} sequences of {count} requests differ; equal tokens' logprobs by at most {moved:.1e}")
    assert drafting.drafts.accepted > 0


@pytest.fixture
def dispatches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The rows and the steps of each decode dispatch, in order."""
    made: list[tuple[int, int]] = []
    real = SamplerModel.decode_chunk

    def watched(model: SamplerModel, S: int, slots: Any, steps: int, before: Any) -> Any:
        made.append((S, steps))
        return real(model, S, slots, steps, before)

    monkeypatch.setattr(SamplerModel, "decode_chunk", watched)
    return made


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """texts[request_id] = int32 [T]: the request's prompt and the tokens that are drawn for its only sample."""
    given: dict[str, np.ndarray] = {}
    real = SamplerModel.read_chunk

    def drawn(model: SamplerModel, chunk: Any) -> Any:
        decoded = real(model, chunk)
        tokens_CS = np.array(decoded.tokens_CS)
        for slot, row in chunk.slots:
            start = row.cached - row.in_flight + 1
            own_C = given[row.parent.id][start : start + chunk.steps]
            tokens_CS[: len(own_C), slot] = own_C
        return replace(decoded, tokens_CS=tokens_CS)

    monkeypatch.setattr(SamplerModel, "read_chunk", drawn)
    return given


def cost(dispatches: list[tuple[int, int]]) -> float:
    """The cost of dispatches in rows, as `Drafts` counts it."""
    return sum(steps * (drafts_module._STEP + S) + drafts_module._DISPATCH for S, steps in dispatches)


@pytest.mark.parametrize("prompts", [1, 2, 8])
@pytest.mark.parametrize(
    ("vocab", "length", "most"),
    [
        pytest.param(2, 512, np.inf, id="half of the first draft tokens are right"),
        pytest.param(8, 128, np.inf, id="many draft tokens, few of them right"),
        pytest.param(VOCAB, 128, 1, id="only the prompt repeats"),
    ],
)
def test_random_text_costs_no_more_with_drafts(
    vocab: int, length: int, most: float, prompts: int, qwen: Any, dispatches: Any, texts: Any
) -> None:
    asked = []
    for number in range(prompts):
        chance = np.random.default_rng([vocab, prompts, number])
        prompt = np.resize(chance.integers(0, vocab, 8), 64)
        texts[f"{number}"] = np.append(prompt, chance.integers(0, vocab, length)).astype(np.int32)
        asked.append(ask(f"{number}", prompt.tolist(), length))
    run_all(qwen.sampler(), *asked)
    plain = list(dispatches)
    dispatches.clear()
    found = run_all(qwen.sampler(drafts=True), *asked)
    for request_id, text_T in texts.items():
        assert found[request_id].sequences[0].tokens_T.tolist() == text_T[64:].tolist()
    assert cost(dispatches) <= 1.03 * cost(plain)
    assert len(dispatches) <= len(plain) + most


def test_a_repeated_request_needs_few_steps(qwen: Any, dispatches: list[tuple[int, int]]) -> None:
    """The second time, drafts come from the first answer, and all drafted tokens are right."""
    sampler, request = qwen.sampler(drafts=True), ask("a", prompt(20), 48, temperature=1.0, seed=3)
    first = result_of(sampler, request)
    plain = sum(steps for _, steps in dispatches)
    dispatches.clear()
    again = result_of(sampler, request)
    assert again.sequences[0].tokens_T.tolist() == first.sequences[0].tokens_T.tolist()
    assert plain > 40 and sum(steps for _, steps in dispatches) <= 15


def test_a_cancelled_request_leaves_no_pages(qwen: Any) -> None:
    sampler = qwen.sampler(drafts=True)
    loop = ask("loop", [5, 6, 7] * 42, 200, num_samples=3)  # the first drafts need the next page
    sampler.step(SampleStep(admit=(loop, ask("other", [5, 6, 7] * 42, 30))))
    sampler.step(SampleStep())
    sampler.step(SampleStep(cancel=("loop",)))
    results = run_all(sampler, ask("late", [9] * 12, 20))
    assert "loop" not in results and sampler.pages.used == 0


def sequence(owner: str, prompt: list[int], tokens: list[int], request_id: str = "r", index: int = 0) -> ActiveSequence:
    asked = SampleRequest(request_id, owner, None, np.asarray(prompt, np.int32), 1, 100, 1.0, -1, 1.0, 0)
    made = ActiveSequence(
        ActiveRequest(asked, None, 100), index, StopDetector(frozenset(), (), None), UniformStream(0, index)
    )
    made.tokens += tokens
    return made


def test_drafts_come_from_the_prompt_and_its_samples_of_one_owner() -> None:
    texts = DraftTexts()
    prompt = [1, 2, 3, 4]
    texts.add(sequence("mine", prompt, [5, 6, 7, 8, 9]))
    sibling = texts.add(sequence("mine", prompt, [5, 6, 7], "later"))
    assert sibling.after((5, 6, 7), 2) == [8, 9]
    assert sibling.after((3, 4, 5), 3) == [6, 7, 6]  # the newest sample, whose end repeats
    for other in (sequence("other", prompt, [5, 6, 7]), sequence("mine", [*prompt, 0], [5, 6, 7])):
        found = texts.add(other)
        assert found.after((5, 6, 7), 2) == [] and found.after((6, 7, 8), 2) == []
        assert found.after((1, 2, 3), 1) == [4]


def test_texts_of_one_prompt_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts_module, "_MOST_KEPT", 100)
    texts, chance, prompt = DraftTexts(), np.random.default_rng(0), [1, 2, 3, 4]
    running = sequence("o", prompt, [], "running")
    for number in range(50):
        running.tokens += chance.integers(0, VOCAB, 15).tolist()
        done = sequence("o", prompt, chance.integers(0, VOCAB, 15).tolist(), f"{number}")
        for each in (running, done):
            found = texts.add(each)
            assert found.size <= 100 + len(prompt)
    running.tokens += [5, 6, 7, 8]
    assert texts.add(running).after((5, 6, 7), 1) == [8]


def test_sequence_without_accepted_drafts_pauses_drafting(qwen: Any) -> None:
    sampler = qwen.sampler(drafts=True)
    drafts = sampler.drafts
    assert isinstance(drafts, Drafts)
    repeated = sequence("o", [1, 2, 3] * 5, [])
    wrong = 0
    while (step := drafts.next_step([repeated])) is not None:
        wrong += 1
        assert drafts.accept(step, repeated, [7] * 8) == 1
    assert 2 <= wrong <= 8
    drafts.note(repeated, 100)
    step = drafts.next_step([repeated])
    assert step is not None
    (draft,) = step.drafts.values()
    assert drafts.accept(step, repeated, [*draft, 7]) == 1 + len(draft)
    assert drafts.next_step([repeated]) is not None, "a right draft earns more drafts"


def test_the_token_before_a_wrong_draft_with_nan_is_streamed(modeled: Any) -> None:
    """A batch-invariant sampler draws all tokens of the sequence again."""
    sampler = modeled(invariant=True)
    sampler.step(SampleStep(admit=(ask("a", [1, 2, 3], 50, stream=True),)))
    (running,), chunks = sampler._scheduler.slots.sequences, sampler._chunks
    known = len(running.tokens)
    chunks.append(running, TokensOf([5, 6], [-1.0, np.nan], 1, None, (0, [0, 1])), 1)
    (new,) = chunks.streamed
    assert (new.start, new.tokens_T.tolist()) == (known, [5])
    assert running.tokens == [] and sampler._scheduler.waiting == 1


def test_repeating_text_is_continued_from_its_end() -> None:
    assert PromptTexts([4, 4, 4, 4]).after((4, 4, 4), 3) == [4, 4, 4]


def test_models_with_linear_attention_have_no_drafts(hybrid: Any) -> None:
    assert hybrid.sampler(page=32, drafts=True).drafts is None
