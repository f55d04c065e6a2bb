"""The tokens that a constraint allows next. Each sequence has a `Matcher` on the host, which is equal in all processes.

A constraint decides token by token, so each token of a constrained sequence is read before the next one is dispatched.
The end-of-text token is allowed wherever the text may end. If no other token may follow, it is the only allowed token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import Constraint
from tinkerflow.backend.spec.constraints import describe_error, first_lines, grammar_of, limits, on_large_stack

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_WORD = 32  # tokens per number of a mask


class Matcher:
    """The state of one sequence in its constraint."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        """Start at the beginning of a text. vocab: the size of the model's vocabulary."""
        self._matcher = matcher
        self._taken = 0
        self.allowed = np.zeros(words(vocab), np.uint32)  # bit v % 32 of number v // 32: token v may be next

    def copy(self) -> Matcher:
        """A matcher in the same state."""
        return Matcher(self._matcher.deep_copy(), len(self.allowed) * _WORD)

    def fresh(self) -> Matcher:
        """A matcher for the same constraint at the beginning of a text."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return Matcher(matcher, len(self.allowed) * _WORD)

    def advance(self, tokens: Sequence[int]) -> None:
        """Compute the allowed next tokens after `tokens`, which are all tokens of the sequence.

        UserError: no token is allowed, or the computation takes too much work.
        """
        from llguidance.numpy import fill_next_token_bitmask

        for token in tokens[self._taken :]:
            self._matcher.consume_token(token)
        self._taken = len(tokens)
        fill_next_token_bitmask(self._matcher, self.allowed.view(np.int32)[None])
        if self._matcher.is_error() or not self.allowed.any():
            reason = describe_error(self._matcher.get_error())
            raise UserError(f"sampling_params.constraint cannot be enforced after {self._taken} tokens: {reason}")


def new_matcher(folder: str | Path, vocab: int, constraint: Constraint) -> Matcher:
    """The matcher of a constraint for the tokenizer in a model's folder. UserError: the constraint cannot be compiled.

    vocab: the size of the model's vocabulary.
    """
    from llguidance import LLMatcher

    def made() -> LLMatcher:
        tokenizer = _tokenizer(str(folder), vocab, constraint.ends)
        return LLMatcher(tokenizer, grammar_of(constraint.kind, constraint.text), limits=limits(), log_level=0)

    matcher = on_large_stack(made)
    if matcher.is_error():
        raise UserError(f"sampling_params.constraint cannot be enforced: {first_lines(matcher.get_error())}")
    return Matcher(matcher, vocab)


def words(vocab: int) -> int:
    """The number of words in a mask."""
    return -(-vocab // _WORD)


def everything(rows: int, vocab: int) -> npt.NDArray[np.uint32]:
    """Masks [rows, words] that allow every token."""
    return np.full((rows, words(vocab)), 2**32 - 1, np.uint32)


@cache
def _tokenizer(folder: str, vocab: int, ends: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer

    path = Path(folder) / "tokenizer.json"
    try:
        return LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab, eos_token=list(ends))
    except (OSError, ValueError) as error:
        text = f"sampling_params.constraint needs the model's tokenizer, and {path} cannot be read: {error}"
        raise UserError(text) from error
