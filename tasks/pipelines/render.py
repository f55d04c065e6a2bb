"""Tokenizes rows with the model's own chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.row_errors import RowError
from tinkerflow.tasks.pipelines.rows import Message, Row
from tinkerflow.tasks.pipelines.template_check import TemplateCheck, holds_text
from tinkerflow.tasks.pipelines.work import digest

if TYPE_CHECKING:
    import tinker
    from transformers import PreTrainedTokenizerBase

Format = Literal["chat", "text"]
SpecialTokens = Literal["text", "tokens"]
_VERSION = "2"  # version of the rules below; part of cache keys
_MARK = re.compile("\ufdd0(\\d+)\ufdd1")  # replaces a special token in a text; the two code points are noncharacters


@dataclass(frozen=True)
class TokenizedExample:
    """The tokens [T] of one sequence, and the weight [T] of each token in the loss (0: not trained on)."""

    tokens: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]

    @property
    def learned(self) -> float:
        """The sum of the weights that the loss uses. No token predicts the first token, which only texts weight."""
        return float(self.weights[1:].sum())

    def scaled(self, factor: float) -> TokenizedExample:
        """The example with its weights times `factor`."""
        return TokenizedExample(self.tokens, (self.weights * np.float32(factor)).astype(np.float32))

    def datum(self) -> tinker.Datum:
        """The input for `cross_entropy`: position t predicts token t + 1."""
        import tinker

        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(self.tokens[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(self.tokens[1:].astype(np.int64)),
                "weights": tinker.TensorData.from_numpy(self.weights[1:]),
            },
        )


class Renderer:
    """A tokenizer with the rules that turn conversations into tokens.

    Format chat: the tokenizer's chat template. Format text, for models without a template: the messages' texts one
    after another, then the end-of-text token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, format_: Format = "chat", special_tokens: SpecialTokens = "text"
    ) -> None:
        """special_tokens: how to tokenize a special token such as `<|im_end|>` in a row's text.

        "text" turns it into tokens of plain text. "tokens" turns it into the special token, which lets data end a turn
        and speak in another role. UserError: the format is chat, and the tokenizer has no chat template.
        """
        if format_ == "chat" and not tokenizer.chat_template:
            raise UserError(f"format 'chat': the tokenizer {tokenizer.name_or_path} has no chat template; use 'text'")
        self._tokenizer = tokenizer
        self._format = format_
        self._special_tokens = special_tokens
        self._template = TemplateCheck(self._text)

    def with_special_tokens(self, special_tokens: SpecialTokens) -> Renderer:
        """A renderer with this rule for special tokens in texts."""
        same = special_tokens == self._special_tokens
        return self if same else Renderer(self._tokenizer, self._format, special_tokens)

    @cached_property
    def fingerprint(self) -> str:
        """A digest that is equal for renderers that produce the same tokens from the same rows."""
        rules = getattr(self._tokenizer, "backend_tokenizer", None)
        return digest(
            _VERSION,
            self._format,
            str(self._tokenizer.chat_template),
            self.vocabulary,
            rules.to_str() if rules else "",
            *(["special tokens in texts"] if self._special_tokens == "tokens" else []),
            *(["no spaces between parts"] if self._adds_space else []),
        )

    @cached_property
    def vocabulary(self) -> str:
        """A digest that is equal for tokenizers with the same vocabulary."""
        return digest(str(sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])))

    @cached_property
    def stop(self) -> list[int]:
        """Token ids that end an answer: the end of a text, and the template's end of a turn, which may be another."""
        eos, mark = self._tokenizer.eos_token_id, "zqz"
        ends = [] if eos is None else [int(eos)]
        chat = [Message(role="user", content="a"), Message(role="assistant", content=mark)]
        try:
            behind = self._text(chat, ()).rpartition(mark)[2]
        except RowError:  # the template needs another conversation
            return ends
        special = next((found[0] for found in self._special_pattern.finditer(behind)), None)
        ids = [] if special is None else self._tokenizer.encode(special, add_special_tokens=False)
        return [*dict.fromkeys([*ends, *ids[:1]])]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Tokens that request the next assistant message.

        RowError: the template rejects the messages, or does not show one of their fields.
        """
        text = self._text(messages, tools, asking=True)
        self._check_fields(messages, tools)
        return self._tokens(text)

    def text(self, tokens: Sequence[int]) -> str:
        """Sampled tokens as text, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def pieces(self, example: TokenizedExample) -> list[tuple[str, bool]]:
        """The example's text for people, in order: (text, whether it is trained on)."""
        borders = [0, *(np.flatnonzero(np.diff(example.weights > 0)) + 1), len(example.tokens)]
        return [
            (str(self._tokenizer.decode(example.tokens[a:b].tolist())), bool(example.weights[a] > 0))
            for a, b in pairwise(map(int, borders))
        ]

    def answer_text(self, row: Row) -> str:
        """The row's first answer, in the form in which `text` returns a sampled one; "" if the row has none."""
        if not row.chosen:
            return ""
        if not {"tool_calls", "reasoning_content"} & row.chosen[0].keys():
            return row.chosen[0]["content"].strip()
        before = self._text(row.prompt, row.tools, asking=True)
        return self.text(self._tokens(self._text([*row.prompt, row.chosen[0]], row.tools)[len(before) :]))

    def prompt_example(self, row: Row) -> TokenizedExample:
        """The row's prompt as a sequence with weights of 0. RowError: see `prompt`, or the row is a plain text."""
        if not row.prompt:
            raise RowError("text", row.text, "is not a prompt")
        tokens = self.prompt(row.prompt, row.tools)
        return TokenizedExample(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32))

    def examples(self, row: Row, longest_text: int = 0) -> list[list[TokenizedExample]]:
        """The row as sequences in which the assistant's messages are trained on, in groups that stay together.

        Usually this is one sequence. Some templates rewrite earlier turns when later turns follow, for example to
        drop reasoning. Then each assistant message becomes one sequence, preceded by exactly the tokens that sampling
        sees. The two answers of a preference form one group. A text is cut into equal sequences of at most
        `longest_text` tokens (0 = not cut).

        RowError: the template rejects the row, or does not show one of its fields.
        """
        if row.text:
            tokens = np.array(self._tokens(self._escaped(row.text) + str(self._tokenizer.eos_token or "")), np.int32)
            if len(tokens) < 2:
                raise RowError("text", row.text, "has a single token, and training needs two")
            parts = np.array_split(tokens, -(-len(tokens) // longest_text) if longest_text else 1)
            return [[TokenizedExample(part, np.ones(len(part), np.float32))] for part in parts]
        if not row.rejected:
            return [[example] for example in self._answered(row.prompt, row.chosen, row.tools)]
        pair = [self._answered(row.prompt, answer, row.tools) for answer in (row.chosen, row.rejected)]
        for name, examples in zip(("chosen", "rejected"), pair, strict=True):
            if len(examples) > 1:
                rule = "must be one message: the chat template needs a sequence for each turn"
                raise RowError(name, [message["role"] for message in getattr(row, name)], rule)
        return [[example for examples in pair for example in examples]]

    def _answered(
        self, prompt: Sequence[Message], answer: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[TokenizedExample]:
        """Tokenize a conversation. Each part between two borders is tokenized separately, as in sampling."""
        turns = [i for i, message in enumerate(answer) if message["role"] == "assistant" and message.get("weight", 1)]
        if not turns:
            raise RowError("messages", [message["role"] for message in answer], "have no answer with a weight over 0")
        asked = [self._text([*prompt, *answer[:i]], tools, asking=True) for i in turns]
        answered = [self._text([*prompt, *answer[: i + 1]], tools) for i in turns]
        for i, before, after in zip(turns, asked, answered, strict=True):
            name = f"messages[{len(prompt) + i}]"
            if not after.startswith(before):
                raise RowError(
                    name, after[-200:], "the chat template renders this answer differently from its generation prompt"
                )
            if not holds_text(after[len(before) :], self._escaped(answer[i]["content"]).strip()):
                raise RowError(f"{name}.content", answer[i]["content"], "the chat template drops a part of it")
        self._check_fields([*prompt, *answer[: turns[-1] + 1]], tools)
        if all(later.startswith(earlier) for earlier, later in zip(answered, asked[1:], strict=False)):
            borders = [0, *(len(text) for pair in zip(asked, answered, strict=True) for text in pair)]
            return [self._example(answered[-1], borders)]
        return [
            self._example(after, [0, len(before), len(after)]) for before, after in zip(asked, answered, strict=True)
        ]

    def _example(self, text: str, borders: Sequence[int]) -> TokenizedExample:
        tokens: list[int] = []
        weights: list[float] = []
        for i, (start, end) in enumerate(pairwise(borders)):
            part = self._continued(text[:start], text[start:end])
            tokens += part
            weights += [float(i % 2)] * len(part)  # read, trained on, read, trained on, ...
        if not any(weights[1:]):
            raise RowError("messages", text[-200:], "have no token to train on")
        return TokenizedExample(np.array(tokens, np.int32), np.array(weights, np.float32))

    def _check_fields(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        if self._format == "chat":
            self._template.check(messages, tools)
            return
        _check_plain(messages, tools)

    def _text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, asking: bool = False) -> str:
        """Render the conversation by the format's rules. Marks replace special tokens in its own texts."""
        if self._format == "text":
            end = "" if asking else str(self._tokenizer.eos_token or "")
            return self._escaped("".join(message["content"] for message in messages)) + end
        conversation = [self._for_template(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=_with_texts(tools, self._escaped) or None,
                tokenize=False,
                add_generation_prompt=asking,
            )
        except Exception as error:  # noqa: BLE001  a template is a program, which can fail in any way
            raise RowError(
                "messages", [m["role"] for m in messages], f"the chat template rejects them: {error}"
            ) from None
        return str(text)

    def _for_template(self, message: Message) -> dict[str, Any]:
        """The message with the field names of templates, which use different names for reasoning."""
        shown: dict[str, Any] = {key: value for key, value in message.items() if key != "weight"}
        if "reasoning_content" in message:
            shown["thinking"] = message["reasoning_content"]
        return dict(_with_texts(shown, self._escaped))

    @cached_property
    def _specials(self) -> list[tuple[str, bool, bool]]:
        """All special tokens, longest first: (text, whether it includes spaces before it, and after it)."""
        added = self._tokenizer.added_tokens_decoder.values()
        tokens = {str(token.content): (token.lstrip, token.rstrip) for token in added if token.special}
        tokens |= {
            str(token): (False, False) for token in self._tokenizer.all_special_tokens if str(token) not in tokens
        }
        return sorted(((text, *strips) for text, strips in tokens.items() if text), key=lambda one: (-len(one[0]), one))

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        tokens = (
            (rf"\s*{re.escape(t)}" if left else re.escape(t)) + (r"\s*" if right else "")
            for t, left, right in self._specials
        )
        return re.compile("|".join(["\ufdd0", *tokens]))

    def _escaped(self, text: str) -> str:
        """The text with special tokens replaced by marks, unless they stay special tokens."""
        if self._special_tokens == "tokens" or not self._special_pattern.search(text):
            return text
        return self._plain_pattern.sub(lambda found: f"\ufdd0{self._marks.index(found[0])}\ufdd1", text)

    @cached_property
    def _marks(self) -> list[str]:
        """The texts that marks replace, by number. The character that begins a mark is one of them."""
        return ["\ufdd0", *(text for text, *_ in self._specials)]

    @cached_property
    def _plain_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._marks)))

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer begins every text with a space, even a continuation, as Llama 2's does."""
        alone, line, both = (self._tokenizer.encode(text, add_special_tokens=False) for text in ("a", "\n", "\na"))
        return bool(both[: len(line)] == line and both[len(line) :] != alone)

    def _continued(self, before: str, text: str) -> list[int]:
        """The tokens of a text that follows the text `before`."""
        for known in (before, "\n") if before and self._adds_space else ():
            first, both = self._tokens(known), self._tokens(known + text)
            if both[: len(first)] == first:
                return both[len(first) :]
        return self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        """The text's tokens. The template's special tokens stay special, and marks become plain text."""
        if "\ufdd0" not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        tokens: list[int] = []
        for part, special in _parts(text, self._special_pattern):
            if special:
                tokens += self._tokenizer.encode(part, add_special_tokens=False)
            elif part:
                plain = _MARK.sub(lambda found: self._marks[int(found[1])], part)
                tokens += self._tokenizer.encode(plain, add_special_tokens=False, split_special_tokens=True)
        return tokens


def _check_plain(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise RowError for a part of a conversation that the format `text` has no place for."""
    for i, message in enumerate(messages):
        for key, value in message.items():
            if key not in ("role", "content", "weight"):
                raise RowError(f"messages[{i}].{key}", value, "format 'text' has no place for it; use format 'chat'")
    if tools:
        raise RowError("tools", [tool["function"]["name"] for tool in tools], "format 'text' has no place for them")


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with all texts in it changed."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {key: _with_texts(held, change) for key, held in value.items()}
        case list() | tuple():
            return [_with_texts(held, change) for held in value]
    return value


def _parts(text: str, special: re.Pattern[str]) -> list[tuple[str, bool]]:
    """The text split at the template's special tokens: (part, whether it is a special token)."""
    parts, end = [], 0
    for found in special.finditer(text):
        if found[0] != "\ufdd0":
            parts += [(text[end : found.start()], False), (found[0], True)]
            end = found.end()
    return [*parts, (text[end:], False)]
