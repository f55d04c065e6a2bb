"""A sample request on the host: it is split into sequences, and its result is put together from theirs.

`wire.sample` has checked it: its prompt fits the context, and its parameters are in range. Here are no device arrays,
and nothing depends on time or rank: every process of a group does the same with a request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.compute.sampler.constraints import Matcher
from tinkerflow.backend.compute.sampler.pages import PageTable
from tinkerflow.backend.compute.sampler.prompt_scores import PromptScores
from tinkerflow.backend.compute.sampler.sampling import UniformStream, normal_temperature, normal_top_p
from tinkerflow.backend.compute.sampler.snapshot_cache import AdapterSnapshot
from tinkerflow.backend.compute.sampler.stops import StopDetector
from tinkerflow.backend.spec.commands import Candidates, Int32, NewTokens, SampledSequence, SampleRequest, SampleResult


@dataclass(frozen=True)
class PrefixScope:
    """Requests that may share cached prompts: of one owner and of one snapshot (None: the base model).

    Across owners, the time an answer takes and the cache hit it reports would tell what other owners asked.
    """

    owner: str
    snapshot: AdapterSnapshot | None


@dataclass(eq=False)
class ParentRequest:
    """An admitted request, of which each sample is an `ActiveSequence`.

    snapshot: held until the request is done, even if it is dropped meanwhile; None: the base model.
    `Scheduler.switch_snapshot` replaces it when its id passes to another snapshot. limit: tokens that each sequence may
    have. done: finished sequences by index. scores: what is wanted of the prompt. known: how many tokens of the prompt
    were cached when its prefill began; None before. shift: how much later decoded tokens turn than they stand, because
    of images.
    """

    request: SampleRequest
    snapshot: AdapterSnapshot | None
    limit: int
    done: dict[int, SampledSequence] = field(default_factory=dict)
    scores: PromptScores | None = None
    known: int | None = None
    shift: int = 0

    @property
    def scope(self) -> PrefixScope:
        """The requests with which it may share what is computed of its prompt."""
        return PrefixScope(self.request.owner, self.snapshot)

    def choice(self, vocab: int) -> tuple[float, int, float, float]:
        """How its tokens are drawn, in the order of `sampling.Choice`. vocab: of the model."""
        asked = self.request
        return normal_temperature(asked.temperature), min(asked.top_k, vocab), normal_top_p(asked.top_p), asked.min_p

    @cached_property
    def prompt_tokens(self) -> Int32:
        """The tokens of the prompt, each once."""
        return np.unique(self.request.prompt_T)

    def marks(self, start: int, end: int, pieces: Sequence[tuple[int, int]]) -> bytes:
        """What decides the numbers of the prompt's positions [start, end) beside tokens and what comes before.

        That is each image that begins there, and which of the pieces that compute them take images: these go through
        another program. pieces: as (start, end). Nothing where there is no image up to there.
        """
        taking = [any(image.start < stop for image in self.request.images) for _, stop in pieces]
        if not any(taking):
            return b""
        begun = [(at, digest) for at, digest in self._image_digests if start <= at < end]
        return repr((begun, taking)).encode()

    @cached_property
    def _image_digests(self) -> list[tuple[int, str]]:
        def digest(pixels_HWC: npt.NDArray[np.uint8]) -> str:
            return hashlib.sha256(repr(pixels_HWC.shape).encode() + pixels_HWC.tobytes()).hexdigest()

        return [(image.start, digest(image.pixels_HWC)) for image in self.request.images]

    def result(self) -> SampleResult | None:
        """The request's result when all of its sequences are done."""
        if len(self.done) < self.request.num_samples:
            return None
        sequences = tuple(self.done[index] for index in range(self.request.num_samples))
        result = SampleResult(self.request.request_id, sequences, prompt_cache_hit_tokens=self.known or 0)
        return result if self.scores is None else self.scores.add_to(result)


@dataclass(eq=False)
class ActiveSequence:
    """Sample `index` of a request, with its tokens so far.

    top: candidates at every token so far, k or more a token. table: its pages, while it decodes. source: the
    prompt's pages, if pages of `table` are copies of them, until a chunk is decoded: before, nobody knows whether they
    are finite. unproven: from this place in its table on, no chunk was decoded from its pages; None after a chunk.
    preempted: it had to leave its slot before its end. matcher: where it stands in the request's constraint, if any.
    ahead: tokens of it that the devices were asked for and that nobody has read yet; it may have ended before them.
    """

    parent: ParentRequest
    index: int
    stops: StopDetector
    uniforms: UniformStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Candidates] = field(default_factory=list)
    table: PageTable = field(default_factory=lambda: PageTable(0))
    source: PageTable = field(default_factory=lambda: PageTable(0))
    unproven: int | None = None
    preempted: bool = False
    matcher: Matcher | None = None
    ahead: int = 0

    @property
    def remaining(self) -> int:
        """How many tokens the devices may still be asked for."""
        return self.parent.limit - len(self.tokens) - self.ahead

    @property
    def cached(self) -> int:
        """How many of its tokens the cache holds after what the devices were asked for: all but the last."""
        return len(self.parent.request.prompt_T) + len(self.tokens) + self.ahead - 1

    @property
    def ended(self) -> bool:
        """Whether it has all of its tokens."""
        return self.index in self.parent.done

    @property
    def needs_host(self) -> bool:
        """Whether the host must know its tokens before the devices are asked for more."""
        asked = self.parent.request.adjustments
        return self.matcher is not None or (asked is not None and asked.penalises)

    @property
    def most_cached(self) -> int:
        """How many of its tokens the cache holds at the most, when it reaches its limit."""
        return len(self.parent.request.prompt_T) + self.parent.limit - 1

    @property
    def last_token(self) -> int:
        """The token that the next step is given."""
        return self.tokens[-1] if self.tokens else int(self.parent.request.prompt_T[-1])

    def restart(self) -> None:
        """It has no pages, and the devices are asked again for what nobody has read."""
        self.table, self.source, self.unproven = PageTable(0), PageTable(0), None
        self.preempted, self.ahead = False, 0
        self.uniforms = UniformStream(self.parent.request.seed, self.index)
        self.uniforms.take(len(self.tokens))

    def prefix(self) -> Int32:
        """Every token so far, prompt first."""
        return np.concatenate([self.parent.request.prompt_T, np.asarray(self.tokens, np.int32)]).astype(np.int32)

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], top: Candidates | None = None) -> bool:
        """Add tokens until the sequence ends; True when it has ended. Tokens after its end are ignored.

        tokens, logprobs: one chunk's. top: the candidates at each of the tokens, when the request wants some.
        """
        self.unproven = None
        if top is not None:
            self.top.append(top)
        left = self.parent.limit - len(self.tokens)
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
        )
        return True

    def since(self, start: int, top: Candidates | None) -> NewTokens:
        """The tokens from `start` on, for a request that streams. top: the candidates at these tokens, maybe more."""
        ended, length = self.parent.done.get(self.index), len(self.tokens) - start
        if top is not None:
            k = self.parent.request.topk_sample
            top = Candidates(top.tokens_Nk[:length, :k], top.logprobs_Nk[:length, :k])
        return NewTokens(
            self.parent.request.request_id,
            self.index,
            start,
            np.asarray(self.tokens[start:], np.int32),
            np.asarray(self.logprobs[start:], np.float32),
            top,
            None if ended is None else ended.stop_reason,
        )

    def _candidates(self) -> Candidates | None:
        if not self.top:
            return None
        length, k = len(self.tokens), self.parent.request.topk_sample
        return Candidates(
            np.concatenate([part.tokens_Nk for part in self.top])[:length, :k],
            np.concatenate([part.logprobs_Nk for part in self.top])[:length, :k],
        )


SlotAssignment = list[tuple[int, ActiveSequence]]  # (slot, the sequence in it), ascending
