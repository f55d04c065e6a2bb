"""Text and tokens: incremental decoding equals whole decoding for any tokens, and stop strings are cut off exactly."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tinkerflow.api.text import Detokenizer, Offsets, Tokenizer, Tokenizers
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.errors import ServerError
from tinkerflow.deployments.tiny_model import make_tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer: most characters beyond ASCII are several tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return Tokenizer(folder)


def spoken(tokenizer: Tokenizer, text: str, stop: tuple[str, ...] = (), step: int = 1) -> tuple[list[str], str | None]:
    tokens = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, stop)
    parts = [detokenizer.feed(tokens[at : at + step]) for at in range(0, len(tokens), step)]
    return [*parts, detokenizer.finish()], detokenizer.stopped


@given(text=st.text(max_size=40), step=st.integers(1, 5))
def test_text_parts_add_up_to_the_whole_and_split_no_character(tokenizer: Tokenizer, text: str, step: int) -> None:
    parts, stopped = spoken(tokenizer, text, step=step)
    assert "".join(parts) == tokenizer.decode(tokenizer.encode(text))
    assert stopped is None
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts)


def test_long_text_in_one_part_is_searched_for_stop_strings_once(tokenizer: Tokenizer) -> None:
    """Reading the text again for each token would take minutes."""
    text = "a b " * 50_000 + "STOP c"
    assert spoken(tokenizer, text, ("STOP",), 2**20) == ([text[:-6], ""], "STOP")


@given(
    before=st.text("ab", max_size=12),
    stop=st.text("ab", min_size=1, max_size=4),
    other=st.text("ab", min_size=1, max_size=4),
    step=st.integers(1, 4),
)
def test_text_ends_before_the_first_stop_string(
    tokenizer: Tokenizer, before: str, stop: str, other: str, step: int
) -> None:
    text = before + "é€🙂" + before
    parts, stopped = spoken(tokenizer, text, (stop, other), step)
    said = "".join(parts)
    alone, ended = spoken(tokenizer, text, (stop, other), 1)
    assert (said, stopped) == ("".join(alone), ended), "in any pieces"
    if stop in text or other in text:
        assert stopped is not None
        assert text.startswith(said + stopped)
        assert stop not in said and other not in said
    else:
        assert (said, stopped) == (text, None)


def test_invalid_utf_8_does_not_hold_back_a_stream(tokenizer: Tokenizer) -> None:
    (first, *_) = tokenizer.encode("🙂")  # the first byte of a character
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.feed([first]) for _ in range(64)]
    assert "".join(parts).count("\N{REPLACEMENT CHARACTER}") >= 32
    assert "".join([*parts, detokenizer.finish()]).count("\N{REPLACEMENT CHARACTER}") == 64


@given(text=st.text(max_size=40), start=st.integers(0, 5))
def test_tokens_have_the_positions_of_their_first_characters(tokenizer: Tokenizer, text: str, start: int) -> None:
    tokens = tokenizer.encode(text)
    ends = accumulate((tokenizer.token_bytes(token) for token in tokens), initial=b"")
    expected = [start + len(before.decode(errors="ignore")) for before in ends]
    assert [*map(Offsets(tokenizer, start).of, tokens)] == expected[:-1]


def test_hidden_tokens_and_invalid_utf_8_have_positions(tokenizer: Tokenizer) -> None:
    (first, *_), end = tokenizer.encode("🙂"), min(tokenizer.special_ids)
    tokens = [first, first, end, *tokenizer.encode("a")]
    assert [*map(Offsets(tokenizer).of, tokens)] == [0, 1, 1, 2]
    shown = len(tokenizer.token_text(end))
    assert [*map(Offsets(tokenizer, special=True).of, tokens)] == [0, 1, 2, 2 + shown]


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    end = min(tokenizer.special_ids)
    tokens = [*tokenizer.encode("hi"), end]
    shown = Detokenizer(tokenizer, special=True)
    assert shown.feed(tokens) + shown.finish() == "hi" + tokenizer.token_text(end)
    assert tokenizer.decode(tokens) == "hi"
    assert tokenizer.id_of(tokenizer.token_text(end)) == end
    assert tokenizer.id_of("no such token") is None


def test_a_continuation_keeps_the_space_before_its_first_word(tmp_path: Path) -> None:
    """The decoder of Llama 2, Mistral and Phi-3 drops the space before the first word of a text."""
    words = ["<unk>", "▁", "▁The", "▁end", "s", "</s>"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    made.decoder = tokenizers.decoders.Sequence(parts)
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for tokens in ([3, 4], [1, 3], [1, 1, 1, 3], [5, 1, 3, 5, 4], [4, 1, 3]):
        for prompt, whole in (
            ([2], tokenizer.decode([2, *tokens]).removeprefix("The")),
            ([], tokenizer.decode(tokens)),
        ):
            text = Detokenizer(tokenizer, prompt=prompt)
            assert "".join([*(text.feed([token]) for token in tokens), text.finish()]) == whole
    for prompt, places in (([2], [0, 4]), ([], [0, 3])):
        continues = Detokenizer(tokenizer, prompt=prompt).continues
        assert [*map(Offsets(tokenizer, continues=continues).of, [3, 4])] == places


def test_a_tokenizer_is_loaded_once_and_tried_again_after_a_failure(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def card(folder: Path) -> ModelCard:
        return ModelCard("m", str(folder), str(folder), "Qwen3ForCausalLM", 9, 9, (1,), 9, tied=False)

    async def scene() -> None:
        tokenizers = Tokenizers()
        first, second = await asyncio.gather(*(tokenizers.load(card(tokenizer.folder)) for _ in range(2)))
        assert first is second
        for _ in range(2):
            with pytest.raises(ServerError, match="cannot be read"):
                await tokenizers.load(card(tmp_path))

    asyncio.run(scene())


def test_every_token_has_its_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_tiny(tmp_path / "tiny"))
    text = "Ein Bär 🐻 sagt: «hm»\n"
    tokens = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()
    assert any("\ufffd" in tokenizer.token_text(token) for token in tokens)
