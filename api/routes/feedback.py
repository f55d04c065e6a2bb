"""Feedback on answers (`/v1/feedback`), which the pipelines' data source `journal://` reads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import orjson
from fastapi import Query
from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError

from tinkerflow.api.call import Authorized, Call, PageLimit, Router
from tinkerflow.api.errors import naming
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import OPEN_API, Strict, Wire
from tinkerflow.api.submit import base_model_card
from tinkerflow.api.text import Detokenizer, Tokenizer
from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.journal.feedback import NewFeedback
from tinkerflow.backend.journal.samples import WholeSample
from tinkerflow.backend.wire import decode_sample

router = Router(busy=3, at=OPEN_API)

_LONGEST = 2**20  # characters of a better answer
_MESSAGES = TypeAdapter(list[dict[str, str]])


class Feedback(Strict):
    """A rating of an answer. id: the id of the answer, or of one of its choices.

    reward: any number; higher is better. label: good or bad. text: a better answer. At least one of these is required.
    """

    id: str
    reward: float | None = Field(None, allow_inf_nan=False)
    label: Literal["good", "bad"] | None = None
    text: str | None = Field(None, min_length=1, max_length=_LONGEST)


class FeedbackKept(Wire):
    """id: the feedback's id. sample_id: the rated sample."""

    id: int
    sample_id: str


class FeedbackShown(Wire):
    """Feedback with the rated answer. prompt: the messages, or the text. answer: the sample's text."""

    id: int
    at: datetime
    sample_id: str
    reward: float | None
    label: str | None
    text: str | None
    model: str
    prompt: list[dict[str, str]] | str
    answer: str


class FeedbackPage(Wire):
    """Feedback, oldest first."""

    data: list[FeedbackShown]


@router.post("/feedback", openapi_extra=takes(Feedback))
async def give_feedback(call: Authorized) -> FeedbackKept:
    """Store a rating of an answer that was sampled in the caller's project, together with the answer."""
    body = await call.parsed(Feedback, 8 * _LONGEST)
    if body.reward is None and body.label is None and body.text is None:
        raise UserError("reward, label and text are all absent: at least one must be given")
    await asyncio.to_thread(call.journal.feedback.check, call.owner, call.limits)  # check this before the work
    request_id, index = _parts(body.id)
    view = await asyncio.to_thread(_sample, call, request_id)
    card = await asyncio.to_thread(base_model_card, call.journal, view.base_model)
    tokenizer = await call.services.tokenizers.load(card)
    new = await call.slowly(_new, call, body, view, index, tokenizer)
    kept = await asyncio.to_thread(call.journal.feedback.add, new, call.limits)
    return FeedbackKept(id=kept, sample_id=new.sample_id)


@router.get("/feedback")
async def list_feedback(
    call: Authorized,
    since: AwareDatetime | None = None,
    after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
    limit: PageLimit = 100,
) -> FeedbackPage:
    """The project's feedback, oldest first. since: the earliest time. after: the id of a page's last feedback.

    A page of long rows contains fewer than `limit`; an empty page is the end.
    """
    found = await asyncio.to_thread(call.journal.feedback.page, call.owner, since=since, after=after, limit=limit)
    return FeedbackPage(data=[FeedbackShown.of(one, model=one.model_path or one.base_model) for one in found])


def _parts(answer_id: str) -> tuple[str, int]:
    """The request and the number of the sample that an id refers to; without a number, the first sample."""
    head, _, number = answer_id.rpartition("-")
    if head.startswith("req-") and number.isascii() and number.isdecimal() and len(number) < 5:
        return head, int(number)
    return answer_id, 0


def _sample(call: Call, request_id: str) -> WholeSample:
    with naming({"request": "id"}):
        view = call.journal.samples.whole(request_id, call.owner)
    if view.error is not None or not view.result:
        raise UserError(f"id {request_id!r} has no answer to rate: the request failed, is waiting, or was dropped")
    return view


def _new(call: Call, body: Feedback, view: WholeSample, index: int, tokenizer: Tokenizer) -> NewFeedback:
    asked: dict[str, Any] = orjson.loads(view.payload)
    sequences = decode_sample(view.id, view.result or b"").sequences
    if index >= len(sequences):
        raise NotFoundError(f"id {body.id!r} does not exist: the request has {len(sequences)} samples")
    sampled = sequences[index]
    begun: Sequence[int] = ()  # the tokens that the answer's text continues
    prompt: list[dict[str, str]] | str
    try:
        prompt = _MESSAGES.validate_python(asked.get("messages"))
    except ValidationError:  # there are no messages, or another client sent an unknown field
        begun = [token for chunk in asked["prompt"]["chunks"] for token in chunk.get("tokens", ())]
        prompt = tokenizer.decode(begun)
    # The answer as its client saw it: with the beginning that the client gave, and without the stop string.
    read = Detokenizer(tokenizer, _stops(asked), prompt=begun)
    answer = str(asked.get("prefill") or "") + read.feed(sampled.tokens_T.tolist()) + read.finish()
    return NewFeedback(
        owner=call.owner,
        key_id=call.key_id,
        sample_id=f"{view.id}-{index}",
        reward=body.reward,
        label=body.label,
        text=body.text,
        base_model=view.base_model,
        model_path=view.model_path,
        prompt=prompt,
        answer=answer.replace("\0", "\N{REPLACEMENT CHARACTER}"),  # databases cannot store NUL
        tokens=sampled.tokens_T.tobytes(),
        logprobs=sampled.logprobs_T.tobytes(),
    )


def _stops(asked: Mapping[str, Any]) -> list[str]:
    """The stop strings of an answered sample request."""
    stop = (asked.get("sampling_params") or {}).get("stop") or []
    return [one for one in ([stop] if isinstance(stop, str) else stop) if isinstance(one, str)]
