"""Rows as tokens, by the model's own chat template; cached in the work folder by their content."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.data import load_rows
from tinkerflow.tasks.pipelines.rows import Message, Row
from tinkerflow.tasks.pipelines.work import create_once, digest, open_work

if TYPE_CHECKING:
    import tinker
    from transformers import PreTrainedTokenizerBase

Format = Literal["chat", "text"]
_VERSION = "2"  # of the rules below; part of the cache's keys


@dataclass(frozen=True)
class TokenizedExample:
    """The tokens [T] of one sequence, and the weight [T] with which each token is learnt (0: not learnt)."""

    tokens: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]

    def scaled(self, factor: float) -> TokenizedExample:
        """The example with its weights times `factor`."""
        return TokenizedExample(self.tokens, (self.weights * np.float32(factor)).astype(np.float32))

    def datum(self) -> tinker.Datum:
        """The input of `cross_entropy`: position t predicts token t + 1."""
        import tinker

        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(self.tokens[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(self.tokens[1:].astype(np.int64)),
                "weights": tinker.TensorData.from_numpy(self.weights[1:]),
            },
        )


class Rendered(BaseModel):
    """A data set as tokens. key: its place in the work folder, for `load_examples`.

    A preference makes two successive examples: the chosen and the rejected answer. left_out: what was too long.
    """

    key: str
    examples: int
    left_out: int


class Renderer:
    """A tokenizer with the rules by which conversations become tokens.

    Format chat: the tokenizer's chat template. Format text, for models without a template: the messages' texts one
    after another, then the end-of-text token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, format_: Format = "chat") -> None:
        """Raise UserError when the format is chat and the tokenizer has no chat template."""
        if format_ == "chat" and not tokenizer.chat_template:
            raise UserError(f"format 'chat': the tokenizer {tokenizer.name_or_path} has no chat template; use 'text'")
        self._tokenizer = tokenizer
        self._format = format_

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Strings that no text of a data set may contain."""
        return tuple(sorted({str(token) for token in self._tokenizer.all_special_tokens}))

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that make the same tokens of the same rows."""
        rules = getattr(self._tokenizer, "backend_tokenizer", None)
        return digest(
            _VERSION,
            self._format,
            str(self._tokenizer.chat_template),
            self.vocabulary,
            rules.to_str() if rules else "",
        )

    @property
    def vocabulary(self) -> str:
        """Equal for tokenizers whose token ids mean the same."""
        return digest(str(sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])))

    @property
    def stop(self) -> list[int]:
        """Token ids that end an answer."""
        return [] if self._tokenizer.eos_token_id is None else [int(self._tokenizer.eos_token_id)]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens that ask for the next assistant message."""
        return self._tokens(self._text(messages, asking=True))

    def text(self, tokens: Sequence[int]) -> str:
        """Sampled tokens as text, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def examples(self, prompt: Sequence[Message], answer: Sequence[Message]) -> list[TokenizedExample]:
        """The conversation as sequences in which the assistant's messages of `answer` are learnt.

        Usually this is one sequence. Some templates rewrite earlier turns once there are later ones, for example to
        drop thoughts. Then there is one sequence for each assistant message, with exactly the tokens before it that
        sampling sees. Each part between two borders is tokenized separately, as it is when the model is sampled.
        """
        turns = [i for i, message in enumerate(answer) if message["role"] == "assistant"]
        asked = [self._text([*prompt, *answer[:i]], asking=True) for i in turns]
        answered = [self._text([*prompt, *answer[: i + 1]]) for i in turns]
        for before, after in zip(asked, answered, strict=True):
            if not after.startswith(before):
                raise UserError("format 'chat': the chat template writes an answer otherwise than it asks for it")
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
            part = self._tokens(text[start:end])
            tokens += part
            weights += [float(i % 2)] * len(part)  # read, learnt, read, learnt, ...
        return TokenizedExample(np.array(tokens, np.int32), np.array(weights, np.float32))

    def _text(self, messages: Sequence[Message], *, asking: bool = False) -> str:
        if self._format == "text":
            end = "" if asking else str(self._tokenizer.eos_token or "")
            return "".join(message["content"] for message in messages) + end
        conversation = [{"role": message["role"], "content": message["content"]} for message in messages]
        return str(self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=asking))

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


@task(name="render", task_run_name="render {data_digest}", cache_policy=NO_CACHE)
def render(data_digest: str, work_url: str, renderer: Renderer, max_tokens: int) -> Rendered:
    """Make tokens of a data set, once for each content, tokenizer and length.

    Sequences longer than `max_tokens` are left out; a preference is left out when one of its two is longer. Raises
    UserError when none is left.
    """
    work = open_work(work_url)
    key = f"rendered/{digest(data_digest, renderer.fingerprint, str(max_tokens))}.npz"
    try:
        data = work.read(key)
    except FileNotFoundError:
        rows = load_rows(work_url, data_digest)
        data = _pack(_render(rows, renderer), max_tokens)
        create_once(work, key, data)
    with np.load(io.BytesIO(data)) as arrays:
        examples, left_out = len(arrays["lengths"]), int(arrays["left_out"])
    if not examples:
        raise UserError(f"max_tokens {max_tokens}: all {left_out} sequences of the data are longer")
    return Rendered(key=key, examples=examples, left_out=left_out)


def load_examples(work_url: str, key: str) -> list[TokenizedExample]:
    """The sequences that `render` stored."""
    with np.load(io.BytesIO(open_work(work_url).read(key))) as arrays:
        tokens, weights, ends = arrays["tokens"], arrays["weights"], np.cumsum(arrays["lengths"])
    starts = [0, *ends[:-1]]
    return [TokenizedExample(tokens[a:b], weights[a:b]) for a, b in zip(starts, ends, strict=True)]


def _render(rows: Sequence[Row], renderer: Renderer) -> list[list[TokenizedExample]]:
    """Groups of sequences that stay together: the two of a preference; otherwise one sequence each."""
    groups = []
    for row in rows:
        if row.rejected:
            groups.append([_only(renderer, row.prompt, answer) for answer in (row.chosen, row.rejected)])
        elif row.chosen:
            groups += [[example] for example in renderer.examples(row.prompt, row.chosen)]
    return groups


def _only(renderer: Renderer, prompt: Sequence[Message], answer: Sequence[Message]) -> TokenizedExample:
    examples = renderer.examples(prompt, answer)
    if len(examples) > 1:
        raise UserError("preference: the chat template needs a sequence for each turn; give answers of one message")
    return examples[0]


def _pack(groups: Sequence[Sequence[TokenizedExample]], max_tokens: int) -> bytes:
    fit = [group for group in groups if max(len(example.tokens) for example in group) <= max_tokens]
    kept = [example for group in fit for example in group]
    out = io.BytesIO()
    np.savez_compressed(
        out,
        tokens=np.concatenate([np.zeros(0, np.int32), *(example.tokens for example in kept)]),
        weights=np.concatenate([np.zeros(0, np.float32), *(example.weights for example in kept)]),
        lengths=np.array([len(example.tokens) for example in kept], np.int64),
        left_out=np.int64(len(groups) - len(fit)),
    )
    return out.getvalue()
