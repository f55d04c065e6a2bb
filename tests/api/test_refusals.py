"""The id of a refused request contains the reason, and no other id does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkerflow.api.submit import reason_of, refuse


@given(st.text(min_size=1, max_size=500).filter(lambda s: s.isascii()))
def test_the_reason_comes_back(reason: str) -> None:
    assert reason_of(refuse(reason)) == reason


def test_long_reasons_are_truncated() -> None:
    assert reason_of(refuse("x" * 10_000)) == "x" * 500


@given(st.text())
def test_only_refusal_ids_have_a_reason(text: str) -> None:
    assert reason_of(text) is None or text.startswith("refused-")
    reason_of("refused-" + text)
