"""If a step fails because the devices have no memory, only the newest request of that step fails."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import ask, run_all
from tests.compute.sampler.conftest import prompt, random_lora

from tinkerflow.backend.compute.sampler import admission
from tinkerflow.backend.compute.sampler import model as model_module
from tinkerflow.backend.compute.sampler import sampler as sampler_module
from tinkerflow.backend.compute.sampler.constraints import everything
from tinkerflow.backend.compute.sampler.model import SamplerModel
from tinkerflow.backend.spec.commands import Constraint, LoraSpec, SampleStep


def requests_in(work: Any) -> set[str]:
    """The ids of the requests in a dispatch, which is a group of prompts, a list of slots, or a chunk."""
    if hasattr(work, "jobs"):
        return {job.parent.id for job in work.jobs}
    return {sequence.parent.id for _, sequence in getattr(work, "slots", work)}


@pytest.mark.parametrize(
    ("method", "place", "tokens", "ahead"),
    [
        ("prefill_piece", 0, 12, False),
        ("prefill_piece", 0, 2, False),  # without the batch
        ("decode_chunk", 1, 12, True),
        ("decode_chunk", 1, 2, True),
        ("read_chunk", 0, 12, True),
    ],
)
def test_last_request_fails_on_out_of_memory_and_other_results_do_not_change(
    qwen: Any, monkeypatch: pytest.MonkeyPatch, method: str, place: int, tokens: int, ahead: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sampler_module, "on_cpu", lambda: not ahead)
        sampler = qwen.sampler(sample_slots=8, decode_chunk=4)
    sampler.publish("snap", random_lora(qwen.cfg, LoraSpec(8), 0), LoraSpec(8))
    requests = (
        ask("greedy", prompt(30), 24),
        ask("drawn", prompt(40), 24, temperature=1.0, seed=7, num_samples=2, snapshot_id="snap"),
        ask("scored", prompt(33), 16, temperature=1.0, seed=8, prompt_logprobs=True, topk_sample=2),
    )
    expected, real = run_all(sampler, *requests), getattr(SamplerModel, method)

    def short_of_memory(model: SamplerModel, *args: Any) -> Any:
        if "last" in requests_in(args[place]):
            jax.tree.map(lambda leaf: leaf.delete(), model.cache)  # as after its donation to the program that failed
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return real(model, *args)

    monkeypatch.setattr(SamplerModel, method, short_of_memory)
    progress = sampler.step(SampleStep(admit=requests))
    finished = [*progress.finished, *sampler.step(SampleStep()).finished]
    progress = sampler.step(SampleStep(admit=(ask("last", prompt(20), tokens),)))
    finished += progress.finished
    while progress.active or progress.waiting:
        progress = sampler.step(SampleStep())
        finished += progress.finished
    found = {result.request_id: result for result in finished}
    assert len(found) == len(finished) == 4, "each is answered once"
    last = found.pop("last")
    assert last.error is not None and "no memory left for this request" in last.error and last.category == "server"
    for name, result in found.items():
        assert result.error is None
        for mine, theirs in zip(result.sequences, expected[name].sequences, strict=True):
            assert mine.tokens_T.tolist() == theirs.tokens_T.tolist()
            close_logprobs(mine.logprobs_T, theirs.logprobs_T, ulps=128)
    close_logprobs(found["scored"].prompt_logprobs_T[1:], expected["scored"].prompt_logprobs_T[1:], ulps=128)
    assert sampler.pages.used == 0


def out_of_memory(*_: Any) -> Any:
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_old_cache_is_freed_before_the_next_one_is_allocated(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, real, gone = qwen.sampler(sample_slots=8, decode_chunk=4), model_module.empty_cache, list[bool]()
    arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves(sampler._model.cache)]

    def watched(*args: Any) -> Any:
        gone.append(all(array() is None for array in arrays))
        return real(*args)

    monkeypatch.setattr(model_module, "empty_cache", watched)
    monkeypatch.setattr(model_module, "prefill", out_of_memory)
    monkeypatch.setattr(sampler_module.log, "disabled", True)  # pytest keeps log records, tracebacks included
    (result,) = sampler.step(SampleStep(admit=(ask("a", prompt(20), 12),))).finished
    assert "no memory left" in result.error
    assert gone == [True]


def test_a_request_that_is_done_before_its_step_fails_is_answered(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = SimpleNamespace(allowed=everything(1, qwen.cfg.vocab)[0], advance=lambda _: None)
    matcher.copy = lambda: matcher
    monkeypatch.setattr(admission, "new_matcher", lambda *_: matcher)
    sampler, real = qwen.sampler(sample_slots=8, decode_chunk=4), SamplerModel.decode_chunk

    def short_of_memory(model: SamplerModel, *args: Any) -> Any:
        return out_of_memory() if "long" in requests_in(args[1]) else real(model, *args)

    monkeypatch.setattr(SamplerModel, "decode_chunk", short_of_memory)
    led = ask("led", prompt(20), 3, constraint=Constraint("regex", ".*", ()))
    finished = sampler.step(SampleStep(admit=(ask("long", prompt(30), 24), led))).finished
    found = {result.request_id: result for result in finished}
    assert len(found) == len(finished) == 2 and len(found["led"].sequences[0].tokens_T) == 3
    assert "no memory left for this request" in found["long"].error
    assert sampler.pages.used == 0
