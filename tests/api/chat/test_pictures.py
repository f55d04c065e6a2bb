"""Images in conversations, from OpenAI's and Anthropic's clients through the chat template to the prompt."""

from __future__ import annotations

import base64
import io
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image
from tests.api.chat.conftest import END, Speaker
from tests.api.conftest import BASE

from tinkerflow.api import submit
from tinkerflow.api.endpoints import generation, images
from tinkerflow.api.endpoints.targets import Target
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import Journal, Outcome, Pending
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.wire import SampleBody, parse, sample_request
from tinkerflow.backend.wire.images import pixels_of
from tinkerflow.deployments.tiny_model import VOCAB

SIGN, TOKEN = "<|pad|>", 3
SEES = ImageProcessor(token=TOKEN, side=8, least=64, most=1024, mean=(0.0,) * 3, deviation=(1.0,) * 3)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}[<|pad|>]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture
def png() -> str:
    out = io.BytesIO()
    Image.new("RGB", (24, 16), "red").save(out, "png")
    return base64.b64encode(out.getvalue()).decode()


@pytest.fixture
def sees(card: ModelCard, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base model takes images, and its chat template renders them."""
    shutil.copytree(card.path, tmp_path / "sees")
    (tmp_path / "sees" / "chat_template.jinja").write_text(TEMPLATE)
    journal.base_models.register([(BASE, replace(card, path=str(tmp_path / "sees")).to_json())])
    for module in (images, generation, submit):
        monkeypatch.setattr(module, "image_processor", lambda folder: SEES)


def chunks(speaker: Speaker) -> list[Any]:
    """The latest prompt's chunks: texts, and images as (data, expected tokens)."""
    return [
        (chunk["data"], chunk["expected_tokens"])
        if chunk["type"] == "image"
        else speaker.tokenizer.decode(chunk["tokens"], skip_special_tokens=False)
        for chunk in speaker.asked[-1].prompt.chunks
    ]


def test_image_has_the_position_that_the_template_gives_it(
    sees: None, gpt: openai.OpenAI, claude: Any, speaker: Speaker, png: str
) -> None:
    url = f"data:image/png;base64,{png}"
    wanted = ["<|im_start|>user\nLook: [", (png, 6), f"]?{END}\n<|im_start|>assistant"]
    texts: Any = [{"type": "text", "text": "Look: "}, {"type": "text", "text": "?"}]
    parts: Any = [texts[0], {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}, texts[1]]
    speaker.says(f"Red.{END}")
    done = gpt.chat.completions.create(model=BASE, messages=[{"role": "user", "content": parts}])
    assert done.choices[0].message.content == "Red."
    assert chunks(speaker) == wanted
    assert done.usage is not None
    text_tokens = sum(len(chunk["tokens"]) for chunk in speaker.asked[-1].prompt.chunks if "tokens" in chunk)
    assert done.usage.prompt_tokens == text_tokens + 6
    blocks: Any = [
        texts[0], {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png}}, texts[1]
    ]  # fmt: skip
    speaker.says(f"Red.{END}")
    claude.messages.create(model=BASE, max_tokens=9, messages=[{"role": "user", "content": blocks}])
    assert chunks(speaker) == wanted
    asked: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "?"}]
    speaker.says(f"Red.{END}")
    gpt.responses.create(model=BASE, input=[{"role": "user", "content": asked}])
    assert chunks(speaker)[1] == (png, 6)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://127.0.0.1/x.png"}}], "the server does not fetch images"),
        ([{"type": "image_url", "image_url": {"url": "data:image/gif;base64,AAAA"}}], "data:image/png;base64,"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "image_url.url is not a png"),
        ([{"type": "text", "text": SIGN}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,PNG"}}],
         "contains <|pad|> 2 times for 1 images"),
        ([{"type": "input_audio"}], "audio and files"),
    ],
)  # fmt: skip
def test_invalid_images_are_named_in_the_error(
    sees: None, post: Callable[..., Any], speaker: Speaker, content: Any, says: str, png: str
) -> None:
    content = [
        {**part, "image_url": {"url": part["image_url"]["url"].replace("PNG", png)}} if "image_url" in part else part
        for part in content
    ]
    body = {"model": BASE, "messages": [{"role": "user", "content": content}], "allow_special_tokens": True}
    answer = post("chat/completions", body)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"type": "url", "url": "https://127.0.0.1/x.png"}, "source.type is 'url': must be base64"),
        ({"type": "base64", "media_type": "image/gif", "data": ""}, "media_type is 'image/gif'"),
        ({"type": "base64", "media_type": "image/png", "data": 3}, "source.data is 3"),
    ],
)
def test_invalid_image_sources_are_named_in_the_error(
    sees: None, post: Callable[..., Any], speaker: Speaker, source: Any, says: str
) -> None:
    content = [{"type": "image", "source": source}]
    answer = post("messages", {"model": BASE, "max_tokens": 3, "messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


PARTS: dict[str, Callable[[str], tuple[dict[str, Any], str]]] = {
    "chat/completions": lambda url: (
        {"type": "image_url", "image_url": {"url": url}},
        "messages[0].content[1].image_url.url",
    ),
    "responses": lambda url: ({"type": "input_image", "image_url": url}, "input[0].content[1].image_url"),
    "messages": lambda url: (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url.split(",")[1]}},
        "messages[0].content[1].source.data",
    ),
}


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize("stream", [False, True])
def test_damaged_image_is_named_by_its_place_in_the_request(
    path: str, stream: bool, sees: None, post: Callable[..., Any], speaker: Speaker, png: str
) -> None:
    """An error after the file's header is found only when the engine decodes the image."""

    def decode(request: Pending) -> Outcome:
        asked: Any = {"request_id": "", "owner": "", "vocab_size": VOCAB, "max_context": 4096}
        with pytest.raises(UserError) as found:
            sample_request(SampleBody.from_values(parse(request.payload)), **asked, eos=(2,), processor=lambda: SEES)
        return request.failed(found.value)

    speaker.engine.next_outcome = decode
    cut = base64.b64encode(base64.b64decode(png)[:50]).decode()
    part, field = PARTS[path](f"data:image/png;base64,{cut}")
    said = [{"role": "user", "content": [{"type": "input_text" if path == "responses" else "text", "text": "?"}, part]}]
    body = {"model": BASE, "stream": stream, ("input" if path == "responses" else "messages"): said}
    answer = post(path, body | ({"max_tokens": 9} if path == "messages" else {}))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(f"{field} cannot be read as png: ")


def test_images_beyond_the_context_are_not_measured(
    sees: None, post: Callable[..., Any], speaker: Speaker, png: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "longest_text", 100)
    monkeypatch.setattr(Target, "encode", encode_anything)
    measured: list[str] = []

    def measure(chunk: Any, name: str, *args: Any, **more: Any) -> Any:
        measured.append(name)
        return pixels_of(chunk, name, *args, **more)

    monkeypatch.setattr(images, "pixels_of", measure)
    content = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png}}] * 50
    answer = post("messages/count_tokens", {"model": BASE, "messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400, answer.text
    assert re.fullmatch(r"prompt is too long: 10\d tokens > 100 maximum", answer.json()["error"]["message"])
    assert len(measured) < 20


async def encode_anything(target: Target, text: str, field: str, control: Any = None) -> list[int]:
    return control.encode(text)


def test_an_error_counts_all_blocks_of_a_message(sees: None, post: Callable[..., Any], speaker: Speaker) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "?"}
    image = {"type": "image", "source": {"type": "url"}}
    body = {"model": BASE, "max_tokens": 3, "messages": [{"role": "user", "content": [result, image]}]}
    assert "messages[0].content[1].source.type" in post("messages", body).json()["error"]["message"]


@pytest.mark.parametrize("template", [TEMPLATE, "{{ messages[0].content + 'a text' }}"])
def test_image_for_a_text_model_is_refused(
    template: str, sees: None, tmp_path: Path, post: Callable[..., Any], speaker: Speaker, monkeypatch: Any
) -> None:
    (tmp_path / "sees" / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(images, "image_processor", lambda folder: None)
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    answer = post("chat/completions", {"model": BASE, "messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400, answer.text
    told = f"messages[0].content[0] is an image: must be text, because {BASE} does not accept images"
    assert answer.json()["error"]["message"] == told
    system = [{"role": "system", "content": content}, {"role": "user", "content": "?"}]
    answer = post("chat/completions", {"model": BASE, "messages": system})
    assert "only user messages may contain images" in answer.json()["error"]["message"]
