"""Find rows of a file that were trained on, word for word or in long parts.

A token of a row counts as trained on if it belongs to an n-gram of 13 tokens that also occurs in the training data.
13-grams follow GPT-3 (Brown et al., 2020, "Language Models are Few-Shot Learners", appendix C). The share of such
tokens in a row, and its limit of 80 %, follow Llama 2 (Touvron et al., 2023, "Llama 2", appendix A.6). N-grams that
occur in most rows of the file, such as those of a chat template, do not count. N-grams are compared by 64-bit hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.catalog.card import row_digest
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.deployments.explain import requests_behind
from tinkerflow.deployments.recorded_run import LOADS, Api

NGRAM = 13
CONTAMINATED = 0.8  # limit of the share of a row's tokens
_FEWEST_ROWS = 4  # rows of a file in which n-grams of most rows count as a template
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd: Knuth's multiplicative hashing

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TrainedRow:
    """A row of a run's history. step, row: as in `tinkerflow rerun --without STEP:ROW`."""

    run_id: str
    step: int
    row: int

    def __str__(self) -> str:
        return f"{self.step}:{self.row} of {self.run_id}"


@dataclass
class Overlap:
    """How much of a row was trained on. exact: the trained row that equals it.

    share: the share of its tokens that were trained on. nearest: the trained row with most of its n-grams.
    """

    exact: TrainedRow | None = None
    share: float = 0.0
    nearest: TrainedRow | None = None

    @property
    def contaminated(self) -> bool:
        """Whether the row is unfit for an evaluation."""
        return self.exact is not None or self.share >= CONTAMINATED


def trained_rows(api: Api, against: str, unknown: Callable[[str], object]) -> Iterator[tuple[TrainedRow, Tokens]]:
    """The distinct rows that a run, or a checkpoint and the checkpoints before it, were trained on, with their tokens.

    unknown: called with each earlier checkpoint whose rows are not known. NotFoundError: the run has no history, or did
    not make the checkpoint.
    """
    seen: set[str] = set()
    number = 0
    for run, recorded in requests_behind(api, against, unknown):
        if recorded.seq_id == 0 or recorded.kind in ("optim_step", *LOADS):
            number = 0
        if recorded.kind != "forward_backward" or recorded.error is not None:
            continue
        for datum in pb.ForwardBackwardRequest.FromString(recorded.payload).data:
            key = row_digest(datum)
            if key not in seen:
                seen.add(key)
                yield TrainedRow(run.run_id, recorded.step, number), _tokens(datum)
            number += 1


def _tokens(datum: pb.Datum) -> Tokens:
    """The tokens of a row and its last target. An image becomes one token, -1, which occurs in no text."""
    parts = [np.frombuffer(one.encoded_text.tokens, "<i4") for one in datum.model_input if one.HasField("encoded_text")]
    if len(parts) < len(datum.model_input):
        kinds = [one.HasField("encoded_text") for one in datum.model_input]
        texts = iter(parts)
        parts = [next(texts) if is_text else np.array([-1], np.int32) for is_text in kinds]
    inputs = datum.loss_fn_inputs
    if "target_tokens" in inputs:
        targets = inputs["target_tokens"]
        kind = {pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}.get(targets.dtype)
        if kind is not None and targets.dense:
            parts.append(np.frombuffer(targets.dense, kind)[-1:].astype(np.int32))
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


@dataclass
class _NGrams:
    """The n-grams of the file. hashes: sorted and unique. places: the rows and positions of each hash, by its index."""

    hashes: npt.NDArray[np.uint64]
    places: list[list[tuple[int, int]]]


@dataclass
class Comparison:
    """Compares the rows of a file with trained rows, one at a time. rows: each row's tokens; at least one row."""

    rows: Sequence[Tokens]
    n: int = NGRAM
    overlaps: list[Overlap] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.overlaps = [Overlap() for _ in self.rows]
        self._covered = [np.zeros(len(row), bool) for row in self.rows]
        self._best = [0] * len(self.rows)
        self._whole: dict[bytes, list[int]] = {}
        for number, row in enumerate(self.rows):
            self._whole.setdefault(row.astype("<i4").tobytes(), []).append(number)
        self._grams = self._index()

    def _index(self) -> _NGrams:
        places: dict[int, list[tuple[int, int]]] = {}
        for number, row in enumerate(self.rows):
            for position, value in enumerate(hashes(row, self.n).tolist()):
                places.setdefault(value, []).append((number, position))
        if len(self.rows) >= _FEWEST_ROWS:
            most = len(self.rows) / 2
            places = {value: found for value, found in places.items() if len({row for row, _ in found}) <= most}
        ordered = sorted(places)
        return _NGrams(np.array(ordered, np.uint64), [places[value] for value in ordered])

    def add(self, where: TrainedRow, tokens: Tokens) -> None:
        for number in self._whole.get(tokens.astype("<i4").tobytes(), ()):
            overlap = self.overlaps[number]
            overlap.exact, overlap.share = overlap.exact or where, 1.0
            overlap.nearest = overlap.exact
        grams = self._grams.hashes
        values = np.unique(hashes(tokens, self.n))
        if not len(values) or not len(grams):
            return
        at = np.minimum(np.searchsorted(grams, values), len(grams) - 1)
        counts: dict[int, int] = {}
        for index in at[grams[at] == values].tolist():
            for number, position in self._grams.places[index]:
                self._covered[number][position : position + self.n] = True
                counts[number] = counts.get(number, 0) + 1
        for number, count in counts.items():
            overlap = self.overlaps[number]
            if overlap.exact is None:
                overlap.share = float(self._covered[number].mean())
                if count > self._best[number]:
                    self._best[number], overlap.nearest = count, where


def hashes(tokens: Tokens, n: int) -> npt.NDArray[np.uint64]:
    """A 64-bit hash for each n-gram of a sequence; empty if the sequence is shorter than n."""
    if len(tokens) < n:
        return np.empty(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.int64).view(np.uint64), n)
    found = np.zeros(len(windows), np.uint64)
    for column in range(n):
        found = (found ^ windows[:, column]) * _FACTOR
        found ^= found >> np.uint64(29)
    return found
