"""A served base model whose answers tests set, and OpenAI's and Anthropic's clients for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
from tests.api.conftest import BASE, KEY, Engine, Running, card_json

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.journal import Journal, Outcome, Pending
from tinkerflow.backend.spec.commands import SampledSequence, SampleResult
from tinkerflow.backend.wire import SampleBody, encode_sample, parse
from tinkerflow.deployments.tiny_model import VOCAB, make_tiny

END = "<|im_end|>"


@dataclass
class Speaker:
    """Answers sample requests with texts that a test sets, and records the requests."""

    engine: Engine
    tokenizer: Any
    asked: list[SampleBody] = field(default_factory=list)

    def says(self, *texts: str, reason: str = "stop") -> None:
        """Answer the next request with these texts, one per sample."""

        def answer(request: Pending) -> Outcome:
            self.asked.append(SampleBody.from_values(parse(request.payload)))
            sequences = [self._sequence(text, reason) for text in texts]
            return request.done(encode_sample(SampleResult(request.id, tuple(sequences), None, 2)), "proto")

        self.engine.next_outcome = answer

    def _sequence(self, text: str, reason: str) -> SampledSequence:
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 8
        return SampledSequence(np.array(tokens, np.int32), logprobs, reason)  # type: ignore[arg-type]

    @property
    def prompt(self) -> str:
        """The text of the newest prompt."""
        return str(self.tokenizer.decode(self.tokens, skip_special_tokens=False))

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens of the newest prompt."""
        return list(self.asked[-1].prompt.chunks[0]["tokens"])

    @property
    def params(self) -> Any:
        """The newest request's sampling_params."""
        return self.asked[-1].sampling_params


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def card(journal: Journal, tiny: Path) -> ModelCard:
    """The base model with the tiny model's tokenizer and chat template."""
    card = replace(
        ModelCard.from_json(card_json()), path=str(tiny), vocab_size=VOCAB, max_context=4096, eos_token_ids=(2,)
    )
    journal.base_models.register([(BASE, card.to_json())])
    return card


@pytest.fixture
def speaker(engine: Engine, card: ModelCard, tiny: Path) -> Speaker:
    """Sets the model's answers."""
    return Speaker(engine, tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json")))


@pytest.fixture
def gpt(server: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's client, connected to the server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server: Running) -> Iterator[Any]:
    """Anthropic's client, connected to the server."""
    import anthropic  # here, because the import takes seconds in each process that collects tests

    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def post(server: Running) -> Callable[..., Any]:
    """post(path, body): the response to a POST of this JSON body to /v1/`path`."""
    return lambda path, body: server.http.post(
        f"{server.url}/v1/{path}", json=body, headers={"Authorization": f"Bearer {KEY}"}
    )
