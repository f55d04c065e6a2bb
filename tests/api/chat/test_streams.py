"""Streams of chats while tokens are sampled: parts, errors in the form of the protocol, and clients that leave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers
from tests.api.conftest import BASE, KEY, Running
from tests.waiting import wait_for

from tinkerflow.backend.journal import Journal, Pending
from tinkerflow.backend.journal.streams import StreamedTokens, stream_name
from tinkerflow.backend.spec.commands import NewTokens, SampledSequence, SampleResult
from tinkerflow.backend.wire import encode_sample

pytestmark = pytest.mark.usefixtures("card")
HI: Any = [{"role": "user", "content": "Hi"}]
FIRST, SECOND = "It is ", "raining.<|im_end|>"


class Decoder:
    """Decodes one request, in chunks set by the test."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self.journal = journal
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.sampled: list[int] = []

    def take(self) -> Pending:
        """Wait for the request."""
        (request,) = wait_for(lambda: self.journal.requests.pending_samples(10))
        return request  # type: ignore[no-any-return]

    def says(self, request: Pending, text: str) -> None:
        """Stream the tokens of `text`."""
        tokens = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        new = NewTokens(request.id, 0, len(self.sampled), tokens, -np.ones(len(tokens), np.float32))
        self.sampled += tokens.tolist()
        self.journal.streams.write([StreamedTokens(stream_name(str(request.sampler_id), request.seq_id), new)])

    def ends(self, request: Pending) -> None:
        """Answer the request with all tokens streamed so far."""
        one = SampledSequence(np.array(self.sampled, np.int32), -np.ones(len(self.sampled), np.float32), "stop")
        self.journal.results.finish([request.done(encode_sample(SampleResult(request.id, (one,))), "proto")])

    def fails(self, request: Pending) -> None:
        self.journal.results.finish([request.failed("the weights have diverged", "user")])


@pytest.fixture
def decoder(journal: Journal, tiny: Path) -> Decoder:
    return Decoder(journal, tiny)


@pytest.mark.parametrize("fails", [False, True])
def test_openai_chunks_arrive_as_tokens_are_sampled(gpt: openai.OpenAI, decoder: Decoder, fails: bool) -> None:
    heard = ""

    def create() -> Any:
        return gpt.chat.completions.create(model=BASE, messages=HI, stream=True)

    with ThreadPoolExecutor(1) as threads:
        begun = threads.submit(create)
        request = decoder.take()
        decoder.says(request, FIRST)
        chunks = iter(begun.result(60))
    while len(heard) < len(FIRST.rstrip()):
        heard += next(chunks).choices[0].delta.content or ""
    if fails:
        decoder.fails(request)
        with pytest.raises(openai.APIError, match="the weights have diverged"):
            list(chunks)
    else:
        decoder.says(request, SECOND)
        decoder.ends(request)
        rest = list(chunks)
        assert heard + "".join(chunk.choices[0].delta.content or "" for chunk in rest) == "It is raining."
        assert rest[-1].choices[0].finish_reason == "stop"


def test_anthropic_stream_ends_with_an_anthropic_error(claude: Any, decoder: Decoder) -> None:
    import anthropic  # here, because the import takes seconds in each process that collects tests

    with ThreadPoolExecutor(1) as threads:
        begun = threads.submit(claude.messages.create, model=BASE, messages=HI, max_tokens=50, stream=True)
        request = decoder.take()
        decoder.says(request, FIRST)
        events = iter(begun.result(60))
    heard = ""
    while not heard:
        event = next(events)
        heard += event.delta.text if event.type == "content_block_delta" else ""
    assert FIRST.startswith(heard)
    decoder.fails(request)
    with pytest.raises(anthropic.APIStatusError, match="the weights have diverged"):
        list(events)


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_request_is_cancelled_if_the_client_leaves_before_the_first_token(
    server: Running, decoder: Decoder, path: str, stream: bool
) -> None:
    body: Any = {"model": BASE, "stream": stream} | ({"input": "Hi"} if path == "responses" else {"messages": HI})
    if path == "messages":
        body["max_tokens"] = 5
    with ThreadPoolExecutor(1) as threads:
        headers = {"x-api-key": KEY}
        asking = threads.submit(httpx.post, f"{server.url}/v1/{path}", json=body, headers=headers, timeout=4.0)
        request = decoder.take()
        assert isinstance(asking.exception(60), httpx.ReadTimeout)
    wait_for(lambda: decoder.journal.results.finished([request.id]))
