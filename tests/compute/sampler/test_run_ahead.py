"""Chunks that are dispatched before the previous one is read give the same results, and the devices do not wait."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import ask, result_of, run_all
from tests.compute.sampler.conftest import make_tiny, prompt
from tests.compute.sampler.tokenizer import END, save_tokenizer

from tinkerflow.backend.compute.compiles import CompileCounter
from tinkerflow.backend.compute.platforms import CPU
from tinkerflow.backend.compute.sampler import model as model_module
from tinkerflow.backend.compute.sampler import sampler as sampler_module
from tinkerflow.backend.compute.sampler.decode import decode
from tinkerflow.backend.compute.sampler.model import SamplerModel
from tinkerflow.backend.spec.commands import Adjustments, Constraint, SampleStep

SMALL = {"sample_slots": 4, "decode_chunk": 4}


@pytest.fixture
def ahead(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """ahead(…): a sampler that runs ahead, as on GPUs and TPUs."""

    def make(**changes: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(sampler_module, "on_cpu", lambda: False)
            return qwen.sampler(**SMALL, **changes)

    return make


def test_run_ahead_gives_the_results_of_reading_every_chunk_first(qwen: Any, ahead: Any, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    drawn = {"temperature": 1.0, "seed": 7}
    requests = [
        ask("greedy", prompt(30), 40),
        ask("stops", prompt(40), 60, **drawn, num_samples=3, stop_tokens=tuple(range(30))),
        ask("penalised", prompt(20), 30, **drawn, adjustments=Adjustments(presence=0.5, repetition=1.2)),
        ask("constrained", prompt(25), 20, **drawn, constraint=Constraint("regex", r"[ab]{3,9}-\d\d", (END,))),
        ask("scored", prompt(33), 3, prompt_logprobs=True, topk_sample=2),
    ]
    shape = {"pages": 10, "page": 32, "model_path": str(tmp_path)}  # too few pages for all, so some are preempted
    expected = run_all(qwen.sampler(**SMALL, **shape), *requests)
    sampler = ahead(**shape)
    found = run_all(sampler, *requests)
    assert sampler.pages.used == 0
    for request in requests:
        one, other = expected[request.request_id], found[request.request_id]
        assert one.error is None and other.error is None
        for mine, theirs in zip(one.sequences, other.sequences, strict=True):
            assert mine.tokens_T.tolist() == theirs.tokens_T.tolist()
            assert mine.stop_reason == theirs.stop_reason
            close_logprobs(mine.logprobs_T, theirs.logprobs_T, ulps=128)


def test_next_chunk_is_started_before_the_last_one_is_read(ahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def watched(name: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            happened.append(name)
            return real(*args)

        return call

    for name in ("decode_chunk", "read_chunk"):
        monkeypatch.setattr(SamplerModel, name, watched(name, getattr(SamplerModel, name)))
    run_all(ahead(), ask("a", prompt(20), 12))
    assert happened == ["decode_chunk", "decode_chunk", "read_chunk", "decode_chunk", "read_chunk", "read_chunk"]
    happened.clear()
    run_all(ahead(), ask("a", prompt(20), 12, adjustments=Adjustments(frequency=1.0)))
    assert happened == ["decode_chunk", "read_chunk"] * 3, "penalties count tokens, so the host must read them"


def test_waiting_step_leaves_no_chunk_unread(ahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, request, happened = ahead(), ask("a", prompt(20), 12), list[str]()
    expected = result_of(sampler, request).sequences[0]
    real = SamplerModel.read_chunk
    monkeypatch.setattr(SamplerModel, "read_chunk", lambda model, chunk: happened.append("read") or real(model, chunk))
    sampler.step(SampleStep((request,), wait=True))
    assert happened == ["read"]
    sampler.step(SampleStep())
    assert happened == ["read"], "then it runs ahead again"
    (result,) = sampler.step(SampleStep(wait=True)).finished
    assert result.sequences[0].tokens_T.tolist() == expected.tokens_T.tolist()


def test_sequences_that_ended_unread_leave_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid, slots = make_tiny(tmp_path, "qwen3_5"), 64  # fewer than two states for each sequence
    monkeypatch.setattr(sampler_module, "on_cpu", lambda: False)
    sampler = hybrid.sampler(sample_slots=slots, decode_chunk=4)
    results = run_all(sampler, *(ask(name, prompt(20), 4, num_samples=slots) for name in "ab"))
    assert [results[name].error for name in "ab"] == [None, None]
    assert sampler.pages.used == 0


def test_cancelled_request_frees_its_pages_and_disturbs_no_other(ahead: Any) -> None:
    sampler, kept = ahead(), ask("kept", prompt(20), 24, temperature=1.0)
    expected = result_of(sampler, kept).sequences[0]
    sampler.step(SampleStep((kept, *(ask(name, prompt(20), 200) for name in "abc"))))
    sampler.step(SampleStep())
    assert sampler.pages.used == 4
    sampler.step(SampleStep(cancel=("a", "b")))
    assert sampler.pages.used == 2
    result = run_all(sampler, ask("a", prompt(9), 6))  # while a chunk of the other `a` is not read yet
    assert len(result["a"].sequences[0].tokens_T) == 6
    assert result["kept"].sequences[0].tokens_T.tolist() == expected.tokens_T.tolist()


def test_warm_up_compiles_the_programs_of_run_ahead(ahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, real, compiled = ahead(), SamplerModel.decode_chunk, list[int]()
    for program in sampler.programs():
        if program.name.startswith("decode, ") and program.name.endswith(" 0 columns"):
            program.make()

    def counted(model: SamplerModel, *args: Any) -> Any:
        counter = CompileCounter()
        chunk = real(model, *args)
        compiled.append(counter.count)
        return chunk

    monkeypatch.setattr(SamplerModel, "decode_chunk", counted)
    run_all(sampler, ask("a", prompt(20), 12), ask("b", prompt(20), 30, num_samples=3))
    run_all(sampler, ask("a", prompt(20), 12))
    assert len(compiled) > 8 and not any(compiled)


def test_host_side_decisions_keep_results_and_compile_nothing(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, sampled = {"temperature": 1.0, "seed": 7}, ("decode_chunk", "prefill_piece")
    requests = [
        ask("greedy", prompt(30), 9),
        ask("drawn", prompt(40), 9, **drawn, num_samples=2),
        ask("one", prompt(28), 1, prompt_logprobs=True),
        ask("filtered", prompt(20), 6, **drawn, top_k=20, top_p=0.9),
        ask("biased", prompt(20), 6, **drawn, adjustments=Adjustments(bias=((5, 3.0),))),
    ]
    plain = qwen.sampler(**SMALL)
    expected = {request.request_id: result_of(plain, request) for request in requests}
    monkeypatch.setattr(sampler_module, "on_cpu", lambda: False)
    monkeypatch.setattr(sampler_module, "platform", lambda: replace(CPU, host_decides=True))
    sampler, dispatched, compiled = qwen.sampler(**SMALL), list[tuple[int, bool | None]](), list[int]()
    for program in sampler.programs():
        if re.fullmatch(r"copies of pages|(decode.*|.* of 1x(32|64) tokens), 0 columns", program.name):
            program.make()

    def counted(real: Any, model: SamplerModel, *args: Any) -> Any:
        counter = CompileCounter()
        made = real(model, *args)
        compiled.append(counter.here)
        return made

    def watched(*args: Any) -> Any:
        chunk, rows = args[2], args[7]
        dispatched.append((chunk, rows.choice.filters))
        assert args[8] is None
        return decode(*args)

    for name in sampled:
        monkeypatch.setattr(SamplerModel, name, partialmethod(partial(counted, getattr(SamplerModel, name))))
    monkeypatch.setattr(model_module, "decode", watched)
    for request in requests:
        found, wanted = result_of(sampler, request), expected[request.request_id]
        assert found.error is None
        for mine, theirs in zip(found.sequences, wanted.sequences, strict=True):
            assert mine.tokens_T.tolist() == theirs.tokens_T.tolist()
            close_logprobs(mine.logprobs_T, theirs.logprobs_T, ulps=128)
        if wanted.prompt_logprobs_T is not None:
            close_logprobs(found.prompt_logprobs_T[1:], wanted.prompt_logprobs_T[1:], ulps=128)
    assert {*dispatched} == {(4, False), (4, True), (1, True)}
    assert len(compiled) > 10 and not any(compiled)
    assert len([*sampler.programs()]) == 46  # 23 if the devices decide; each takes seconds to compile


def test_half_of_64_streams_are_cancelled_and_a_kill_changes_no_token(
    qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "on_cpu", lambda: False)
    new = partial(qwen.sampler, sample_slots=64, decode_chunk=4)
    requests = [ask(f"{i}", prompt(20), 24, temperature=1.0, seed=i, stream=True) for i in range(64)]
    expected = run_all(new(), *requests)
    killed, told = new(), defaultdict[str, list[int]](list)
    for admit in (tuple(requests), (), (), ()):
        for part in killed.step(SampleStep(admit)).streamed:
            told[part.request_id] += part.tokens_T.tolist()
    assert len(told) == 64 and len(killed.decoding) == 64
    again, gone = new(), tuple(f"{i}" for i in range(32))
    found = again.step(SampleStep(tuple(requests))).finished + again.step(SampleStep()).finished
    assert again.pages.used == 64
    found += again.step(SampleStep(cancel=gone)).finished + again.step(SampleStep()).finished
    assert again.pages.used == 32, "after two chunks"
    results = {result.request_id: result for result in found} | run_all(again)
    assert set(results) == {f"{i}" for i in range(32, 64)}
    for name, result in results.items():
        (one,), (same,) = result.sequences, expected[name].sequences
        assert one.tokens_T.tolist() == same.tokens_T.tolist()
        assert one.tokens_T.tolist()[: len(told[name])] == told[name]
