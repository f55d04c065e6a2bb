"""AnswerReader on pieces of one sample, with a stand-in for the parser."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tinkerflow.api.chat.answer import AnswerReader
from tinkerflow.api.chat.events import ReasoningDelta
from tinkerflow.api.endpoints.generation import SamplePiece
from tinkerflow.api.text import Tokenizer


def test_reasoning_that_ends_inside_a_character_has_at_most_the_sampled_tokens(tiny: Path) -> None:
    tokenizer = Tokenizer(tiny)
    parser = SimpleNamespace(feed=lambda text: [ReasoningDelta(text)] if text else [], end=lambda: [])
    prompt: Any = SimpleNamespace(ends=(), spec=SimpleNamespace(marks=(), think=None), parser=lambda: parser)
    target: Any = SimpleNamespace(tokenizer=tokenizer, card=SimpleNamespace(eos_token_ids=()))
    reader = AnswerReader(target, prompt, ())
    first, *rest = tokenizer.encode("🐻", special=False)
    assert rest
    reader.feed(SamplePiece(0, [first], [-1.0], stop_reason="length"))
    assert reader.answer.reasoning == "\ufffd"
    assert len(tokenizer.encode("\ufffd", special=False)) > 1 == reader.reasoning_tokens
