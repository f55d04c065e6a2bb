"""Drafts: tokens that probably come next, found in earlier text, and verified together in one step of the batch.

    earlier text --next_step--> more rows of a step --accept--> one or more tokens of each sequence

There is no draft model. The last `_GRAM` tokens of a sequence are looked up in its prompt and in all samples of the
prompt, including earlier requests of the same owner (suffix decoding, arXiv 2411.04975). A draft token is a row of the
usual decode program, with the page table of its sequence and the next position. Each layer writes the keys and values
of all rows before it attends, so a row sees the keys and values of the rows before it.

Row i is drawn with the random number that plain decoding would use there. Tokens are accepted while they equal the
draft. The first token that differs is also accepted, because its row saw the right text. Unused random numbers are
given back. In steps of the same number of rows, the tokens and logprobs therefore equal those of plain decoding, bit
for bit. Drafts may make a step larger. Like other requests in the batch, a larger step changes the last bits of
logprobs, so another token may be drawn where these bits decide. The next tokens overwrite the keys and values of
rejected rows.

All decisions depend only on commands and on tokens that were read, so all processes of a group decide alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from tinkerflow.backend.compute.sampler.pages import PagePool, PageTable
from tinkerflow.backend.compute.sampler.requests import ActiveRequest, ActiveSequence
from tinkerflow.backend.compute.sampler.shapes import Shapes, at_least
from tinkerflow.backend.spec.commands import Float32

MOST_DRAFTED = 7  # tokens of one sequence in a step
_GRAM = 3  # tokens that must be equal before a draft
_MOST_KEPT = 2**18  # tokens in all texts
_STEP = 9  # rows that cost as much as the rest of a step (small-qwen3 on 2 cores: 31 CPU-ms for 1 row, 52 for 8)
_DISPATCH = 0.5  # rows that cost as much as one more dispatch (36.1 CPU-ms for a token alone, 34.7 in a chunk)
_MOST_LOST = 1.6  # the cost, in tokens, that wrong drafts may lose for each sequence of the batch
_REGAINED = 0.01  # tokens per decoded token: 512 tokens with only wrong drafts cost as much as 519
_FORGOTTEN = 64  # tokens without a draft after which a sequence's tally starts again

Gram = tuple[int, ...]


class PromptTexts:
    """The texts of a prompt and its samples, with the place after each run of `_GRAM` tokens."""

    def __init__(self, prompt: list[int]) -> None:
        """Start with only the prompt."""
        self._prompt = prompt
        self._read: WeakKeyDictionary[ActiveSequence, int] = WeakKeyDictionary()  # tokens of running samples
        self.forget()

    def forget(self) -> None:
        """Forget the texts of all samples so far. Later tokens of running samples are added."""
        self._texts: WeakKeyDictionary[ActiveSequence, list[int]] = WeakKeyDictionary()
        self._places: dict[Gram, tuple[list[int], int]] = {}
        self.size = len(self._prompt)
        self._index(self._prompt, _GRAM)

    @property
    def sampled(self) -> int:
        """The number of tokens in the texts of samples."""
        return self.size - len(self._prompt)

    def add(self, sequence: ActiveSequence) -> None:
        """Add the tokens of a sample since the last call."""
        read, tokens = self._read.get(sequence, 0), sequence.tokens
        before = [*self._prompt[-_GRAM:], *tokens[max(0, read - _GRAM) : read]]
        text = self._texts.setdefault(sequence, before[-_GRAM:])
        start, new = max(_GRAM, len(text)), tokens[read:]
        text += new
        self.size += len(new)
        self._read[sequence] = max(read, len(tokens))
        self._index(text, start)

    def after(self, gram: Gram, most: int) -> list[int]:
        """At most `most` tokens after the last place of a gram. At the text's end, the draft is repeated."""
        found = self._places.get(gram)
        if found is None:
            return []
        (text, start), draft = found, list[int]()
        for place in range(start, start + most):
            draft.append(text[place] if place < len(text) else draft[place - len(text)])
        return draft

    def _index(self, text: list[int], start: int) -> None:
        for place in range(start, len(text)):
            self._places[tuple(text[place - _GRAM : place])] = text, place


class DraftTexts:
    """The texts of prompts, by owner. The least recently used prompt is dropped first."""

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[str, bytes], PromptTexts] = OrderedDict()
        self._size = 0

    def add(self, sequence: ActiveSequence) -> PromptTexts:
        """The texts for a sequence, including its tokens so far."""
        request = sequence.parent.request
        key = request.owner, request.prompt_T.tobytes()
        texts = self._texts.pop(key, None)
        before = 0 if texts is None else texts.size
        texts = texts or PromptTexts(request.prompt_T.tolist())
        texts.add(sequence)
        self._texts[key] = texts
        self._size += texts.size - before
        while self._size > _MOST_KEPT and len(self._texts) > 1:
            self._size -= self._texts.popitem(last=False)[1].size
        if texts.sampled > _MOST_KEPT:
            self._size -= texts.sampled
            texts.forget()
        return texts


@dataclass
class DraftTally:
    """The numbers of a sequence's recent draft tokens: drafted tokens that had a chance, and accepted tokens.

    tokens: the sequence's number of tokens at its last draft.
    """

    drafted: int = 0
    accepted: int = 0
    tokens: int = 0

    @property
    def rate(self) -> float:
        """The probability that the next draft token is accepted if all earlier draft tokens are accepted."""
        return (self.accepted + 3) / (self.drafted + 4)


@dataclass
class DraftRow:
    """A row of a step, with one token of a sequence at its own position. See `requests.DecodeRow`."""

    parent: ActiveRequest
    table: PageTable
    tokens: list[int]
    last_token: int
    cached: int
    number: Float32
    in_flight: int = 0
    matcher: None = None

    def draw(self, count: int) -> Float32:
        """The row's random number. count: 1."""
        assert count == 1, "a draft is verified in a step of one token"
        return self.number


@dataclass
class DraftedStep:
    """One step of several sequences with their drafts. slots: the number of rows of the dispatch. rows: by slot,
    ascending.

    places: the slots of each sequence, in the order of its positions. numbers: the random numbers of these rows.
    row_cost: the cost of each draft token, in tokens without drafts.
    """

    slots: int
    drafts: dict[ActiveSequence, list[int]]
    row_cost: float = 0.0
    rows: list[tuple[int, DraftRow]] = field(default_factory=list)
    places: dict[ActiveSequence, list[int]] = field(default_factory=dict)
    numbers: dict[ActiveSequence, Float32] = field(default_factory=dict)


class Drafts:
    """The drafts of one sampler. drafted, accepted: tokens so far."""

    def __init__(self, shapes: Shapes, pool: PagePool) -> None:
        """Start without drafts. shapes: the sizes of dispatches. pool: the pages."""
        self._shapes, self._pool = shapes, pool
        self._texts = DraftTexts()
        self._tallies: WeakKeyDictionary[ActiveSequence, DraftTally] = WeakKeyDictionary()
        self._budget = 0.0  # the cost, in tokens, that wrong drafts may lose
        self.drafted = self.accepted = 0

    def note(self, sequence: ActiveSequence, new: int) -> None:
        """Remember the `new` last tokens of a sequence for later drafts."""
        self._budget += _REGAINED * new
        if not sequence.parent.request.images:  # equal tokens may represent different images
            self._texts.add(sequence)

    def next_step(self, sequences: Sequence[ActiveSequence]) -> DraftedStep | None:
        """The next step of these sequences, with pages; None if no draft is worth its rows."""
        begun = [sequence for sequence in sequences if sequence not in self._tallies]
        self._tallies.update((sequence, DraftTally()) for sequence in begun)
        self._budget = min(self._budget + _MOST_LOST * len(begun), _MOST_LOST * len(sequences))
        if self._budget <= 0:
            return None
        found = {sequence: draft for sequence in sequences if (draft := self._propose(sequence))}
        if not found:
            return None
        step = self._planned(sequences, found)
        for sequence, draft in step.drafts.items():
            start = sequence.cached
            if not self._pool.reserve(sequence.table, start, start + 1 + len(draft)):
                draft.clear()
        return self._with_rows(step) if any(step.drafts.values()) else None

    def accept(self, step: DraftedStep, sequence: ActiveSequence, tokens: list[int]) -> int:
        """The number of tokens drawn in a sequence's rows that equal those of plain decoding."""
        draft = step.drafts[sequence]  # for every row but the first, the token that it assumed
        right = next((i for i, token in enumerate(draft) if token != tokens[i]), len(draft))
        if draft:
            tally = self._tallies[sequence]
            tally.drafted += min(right + 1, len(draft))  # tokens after the first wrong one had no chance
            tally.accepted += right
            tally.tokens = len(sequence.tokens)
            self._budget += right - len(draft) * step.row_cost
            self.drafted += len(draft)
            self.accepted += right
        return right + 1

    def _propose(self, sequence: ActiveSequence) -> list[int]:
        parent, tokens = sequence.parent, sequence.tokens
        most = min(MOST_DRAFTED, sequence.remaining - 1)
        if most < 1 or parent.request.images or parent.request.adjustments is not None or sequence.matcher is not None:
            return []
        if len(tokens) - self._tallies[sequence].tokens > _FORGOTTEN:
            self._tallies[sequence] = DraftTally(tokens=len(tokens))
        texts = self._texts.add(sequence)
        last = tokens[-_GRAM:]
        if len(last) < _GRAM:
            last = [*parent.request.prompt_T[len(last) - _GRAM :].tolist(), *last]
        return texts.after(tuple(last), most)

    def _planned(self, sequences: Sequence[ActiveSequence], found: dict[ActiveSequence, list[int]]) -> DraftedStep:
        """The step with the most expected tokens for its cost, and the drafts that fit into it, if any."""
        shards = range(self._pool.shards)
        here = [sum(sequence.table.shard == shard for sequence in sequences) for shard in shards]
        sizes = [size for size in self._shapes.slots if size >= len(shards) * max(here)] or [self._shapes.slots[-1]]
        # A token is accepted only if all earlier tokens are, so the i-th token of a draft is worth rate ** i.
        worth = [
            (self._tallies[sequence].rate ** (i + 1), -order, sequence)
            for order, (sequence, draft) in enumerate(found.items())
            for i in range(len(draft))
        ]
        worth.sort(key=lambda each: each[:2], reverse=True)
        best, chosen = len(sequences) / (_STEP + sizes[0]), DraftedStep(sizes[0], {})
        for size in sizes:
            free, tokens = [size // len(shards) - count for count in here], float(len(sequences))
            lengths = dict.fromkeys(sequences, 0)
            for value, _, sequence in worth:
                if free[sequence.table.shard] > 0:
                    free[sequence.table.shard] -= 1
                    lengths[sequence] += 1
                    tokens += value
            if tokens / (_STEP + size + _DISPATCH) > best:
                best = tokens / (_STEP + size + _DISPATCH)
                drafts = {sequence: found.get(sequence, [])[:length] for sequence, length in lengths.items()}
                more = (size + _DISPATCH - sizes[0]) / (_STEP + sizes[0]) * len(sequences)
                chosen = DraftedStep(size, drafts, more / sum(lengths.values()))
        return chosen

    def _with_rows(self, step: DraftedStep) -> DraftedStep:
        shards: list[list[tuple[ActiveSequence, DraftRow]]] = [[] for _ in range(self._pool.shards)]
        for sequence, draft in step.drafts.items():
            numbers = step.numbers[sequence] = sequence.uniforms.draw(1 + len(draft))
            for i, token in enumerate([sequence.last_token, *draft]):
                row = DraftRow(
                    sequence.parent, sequence.table, sequence.tokens, token, sequence.cached + i, numbers[i : i + 1]
                )
                shards[sequence.table.shard].append((sequence, row))
        step.slots = at_least(self._shapes.slots, len(shards) * max(map(len, shards)))
        for shard, rows in enumerate(shards):
            rows.sort(key=lambda each: -each[1].cached)  # as in `DecodeSlots.assign`
            for slot, (sequence, row) in enumerate(rows, shard * step.slots // len(shards)):
                step.rows.append((slot, row))
                step.places.setdefault(sequence, []).insert(0, slot)
        return step
