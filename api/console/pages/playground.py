"""`/playground`: a chat with base models, checkpoints and champions, two side by side, with each token's probability.

`/playground?model=NAME&other=NAME`; the SDK links to `?mode=checkpoint&checkpoint=tinker://…`. An answer is sent as
server-sent events, one for each piece of text: `{text, tokens: [{text, p, top: [[text, p], …]}]}`, and a last one
with `{id, count, stop}`. It is a sample like any other: limits, fair queueing and usage apply.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import orjson
from fastapi.responses import Response

from tinkerflow.api.chat.conversation import Chat, prompt_of
from tinkerflow.api.console.visit import Visiting, page_router
from tinkerflow.api.endpoints.generation import Generation, SamplePiece, generate, until_gone
from tinkerflow.api.endpoints.sse import EventStream, event
from tinkerflow.api.endpoints.targets import Target, list_models, resolve
from tinkerflow.api.text import Detokenizer, Tokenizer
from tinkerflow.backend.catalog.model_card import public_name
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal.base_models import BaseModelView

TOP = 5  # most likely alternatives shown for each token
COMPILES = (
    "The first answer of each kind waits until its programs are compiled: about a minute, or longer for large models."
)
_MOST_MODELS = 200
_ROLES = ("system", "user", "assistant")
router = page_router()


@router.get("/playground")
async def playground_page(visit: Visiting, model: str = "", other: str = "", checkpoint: str = "") -> Response:
    """The page. It samples nothing yet."""
    models = await list_models(visit.call)
    known = list(dict.fromkeys(public_name(one.name) for one in models[:_MOST_MODELS]))
    chosen = checkpoint or model or next(iter(known), "")
    bases = await asyncio.to_thread(visit.call.journal.base_models.all)
    return visit.page("playground.html", models=known, chosen=[chosen, other], top=TOP, waits=_waits(bases))


def _waits(bases: Sequence[BaseModelView]) -> str:
    """The reason why a first answer waits, with the progress of the warm-ups."""
    statuses = [(one.compile_status.ready, one.compile_status.planned) for one in bases if one.compile_status]
    ready, planned = map(sum, zip((0, 0), *statuses, strict=True))
    progress = f" {ready} of {planned} programs are ready." if ready < planned else ""
    return f"{COMPILES}{progress}"


@router.post("/playground/answer")
async def answer(visit: Visiting) -> Response:
    """One answer to the form's `messages` (JSON) in mode `chat`, or a continuation of its `prompt` in mode `text`.

    The form also contains the fields model, max_tokens and temperature.
    """
    fields = visit.fields
    params = {"max_tokens": _number(fields, "max_tokens", int), "temperature": _number(fields, "temperature", float)}
    target = await resolve(visit.call, fields.get("model", "").strip())
    prompt, ends = await _prompt(target, fields)
    if ends:
        params["stop_token_ids"] = [*target.card.eos_token_ids, *ends]
    async with AsyncExitStack() as stack:
        made = await generate(visit.call, target, prompt, params, stream=True, top_logprobs=TOP)
        await stack.enter_async_context(made)
        await until_gone(visit.call.request, made.begin())
        return EventStream(visit.call.request, _events(stack.pop_all(), made, target.tokenizer))


async def _prompt(target: Target, fields: Any) -> tuple[list[int], tuple[int, ...]]:
    """The prompt's tokens, and the tokens that end the answer in addition to those of the base model."""
    mode = fields.get("mode", "")
    if mode == "text":
        return await target.encode(fields.get("prompt", ""), "prompt"), ()
    if mode != "chat":
        raise UserError(f"mode is {mode!r}: must be chat or text")
    made = await prompt_of(target, Chat(_messages(fields.get("messages", ""))))
    return made.tokens, made.ends


def _messages(text: str) -> list[dict[str, str]]:
    try:
        given = orjson.loads(text)
        found = [{"role": str(one["role"]), "content": str(one["content"])} for one in given]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError("messages must be a JSON list of objects with role and content") from error
    if not found or any(one["role"] not in _ROLES for one in found):
        raise UserError(f"messages: must not be empty, and each role one of {', '.join(_ROLES)}")
    return found


def _number(fields: Any, name: str, kind: type[int] | type[float]) -> Any:
    given = fields.get(name, "")
    try:
        return kind(given)
    except ValueError:
        raise UserError(f"{name} is {given!r}: must be a number") from None


async def _events(stack: AsyncExitStack, made: Generation, tokenizer: Tokenizer) -> AsyncIterator[bytes]:
    """The answer's text with its tokens, piece by piece. stack: cancels the request if the client disconnects."""
    async with stack:
        text, waiting, count, stop = Detokenizer(tokenizer), [], 0, None
        async for piece in made:
            stop = piece.stop_reason or stop
            for n in range(len(piece.tokens)):
                waiting.append(_token(piece, n, tokenizer))
                count += 1
                if bit := text.feed([piece.tokens[n]]):
                    yield event({"text": bit, "tokens": waiting})
                    waiting = []
        yield event({"text": text.finish(), "tokens": waiting})
        yield event({"id": made.id, "count": count, "stop": stop})


def _token(piece: SamplePiece, n: int, tokenizer: Tokenizer) -> dict[str, Any]:
    top = piece.top[n] if piece.top is not None else []
    return {
        "text": tokenizer.token_text(piece.tokens[n]),
        "p": math.exp(piece.logprobs[n]),
        "top": [[tokenizer.token_text(token), math.exp(logprob)] for token, logprob in top],
    }
