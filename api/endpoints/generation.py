"""Generation for the OpenAI- and Anthropic-compatible endpoints and for the playground.

    target = await resolve(call, "champion/helpdesk")                        # targets.py
    generation = await generate(call, target, tokens, {"max_tokens": 100}, stream=True)
    async for piece in generation: ...                                       # or: await generation.result()

A generation goes through the journal like a sample of the SDK, so keys, projects, limits, fair queueing, usage and
audit apply. When the iteration or `result` is cancelled or closed, the request is cancelled too, and its slots in the
decode batch are freed within a chunk.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, TypeVar

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect

from tinkerflow.api.call import Call
from tinkerflow.api.endpoints.images import PromptImage, chunks_of, fields_of
from tinkerflow.api.endpoints.sse import left
from tinkerflow.api.endpoints.targets import Target
from tinkerflow.api.errors import naming, renamed
from tinkerflow.api.submit import submit_sample
from tinkerflow.backend.catalog.model_card import image_processor
from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.core.retry import retry
from tinkerflow.backend.journal import AWAY, Result
from tinkerflow.backend.journal.streams import Listener, stream_name
from tinkerflow.backend.journal.waiter import Waiter
from tinkerflow.backend.spec.commands import Candidates, NewTokens, Priority, SampledSequence, SampleResult
from tinkerflow.backend.wire import SampleBody, decode_sample, sample_request

log = logging.getLogger(__name__)

T = TypeVar("T")
StopReason = Literal["stop", "length"]
Top = list[list[tuple[int, float]]]
_SEED_BITS = 63
_PAUSES = (0.1, 0.2, 0.5, *[1.0] * 120)  # seconds between attempts to read a result while the database is away
_SHORT = 1000  # tokens of an answer, listed ones included, that is written on the event loop
_LONGEST = 256  # tokens of a piece, once all tokens have arrived
_NAMES = {"sampling_params.": ""}  # requests of these endpoints have the same fields at their top level
_giving_up: set[asyncio.Task[None]] = set()  # keeps references to running tasks


@dataclass(frozen=True)
class SamplePiece:
    """New tokens of one of the samples.

    index: the sample's number. logprobs: the logprobs of `tokens`, natural logarithms of the softmax without
    temperature. top: for each token, the most likely tokens with their logprobs, best first; None unless requested.
    stop_reason: set only in a sample's last piece, which may contain no tokens. `stop`: a stop token or stop string,
    which is among the tokens.
    """

    index: int
    tokens: list[int]
    logprobs: list[float]
    top: Top | None = None
    stop_reason: StopReason | None = None


class Generation:
    """An accepted sample. id: the id of its request. The journal stores tokens, logprobs and weights under it."""

    def __init__(
        self,
        call: Call,
        target: Target,
        request_id: str,
        session_id: str,
        prompt_tokens: Sequence[int],
        listener: Listener | None,
        names: Mapping[str, str],
    ) -> None:
        """Use `generate`.

        call, target, prompt_tokens: the request's. request_id, session_id: the ids in the journal. listener: receives
        new tokens; None if they are not streamed. names: the client's names of our fields, for errors.
        """
        self.id = request_id
        self.target = target
        self.prompt_tokens = prompt_tokens
        self._call = call
        self._session_id = session_id
        self._listener = listener
        self._names = names
        self._result: SampleResult | None = None
        self._beat_at = call.services.clock.monotonic()

    async def __aenter__(self) -> Self:
        """Return itself. The request is cancelled when the block ends, unless it was answered."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the request if its result was not read yet."""
        self.cancel()

    @property
    def headers(self) -> dict[str, str]:
        """The request's id in the headers that OpenAI's and Anthropic's clients read."""
        return {"x-request-id": self.id, "request-id": self.id}

    def sequence_id(self, index: int) -> str:
        """The id of one sample, equal to `sequence_id` of the SDK. Feedback refers to it."""
        return f"{self.id}-{index}"

    async def begin(self) -> None:
        """Wait for the first tokens. Raises the errors of `result`. Few requests fail after their first tokens."""
        if self._listener is None:
            await self.result()
            return
        try:
            with self._call.services.subscriptions.request(self.id, self._listener):
                if not (answered := await self._look() is not None):
                    await self._woken(self._listener)
                    answered = self._listener.answered
        except asyncio.CancelledError:
            self.cancel()
            raise
        if answered:
            await self.result()

    async def result(self) -> SampleResult:
        """Wait for all samples. UserError, ServerError: the request failed."""
        if self._result is None:
            try:
                self._result = await self._wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._result

    async def __aiter__(self) -> AsyncIterator[SamplePiece]:
        """The pieces of all samples in the order in which they arrive. Raises the errors of `result`."""
        known: Counter[int] = Counter()
        ended: set[int] = set()
        try:
            async for piece in self._streamed():
                known[piece.index] += len(piece.tokens)
                if piece.stop_reason is not None:
                    ended.add(piece.index)
                yield piece
            result = await self.result()
            for index, sequence in enumerate(result.sequences):
                for piece in () if index in ended else _parts(_rest(index, sequence, known[index])):
                    yield piece
                    await asyncio.sleep(0)  # other requests go on meanwhile
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the request, without waiting, if its result was not read yet. Sampling stops within one chunk."""
        if self._result is None:
            task = asyncio.create_task(self._cancel(), name=f"cancel {self.id}")
            _giving_up.add(task)
            task.add_done_callback(_giving_up.discard)

    async def _cancel(self) -> None:
        cancel = partial(asyncio.to_thread, self._call.journal.requests.cancel, self.id, self._call.owner)
        await retry(cancel, on=AWAY, what=f"request {self.id} cannot be cancelled", log=log)

    async def _wait(self) -> SampleResult:
        with self._call.services.subscriptions.request(self.id) as answer:
            while (found := await self._look()) is None:
                await self._woken(answer)
        return _read(found, self._names)

    async def _streamed(self) -> AsyncIterator[SamplePiece]:
        """The pieces that arrive before the result."""
        listener = self._listener
        if listener is None:
            return
        with self._call.services.subscriptions.request(self.id, listener):
            if await self._look() is not None:
                return
            while not listener.answered:
                await self._woken(listener)
                for new in listener.take():
                    yield _piece(new)

    async def _look(self) -> Result | None:
        """The result, if there is one. Raises one of AWAY if the database stays away for two minutes."""
        look = partial(asyncio.to_thread, self._call.journal.results.get, self.id, self._call.owner)
        return await retry(look, on=AWAY, pauses=_PAUSES, what="the journal cannot be read", log=log)

    async def _woken(self, waiter: Waiter) -> None:
        """Wait until the waiter is woken, for any length of time, and keep the session alive meanwhile."""
        services, woken = self._call.services, False
        while not woken:
            woken = await services.holds.hold(waiter.wait(services.samplers.beat_seconds))
            if not woken and services.holds.released:
                raise ServerError("the service is stopping: send the request again")
            now = services.clock.monotonic()
            if not woken or now - self._beat_at >= services.samplers.beat_seconds:
                self._beat_at = now
                try:
                    await services.samplers.beat(self._session_id)
                except AWAY as error:  # no session expires meanwhile, and a later heartbeat is in time
                    log.warning("no heartbeat for session %s: %s", self._session_id, error)


async def generate(
    call: Call,
    target: Target,
    prompt_tokens: Sequence[int],
    params: Mapping[str, Any],
    num_samples: int = 1,
    *,
    stream: bool = False,
    top_logprobs: int = 0,
    prompt_logprobs: bool = False,
    top_prompt_logprobs: int = 0,
    messages: Sequence[Mapping[str, Any]] = (),
    prefill: str = "",
    images: Sequence[PromptImage] = (),
    priority: Priority = "interactive",
) -> Generation:
    """Submit a sample, and return without waiting for it.

    call: the client's call. target: the model to sample. prompt_tokens: at least one. params: sampling_params of the
    tinker protocol (wire/requests.py), such as max_tokens, temperature, seed, stop and stop_token_ids. num_samples: the
    number of samples. stream: iteration yields tokens as they are decoded, otherwise when all are done. top_logprobs:
    the number of most likely tokens to list for each sampled token. prompt_logprobs, top_prompt_logprobs: the same for
    the prompt, in the result. messages, prefill: the conversation of the prompt, and the beginning of the answer that
    the prompt ends with; both are stored for people who rate the answer. images: the prompt's images, with placeholders
    among the tokens. priority: a project's interactive samples precede its batch samples.
    UserError: names the field, its value and the rule. TooManyError: too many requests of the project are waiting.
    """
    values: dict[str, Any] = {
        "prompt": {"chunks": chunks_of(prompt_tokens, images)},
        "sampling_params": dict(params),
        "num_samples": num_samples,
        "topk_sample_logprobs": top_logprobs,
        "prompt_logprobs": prompt_logprobs,
        "topk_prompt_logprobs": top_prompt_logprobs,
        "stream": stream,
        "priority": priority,
    }
    if messages:
        values["messages"] = [{"role": one["role"], "content": str(one.get("content") or "")} for one in messages]
        values["prefill"] = prefill
    if values["sampling_params"].get("seed") is None:
        values["sampling_params"]["seed"] = secrets.randbits(_SEED_BITS)
    names = _NAMES | fields_of(images)
    with naming(names):
        await call.slowly(_check, target, values)
    session_id, sampler, seq_id = await call.services.samplers.address(
        call.identity, target.card.name, target.checkpoint, call.limits
    )
    values |= {"sampling_session_id": sampler, "seq_id": seq_id}
    listener = await call.services.subscriptions.tokens.listen(stream_name(sampler, seq_id)) if stream else None
    request_id = await call.on_body(call.body_size, lambda: submit_sample(call, orjson.dumps(values), values))
    call.release_body()  # the journal holds it
    return Generation(call, target, request_id, session_id, prompt_tokens, listener, names)


async def together(made: Sequence[Generation]) -> list[SampleResult]:
    """The results of all generations. Raises the first error; other generations continue until they are cancelled."""
    return list(await asyncio.gather(*(one.result() for one in made)))


async def merged(made: Sequence[Generation]) -> AsyncIterator[tuple[int, SamplePiece]]:
    """The pieces of all generations as they arrive, each with the number of its generation."""
    pieces = [aiter(one) for one in made]
    waiting = {asyncio.ensure_future(anext(one)): number for number, one in enumerate(pieces)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                try:
                    piece = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(pieces[number]))] = number
                yield number, piece
    finally:
        for task in waiting:
            task.cancel()


async def written(call: Call, results: Sequence[SampleResult], write: Callable[[], bytes]) -> bytes:
    """The bytes that `write` returns, an answer with these results. A thread writes a long one, which takes seconds."""
    return write() if sum(map(_size, results)) <= _SHORT else await call.slowly(write)


def _size(result: SampleResult) -> int:
    """The number of tokens with logprobs, listed ones included."""
    arrays = [result.prompt_logprobs_T, *(one.tokens_T for one in result.sequences)]
    arrays += [top.tokens_Nk for top in (result.top, *(one.top for one in result.sequences)) if top is not None]
    return sum(array.size for array in arrays if array is not None)


def collected(result: SampleResult) -> list[SamplePiece]:
    """A result as one piece for each sample."""
    return [_rest(index, sequence, 0) for index, sequence in enumerate(result.sequences)]


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`. If the client disconnects first, `work` is cancelled and ClientDisconnect raised.

    The request's body must have been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise ClientDisconnect
    finally:
        leaving.cancel()
        working.cancel()


def _check(target: Target, values: dict[str, Any]) -> None:
    """Raise the engine's errors for invalid content before the request is stored."""
    card = target.card
    sample_request(
        SampleBody.from_values(values),
        request_id="",
        owner="",
        vocab_size=card.vocab_size,
        max_context=card.max_context,
        eos=card.eos_token_ids,
        context_rule=card.context_rule,
        processor=lambda: image_processor(card.path),
        blank=True,
    )


def _read(found: Result, names: Mapping[str, str]) -> SampleResult:
    if found.error is not None:
        raise (UserError if found.category == "user" else ServerError)(renamed(found.error, names))
    assert found.result is not None, "the result was requested without a size limit"
    return decode_sample(found.request_id, found.result)


def _piece(new: NewTokens) -> SamplePiece:
    top = None if new.top is None else listed(new.top)
    return SamplePiece(new.index, new.tokens_T.tolist(), new.logprobs_T.tolist(), top, new.stop_reason)


def _rest(index: int, sequence: SampledSequence, known: int) -> SamplePiece:
    """The part of a finished sample after its first `known` tokens."""
    return SamplePiece(
        index,
        sequence.tokens_T[known:].tolist(),
        sequence.logprobs_T[known:].tolist(),
        None if sequence.top is None else listed(sequence.top, known),
        sequence.stop_reason,
    )


def _parts(piece: SamplePiece) -> Iterator[SamplePiece]:
    """The piece in parts of at most _LONGEST tokens. The last part has the stop reason."""
    for start in range(0, max(len(piece.tokens), 1), _LONGEST):
        end = start + _LONGEST
        yield SamplePiece(
            piece.index,
            piece.tokens[start:end],
            piece.logprobs[start:end],
            None if piece.top is None else piece.top[start:end],
            piece.stop_reason if end >= len(piece.tokens) else None,
        )


def listed(found: Candidates, first: int = 0) -> Top:
    """Lists of tokens with their logprobs, from position `first` on."""
    rows = zip(found.tokens_Nk[first:].tolist(), found.logprobs_Nk[first:].tolist(), strict=True)
    return [list(zip(tokens, logprobs, strict=True)) for tokens, logprobs in rows]
