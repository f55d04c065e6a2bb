"""Samples for people to read: the texts of prompts and answers, while the journal still holds their bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tinkerflow.api.console.render import size
from tinkerflow.api.console.visit import Visit, record
from tinkerflow.api.text import Tokenizer
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.journal import AuditedEvent, SampleView, WholeSample
from tinkerflow.backend.wire import SampleBody, decode_sample

_SHOWN = 400  # characters shown in lists: of a prompt's end and of an answer's beginning
_READ, _READ_IN_LIST = 2**24, 2**20  # bytes of the largest samples whose texts are shown: alone, and in a list


@dataclass(frozen=True)
class ShownSample:
    """A sample with its texts. answers: text, number of tokens, stop reason. note: why a text is missing.

    prompt: its text, with [image] for each image. images: as data URLs, only when a sample is shown alone.
    """

    sample: SampleView
    prompt: str | None
    answers: Sequence[tuple[str, int, str]]
    note: str = ""
    images: Sequence[str] = ()


async def shown(visit: Visit, *, run_id: str | None = None, limit: int = 20) -> list[ShownSample]:
    """The newest samples that the visitor may see: all of them, or only those drawn from one run's weights."""
    found = await asyncio.to_thread(visit.journal.samples.recent, visit.owner, run_id=run_id, limit=limit)
    await _audit(visit, found)
    return [await _shown(visit, sample, shorten=True) for sample in found]  # one after another, to limit memory


async def read(visit: Visit, sample: SampleView) -> ShownSample:
    """One sample with its whole texts."""
    await _audit(visit, [sample])
    return await _shown(visit, sample, shorten=False)


async def _audit(visit: Visit, samples: Sequence[SampleView]) -> None:
    """Record in the audit logs of other projects that an admin read their samples."""
    others: dict[str, list[str]] = {}
    for sample in samples:
        if sample.owner != visit.identity.owner:
            others.setdefault(sample.owner, []).append(sample.id)
    for owner, ids in others.items():
        await record(visit.call.services, AuditedEvent.PROJECT_SAMPLE_READ, visit.identity, owner, samples=ids)


async def _shown(visit: Visit, sample: SampleView, *, shorten: bool) -> ShownSample:
    """A sample's texts. shorten: keep only the end of the prompt and the beginnings of the answers."""
    if sample.size > (_READ_IN_LIST if shorten else _READ):
        return ShownSample(sample, None, (), f"too large to show here: {size(sample.size)}")
    whole = await asyncio.to_thread(visit.journal.samples.whole, sample.id, visit.owner)
    if not whole.payload:
        return ShownSample(
            sample, None, (), "its text was deleted: the client acknowledged it, or result_ttl has passed"
        )
    tokenizer = await tokenizer_of(visit, sample.base_model)
    if tokenizer is None:
        return ShownSample(sample, None, (), f"{sample.base_model} is no longer served")
    return await asyncio.to_thread(_read, whole, tokenizer, shorten)


async def tokenizer_of(visit: Visit, base_model: str) -> Tokenizer | None:
    """The tokenizer of a base model; None if the model is not served or its tokenizer's file is not on this machine."""
    cards = await asyncio.to_thread(visit.journal.base_models.all)
    card = next((row.card for row in cards if row.name == base_model), None)
    try:
        return None if card is None else await visit.call.services.tokenizers.load(ModelCard.from_json(card))
    except ServerError:  # the API's machine has no such file, so texts cannot be shown
        return None


def _read(sample: WholeSample, tokenizer: Tokenizer, shorten: bool) -> ShownSample:
    try:
        chunks = SampleBody.decode(sample.payload).prompt.chunks
        prompt = "".join(_texts(chunks, tokenizer))
        images = [] if shorten else [_url(chunk) for chunk in chunks if _is_image(chunk)]
    except (UserError, AttributeError, KeyError, TypeError, OverflowError, ValueError):
        return ShownSample(sample, None, (), "the sample request was invalid")
    answers = []
    if sample.result is not None and sample.result_type == "proto":
        for sequence in decode_sample(sample.id, sample.result).sequences:
            text = tokenizer.decode(sequence.tokens_T.tolist(), special=True)
            answers.append((text[:_SHOWN] if shorten else text, len(sequence.tokens_T), sequence.stop_reason))
    return ShownSample(sample, prompt[-_SHOWN:] if shorten else prompt, answers, images=images)


def _texts(chunks: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> Iterator[str]:
    """The texts between the images, and a placeholder for each image."""
    for is_image, run in groupby(chunks, _is_image):
        if is_image:
            yield from ("[image]" for _ in run)
        else:
            yield tokenizer.decode([token for chunk in run for token in chunk.get("tokens", ())], special=True)


def _is_image(chunk: Mapping[str, Any]) -> bool:
    return bool(chunk.get("type", "encoded_text") != "encoded_text")


def _url(image: Mapping[str, Any]) -> str:
    return f"data:image/{image['format']};base64,{image['data']}"
