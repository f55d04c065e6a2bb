"""Stop tokens, stop strings within and across tokens, and characters of several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkerflow.backend.compute.sampler.stops import StopDetector, load_decode
from tinkerflow.backend.core.errors import UserError

PIECES = [bytes([byte]) for byte in range(256)] + [b"ab", b"bc", b"abc", "\u20ac".encode(), b"\xe2\x82", b" a", b"ENDx"]


def decode(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", errors="replace")


def ended_at(tokens: Sequence[int], stop_tokens: frozenset[int], strings: tuple[str, ...]) -> int | None:
    watch = StopDetector(stop_tokens, strings, decode)
    return next((count for count, token in enumerate(tokens, 1) if watch.ends_with(token)), None)


def spell(*pieces: bytes) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def test_a_stop_token_ends_the_sequence_when_it_comes() -> None:
    assert ended_at([4, 5, 6, 5], frozenset({6}), ()) == 3
    assert ended_at([4, 5], frozenset({6}), ()) is None


def test_stop_detector_without_stops_needs_no_decoder() -> None:
    watch = StopDetector(frozenset(), (), None)
    assert not any(watch.ends_with(token) for token in range(250))


def test_a_string_across_three_tokens() -> None:
    assert ended_at(spell(b"x", b"ab", b"c", b" a"), frozenset(), ("bc ",)) == 4


def test_a_string_inside_one_token_ends_with_that_token() -> None:
    assert ended_at(spell(b"x", b"ENDx", b"a"), frozenset(), ("END",)) == 2


def test_a_character_spread_over_tokens_is_seen_whole() -> None:
    assert ended_at(spell(b"a", b"\xe2\x82", b"\xac", b"b"), frozenset(), ("\u20ac",)) == 3
    assert ended_at(spell(b"\xe2", b"\x82", b"\xac", b"b"), frozenset(), ("\u20acb",)) == 4


def test_text_before_a_partial_stop_string_is_counted_once() -> None:
    assert ended_at(spell(b"a", b"b", b"a", b"bc"), frozenset(), ("abc",)) == 4


def test_space_before_the_first_word_continues_the_prompt() -> None:
    def sentence_piece(tokens: Sequence[int]) -> str:
        return decode(tokens).removeprefix(" ")

    said, (first, second) = spell(b"ENDx"), spell(b" a", b" a")
    watch = StopDetector(frozenset(), (" a",), sentence_piece, said)
    assert watch.end_of([first]) == watch.fresh().end_of([first]) == 1
    assert StopDetector(frozenset(), (" a",), sentence_piece).end_of([first, second]) == 2
    unfinished = StopDetector(frozenset(), ("a\u20ac",), decode, spell(b"\xe2"))
    assert unfinished.end_of(spell(b"a", b"\xe2\x82", b"\xac")) == 3
    assert StopDetector(frozenset(), ("ENDxa",), decode, said).end_of(spell(b"a", b"b")) is None


@given(
    tokens=st.lists(
        st.sampled_from([*spell(b"a", b"b", b"c", b"ab", b"bc", b"abc", b" a"), 0xE2, 0x82, 0xAC, 256]), max_size=40
    ),
    strings=st.lists(st.text("abc \u20ac", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_sequence_ends_where_the_whole_text_first_contains_a_stop_string(tokens: list[int], strings: list[str]) -> None:
    prefixes = (count for count in range(1, len(tokens) + 1) if any(s in decode(tokens[:count]) for s in strings))
    assert ended_at(tokens, frozenset(), tuple(strings)) == next(prefixes, None)


def test_the_tokenizer_of_a_model_folder_decodes_special_tokens_too(tmp_path: Path) -> None:
    import tokenizers

    vocabulary = {"<|end|>": 0, "he": 1, "y": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="y"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_decode(tmp_path)([1, 2, 0]) == "hey<|end|>"


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stop strings need .*tokenizer\.json"):
        load_decode(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        load_decode(tmp_path)


@pytest.mark.parametrize("strings", [(), ("never",)])
def test_stop_is_found_among_several_tokens(strings: tuple[str, ...]) -> None:
    detector = StopDetector(frozenset({7}), strings, lambda tokens: "x" * len(tokens))
    assert detector.end_of([1, 2, 3]) is None
    assert detector.end_of([4, 7, 7]) == 2
