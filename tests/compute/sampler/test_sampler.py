"""The whole sampler: a request's results do not depend on the rest of the batch."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from tests.compute.conftest import ask, result_of, run_all
from tests.compute.sampler.conftest import prompt, random_lora

from tinkerflow.backend.compute.compiles import CompileCounter
from tinkerflow.backend.compute.sampler import chunks
from tinkerflow.backend.compute.sampler.model import Chunk, SamplerModel
from tinkerflow.backend.core.errors import ConflictError
from tinkerflow.backend.spec.commands import LoraSpec, SampledSequence, SampleStep


def tokens_of(sequence: SampledSequence) -> list[int]:
    return [int(token) for token in sequence.tokens_T]


def test_samples_of_one_prompt_are_prefilled_once(qwen: Any, pieces: list[tuple[int, int]]) -> None:
    result = result_of(qwen.sampler(), ask("a", prompt(30), 5, num_samples=20, temperature=1.0))
    assert len(result.sequences) == 20  # more than the 16 slots
    assert pieces == [(1, 32)]


def test_a_snapshot_does_not_change_when_its_adapter_is_trained(qwen: Any) -> None:
    sampler, spec = qwen.sampler(), LoraSpec(4)
    lora = jax.device_put(random_lora(qwen.cfg, spec, 0))
    sampler.publish("first", lora, spec)
    request = ask("a", prompt(10), 12, snapshot_id="first")
    before = result_of(sampler, request)
    trained = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * -1.5 + 0.05, tree), donate_argnums=0)(lora)
    sampler.publish("second", trained, spec)
    np.testing.assert_array_equal(result_of(sampler, request).sequences[0].logprobs_T, before.sequences[0].logprobs_T)
    after = result_of(sampler, ask("a", prompt(10), 12, snapshot_id="second"))
    assert tokens_of(after.sequences[0]) != tokens_of(before.sequences[0])
    with pytest.raises(ConflictError):
        sampler.publish("first", trained, spec)


def test_dropped_snapshot_serves_the_requests_admitted_before(qwen: Any) -> None:
    sampler, spec = qwen.sampler(), LoraSpec(4)
    sampler.publish("snap", random_lora(qwen.cfg, spec, 0), spec)
    request = ask("a", prompt(10), 30, snapshot_id="snap")
    expected = result_of(sampler, request)
    sampler.step(SampleStep(admit=(request,)))
    sampler.drop_snapshot("snap")
    result = run_all(sampler, ask("b", prompt(10), 5, snapshot_id="snap"))
    assert tokens_of(result["a"].sequences[0]) == tokens_of(expected.sequences[0])
    assert result["b"].error is not None and "'snap'" in result["b"].error


def test_request_without_its_snapshot_fails_alone(qwen: Any) -> None:
    sampler, good = qwen.sampler(), ask("good", prompt(5), 10)
    expected = result_of(sampler, good)
    results = run_all(sampler, ask("bad", [1, 2], snapshot_id="nope"), good, ask("worse", [1], snapshot_id="none"))
    np.testing.assert_array_equal(results["good"].sequences[0].logprobs_T, expected.sequences[0].logprobs_T)
    assert results["good"].error is None
    for name, snapshot in (("bad", "nope"), ("worse", "none")):
        assert results[name].sequences == ()
        assert f"snapshot {snapshot!r}" in (results[name].error or "")


def test_answer_length_is_bounded_by_max_tokens_and_the_context(qwen: Any) -> None:
    results = run_all(qwen.sampler(), ask("a", prompt(580), 1_000_000), ask("b", prompt(3), 1))
    (a,), (b,) = results["a"].sequences, results["b"].sequences
    assert (len(a.tokens_T), a.stop_reason) == (20, "length")
    assert (len(b.tokens_T), b.stop_reason) == (1, "length")


def test_stop_token_is_returned_once_as_the_last_token(qwen: Any) -> None:
    sampler = qwen.sampler()
    free = tokens_of(result_of(sampler, ask("a", prompt(9), 40, temperature=1.0, seed=4)).sequences[0])
    stop = free[20]
    first = free.index(stop)
    (cut,) = result_of(sampler, ask("a", prompt(9), 40, temperature=1.0, seed=4, stop_tokens=(stop, 319))).sequences
    assert tokens_of(cut) == free[: first + 1] and cut.stop_reason == "stop"
    assert len(cut.logprobs_T) == first + 1


def test_a_stop_string_may_cross_token_borders(qwen: Any) -> None:
    import tokenizers

    letters = "abcdefghijklmnopqrst"
    vocabulary = {f"{letters[i // 20]}{letters[i % 20]}": i for i in range(qwen.cfg.vocab)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="aa"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(qwen.folder / "tokenizer.json"))
    words = {number: word for word, number in vocabulary.items()}
    sampler = qwen.sampler()
    free = tokens_of(result_of(sampler, ask("a", prompt(9), 40, temperature=1.0, seed=4)).sequences[0])
    text = "".join(words[token] for token in free)
    stop = text[25:30]  # from the second letter of token 12 to the first of token 14, unless an earlier match exists
    (cut,) = result_of(sampler, ask("a", prompt(9), 40, temperature=1.0, seed=4, stop_strings=("zz", stop))).sequences
    assert len(cut.tokens_T) == -(-(text.index(stop) + len(stop)) // 2)
    assert tokens_of(cut) == free[: len(cut.tokens_T)] and cut.stop_reason == "stop"


def test_cancelling_frees_the_slots(qwen: Any) -> None:
    sampler = qwen.sampler(sample_slots=4)
    busy = ask("busy", prompt(5), 400, num_samples=4)
    progress = sampler.step(SampleStep(admit=(busy, ask("next", prompt(6), 10))))
    assert (progress.active, progress.waiting) == (1, 1)
    progress = sampler.step(SampleStep(cancel=("busy", "unknown")))
    assert (progress.active, progress.waiting) == (1, 0)
    assert "busy" not in run_all(sampler)


def test_cancelled_prompt_leaves_no_pages_or_requests(qwen: Any) -> None:
    sampler, spec = qwen.sampler(max_context=2000, sample_slots=4), LoraSpec(4)
    lora = random_lora(qwen.cfg, spec, 0)
    for pair in lora.layers.values():
        pair.A[...], pair.B[...] = 1e20, 1e25  # finite weights with results that are not finite
    sampler.publish("diverged", lora, spec)
    sampler.step(SampleStep((ask("beside it", prompt(21), 400),)))
    bad = ask("bad", prompt(1020), 50, snapshot_id="diverged", owner="another")
    progress = sampler.step(SampleStep((bad,)))
    while "bad" not in dict(sampler.decoding):
        assert not progress.finished  # the step that gives it a slot decodes nothing
        progress = sampler.step(SampleStep(()))
    assert not sampler.step(SampleStep((ask("next", prompt(20), 200),), cancel=("bad",))).finished
    assert {name: one.error for name, one in run_all(sampler).items()} == {"beside it": None, "next": None}


def test_finished_long_request_leaves_its_slots_to_short_ones(qwen: Any) -> None:
    sampler = qwen.sampler(pages=25, max_context=2000, sample_slots=16)
    names = (f"short {number}" for number in itertools.count())
    progress = sampler.step(SampleStep((ask("long", prompt(700), 10), ask(next(names), prompt(10), 32))))
    while "long" not in {one.request_id for one in progress.finished}:
        progress = sampler.step(SampleStep(()))
    busy = set()
    for _ in range(40):  # some requests always wait
        wanted = 20 - progress.active - progress.waiting
        progress = sampler.step(SampleStep(tuple(ask(next(names), prompt(10), 32) for _ in range(wanted))))
        busy.add(len(sampler.decoding))
    assert max(busy) == 16


@pytest.mark.parametrize("given", [{"temperature": 1e-40}, {"temperature": 1e-38}, {"top_p": 1e-40}, {"top_p": 1e-50}])
def test_temperature_that_underflows_in_float32_samples_greedily(qwen: Any, given: dict[str, float]) -> None:
    tiny = ask("tiny", prompt(8), 6, **{"temperature": 1.0, **given})
    greedy = ask("greedy", prompt(8), 6, temperature=0.0)
    results = run_all(qwen.sampler(), tiny, greedy)
    assert results["tiny"].sequences[0].tokens_T.tolist() == results["greedy"].sequences[0].tokens_T.tolist()


def test_short_requests_need_no_slot_and_the_batch_continues(qwen: Any) -> None:
    sampler = qwen.sampler(sample_slots=4)
    little = [ask(f"little{i}", prompt(9, i), 1 + i, num_samples=1 + i, temperature=1.0, seed=i) for i in range(3)]
    expected = {one.request_id: result_of(qwen.sampler(), one) for one in little}
    busy = ask("busy", prompt(5), 100, num_samples=4)
    sampler.step(SampleStep(admit=(busy,)))

    def ended(*admit: Any) -> dict[str, Any]:
        return {result.request_id: result for result in sampler.step(SampleStep(admit=admit)).finished}

    found = ended(little[0])  # in the same step, although no slot is free
    assert set(found) == {"little0"}
    assert not ended(little[1], little[2])  # the batch decodes in every second step
    found |= ended()  # five sequences are more than one step serves without the batch
    assert set(found) == {"little0", "little1"}
    found |= run_all(sampler)
    assert set(found) == {"little0", "little1", "little2", "busy"} and len(found["busy"].sequences) == 4
    for name, result in expected.items():
        assert [tokens_of(one) for one in found[name].sequences] == [tokens_of(one) for one in result.sequences]
    assert tokens_of(found["busy"].sequences[0]) == tokens_of(result_of(qwen.sampler(), busy).sequences[0])


def test_requests_join_a_running_batch(qwen: Any) -> None:
    sampler = qwen.sampler()
    first, second = ask("first", prompt(5), 60), ask("second", prompt(40), 20)
    expected = run_all(sampler, first) | run_all(sampler, second)
    sampler.step(SampleStep(admit=(first,)))
    sampler.step(SampleStep(admit=(first,)))  # sent again, but served once
    results = run_all(sampler, second)
    assert set(results) == {"first", "second"}
    for name, result in results.items():
        assert tokens_of(result.sequences[0]) == tokens_of(expected[name].sequences[0])


def test_batch_waits_for_several_joining_requests_but_not_for_one(qwen: Any) -> None:
    sampler = qwen.sampler(prefill_budget=160)  # one prompt for each step
    requests = tuple(ask(f"r{i}", prompt(150, seed=i), 40) for i in range(6))
    steps = [SampleStep(admit=requests), *(SampleStep() for _ in range(8))]
    assert [sampler.step(step).active for step in steps] == [1, 2, 3, 3, 4, 5, 5, 6, 6]
    chunks = [tokens // 8 for _, tokens in sampler.decoding]
    # Three steps only prefill, and then the batch decodes. After two more, it does not wait for one last request.
    assert chunks == [3, 3, 3, 2, 2, 1]


def test_a_batch_does_not_wait_for_one_long_prompt(qwen: Any) -> None:
    sampler = qwen.sampler(prefill_budget=64)
    sampler.step(SampleStep(admit=(ask("first", prompt(5), 100),)))
    sampler.step(SampleStep(admit=(ask("long", prompt(500), 10),)))
    made = [dict(sampler.decoding)["first"]]
    for _ in range(6):
        sampler.step(SampleStep())
        made.append(dict(sampler.decoding)["first"])
    # Every other step decodes while the prompt's first pieces are computed. The batch waits for the last piece.
    assert made == [8, 16, 16, 24, 24, 24, 32]


def test_chunk_ends_at_the_first_limit_after_its_half(qwen: Any) -> None:
    sampler = qwen.sampler()
    limits = {"a": 9, "b": 16, "c": 40}
    sampler.step(SampleStep(admit=tuple(ask(name, prompt(5), limit) for name, limit in limits.items())))
    made = []
    while sampler.decoding:
        made.append(max(tokens for _, tokens in sampler.decoding))
        sampler.step(SampleStep())
    assert made == [8, 12, 16, 24, 32]


def test_overflowing_prompt_fails_alone_and_leaves_no_pages(qwen: Any) -> None:
    sampler, spec = qwen.sampler(), LoraSpec(8)
    # The good prompt is long, so attention reads the second block of every slot. The wild request leaves NaN there,
    # and the later request, which gets its slot, does not write to it.
    good, later = ask("good", prompt(140), 60), ask("later", prompt(20), 8)
    expected = run_all(sampler, good) | run_all(sampler, later)
    wild = random_lora(qwen.cfg, spec, 0)
    for pair in wild.layers.values():
        pair.B[...] *= 1e30
    sampler.publish("wild", wild, spec)
    sampler.step(SampleStep(admit=(good,)))
    finished = list(sampler.step(SampleStep(admit=(ask("wild", prompt(250), 10, snapshot_id="wild"),))).finished)
    while not finished:
        finished += sampler.step(SampleStep()).finished
    assert finished[0].error is not None and "'wild'" in finished[0].error
    results = run_all(sampler, later)
    for name in ("good", "later"):
        assert results[name].error is None
        assert tokens_of(results[name].sequences[0]) == tokens_of(expected[name].sequences[0])


def test_request_that_records_too_much_fails_alone(modeled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MAX_RECORDED_BYTES", 2 * 30 * 3 * 8)  # 8 bytes: an id and a logprob
    fits, plain = ask("fits", prompt(20), 30, topk_sample=3, num_samples=2), ask("plain", prompt(9), 60)
    large = ask("large", prompt(20), 31, topk_sample=3, num_samples=2)
    found = run_all(modeled(slots=8), fits, plain, large)
    assert "topk_sample_logprobs 3 with num_samples 2 and max_tokens 31" in (found["large"].error or "")
    for request in (fits, plain):
        (alone,) = run_all(modeled(slots=8), request).values()
        assert list(map(tokens_of, found[request.request_id].sequences)) == list(map(tokens_of, alone.sequences))


def test_failed_batch_is_answered_and_the_next_one_works(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, request = qwen.sampler(), ask("a", prompt(20), 20)
    expected = result_of(sampler, request)

    def broken(model: SamplerModel, *args: Any) -> Any:
        jax.tree.map(lambda leaf: leaf.delete(), model.cache)  # as after a dispatch that failed with the donated cache
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(SamplerModel, "decode_chunk", broken)
        failed = run_all(sampler, request, ask("b", prompt(3), 5))
    assert failed.keys() == {"a", "b"}
    assert all("RESOURCE_EXHAUSTED" in (result.error or "") for result in failed.values())
    assert tokens_of(result_of(sampler, request).sequences[0]) == tokens_of(expected.sequences[0])


def test_repeated_traffic_compiles_nothing_and_first_traffic_few_shapes(qwen: Any) -> None:
    counter = CompileCounter()
    sampler, spec = qwen.sampler(decode_chunk=4), LoraSpec(8)  # a chunk that no other test compiles
    sampler.publish("snap", random_lora(qwen.cfg, spec, 0), spec)

    def traffic() -> None:
        for seed in range(6):
            requests = [
                ask(
                    f"{i}",
                    prompt(3 + 17 * i * (seed + 1) % 120, seed),
                    5 + 9 * i,
                    temperature=i / 4,
                    top_k=-1 if i % 2 else 5 + seed,
                    num_samples=1 + i % 3,
                    seed=seed,
                    stop_tokens=tuple(range(i)),
                    snapshot_id="snap" if i % 2 else None,
                )
                for i in range(1 + seed)
            ]
            run_all(sampler, *requests)

    traffic()
    first = counter.count
    traffic()
    assert counter.count == first
    assert first <= 30, f"{first} executables"


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_short_request_may_have_more_samples_than_slots(qwen: Any, slots: int) -> None:
    sampler, short = qwen.sampler(sample_slots=slots), ask("short", prompt(10, 1), 4, num_samples=4, temperature=1.0)
    long = ask("long", prompt(10), 40)
    sampler.step(SampleStep(admit=(long,)))
    results = run_all(sampler, short)
    assert [results[name].error for name in ("short", "long")] == [None, None]
    alone = result_of(qwen.sampler(), short)
    for one, same in zip(results["short"].sequences, alone.sequences, strict=True):
        np.testing.assert_array_equal(one.tokens_T, same.tokens_T)


def test_a_prompt_that_fills_the_pool_is_served(qwen: Any) -> None:
    request = ask("a", prompt(200), 20)
    full = qwen.sampler(free_pages=2)  # two pages, and the prefix cache keeps the prompt's last page
    expected = result_of(qwen.sampler(), request).sequences[0]
    (got,) = result_of(full, request).sequences
    assert tokens_of(got) == tokens_of(expected)


def test_non_finite_sample_ends_only_its_request(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, real = qwen.sampler(), SamplerModel.read_chunk

    def spoiled(model: SamplerModel, chunk: Chunk) -> Any:
        decoded = real(model, chunk)
        logprobs = np.array(decoded.logprobs_CS)
        for slot, sequence in chunk.slots:
            if sequence.parent.id == "bad" and sequence.index < 2:
                logprobs[:, slot] = np.nan
        return decoded.replace(logprobs_CS=logprobs)

    monkeypatch.setattr(SamplerModel, "read_chunk", spoiled)
    progress = sampler.step(SampleStep((ask("bad", prompt(20), 8, num_samples=3), ask("good", prompt(30), 20))))
    finished = [*progress.finished]
    while progress.active or progress.waiting:
        progress = sampler.step(SampleStep())
        finished += progress.finished
    assert [(one.request_id, one.error is None) for one in finished] == [("bad", False), ("good", True)]
    assert "not finite" in (finished[0].error or "")


def test_prompt_longer_than_the_kv_cache_is_refused(qwen: Any) -> None:
    sampler = qwen.sampler(pages=3)
    results = run_all(sampler, ask("long", prompt(257), 5), ask("fits", prompt(250), 50))
    assert results["long"].error == "prompt: 257 tokens; must be at most 256, the capacity of the KV cache"
    assert len(results["fits"].sequences[0].tokens_T) == 6, "the context has positions for six tokens"


def test_streamed_pieces_add_up_to_the_result(qwen: Any) -> None:
    """Includes requests that are preempted or served without the batch."""
    sampler = qwen.sampler(free_pages=7)
    wishes = {"temperature": 1.0, "stream": True, "topk_sample": 3}
    asked = [
        *(ask(f"long {i}", prompt(20, i), 150, num_samples=2, seed=i, **wishes) for i in range(3)),
        ask("short", prompt(5), 3, seed=3, **wishes),
        ask("silent", prompt(7), 12, seed=4, temperature=1.0),
    ]
    progress = sampler.step(SampleStep(admit=tuple(asked)))
    results, streamed = list(progress.finished), list(progress.streamed)
    while progress.active or progress.waiting:
        progress = sampler.step(SampleStep())
        results += progress.finished
        streamed += progress.streamed
        for result in progress.finished:  # the stream ends no later than the result
            of = [new for new in streamed if new.request_id == result.request_id]
            assert sum(new.stop_reason is not None for new in of) in (0, len(result.sequences))
    assert {new.request_id for new in streamed} == {"long 0", "long 1", "long 2", "short"}
    for result in results:
        for index, sequence in enumerate(result.sequences):
            mine = [new for new in streamed if (new.request_id, new.index) == (result.request_id, index)]
            if result.request_id == "silent":
                assert mine == []
                continue
            np.testing.assert_array_equal(np.concatenate([new.tokens_T for new in mine]), sequence.tokens_T)
            np.testing.assert_array_equal(np.concatenate([new.logprobs_T for new in mine]), sequence.logprobs_T)
            tops = [new.top.tokens_Nk for new in mine if new.top is not None]
            assert sequence.top is not None
            np.testing.assert_array_equal(np.concatenate(tops), sequence.top.tokens_Nk)
            assert [new.start for new in mine] == [0, *np.cumsum([len(new.tokens_T) for new in mine])[:-1]]
            assert [new.stop_reason for new in mine] == [None] * (len(mine) - 1) + [sequence.stop_reason]


def test_listed_tokens_of_a_sequence_do_not_keep_those_of_the_batch(modeled: Any) -> None:
    sampler = modeled(slots=4)
    sampler.step(SampleStep((ask("a", prompt(5), 40, topk_sample=3, num_samples=4),)))
    held = [part for sequence in sampler._scheduler.slots.sequences for part in sequence.top]
    assert held and all(part.tokens_Nk.base is None and part.logprobs_Nk.base is None for part in held)
