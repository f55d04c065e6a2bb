"""Random traffic through the real sampler, on a model of the devices that knows what every cell of the cache holds.

The model checks each read and each write. It draws tokens by a rule from the text alone, so the results of a busy
server must be those of an idle one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinkerflow.backend.compute.mesh import FSDP
from tinkerflow.backend.compute.models.layers import Attention
from tinkerflow.backend.compute.platforms import CPU, CUDA
from tinkerflow.backend.compute.sampler import sampler as sampler_module
from tinkerflow.backend.compute.sampler.pages import PageTable
from tinkerflow.backend.compute.sampler.prompt_scores import PieceScores
from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.spec.commands import (
    Adjustments,
    Constraint,
    PromptWishes,
    SampleRequest,
    SampleResult,
    SampleStep,
)

STOP, VOCABULARY = 99, 97
Cell = tuple[int, Any, bool] | None  # a digest of the tokens up to here, the snapshot, whether it is finite


class Snapshot:
    """snapshot_id: as requests name it. wild: now and then it computes what is not finite."""

    def __init__(self, snapshot_id: str, *, wild: bool) -> None:
        self.snapshot_id, self.wild = snapshot_id, wild


class Snapshots:
    """In the place of the snapshot cache."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.held: dict[str, Snapshot] = {}
        self.used: set[Snapshot] = set()

    def find(self, snapshot_id: str) -> Snapshot:
        if snapshot_id not in self.held:
            raise NotFoundError(f"no snapshot {snapshot_id}")
        return self.held[snapshot_id]

    def alive(self, snapshot: Snapshot | None) -> bool:
        return snapshot is None or self.held.get(snapshot.snapshot_id) is snapshot

    def use(self, wanted: Any) -> None:
        self.used = set(wanted)

    def drop(self, snapshot_id: str) -> None:
        self.held.pop(snapshot_id, None)

    def reset(self) -> None:
        self.used = set()


class Matcher:
    """In the place of a constraint's matcher: it allows everything. seen: the tokens that it was told last."""

    def __init__(self, *_: Any) -> None:
        self.seen: list[int] = []

    def fresh(self) -> Matcher:
        return Matcher()

    def advance(self, tokens: list[int]) -> None:
        assert tokens[: len(self.seen)] == self.seen
        self.seen = list(tokens)


def digests(tokens: Any) -> list[int]:
    """One for each token, of it and of all before it."""
    return list(accumulate((int(token) for token in tokens), lambda before, token: hash((before, token)), initial=1))[
        1:
    ]


def next_token(digest: int, index: int) -> int:
    """What follows a text in sample `index`; now and then the stop token."""
    drawn = hash((digest, index)) % (VOCABULARY + 3)
    return drawn if drawn < VOCABULARY else STOP


class Devices:
    """In the place of the sampler's model. The cells of a page are a list; page 0 of each shard stays empty."""

    def __init__(
        self,
        cfg: Any,
        mesh: Any,
        params: Any,
        snapshots: Snapshots,
        pool: Any,
        *,
        chunk: int,
        max_context: int,
        kv_cache: str,
        most_ahead: int | None,
        tower: None,
    ) -> None:
        self.snapshots, self.pool, self.chunk, self.width = snapshots, pool, chunk, pool.pages_for(max_context)
        self.window = max((one.window for one in cfg.attentions if one.window), default=None)
        self.runs_ahead, self.last_piece = most_ahead is not None, None
        self.clear()

    def clear(self) -> None:
        self.cells: list[list[Cell]] = [[None] * self.pool.page for _ in range(self.pool.pages * self.pool.shards)]

    def settle(self) -> None:
        for source, into in self.pool.pending():
            assert into % self.pool.pages, "the page of zeros is written"
            self.cells[into] = list(self.cells[source])

    def row(self, row: int, rows: int, table: PageTable, parent: Any) -> None:
        """A row's pages lie in its shard, and its snapshot in the stack."""
        assert {page // self.pool.pages for page in table.pages} <= {row // (rows // self.pool.shards)}
        assert len(table.pages) <= self.width
        assert parent.snapshot is None or parent.snapshot in self.snapshots.used

    def reads(self, table: PageTable, known: list[int], parent: Any) -> bool:
        """Whether all of the row's pages are finite: what is masked is multiplied by 0, and 0 * nan is nan.

        known: digests of the tokens whose cells are read; they must be of this text and computed with these weights.
        """
        finite = all(cell is None or cell[2] for page in table.pages for cell in self.cells[page])
        first = 0 if self.window is None else max(0, len(known) - self.window + 1)
        for place, digest in enumerate(known[first:], first):
            cell = self.cells[table.pages[place // self.pool.page]][place % self.pool.page]
            assert cell is not None, "an empty cell is read"
            assert cell[0] == digest, "another text is read"
            assert cell[1] is parent.snapshot, "what other weights computed is read"
        # A prompt of the same owner and snapshot is found before anybody knows that it is not finite.
        parent.wild |= parent.snapshot is not None and parent.snapshot.wild
        assert finite or parent.wild, "somebody else's numbers, which are not finite, are read"
        return finite

    def writes(self, table: PageTable, place: int, cell: Cell) -> None:
        if place // self.pool.page < len(table.pages):
            page = table.pages[place // self.pool.page]
            assert self.pool._writable(page), "a shared page is written"
            self.cells[page][place % self.pool.page] = cell

    def computes(self, parent: Any) -> bool:
        """Whether what is computed next is finite."""
        parent.wild |= parent.snapshot is not None and parent.snapshot.wild
        return not (parent.snapshot and parent.snapshot.wild and random.random() < 0.02)

    def prefill_piece(self, group: Any) -> int:
        self.settle()
        start, size = group.start, group.piece
        assert len({job.row for job in group.jobs}) == len(group.jobs)
        logprobs_BQ = np.zeros((group.rows, size), np.float32)
        for job in group.jobs:
            self.row(job.row, group.rows, job.table, job.parent)
            if not job.table.pages:  # it was cancelled
                continue
            known = digests(job.tokens_T[: job.length])
            finite = self.reads(job.table, known[:start], job.parent)
            for place in range(start, start + size):
                finite &= self.computes(job.parent)
                digest = known[place] if place < job.length else 0
                self.writes(job.table, place, (digest, job.parent.snapshot, finite))
            logprobs_BQ[job.row] = 0 if finite else np.nan
        wanted = any(job.wants(start, start + size) for job in group.jobs)
        group.advance(size, PieceScores(logprobs_BQ) if wanted else None)
        return int(logprobs_BQ.size)

    def decode_chunk(self, slots: int, held: Any, steps: int, before: Any) -> Any:
        self.settle()
        assert held and all(sequence.remaining > 0 for _, sequence in held)
        assert before is None or self.runs_ahead
        texts: dict[Any, list[int]] = {}
        assert len({slot for slot, _ in held}) == len(held)
        tokens_CS, logprobs_CS = np.zeros((self.chunk, slots), np.int32), np.zeros((self.chunk, slots), np.float32)
        for slot, sequence in held:
            assert not (sequence.needs_host and sequence.ahead), "its tokens are not read yet"
            assert sequence.matcher is None or (steps, sequence.matcher.seen) == (1, sequence.tokens)
            self.row(slot, slots, sequence.table, sequence.parent)
            known = texts[sequence] = before.texts[sequence] if sequence.ahead else digests(sequence.prefix())
            finite = self.reads(sequence.table, known[:-1], sequence.parent)
            for step in range(steps):
                place = sequence.cached + step
                assert step >= sequence.remaining or place < len(sequence.table.pages) * self.pool.page, "no page"
                finite &= self.computes(sequence.parent)
                self.writes(sequence.table, place, (known[-1], sequence.parent.snapshot, finite))
                tokens_CS[step, slot] = next_token(known[-1], sequence.index)
                logprobs_CS[step, slot] = -1 if finite else np.nan
                known.append(hash((known[-1], int(tokens_CS[step, slot]))))
        decoded = SimpleNamespace(tokens_CS=tokens_CS, logprobs_CS=logprobs_CS, top_CSk=None, top_logprobs_CSk=None)
        return SimpleNamespace(held=held, steps=steps, decoded=decoded, texts=texts)

    def read(self, chunk: Any) -> Any:
        return chunk.decoded


def expected(request: SampleRequest, limit: int) -> list[list[int]]:
    """The tokens of every sample on an idle server."""
    answers: list[list[int]] = []
    for index in range(request.num_samples):
        digest, tokens = digests(request.prompt_T)[-1], list[int]()
        while len(tokens) < limit and STOP not in tokens:
            tokens.append(next_token(digest, index))
            digest = hash((digest, tokens[-1]))
        answers.append(tokens)
    return answers


@cache
def text() -> tuple[int, ...]:
    """Prompts are its beginnings, so that they share pages."""
    chance = random.Random(0)
    return tuple(chance.randrange(90) for _ in range(600))


def requests(chance: random.Random, most: int) -> Iterator[SampleRequest]:
    number = 0
    while True:
        number += 1
        length = min(chance.choice([1, 2, 5, 31, 32, 33, 64, 65, 100, most - 1, most // 2]), most - 1)
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
            adjustments=Adjustments(presence=1.0) if chance.random() < 0.05 else None,
            constraint=Constraint("regex", ".*", (STOP,)) if chance.random() < 0.05 else None,
        )


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_random_traffic(seed: int, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(seed)
    chance = random.Random(seed)
    cpu = chance.random() < 0.5
    for name, stand_in in {
        "SamplerModel": Devices,
        "SnapshotCache": Snapshots,
        "by_layer": lambda cfg, params: params,
        "cache_mesh": lambda mesh, _: mesh,
        "usual_spec": lambda *_: None,
        "SamplerPrograms": lambda *_, **__: None,
        "new_matcher": Matcher,
        "on_cpu": lambda: cpu,
        "platform": lambda: CPU if cpu else CUDA,
    }.items():
        monkeypatch.setattr(sampler_module, name, stand_in)
    monkeypatch.setattr(sampler_module.ParentRequest, "wild", False, raising=False)
    config: Any = SimpleNamespace(
        sample_slots=chance.choice([1, 3, 4, 8, 16]),
        max_context=chance.choice([100, 300]),
        decode_chunk=chance.choice([1, 4, 8]),
        expert_rank=0,
        resident_snapshots=1,
        kv_cache="full",
        model_path="",
    )
    attention = Attention(8, 1, 1, 8, None, window=chance.choice([None, 33, 70]))
    cfg: Any = SimpleNamespace(max_positions=10**6, vocab=100, attentions=[attention], split_heads=1)
    params: Any = SimpleNamespace(embed_VD=SimpleNamespace(dtype=SimpleNamespace(name="float32")), unstacked=True)
    mesh: Any = SimpleNamespace(shape={FSDP: shards})
    pages = chance.choice([3, 5, 9, 40])
    budget = chance.choice([32, 200, 1024])
    sampler = sampler_module.Sampler(cfg, params, mesh, config, pages=pages, page=32, prefill_budget=budget)
    snapshots: Any = sampler.snapshots
    snapshots.held |= {name: Snapshot(name, wild=name == "wild") for name in ("tame", "wild")}

    asked: dict[str, SampleRequest] = {}
    answered: dict[str, SampleResult] = {}
    cancelled: set[str] = set()
    coming = requests(chance, sampler._max_context)
    for _ in range(40):
        admitted = [next(coming) for _ in range(chance.choice([0, 0, 1, 3]))]
        asked |= {request.request_id: request for request in admitted}
        waiting = sorted(set(asked) - set(answered) - cancelled)
        gone = [chance.choice(waiting)] if waiting and chance.random() < 0.2 else []
        cancelled |= set(gone)
        for result in sampler.step(SampleStep(tuple(admitted), cancel=tuple(gone))).finished:
            assert result.request_id not in answered
            answered[result.request_id] = result
    for _ in range(3000):
        progress = sampler.step(SampleStep())
        answered |= {result.request_id: result for result in progress.finished}
        if not (progress.active or progress.waiting):
            break

    assert set(asked) - cancelled <= set(answered)
    assert sampler.pages.used == 0
    served = 0
    for name, result in answered.items():
        request = asked[name]
        if result.error:
            assert (
                request.snapshot_id == "wild" and "not finite" in result.error
            ) or "the KV cache holds" in result.error
            continue
        limit = min(request.max_tokens, sampler._max_context - len(request.prompt_T))
        assert [sequence.tokens_T.tolist() for sequence in result.sequences] == expected(request, limit)
        served += 1
    assert served
    devices: Any = sampler._model
    devices.settle()
    for shard in range(shards):
        assert not any(devices.cells[shard * pages]), "the page of zeros is not empty"
        assert all(cell is None or cell[2] for page in sampler.pages._free[shard] for cell in devices.cells[page])
