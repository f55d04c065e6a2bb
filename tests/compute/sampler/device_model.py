"""The real sampler on simulated devices, without JAX. The content of every cell of the KV cache is known.

Each read and each write is checked. Tokens follow from the text alone, so a busy sampler must give the results of an
idle one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinkerflow.backend.compute.mesh import FSDP
from tinkerflow.backend.compute.platforms import CPU, CUDA
from tinkerflow.backend.compute.sampler import admission
from tinkerflow.backend.compute.sampler import requests as requests_module
from tinkerflow.backend.compute.sampler import sampler as sampler_module
from tinkerflow.backend.compute.sampler.pages import PageTable
from tinkerflow.backend.compute.sampler.prompt_scores import PieceScores
from tinkerflow.backend.compute.sampler.sampler import Sampler
from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.spec.commands import SampleRequest

STOP, VOCABULARY = 99, 97
Cell = tuple[int, Any, bool] | None  # a digest of the tokens up to here, the snapshot, whether it is finite


class Snapshot:
    """A published snapshot. wild: some of its results are NaN."""

    def __init__(self, snapshot_id: str, *, wild: bool = False) -> None:
        self.snapshot_id, self.wild, self.step = snapshot_id, wild, 0


class Snapshots:
    """Replaces `SnapshotCache`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.all: dict[str, Snapshot] = {}
        self.used: set[Snapshot] = set()

    def publish(self, snapshot_id: str, *, wild: bool = False) -> None:
        self.all[snapshot_id] = Snapshot(snapshot_id, wild=wild)

    def find(self, snapshot_id: str) -> Snapshot:
        if snapshot_id not in self.all:
            raise NotFoundError(f"snapshot {snapshot_id!r} is not in the cache")
        return self.all[snapshot_id]

    def alive(self, snapshot: Snapshot | None) -> bool:
        return snapshot is None or self.all.get(snapshot.snapshot_id) is snapshot

    def fits(self, snapshots: Any) -> bool:
        return len({*snapshots}) <= 2

    def use(self, wanted: Any) -> None:
        self.used = {*wanted} - {None}

    def rename(self, snapshot_id: str, to_id: str) -> Snapshot:
        moved = self.all[to_id] = Snapshot(to_id, wild=self.all.pop(snapshot_id).wild)
        return moved

    def drop(self, snapshot_id: str) -> None:
        self.all.pop(snapshot_id, None)

    def reset_stack(self) -> None:
        self.used = set()


class Matcher:
    """Replaces a constraint's matcher, and allows every token. seen: the tokens of the last call."""

    def __init__(self, *_: Any) -> None:
        self.seen: list[int] = []

    def copy(self) -> Matcher:
        return Matcher()

    fresh = copy

    def advance(self, tokens: list[int]) -> None:
        assert tokens[: len(self.seen)] == self.seen
        self.seen = list(tokens)


def digests(tokens: Any) -> list[int]:
    """For each token, a digest of it and of all tokens before it."""
    return [*accumulate((int(token) for token in tokens), lambda before, token: hash((before, token)), initial=1)][1:]


def next_token(digest: int, index: int) -> int:
    """The token after a text in sample `index`. About 3 % are the stop token."""
    drawn = hash((digest, index)) % (VOCABULARY + 3)
    return drawn if drawn < VOCABULARY else STOP


def logprob(digest: int) -> float:
    """The logprob of the last token of a text."""
    return -(digest % 64) / 64


def answers(request: SampleRequest, max_tokens: int) -> list[list[int]]:
    """The tokens of each sample on an idle sampler."""
    samples: list[list[int]] = []
    for index in range(request.num_samples):
        digest, tokens = digests(request.prompt_T)[-1], list[int]()
        while len(tokens) < max_tokens and STOP not in tokens:
            tokens.append(next_token(digest, index))
            digest = hash((digest, tokens[-1]))
        samples.append(tokens)
    return samples


class Devices:
    """Replaces `SamplerModel`. The cells of a page are a list. Page 0 of each shard stays empty.

    events: the name of each call, the ids of its requests, and its size. on_event: called before each, and may raise.
    """

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
        host_decides: bool,
        most_ahead: int | None,
        tower: None,
    ) -> None:
        self.snapshots, self.pool, self.chunk, self.width = snapshots, pool, chunk, pool.pages_for(max_context)
        self.window = max((each.window for each in cfg.attentions if each.window), default=None)
        self.runs_ahead, self.last_piece, self.host_decides = most_ahead is not None, None, host_decides
        self.events: list[tuple[str, tuple[str, ...], int]] = []
        self.on_event: Callable[[str, tuple[str, ...]], None] = lambda name, request_ids: None
        self.reset_cache()

    def reset_cache(self) -> None:
        self.cells: list[list[Cell]] = [[None] * self.pool.page for _ in range(self.pool.pages * self.pool.shards)]
        states = self.pool.states
        self.states: list[Cell] = [None] * (states.pages * states.shards if states else 0)

    def event(self, name: str, sequences: Sequence[Any], size: int) -> None:
        request_ids = tuple(dict.fromkeys(each.parent.id for each in sequences))
        self.events.append((name, request_ids, size))
        self.on_event(name, request_ids)

    def copy_pages(self) -> None:
        for source, into in self.pool.pop_copies():
            assert into % self.pool.pages, "the page of zeros is written"
            self.cells[into] = list(self.cells[source])
        for source, into in self.pool.states.pop_copies() if self.pool.states else ():
            assert into % self.pool.states.pages, "the state of zeros is written"
            self.states[into] = self.states[source]

    def check_row(self, row: int, rows: int, table: PageTable, parent: Any) -> None:
        """Assert that a row's pages are in its shard, and that its snapshot is in the stack."""
        assert {page // self.pool.pages for page in table.pages} <= {row // (rows // self.pool.shards)}
        assert len(table.pages) <= self.width
        assert parent.snapshot is None or parent.snapshot in self.snapshots.used

    def read(self, table: PageTable, known: list[int], parent: Any) -> bool:
        """Whether all of the row's pages are finite: masked values are multiplied by 0, and 0 * NaN is NaN.

        known: digests of the tokens whose cells are read. Asserts that cells have this text and the parent's weights.
        """
        finite = all(cell is None or cell[2] for page in table.pages for cell in self.cells[page])
        first = 0 if self.window is None else max(0, len(known) - self.window + 1)
        cells = [(place, self.cells[table.pages[place // self.pool.page]][place % self.pool.page], known[place])
                 for place in range(first, len(known))]  # fmt: skip
        if self.pool.states and known:
            assert table.state is not None
            cells.append((-1, self.states[table.state.pages[0]], known[-1]))
        for place, cell, digest in cells:
            assert cell is not None, f"an empty cell is read at {place}"
            assert cell[0] == digest, "another text is read"
            assert cell[1] is parent.snapshot, "a cell of other weights is read"
            finite &= cell[2]
        # A prompt of the same owner and snapshot is found before its NaN is discovered.
        parent.wild |= parent.snapshot is not None and parent.snapshot.wild
        assert finite or parent.wild, "NaN of another request is read"
        return finite

    def write(self, table: PageTable, place: int, cell: Cell, *, state: bool = True) -> None:
        if place // self.pool.page < len(table.pages):
            page = table.pages[place // self.pool.page]
            assert self.pool._writable(page), "a shared page is written"
            self.cells[page][place % self.pool.page] = cell
        if self.pool.states and state:
            assert table.state is not None and self.pool.states._writable(table.state.pages[0]), "a shared state"
            self.states[table.state.pages[0]] = cell

    def is_finite(self, parent: Any) -> bool:
        """Whether the next computed number is finite."""
        parent.wild |= parent.snapshot is not None and parent.snapshot.wild
        return not (parent.snapshot and parent.snapshot.wild and random.random() < 0.02)

    def prefill_piece(self, group: Any) -> int:
        self.event("prefill", group.jobs, group.piece)
        self.copy_pages()
        start, size = group.start, group.piece
        assert len({job.row for job in group.jobs}) == len(group.jobs)
        logprobs_BQ = np.zeros((group.rows, size), np.float32)
        for job in group.jobs:
            self.check_row(job.row, group.rows, job.table, job.parent)
            if not job.table.pages:  # the request was cancelled
                continue
            assert self.pool.own_state(job.table)
            self.copy_pages()
            known = digests(job.tokens_T)
            finite = self.read(job.table, known[: min(start, job.length)], job.parent)
            for place in range(start, start + size):
                finite &= self.is_finite(job.parent)
                inside = place < job.length
                self.write(job.table, place, (known[place] if inside else 0, job.parent.snapshot, finite), state=inside)
                logprobs_BQ[job.row, place - start] = logprob(known[place + 1]) if inside else 0
            if not finite:
                logprobs_BQ[job.row] = np.nan
        wanted = any(job.wants_scores(start, start + size) for job in group.jobs)
        group.advance(size, PieceScores(logprobs_BQ) if wanted else None)
        return int(logprobs_BQ.size)

    def decode_chunk(self, slots: int, assigned: Any, steps: int, before: Any) -> Any:
        self.event("decode", [sequence for _, sequence in assigned], steps)
        self.copy_pages()
        assert assigned and all(sequence.remaining > 0 for _, sequence in assigned)
        assert before is None or self.runs_ahead
        assert steps in (1, self.chunk) or not self.host_decides, "there is no such program"
        texts: dict[Any, list[int]] = {}
        assert len({slot for slot, _ in assigned}) == len(assigned)
        tokens_CS, logprobs_CS = np.zeros((self.chunk, slots), np.int32), np.zeros((self.chunk, slots), np.float32)
        for slot, sequence in assigned:
            assert not (sequence.needs_host and sequence.in_flight), "its tokens are not read yet"
            assert sequence.matcher is None or (steps, sequence.matcher.seen) == (1, sequence.tokens)
            self.check_row(slot, slots, sequence.table, sequence.parent)
            known = texts[sequence] = before.texts[sequence] if sequence.in_flight else digests(sequence.all_tokens())
            finite = self.read(sequence.table, known[:-1], sequence.parent)
            for step in range(steps):
                place = sequence.cached + step
                assert step >= sequence.remaining or place < len(sequence.table.pages) * self.pool.page, "no page"
                finite &= self.is_finite(sequence.parent)
                self.write(sequence.table, place, (known[-1], sequence.parent.snapshot, finite))
                tokens_CS[step, slot] = next_token(known[-1], sequence.index)
                known.append(hash((known[-1], int(tokens_CS[step, slot]))))
                logprobs_CS[step, slot] = logprob(known[-1]) if finite else np.nan
        top_CSk = np.repeat(tokens_CS[:, :, None], 8, axis=2) + np.arange(8, dtype=np.int32)
        decoded = SimpleNamespace(
            tokens_CS=tokens_CS, logprobs_CS=logprobs_CS, top_CSk=top_CSk, top_logprobs_CSk=top_CSk.astype(np.float32)
        )
        return SimpleNamespace(slots=assigned, steps=steps, decoded=decoded, texts=texts)

    def read_chunk(self, chunk: Any) -> Any:
        self.event("read", [sequence for _, sequence in chunk.slots], chunk.steps)
        return chunk.decoded


def modeled_sampler(
    monkeypatch: pytest.MonkeyPatch,
    *,
    slots: int = 4,
    chunk: int = 4,
    context: int = 300,
    pages: int = 40,
    page: int = 32,
    states: int = 0,
    shards: int = 1,
    window: int | None = None,
    budget: int = 1024,
    ahead: bool = False,
    host_decides: bool = False,
    pieces: tuple[int, ...] | None = None,
    invariant: bool = False,
) -> Sampler:
    """A sampler on simulated devices. At most two snapshots fit into a batch.

    ahead: a chunk is dispatched before the previous one is read. host_decides: as in `Platform`. pieces: the platform's
    `prefill_tokens`, None = those of a CPU or a GPU. invariant: the setting batch_invariant.
    """
    like = CUDA if ahead else CPU
    for name, stand_in in {
        "SamplerModel": Devices,
        "SnapshotCache": Snapshots,
        "by_layer": lambda cfg, params: params,
        "cache_mesh": lambda mesh, _: mesh,
        "usual_spec": lambda *_: None,
        "SamplerPrograms": lambda *_, **__: None,
        "on_cpu": lambda: not ahead,
        "platform": lambda: replace(like, host_decides=host_decides, prefill_tokens=pieces or like.prefill_tokens),
    }.items():
        monkeypatch.setattr(sampler_module, name, stand_in)
    monkeypatch.setattr(admission, "new_matcher", Matcher)
    monkeypatch.setattr(requests_module.ActiveRequest, "wild", False, raising=False)
    config: Any = SimpleNamespace(
        sample_slots=slots,
        batch_invariant=invariant,
        drafts=False,
        routing_replay=False,
        support_replay=False,
        max_context=context,
        decode_chunk=chunk,
        expert_rank=0,
        resident_snapshots=1,
        kv_cache="full",
        model_path="",
    )
    cfg: Any = SimpleNamespace(
        max_positions=10**6, vocab=100, attentions=[SimpleNamespace(window=window)], split_heads=1, vision=None
    )
    params: Any = SimpleNamespace(embed_VD=SimpleNamespace(dtype=SimpleNamespace(name="float32")), unstacked=True)
    mesh: Any = SimpleNamespace(shape={FSDP: shards})
    limits: Any = {"pages": pages, "states": states, "page": page, "prefill_budget": budget}
    return Sampler(cfg, params, mesh, config, **limits)
