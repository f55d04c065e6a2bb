"""Keeps control tokens in a conversation's texts as plain text, so that only the chat template writes real ones.

A user who writes `<|im_end|>` must not end the message. `ControlTokens.hide` marks such texts before the template is
rendered: the first character of each is replaced by a stand-in, a Unicode noncharacter. The length does not change, so
templates work as before. `ControlTokens.encode` then finds the control tokens that the template itself wrote, restores
the hidden characters, and encodes everything between control tokens as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# Unicode noncharacters, which texts do not contain, then private-use characters in case a model needs more.
_START, *_STAND_INS = map(chr, (*range(0xFDD0, 0xFDF0), *range(0x10F000, 0x10FFFE)))
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ControlTokens:
    """The tokens that structure a conversation of one model.

    They are the special tokens, and the added tokens in the chat template, such as `<tool_call>`. Texts of the
    assistant may contain these added tokens, because earlier answers and training data include reasoning and calls in
    the content.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        """Read the tokens from a tokenizer. template: the source of its chat template, "" for none."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = [entry.content for entry in added if entry.special]
        named = [entry.content for entry in added if not entry.special and entry.content in template]
        all_ = [*self._special, *(text for text in named if text.strip())]
        self._entries: dict[str, AddedToken] = {entry.content: entry for entry in added if entry.content in all_}
        firsts = dict.fromkeys(text[0] for text in all_)
        self._stand_in = dict(zip(firsts, _STAND_INS, strict=False))
        self._original = str.maketrans({stand_in: char for char, stand_in in self._stand_in.items()})
        self._foreign = str.maketrans(dict.fromkeys([_START, *self._stand_in.values()], _REPLACEMENT))
        self._real = re.compile(f"({_any_of(all_)})")
        self._in_users = _starts(all_)
        self._in_assistants = _starts(self._special)

    # ------------------------------------------------------------ before rendering
    def hide(self, value: Any, *, assistant: bool = False) -> Any:
        """Hide the control tokens in all texts of a value, including keys.

        assistant: whether the texts are the assistant's, which may contain control tokens that are not special.
        """
        if isinstance(value, str):
            return self._hide_text(value, self._in_assistants if assistant else self._in_users)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item, assistant=assistant) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item, assistant=assistant) for item in value]
        return value

    def hide_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Hide the control tokens in messages of OpenAI's form, except in roles and types, which are not user texts."""
        return [
            {
                name: value
                if name in ("role", "type")
                else self.hide(value, assistant=name == "content" and message.get("role") == "assistant")
                for name, value in message.items()
            }
            for message in messages
        ]

    def _hide_text(self, text: str, starts: re.Pattern[str]) -> str:
        hidden = starts.sub(lambda match: self._stand_in[match[0]], text.translate(self._foreign))
        # A template may append the next text directly, so the beginning of a control token at the end counts.
        end = len(hidden.rstrip())
        for size in range(1, min(end, self._longest) + 1):
            if hidden[end - size : end] in self._beginnings and hidden[end - size] in self._stand_in:
                hidden = hidden[: end - size] + self._stand_in[hidden[end - size]] + hidden[end - size + 1 :]
        return hidden

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:size] for text in self._entries for size in range(1, len(text)))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._beginnings), default=0)

    # ------------------------------------------------------------ after rendering
    def restore(self, text: str) -> str:
        """Restore the hidden characters in a rendered text."""
        return text.translate(self._original)

    def encode(self, text: str) -> list[int]:
        """Encode a rendered text, without the tokens that a tokenizer adds around every text."""
        restored = self.restore(text)
        if restored == text:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        parts = self._real.split(text)  # texts at even places, control tokens between them
        tokens: list[int] = []
        for place in range(0, len(parts), 2):
            before = self._entries[parts[place - 1]] if place else None
            after = self._entries[parts[place + 1]] if place + 1 < len(parts) else None
            tokens += self._encode_text(self.restore(parts[place]), before, after)
            if after is not None:
                tokens.append(self._tokenizer.token_to_id(after.content))
        return tokens

    def _encode_text(self, text: str, before: AddedToken | None, after: AddedToken | None) -> list[int]:
        """Encode a text between two control tokens."""
        if before is not None and before.rstrip:
            text = text.lstrip()
        if after is not None and after.lstrip:
            text = text.rstrip()
        if not text:
            return []
        plain, ids = self._plain
        if before is None:
            tokens = plain.encode(text, add_special_tokens=False).ids
        else:  # after a token, the text is not at the beginning, where some tokenizers add a space
            tokens = plain.encode(_START + text, add_special_tokens=False).ids[1:]
        return [ids.get(token, token) for token in tokens]

    @cached_property
    def _plain(self) -> tuple[Tokenizer, Mapping[int, int]]:
        """A tokenizer that encodes control tokens as text, and the model's ids of its added tokens.

        The ids are keyed by the plain tokenizer's ids, because it numbers its added tokens without gaps.
        """
        from tokenizers import AddedToken, Tokenizer

        values = json.loads(self._tokenizer.to_str())
        values["added_tokens"] = [one for one in values["added_tokens"] if one["content"] not in self._entries]
        values["post_processor"] = None
        plain = Tokenizer.from_str(json.dumps(values))
        kept = [one["content"] for one in values["added_tokens"]]
        ids = {plain.token_to_id(content): self._tokenizer.token_to_id(content) for content in kept}
        plain.add_tokens([AddedToken(_START, normalized=False)])
        return plain, ids


def _any_of(texts: Sequence[str]) -> str:
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)"


def _starts(texts: Sequence[str]) -> re.Pattern[str]:
    """A pattern for the first character of each of these texts, even if they overlap."""
    return re.compile(f"(?={_any_of(texts)}).", re.DOTALL) if texts else re.compile(r"(?!)")
