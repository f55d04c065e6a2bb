"""The common parts of the OpenAI-compatible endpoints: sampling parameters, the options of a stream, and usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from tinkerflow.api.endpoints.targets import Target
from tinkerflow.api.schemas import Strict
from tinkerflow.backend.core.errors import UserError, broken
from tinkerflow.backend.spec.commands import SampleResult

MAX_TOP = 20  # most likely tokens listed at a position: OpenAI's own limit for chats
MOST_CHOICES = 1024  # answers to one request, over all its prompts
# Passed on unchecked: backend/wire checks them, and its errors name the field.
_HANDED_ON = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias",
)  # fmt: skip


class StreamOptions(Strict):
    """include_usage: send a last event with the usage of the whole request."""

    include_usage: bool = False


class SamplingFields(Strict):
    """Sampling parameters of OpenAI, and those that vLLM adds.

    ignore_eos: the tokens that end a text do not end a sample. return_token_ids: also return the ids of prompt and
    answer. return_tokens_as_token_ids: in logprobs, write tokens as `token_id:<n>`, because several tokens may have the
    same text. user: ignored.
    """

    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    skip_special_tokens: bool = True
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [string for string in given if string]

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with the usage. UserError: stream_options without stream."""
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options is given: must be left out without stream")
        return self.stream_options is not None and self.stream_options.include_usage

    def params(self, target: Target, max_tokens: int | None) -> dict[str, Any]:
        """The sampling_params of the tinker protocol. max_tokens: None means the rest of the context."""
        given = {name: getattr(self, name) for name in _HANDED_ON if getattr(self, name) is not None}
        ends = [*(self.stop_token_ids or ()), *(() if self.ignore_eos else target.card.eos_token_ids)]
        return {**given, "max_tokens": max_tokens, "stop": self.stops, "stop_token_ids": ends}


def usage(prompts: Sequence[Sequence[int]], results: Sequence[SampleResult]) -> dict[str, Any]:
    """The usage of requests with these prompts."""
    read = sum(map(len, prompts))
    sampled = sum(len(sequence.tokens_T) for result in results for sequence in result.sequences)
    cached = sum(result.prompt_cache_hit_tokens for result in results)
    return {
        "prompt_tokens": read,
        "completion_tokens": sampled,
        "total_tokens": read + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def check_choices(prompts: int, n: int) -> None:
    """Check the number of answers. UserError: the request asks for too many."""
    if prompts > MOST_CHOICES:
        raise UserError(f"prompt has {prompts} prompts: must have at most {MOST_CHOICES}")
    if prompts * n > MOST_CHOICES:
        raise broken("n", n, f"at most {MOST_CHOICES // prompts} for {prompts} prompts")
