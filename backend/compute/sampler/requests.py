"""A sample request on the host. It is split into sequences, and its result is built from their results.

`wire.sample` has checked the request: its prompt fits the context, and its parameters are in range. There are no device
arrays here, and nothing depends on time or rank, so every process of a group treats a request alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.compute.sampler.constraints import Matcher
from tinkerflow.backend.compute.sampler.pages import PageTable
from tinkerflow.backend.compute.sampler.prompt_scores import PromptScores
from tinkerflow.backend.compute.sampler.sampling import UniformStream, normal_temperature, normal_top_p
from tinkerflow.backend.compute.sampler.snapshot_cache import AdapterSnapshot
from tinkerflow.backend.compute.sampler.stops import StopDetector
from tinkerflow.backend.spec.commands import (
    Candidates,
    Float32,
    Int16,
    Int32,
    NewTokens,
    SampledSequence,
    SampleRequest,
    SampleResult,
)
from tinkerflow.backend.spec.supports import Supports


@dataclass(frozen=True)
class PrefixScope:
    """The requests of one owner and one snapshot (None: the base model), which may share cached prompts.

    Sharing across owners would reveal other owners' prompts, through response times and reported cache hits.
    """

    owner: str
    snapshot: AdapterSnapshot | None


@dataclass
class BaseWeights:
    """The weights without a snapshot, for all requests. step: their optimizer steps; None: a base model."""

    step: int | None = None


@dataclass(eq=False)
class ActiveRequest:
    """A request in the sampler. Each of its samples is an `ActiveSequence`.

    snapshot: kept until the request is done, even if it is dropped meanwhile; None: the base model.
    `Scheduler.switch_snapshot` replaces it when its id passes to another snapshot. max_tokens: the limit of each
    sequence. base: the weights without a snapshot. done: finished sequences by index. recorded: the size of its
    samples' lists of tokens, experts and supports so far, in bytes. scores: the scores of the prompt, if the request
    wants any. cache_hit_tokens: tokens of the prompt that were cached when its prefill began; None before that.
    rotary_shift: how much a decoded token's rotary position exceeds its index, because of images.
    """

    request: SampleRequest
    snapshot: AdapterSnapshot | None
    max_tokens: int
    base: BaseWeights = field(default_factory=BaseWeights)
    done: dict[int, SampledSequence] = field(default_factory=dict)
    recorded: int = 0
    scores: PromptScores | None = None
    cache_hit_tokens: int | None = None
    rotary_shift: int = 0

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def step(self) -> int | None:
        """The optimizer steps of its weights; None: a base model."""
        return (self.snapshot or self.base).step

    @property
    def scope(self) -> PrefixScope:
        """The requests that may share the pages of its prompt."""
        return PrefixScope(self.request.owner, self.snapshot)

    def sampling_choice(self, vocab: int) -> tuple[float, int, float, float]:
        """How its tokens are drawn, in the order of `sampling.Choice`. vocab: the size of the model's vocabulary."""
        request = self.request
        top_k = min(request.top_k, vocab)
        return normal_temperature(request.temperature), top_k, normal_top_p(request.top_p), request.min_p

    @cached_property
    def prompt_tokens(self) -> Int32:
        """The distinct tokens of the prompt."""
        return np.unique(self.request.prompt_T)

    def image_key(self, start: int, end: int, pieces: Sequence[tuple[int, int]]) -> bytes:
        """The images that affect the keys and values at positions [start, end) of the prompt, for a digest.

        These are the images that begin at these positions. Pieces with images run a different program, so the digest
        also covers the list of pieces with images. pieces: (start, end) of the prefill pieces that compute these
        positions. Empty if there are no images before `end`.
        """
        with_images = [any(image.start < stop for image in self.request.images) for _, stop in pieces]
        if not any(with_images):
            return b""
        begun = [(at, digest) for at, digest in self._image_digests if start <= at < end]
        return repr((begun, with_images)).encode()

    @cached_property
    def _image_digests(self) -> list[tuple[int, str]]:
        def digest(pixels_HWC: npt.NDArray[np.uint8]) -> str:
            return hashlib.sha256(repr(pixels_HWC.shape).encode() + pixels_HWC.tobytes()).hexdigest()

        return [(image.start, digest(image.pixels_HWC)) for image in self.request.images]

    def result(self) -> SampleResult | None:
        """The request's result once all its sequences are done; None before."""
        if len(self.done) < self.request.num_samples:
            return None
        sequences = tuple(self.done[index] for index in range(self.request.num_samples))
        result = SampleResult(self.id, sequences, prompt_cache_hit_tokens=self.cache_hit_tokens or 0)
        return result if self.scores is None else self.scores.add_to(result)


@dataclass(eq=False)
class ActiveSequence:
    """Sample `index` of a request, with its tokens so far.

    top: k candidates at every token so far. routes, supports, weights: as in the result. table: the pages, while it
    decodes. prompt_pages: the prompt's pages, if pages of `table` are copies of them, until a chunk is decoded. Before
    that, the pages may contain NaN. unverified_from: the place in the table from which on no chunk was decoded, so that
    the pages may contain NaN; None after a chunk. preempted_at: the most tokens, with the prompt, at which the sequence
    had to leave its slot before its end; 0: never. matcher: the state in the request's constraint, if any. in_flight:
    tokens that were requested from the devices, but not read by the host. The sequence may end before them.
    """

    parent: ActiveRequest
    index: int
    stops: StopDetector
    uniforms: UniformStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Candidates] = field(default_factory=list)
    routes: list[Int16] = field(default_factory=list)
    supports: list[Supports] = field(default_factory=list)
    weights: list[tuple[int, int]] = field(default_factory=list)
    table: PageTable = field(default_factory=lambda: PageTable(0))
    prompt_pages: PageTable = field(default_factory=lambda: PageTable(0))
    unverified_from: int | None = None
    preempted_at: int = 0
    matcher: Matcher | None = None
    in_flight: int = 0

    @property
    def remaining(self) -> int:
        """How many tokens may still be requested from the devices."""
        return self.parent.max_tokens - len(self.tokens) - self.in_flight

    @property
    def cached(self) -> int:
        """How many of its tokens the cache contains after the dispatches so far: all but the last."""
        return len(self.parent.request.prompt_T) + len(self.tokens) + self.in_flight - 1

    @property
    def ended(self) -> bool:
        """Whether it has all its tokens."""
        return self.index in self.parent.done

    @property
    def needs_host(self) -> bool:
        """Whether the host must read its tokens before the devices decode more."""
        adjustments = self.parent.request.adjustments
        return self.matcher is not None or (adjustments is not None and adjustments.penalizes)

    @property
    def most_cached(self) -> int:
        """How many of its tokens the cache contains when it reaches its limit."""
        return len(self.parent.request.prompt_T) + self.parent.max_tokens - 1

    @property
    def last_token(self) -> int:
        """The input of its next decode step."""
        return self.tokens[-1] if self.tokens else int(self.parent.request.prompt_T[-1])

    def reset(self, *, again: bool) -> None:
        """Drop its pages, and forget dispatches that the host has not read.

        again: also forget its tokens, unless they come from other weights. Equal random numbers draw the same tokens
        again.
        """
        steps: set[int | None] = {step for _, step in self.weights}
        if again and (steps or {None}) == {self.parent.step}:
            self.parent.recorded -= bytes_of(*self.top, *self.routes, *self.supports)
            for part in (self.tokens, self.logprobs, self.top, self.routes, self.supports, self.weights):
                part.clear()
            self.stops, self.matcher = self.stops.fresh(), self.matcher.fresh() if self.matcher else None
        self.table, self.prompt_pages, self.unverified_from = PageTable(0), PageTable(0), None
        self.preempted_at, self.in_flight = 0, 0
        self.uniforms = UniformStream(self.parent.request.seed, self.index)
        self.uniforms.draw(len(self.tokens))

    def draw(self, count: int) -> Float32:
        """Its next `count` random numbers."""
        return self.uniforms.draw(count)

    def all_tokens(self) -> Int32:
        """The prompt and all tokens so far."""
        return np.concatenate([self.parent.request.prompt_T, np.asarray(self.tokens, np.int32)]).astype(np.int32)

    def append(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top: Candidates | None = None,
        routes_Nn: Int16 | None = None,
        supports: Supports | None = None,
    ) -> bool:
        """Append decoded tokens up to the end of the sequence. Returns whether it has ended.

        tokens, logprobs: one chunk's. top: the candidates at each token, if the request wants them. routes_Nn,
        supports: the experts and the support of each token, if they are wanted.
        """
        self.unverified_from = None
        if top is not None:
            self.top.append(top)
        if routes_Nn is not None:
            self.routes.append(routes_Nn)
        if supports is not None:
            self.supports.append(supports)
        if (step := self.parent.step) is not None and (not self.weights or self.weights[-1][1] != step):
            self.weights.append((len(self.tokens), step))
        left = self.parent.max_tokens - len(self.tokens)
        tokens, logprobs = tokens[:left], logprobs[:left]
        end = self.stops.end_of(tokens)
        self.tokens += tokens[:end]
        self.logprobs += logprobs[:end]
        if end is None and len(tokens) < left:
            return False
        self.parent.done[self.index] = SampledSequence(
            tokens_T=np.asarray(self.tokens, np.int32),
            logprobs_T=np.asarray(self.logprobs, np.float32),
            stop_reason="length" if end is None else "stop",
            top=self._candidates(),
            routes_Tn=np.concatenate(self.routes)[: len(self.tokens)] if self.routes else None,
            supports=Supports.joined(self.supports).part(0, len(self.tokens)) if self.supports else None,
            weights=tuple(self.weights),
        )
        return True

    def new_tokens(self, start: int, top: Candidates | None) -> NewTokens:
        """The tokens from `start` on, for a streaming request. top: the candidates there, possibly of more tokens."""
        done, length = self.parent.done.get(self.index), len(self.tokens) - start
        if top is not None:
            top = Candidates(top.tokens_Nk[:length], top.logprobs_Nk[:length])
        return NewTokens(
            self.parent.id,
            self.index,
            start,
            np.asarray(self.tokens[start:], np.int32),
            np.asarray(self.logprobs[start:], np.float32),
            top,
            None if done is None else done.stop_reason,
        )

    def _candidates(self) -> Candidates | None:
        if not self.top:
            return None
        length = len(self.tokens)
        return Candidates(
            np.concatenate([part.tokens_Nk for part in self.top])[:length],
            np.concatenate([part.logprobs_Nk for part in self.top])[:length],
        )


def bytes_of(*parts: Candidates | Int16 | Supports | None) -> int:
    """The size of all arrays."""
    return sum(
        array.nbytes
        for part in parts
        if part is not None
        for array in ([part] if isinstance(part, np.ndarray) else vars(part).values())
    )


SlotAssignment = list[tuple[int, ActiveSequence]]  # (slot, the sequence in it), ascending


class DecodeRow(Protocol):
    """A row of a decode dispatch: a sequence, or a token of its draft (`drafts.DraftRow`)."""

    @property
    def parent(self) -> ActiveRequest:
        """The row's request."""

    @property
    def table(self) -> PageTable:
        """The row's pages."""

    @property
    def tokens(self) -> list[int]:
        """The tokens of the row's sequence so far."""

    @property
    def last_token(self) -> int:
        """The row's input token."""

    @property
    def cached(self) -> int:
        """The position of the input token."""

    @property
    def in_flight(self) -> int:
        """Tokens that the host has not read."""

    @property
    def matcher(self) -> Matcher | None:
        """The state of the row's sequence in a constraint, if any."""

    def draw(self, count: int) -> Float32:
        """The row's next `count` random numbers."""


RowAssignment = Sequence[tuple[int, DecodeRow]]  # (slot, the row in it), ascending
