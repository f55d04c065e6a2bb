"""OpenAI's text completions (`/v1/completions`), with the fields that vLLM adds for token ids."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import orjson
from fastapi.responses import Response
from pydantic import Field

from tinkerflow.api.call import Authorized, Call, Router
from tinkerflow.api.endpoints.generation import (
    Generation,
    SamplePiece,
    Top,
    collected,
    generate,
    listed,
    merged,
    together,
    until_gone,
    written,
)
from tinkerflow.api.endpoints.openai import MAX_TOP, SamplingFields, check_choices, usage
from tinkerflow.api.endpoints.sse import EventStream, event
from tinkerflow.api.endpoints.targets import Target, resolve
from tinkerflow.api.errors import naming
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import OPEN_API
from tinkerflow.api.submit import parsed_prompt
from tinkerflow.api.text import Detokenizer, Offsets
from tinkerflow.backend.core.errors import UserError, broken
from tinkerflow.backend.spec.commands import SampleResult

router = Router(busy=6, at=OPEN_API)

Choice: TypeAlias = dict[str, Any]

_MOST_PROMPTED = 2**20  # characters and token ids of all prompts of a request, unless a single prompt may have more


class CompletionBody(SamplingFields):
    """A request. prompt: a text, token ids, or a list of either. max_tokens: 0 only with echo.

    logprobs: the number of most likely tokens to list at each token, with their logprobs. echo: include the prompt and
    its logprobs in the answer.
    """

    model: str
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    echo: bool = False


@router.post("/completions", openapi_extra=takes(CompletionBody))
async def completions(call: Authorized) -> Response:
    """Continue each of the prompts `n` times."""
    body = await parsed_prompt(call, CompletionBody)
    _check(body)
    wants_usage = body.wants_usage
    target = await resolve(call, body.model)
    prompts = await _tokens(target, body.prompt)
    check_choices(len(prompts), body.n)
    if 0 < (most := call.limits.sampling_requests) < len(prompts):  # waiting would not help
        raise UserError(f"prompt has {len(prompts)} prompts: must have at most {most} (max_sampling_requests)")
    async with AsyncExitStack() as stack:
        made = []
        for number, prompt in enumerate(prompts):
            with naming(_names(body.prompt, number)):
                made.append(await stack.enter_async_context(await _generate(call, target, body, prompt)))
        answer = _Answer(call, target, body, made)
        if not body.stream:
            results = await until_gone(call.request, together(made))
            content = await written(call, results, lambda: orjson.dumps(answer.whole(results)))
            return Response(content, media_type="application/json", headers=made[0].headers)
        await until_gone(call.request, made[0].begin())
        return EventStream(call.request, answer.events(stack.pop_all(), wants_usage), headers=made[0].headers)


def _names(prompt: str | list[Any], number: int) -> dict[str, str]:
    """The request's name of a prompt, for each of our names in errors."""
    one = isinstance(prompt, str) or isinstance(prompt[0], int)
    name = "prompt" if one else f"prompt[{number}]"
    return {"prompt.chunks[0].tokens": name, "prompt has": f"{name} has"}


def _check(body: CompletionBody) -> None:
    if body.max_tokens == 0 and not body.echo:
        raise broken("max_tokens", 0, "at least 1 without echo")
    if body.echo and body.stream:
        raise UserError("echo is true: must be false in a stream")


async def _tokens(target: Target, prompt: str | list[Any]) -> list[list[int]]:
    if isinstance(prompt, str):
        return [await target.encode(prompt, "prompt")]
    if not prompt:
        raise broken("prompt", prompt, "text, token ids, or a non-empty list of either")
    if isinstance(prompt[0], int):
        return [prompt]
    check_choices(len(prompt), 1)
    size, most = sum(map(len, prompt)), max(target.longest_text, _MOST_PROMPTED)
    if size > most:
        raise UserError(f"prompt has {size} characters and token ids in all its texts: must have at most {most}")
    return [await target.encode(one, f"prompt[{i}]") if isinstance(one, str) else one for i, one in enumerate(prompt)]


async def _generate(call: Call, target: Target, body: CompletionBody, prompt: Sequence[int]) -> Generation:
    most = None if body.max_tokens is None else max(body.max_tokens, 1)
    scored = body.echo and body.logprobs is not None
    return await generate(
        call,
        target,
        prompt,
        body.params(target, most),
        body.n,
        stream=body.stream,
        top_logprobs=body.logprobs or 0,
        prompt_logprobs=scored or body.max_tokens == 0,  # a scored prompt may fill the context
        top_prompt_logprobs=(body.logprobs or 0) if scored else 0,
    )


class _Answer:
    """The answer to one request, whole or in events. Its id is that of the first prompt's generation."""

    def __init__(self, call: Call, target: Target, body: CompletionBody, made: Sequence[Generation]) -> None:
        """made: the generations, one for each prompt."""
        self._body = body
        self._made = made
        self._tokenizer = target.tokenizer
        self._frame = {
            "id": made[0].id,
            "object": "text_completion",
            "created": int(call.services.clock.now().timestamp()),
            "model": target.name,
        }

    def whole(self, results: Sequence[SampleResult]) -> dict[str, Any]:
        """The answer, once all samples are done."""
        choices = [
            self._choice(number, piece, result) for number, result in enumerate(results) for piece in collected(result)
        ]
        return {**self._frame, "choices": choices, "usage": self._usage(results)}

    async def events(self, stack: AsyncExitStack, wants_usage: bool) -> AsyncIterator[bytes]:
        """The answer, piece by piece. stack: cancels unfinished samples. wants_usage: send a last event with usage."""
        async with stack:
            texts: dict[tuple[int, int], tuple[Detokenizer, Offsets]] = {}
            more = {"usage": None} if wants_usage else {}
            async for number, piece in merged(self._made):
                place = (number, piece.index)
                first = place not in texts
                text = texts.setdefault(place, self._text(number))
                choice = self._delta(number, piece, *text, first=first)
                yield event({**self._frame, "choices": [choice], **more})
            if wants_usage:
                results = [await one.result() for one in self._made]
                yield event({**self._frame, "choices": [], "usage": self._usage(results)})
            yield event(b"[DONE]")

    def _usage(self, results: Sequence[SampleResult]) -> dict[str, Any]:
        usage_of_all = usage([one.prompt_tokens for one in self._made], results)
        if self._body.max_tokens == 0:
            usage_of_all |= {"completion_tokens": 0, "total_tokens": usage_of_all["prompt_tokens"]}
        return usage_of_all

    def _text(self, number: int, start: int = 0) -> tuple[Detokenizer, Offsets]:
        """The text of a choice's tokens. number: its prompt's number. start: the position of its first token."""
        body, prompt = self._body, self._made[number].prompt_tokens
        special = not body.skip_special_tokens
        text = Detokenizer(self._tokenizer, body.stops, special=special, prompt=prompt)
        return text, Offsets(self._tokenizer, start, special=special, continues=text.continues)

    def _choice(self, number: int, piece: SamplePiece, result: SampleResult) -> Choice:
        body, prompt = self._body, list(self._made[number].prompt_tokens)
        if body.max_tokens == 0:
            piece = SamplePiece(piece.index, [], [], None if piece.top is None else [], "length")
        special = not body.skip_special_tokens
        before = self._tokenizer.decode(prompt, special=special) if body.echo else ""
        choice = self._delta(number, piece, *self._text(number, len(before)), first=True)
        if body.echo:
            choice["text"] = before + choice["text"]
            if body.logprobs is not None:
                assert result.prompt_logprobs_T is not None
                top = None if result.top is None or piece.top is None else [*listed(result.top), *piece.top]
                logprobs = [*result.prompt_logprobs_T.tolist(), *piece.logprobs]
                offsets = [*map(Offsets(self._tokenizer, special=special).of, prompt)]
                offsets += choice["logprobs"]["text_offset"]
                choice["logprobs"] = self._logprobs([*prompt, *piece.tokens], logprobs, top, offsets)
        return choice

    def _delta(self, number: int, piece: SamplePiece, text: Detokenizer, offsets: Offsets, *, first: bool) -> Choice:
        """A part of a choice.

        number: the prompt's number. piece: the part's tokens. text, offsets: of the whole choice. first: whether this
        is the choice's first part.
        """
        body, made = self._body, self._made[number]
        new = text.feed(piece.tokens) + (text.finish() if piece.stop_reason else "")
        choice: Choice = {
            "index": number * body.n + piece.index,
            "id": made.sequence_id(piece.index),
            "text": new,
            "logprobs": None,
            "finish_reason": piece.stop_reason,
        }
        if piece.stop_reason:
            choice["stop_reason"] = text.stopped
        if body.logprobs is not None:
            places = [*map(offsets.of, piece.tokens)]
            choice["logprobs"] = self._logprobs(piece.tokens, piece.logprobs, piece.top, places)
        if body.return_token_ids:
            choice["token_ids"] = piece.tokens
            if first:
                choice["prompt_token_ids"] = list(made.prompt_tokens)
        return choice

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: Top | None, offsets: Sequence[int]
    ) -> Choice:
        """The logprobs of these tokens in OpenAI's form. offsets: the tokens' positions in the text."""
        names = [self._named(token) for token in tokens]
        values = [None if math.isnan(value) else value for value in logprobs]
        tops: list[dict[str, float] | None] | None = None
        if top is not None:
            tops = [
                None if value is None else self._top(row, token, value)
                for row, token, value in zip(top, tokens, values, strict=True)
            ]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": list(offsets)}

    def _top(self, row: Sequence[tuple[int, float]], token: int, logprob: float) -> dict[str, float]:
        """The logprobs of the most likely tokens and of the text's own token."""
        found: dict[str, float] = {}
        for one, value in (*row, (token, logprob)):
            found.setdefault(self._named(one), value)
        return found

    def _named(self, token: int) -> str:
        return f"token_id:{token}" if self._body.return_tokens_as_token_ids else self._tokenizer.token_text(token)
