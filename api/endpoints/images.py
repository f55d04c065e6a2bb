"""Images in conversations: parts of OpenAI's messages and blocks of Anthropic's, and their positions in a prompt.

A chat template writes one placeholder token for each image. We repeat it as often as the model's image processor
computes for the image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkerflow.api.endpoints.targets import Target
from tinkerflow.api.errors import naming
from tinkerflow.backend.catalog.model_card import image_processor
from tinkerflow.backend.core.errors import ContextExceededError, UserError, broken
from tinkerflow.backend.spec.commands import ImagePixels
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.wire.images import pixels_of

IMAGES = ("image_url", "image")  # types of image parts: OpenAI's, and Anthropic's
_DATA = re.compile(r"data:image/(png|jpeg);base64,", re.IGNORECASE)
_MEDIA = {"image/png": "png", "image/jpeg": "jpeg"}


@dataclass(frozen=True)
class Picture:
    """An image of a message. field: the part's path in the request. given: the part, as the client sent it."""

    field: str
    given: Mapping[str, Any]

    @property
    def file_field(self) -> str:
        """The path of the image's file in the request."""
        if self.given.get("type") != "image_url":
            return f"{self.field}.source.data"
        return f"{self.field}.image_url{'.url' if isinstance(self.given.get('image_url'), Mapping) else ''}"

    def chunk(self) -> dict[str, Any]:
        """The image in the tinker protocol's form. Nothing is fetched. UserError: the part is not a valid image."""
        if self.given.get("type") == "image_url":
            return self._of_url()
        source = self.given.get("source")
        if not isinstance(source, Mapping) or source.get("type") != "base64":
            kind = source.get("type") if isinstance(source, Mapping) else source
            raise broken(f"{self.field}.source.type", kind, "base64; the server does not fetch images")
        kind = source.get("media_type")
        if not isinstance(kind, str) or kind not in _MEDIA:
            raise broken(f"{self.field}.source.media_type", kind, " or ".join(_MEDIA))
        return self._chunk(_MEDIA[kind], source.get("data"))

    def _of_url(self) -> dict[str, Any]:
        given = self.given.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        begins = _DATA.match(url) if isinstance(url, str) else None
        if begins is None or not isinstance(url, str):
            rule = "a URL that begins with data:image/png;base64, or data:image/jpeg;base64, and contains the file; "
            raise broken(self.file_field, url, f"{rule}the server does not fetch images")
        return self._chunk(begins[1].lower(), url[begins.end() :])

    def _chunk(self, kind: str, data: Any) -> dict[str, Any]:
        if not isinstance(data, str):
            raise broken(self.file_field, data, "the file's bytes in base64")
        return {"type": "image", "format": kind, "data": "".join(data.split())}


@dataclass(frozen=True)
class PromptImage:
    """An image in a prompt. start, tokens: position and number of placeholders. chunk: `picture` in tinker's form."""

    start: int
    tokens: int
    chunk: Mapping[str, Any]
    picture: Picture


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[Picture]:
    """The images of a conversation, in order."""
    contents = [one["content"] for one in messages if isinstance(one.get("content"), list)]
    return [part["picture"] for content in contents for part in content if "picture" in part]


def shown(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages in the form that chat templates expect."""
    return _with_contents(messages, lambda parts: [{"type": "image"} if "picture" in part else part for part in parts])


def as_texts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with contents as texts, for people who read the conversation later."""
    return _with_contents(
        messages, lambda parts: "\n".join("[image]" if "picture" in part else part["text"] for part in parts)
    )


def _with_contents(
    messages: Sequence[Mapping[str, Any]], made_of: Callable[[Sequence[Mapping[str, Any]]], object]
) -> list[Mapping[str, Any]]:
    """The messages, with contents that are lists of parts replaced by the results of `made_of`."""
    return [
        {**one, "content": made_of(one["content"])} if isinstance(one.get("content"), list) else one for one in messages
    ]


def processor_for(target: Target, picture: Picture) -> ImageProcessor:
    """The image processor of the sampled model. UserError: the model takes no images; the error names `picture`."""
    if (processor := image_processor(target.card.path)) is None:
        raise UserError(f"{picture.field} is an image: must be text, because {target.card.name} does not accept images")
    return processor


def place_images(
    target: Target, processor: ImageProcessor, tokens: Sequence[int], pictures: Sequence[Picture]
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Expand a prompt's placeholders. Returns the tokens and the images.

    Slow for many images, so do not call it on the event loop.

    target: the sampled model. processor: its image processor. tokens: the prompt's, one placeholder for each of
    `pictures`.
    UserError: an image is invalid, or the prompt exceeds the context at an image; the error names the image.
    """
    sign = target.tokenizer.token_text(processor.token)
    if (count := list(tokens).count(processor.token)) != len(pictures):
        raise UserError(
            f"messages: the prompt contains {sign} {count} times for {len(pictures)} images: no text may contain it, "
            "and the chat template must write it once per image"
        )
    made: list[int] = []
    images: list[PromptImage] = []
    most = target.longest_text  # the limit of texts, because a file of 100 bytes may claim any size
    for token in tokens:
        if token != processor.token:
            made.append(token)
            continue
        picture = pictures[len(images)]
        chunk = picture.chunk()
        with naming({f"{picture.field}.data": picture.file_field}):
            pixels_HWC = pixels_of(chunk, picture.field, processor, blank=True)
        size = ImagePixels(len(made), pixels_HWC).tokens(processor.side)
        images.append(PromptImage(len(made), size, {**chunk, "expected_tokens": size}, picture))
        made += [processor.token] * size
        if len(made) > most:
            message = f"messages have {len(made)} tokens up to {picture.field}: must have at most {most}"
            context, length = target.card.max_context, f"{len(made)} tokens"
            raise ContextExceededError(message, context=context, size=length, most=most)
    return made, tuple(images)


def chunks_of(tokens: Sequence[int], images: Sequence[PromptImage]) -> list[Mapping[str, Any]]:
    """The chunks of a prompt: alternately a text and an image, with a text first and last."""
    chunks: list[Mapping[str, Any]] = []
    done = 0
    for image in images:
        chunks += [{"type": "encoded_text", "tokens": list(tokens[done : image.start])}, image.chunk]
        done = image.start + image.tokens
    return [*chunks, {"type": "encoded_text", "tokens": list(tokens[done:])}]


def fields_of(images: Sequence[PromptImage]) -> dict[str, str]:
    """The images' paths in the request, by their paths in the chunks of `chunks_of`."""
    names: dict[str, str] = {}
    for number, image in enumerate(images):
        chunk = f"prompt.chunks[{2 * number + 1}]"  # each image follows a text chunk
        names |= {chunk: image.picture.field, f"{chunk}.data": image.picture.file_field}
    return names
