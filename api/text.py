"""Converts between text and tokens in the API process, without torch or JAX. Files are read off the event loop."""

from __future__ import annotations

import asyncio
import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path

from tinkerflow.backend.catalog.control_tokens import ControlTokens
from tinkerflow.backend.catalog.model_card import TOKENIZER, ModelCard
from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.spec.limits import TEXT_CONTEXT

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the decoded text of an incomplete character
_MOST_HELD_BACK = 16  # the most tokens that form one character; bytes that are not text must not stop a stream
_WORD = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's form of a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's form of a byte that is not a character


class Tokenizer:
    """A base model's tokenizer. `Tokenizers.load` reads it once for each model."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer of the model in `folder`. ServerError: no tokenizer can be read there."""
        import tokenizers

        self.folder = folder
        self._control_tokens: dict[str, ControlTokens] = {}
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str((folder / TOKENIZER).read_text(encoding="utf-8"))
        except Exception as error:  # the package raises a bare Exception for a broken file
            raise ServerError(f"{folder / TOKENIZER} cannot be read: {error}") from error

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text. special: add the tokens that surround every text, such as a first `<s>`."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens. special: include special tokens, such as the end of a text."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def token_text(self, token: int) -> str:
        """The text of a token, even a special one. Incomplete characters are replacement characters."""
        return self.decode([token], special=True)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, even if they are only part of a character."""
        text, name = self.token_text(token), self._tokenizer.id_to_token(token) or ""
        if _UNFINISHED not in text:
            # SentencePiece's decoders drop the space before the first word.
            return text.encode() if not name.startswith(_WORD) or text.startswith(" ") else b" " + text.encode()
        if (byte := _BYTE.fullmatch(name)) is not None:
            return bytes([int(byte[1], 16)])
        known = _bytes_of_characters()
        return bytes(known[char] for char in name) if all(char in known for char in name) else text.encode()

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary, such as `<|im_end|>`; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def control_tokens(self, template: str) -> ControlTokens:
        """The tokens that structure a conversation with this chat template. template: its source."""
        if template not in self._control_tokens:
            self._control_tokens[template] = ControlTokens(self._tokenizer, template)
        return self._control_tokens[template]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which `decode` omits by default."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)


@cache
def _bytes_of_characters() -> dict[str, int]:
    """The byte for each character of byte-level tokenizers.

    Visible characters stand for their own bytes. The characters of all other bytes begin at U+0100.
    """
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


class Tokenizers:
    """The tokenizers of an API process. Each is loaded when it is first needed."""

    def __init__(self) -> None:
        self._loading: dict[str, asyncio.Task[Tokenizer]] = {}

    async def load(self, card: ModelCard) -> Tokenizer:
        """Load the tokenizer of a base model. ServerError: its file cannot be read here; the next call retries."""
        loading = self._loading.get(card.path)
        if loading is None or (loading.done() and (loading.cancelled() or loading.exception() is not None)):
            reading = asyncio.to_thread(Tokenizer, Path(card.path))
            loading = self._loading[card.path] = asyncio.create_task(reading, name=f"tokenizer of {card.name}")
        return await asyncio.shield(loading)


class Detokenizer:
    """Decodes tokens to text as they arrive, without splitting characters. The text ends before a stop string.

    The text of new tokens is the difference that they make to the decoded text. Text that may begin a stop string is
    held back until more tokens arrive.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, special: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        """stop: strings that end the text and are not part of it. special: show special tokens.

        prompt: the tokens before the text, if it continues theirs. SentencePiece's decoders drop the space before the
        first word of any text, which is part of a text that continues another one.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._reach = max(map(len, self._stop), default=1) - 1  # how many characters may begin a stop string
        self._special = special
        # Tokens whose text is settled, the context for decoding later ones.
        self._known: list[int] = list(prompt[-TEXT_CONTEXT:])
        before = tokenizer.decode(self._known, special=special)
        if before.endswith(_UNFINISHED):
            self._known = []
        self.continues = bool(before and self._known)  # whether the text keeps the space before its first word
        self._fresh: list[int] = []  # tokens after these
        self._held = ""  # settled text that may begin a stop string
        self.stopped: str | None = None  # the stop string that ended the text

    def feed(self, tokens: Sequence[int]) -> str:
        """Add new tokens. Returns the text that they settle; "" after a stop string."""
        if self.stopped is not None:
            return ""
        settled, tail = [self._held], self._held
        for token in tokens:
            self._fresh.append(token)
            added = self._settle(_MOST_HELD_BACK)
            settled.append(added)
            tail = tail[max(0, len(tail) - self._reach) :] + added
            if any(string in tail for string in self._stop):
                break  # as in the engine, the token that completes a stop string is the last
        self._held = "".join(settled)
        return self._release(last=False)

    def finish(self) -> str:
        """End the text. Returns the text that was held back."""
        if self.stopped is None:
            self._held += self._settle(0)
        return self._release(last=True)

    def _settle(self, most: int) -> str:
        """The text of the fresh tokens, which become known.

        Returns "" if the text may be incomplete and there are at most `most` fresh tokens.
        """
        if not self._fresh:
            return ""
        decode = self._tokenizer.decode
        before = decode(self._known, special=self._special)
        added = decode(self._known + self._fresh, special=self._special)[len(before) :]
        if added.endswith(_UNFINISHED) and len(self._fresh) <= most:
            return ""
        if added:  # tokens without text, such as special ones, provide no context
            self._known = self._fresh
        elif not before:  # a space that the decoder has dropped: the next one is part of the text
            self._known = [*self._known, *self._fresh][-TEXT_CONTEXT:]
        self._fresh = []
        return added

    def _release(self, *, last: bool) -> str:
        if self.stopped is None:
            found = [(at, string) for string in self._stop if (at := self._held.find(string)) >= 0]
            if found:
                at, self.stopped = min(found)
                return self._given(at, drop=True)
        keep = 0 if last else max((_overlap(self._held, string) for string in self._stop), default=0)
        return self._given(len(self._held) - keep)

    def _given(self, cut: int, *, drop: bool = False) -> str:
        text, self._held = self._held[:cut], "" if drop else self._held[cut:]
        return text


def _overlap(text: str, string: str) -> int:
    """The number of characters at the end of `text` that begin `string`."""
    most = min(len(text), len(string) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(string[:length])), 0)


class Offsets:
    """The positions of tokens in the text that they decode to, in characters.

    A token that continues a character has the position of this character.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0, *, special: bool = False, continues: bool = False) -> None:
        """start: position of the first token. special: the text shows special tokens. continues: as in Detokenizer."""
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._first = not continues  # whether the space before the next word is left out
        self._ended = start  # number of complete characters

    def of(self, token: int) -> int:
        """The position of the next token."""
        text = "" if token in self._tokenizer.special_ids and not self._special else self._tokenizer.token_text(token)
        if not text:
            return self._ended
        # Texts begin without the space of SentencePiece's first word, and so does the text of a single token.
        whole = self._first and _UNFINISHED not in text
        self._first = False
        content = text.encode() if whole else self._tokenizer.token_bytes(token)
        self._ended += len(self._decoder.decode(content[:1]))
        continues = bool(self._decoder.getstate()[0])  # the first byte is part of an incomplete character
        position = self._ended if continues else self._ended - 1
        self._ended += len(self._decoder.decode(content[1:]))
        return position
