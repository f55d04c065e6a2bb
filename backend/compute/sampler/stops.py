"""The end of a sequence: at a stop token, or when its text contains a stop string. This file does not use JAX.

A stop string may begin in one token and end in another, and a character may span several tokens. The text of new
tokens is the text that decoding adds to the text of all earlier tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.limits import TEXT_CONTEXT

Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the text of an incomplete character
_MOST_PENDING = 64  # the most tokens of one unfinished character, so that garbage stays cheap


class StopDetector:
    """Finds the end of one sequence in its tokens as they are decoded."""

    def __init__(
        self,
        tokens: frozenset[int],
        strings: tuple[str, ...],
        decode: Decode | None,
        prompt: Sequence[int] | npt.NDArray[np.int32] = (),
    ) -> None:
        """decode: turns tokens into text, including special tokens; may be None without `strings`.

        prompt: the tokens before the sequence. SentencePiece's decoders drop the space before the first word of any
        text, but in a sequence that continues a text, this space belongs to the sequence.
        """
        self._tokens = tokens
        self._strings = strings
        self._decode = decode
        self._prompt = [*map(int, prompt[-TEXT_CONTEXT:])] if strings and decode else []
        self._window = max((len(string) for string in strings), default=1) - 1
        # Tokens whose text is in _text or before the sequence; the context in which later tokens are decoded.
        self._settled = [] if decode and decode(self._prompt).endswith(_UNFINISHED) else self._prompt
        self._pending: list[int] = []  # later tokens, which may end within a character
        self._text = ""  # the end of the text of all settled tokens, as far as a match may reach back

    def fresh(self) -> StopDetector:
        """A detector for the same stops that has read no tokens."""
        return StopDetector(self._tokens, self._strings, self._decode, self._prompt)

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """Read the next tokens up to a token that ends the sequence. Returns how many were read; None if none does."""
        if not self._strings and self._tokens.isdisjoint(tokens):
            return None  # without decoding each token
        return next((count for count, token in enumerate(tokens, 1) if self.ends_with(token)), None)

    def ends_with(self, token: int) -> bool:
        """Read the next token. Returns whether it is a stop token or completes a stop string."""
        if token in self._tokens:
            return True
        if not self._strings or self._decode is None:
            return False
        self._pending.append(token)
        before = self._decode(self._settled)
        added = self._decode(self._settled + self._pending)[len(before) :]
        text = self._text + added
        if any(string in text for string in self._strings):
            return True
        if not added.endswith(_UNFINISHED) or len(self._pending) >= _MOST_PENDING:
            self._text = text[max(0, len(text) - self._window) :]
            self._settled, self._pending = self._pending, []
        return False


def load_decode(folder: str | Path) -> Decode:
    """The decoder of the tokenizer in a model's folder. UserError: no readable tokenizer."""
    import tokenizers

    path = Path(folder) / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises a bare Exception for a broken file
        raise UserError(f"stop strings need the model's tokenizer, and {path} cannot be read: {error}") from error
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))
