"""Random traffic through the real sampler on simulated devices: requests, cancellations and failures."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.compute.sampler.device_model import STOP, answers, digests, logprob

from tinkerflow.backend.compute.sampler.sampler import Sampler
from tinkerflow.backend.spec.commands import (
    Adjustments,
    Constraint,
    PromptWishes,
    SampleRequest,
    SampleResult,
    SampleStep,
)

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: out of memory"


@cache
def text() -> tuple[int, ...]:
    """A text. Many prompts are prefixes of it, so that they share pages."""
    chance = random.Random(0)
    return tuple(chance.randrange(90) for _ in range(600))


def requests(chance: random.Random, most: int) -> Iterator[SampleRequest]:
    number = 0
    while True:
        number += 1
        length = min(chance.choice([1, 2, 5, 31, 32, 33, 64, 65, 100, most - 1, most // 2, most]), most)
        alike = chance.random() < 0.6
        prompt_T = np.array(text()[:length] if alike else [chance.randrange(90) for _ in range(length)], np.int32)
        wishes = PromptWishes(last_n=chance.randrange(1, length)) if length > 1 and chance.random() < 0.1 else None
        yield SampleRequest(
            request_id=str(number),
            prompt_T=prompt_T,
            max_tokens=chance.choice([1, 3, 8, 40, 10**6]),
            seed=1,
            owner=chance.choice("xyz"),
            snapshot_id=chance.choice([None, None, "tame", "wild"]),
            num_samples=chance.choice([1, 1, 2, 5, 12]),
            temperature=0.0,
            top_k=-1,
            top_p=1.0,
            stop_tokens=(STOP,),
            prompt_logprobs=wishes is not None or chance.random() < 0.1,
            prompt=wishes,
            topk_sample=chance.choice([0, 0, 3]),
            priority=chance.choice(["batch", "interactive"]),
            stream=chance.random() < 0.3,
            adjustments=Adjustments(presence=1.0) if chance.random() < 0.05 else None,
            constraint=Constraint("regex", ".*", (STOP,)) if chance.random() < 0.05 else None,
        )


class Traffic:
    """Random steps of one sampler, and all of its answers."""

    def __init__(self, seed: int, shards: int, modeled: Callable[..., Sampler]) -> None:
        random.seed(seed)  # for random NaN
        chance = self.chance = random.Random(seed)
        slots, self.invariant = chance.choice([1, 3, 4, 8, 16]), chance.random() < 0.3
        self.sampler = modeled(
            slots=slots,
            chunk=chance.choice([1, 4, 8]),
            context=chance.choice([100, 300]),
            pages=chance.choice([3, 5, 9, 40]),
            states=chance.choice([0, 2 * slots + 24]),
            shards=shards,
            window=chance.choice([None, 33, 70]),
            budget=chance.choice([32, 200, 1024]),
            ahead=chance.random() < 0.5,
            host_decides=chance.random() < 0.5,
            pieces=chance.choice([(32, 64), None]),
            invariant=self.invariant,
        )
        self.devices: Any = self.sampler._model
        self.snapshots: Any = self.sampler.snapshots
        self.snapshots.publish("tame")
        self.snapshots.publish("wild", wild=True)
        self.devices.on_event = self.fail
        self.failures: Counter[str] = Counter()
        self.most_failures = chance.choice([0, 0, 3])
        self.coming = requests(chance, self.sampler.admission.max_context)
        self.asked: dict[str, SampleRequest] = {}
        self.answered: dict[str, SampleResult] = {}
        self.cancelled: set[str] = set()
        self.streamed: dict[tuple[str, int], list[Any]] = {}
        self.log: list[Any] = []

    def fail(self, name: str, request_ids: tuple[str, ...]) -> None:
        if self.failures.total() < self.most_failures and self.chance.random() < 0.01:
            error = self.chance.choice([OUT_OF_MEMORY, "broken"])
            self.failures[error] += 1
            raise RuntimeError(error)

    def step(self, *admit: SampleRequest, cancel: tuple[str, ...] = ()) -> bool:
        """Run one step. Returns False if nothing is left to do."""
        progress = self.sampler.step(SampleStep(admit, cancel=cancel, idle=self.chance.random() < 0.5))
        for new in progress.streamed:
            self.streamed.setdefault((new.request_id, new.index), []).append(new)
        for result in progress.finished:
            assert result.request_id not in self.answered, "answered twice"
            self.answered[result.request_id] = result
        self.log.append((sorted(self.answered), progress.active, progress.waiting))
        return bool(progress.active or progress.waiting)

    def continued(self, request: SampleRequest) -> SampleRequest:
        """The request, or the request with the next turn of a conversation as its prompt."""
        name = self.chance.choice([*self.answered, None])
        if name is None or self.answered[name].error or self.chance.random() < 0.4:
            return request
        before, sequence = self.asked[name], self.answered[name].sequences[0]
        prompt_T = np.concatenate([before.prompt_T, sequence.tokens_T, request.prompt_T[:7]])
        same = {"owner": before.owner, "snapshot_id": before.snapshot_id, "prompt": None}
        return replace(request, prompt_T=prompt_T[: self.sampler.admission.max_context], **same)

    def play(self) -> None:
        chance = self.chance
        for _ in range(40):
            admitted = [self.continued(next(self.coming)) for _ in range(chance.choice([0, 0, 1, 3]))]
            self.asked |= {request.request_id: request for request in admitted}
            open_ids = sorted(set(self.asked) - set(self.answered) - self.cancelled)
            gone = (chance.choice(open_ids),) if open_ids and chance.random() < 0.2 else ()
            self.cancelled |= set(gone)
            self.step(*admitted, cancel=gone)
            if chance.random() < 0.1:  # admitted requests finish with the old snapshot
                self.sampler.drop_snapshot("tame")
                self.snapshots.publish("tame")
            for _ in range(chance.choice([0, 0, 0, 60])):
                self.step()
        for _ in range(3000):
            if not self.step():
                return
        raise AssertionError("requests are never answered")

    def check(self) -> None:
        assert set(self.asked) - self.cancelled <= set(self.answered)
        served, failed = 0, Counter[str]()
        for name, result in self.answered.items():
            request = self.asked[name]
            if result.error:
                kind = next((text for text in (OUT_OF_MEMORY, "broken") if text in result.error), "not finite")
                failed[kind] += 1
                assert kind != "not finite" or ("not finite" in result.error and request.snapshot_id == "wild")
                continue
            self.check_result(request, result)
            served += 1
        assert served
        assert failed[OUT_OF_MEMORY] <= self.failures[OUT_OF_MEMORY], "each costs the newest request alone"
        assert self.failures["broken"] or not failed["broken"]

    def check_result(self, request: SampleRequest, result: SampleResult) -> None:
        limit = min(request.max_tokens, max(1, self.sampler.admission.max_context - len(request.prompt_T)))
        expected = answers(request, limit)
        for index, (sequence, tokens) in enumerate(zip(result.sequences, expected, strict=True)):
            assert sequence.tokens_T.tolist() == tokens
            assert sequence.stop_reason == ("stop" if tokens[-1] == STOP else "length")
            text_digests = digests([*request.prompt_T, *tokens])[len(request.prompt_T) :]
            assert sequence.logprobs_T.tolist() == [logprob(digest) for digest in text_digests]
            if request.topk_sample:
                assert sequence.top is not None
                assert (sequence.top.tokens_Nk == sequence.tokens_T[:, None] + np.arange(3)).all()
            parts = self.streamed.get((request.request_id, index), [])
            if not request.stream:
                assert not parts
                continue
            known = 0
            for part in parts:
                assert part.start == known or (part.start == 0 and self.invariant), "only tokens drawn again come again"
                known = part.start + len(part.tokens_T)
                assert part.tokens_T.tolist() == tokens[part.start : known]
            assert known == len(tokens)
            assert [part.stop_reason for part in parts] == [None] * (len(parts) - 1) + [sequence.stop_reason]
        if request.prompt_logprobs:
            assert result.prompt_logprobs_T is not None
            first = 1 if request.prompt is None else len(request.prompt_T) - (request.prompt.last_n or 0)
            scores = [logprob(digest) for digest in digests(request.prompt_T)]
            assert result.prompt_logprobs_T[first:].tolist() == scores[first:]
            assert np.isnan(result.prompt_logprobs_T[:first]).all()

    def check_cache(self) -> None:
        pool = self.sampler.pages
        assert pool.used == 0
        self.devices.copy_pages()
        for shard in range(pool.shards):
            assert not any(self.devices.cells[shard * pool.pages]), "the page of zeros is not empty"
            reused = [page for page in pool._free[shard] if page not in pool._unverified]
            cells = [cell for page in reused for cell in self.devices.cells[page]]
            assert all(cell is None or cell[2] for cell in cells), "a free page holds NaN"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("seed", [*range(12), 42])  # 42: the prefill of an answer gives NaN
def test_requests_under_traffic_get_the_results_of_an_idle_sampler(seed: int, shards: int, modeled: Any) -> None:
    traffic = Traffic(seed, shards, modeled)
    traffic.play()
    traffic.check()
    traffic.check_cache()


def test_processes_with_the_same_commands_do_the_same(modeled: Any) -> None:
    one, other = (Traffic(seed, 1, modeled) for seed in (5, 5))
    for traffic in (one, other):
        random.seed(5)
        traffic.play()
    assert one.log == other.log and one.devices.events == other.devices.events
