"""sample: from a request's body to the pool's SampleRequest, with every check that needs the model card."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from tinkerflow.backend.commands import Int32, PromptWishes, SampleRequest
from tinkerflow.backend.errors import UserError, broken, shown
from tinkerflow.backend.wire.requests import MAX_LISTED, SampleBody
from tinkerflow.backend.wire.targets import target_tokens

MAX_STOPS = 256  # stop tokens or stop strings of one request
MAX_STOP_CHARACTERS = 1024  # of one stop string
_SEED_BITS = 64


def with_seed(body: bytes, values: dict[str, Any]) -> bytes:
    """`body`, whose values these are, with a seed when it has none. A replay of the stored body repeats the sample."""
    params = values.get("sampling_params", {})
    if isinstance(params, dict) and params.get("seed") is None:
        return orjson.dumps({**values, "sampling_params": {**params, "seed": secrets.randbits(_SEED_BITS)}})
    return body


def sample_request(
    body: SampleBody,
    *,
    request_id: str,
    owner: str,
    snapshot_id: str | None,
    vocab_size: int,
    max_context: int,
    eos: Sequence[int],
) -> SampleRequest:
    """The command for a sample request; UserError names the field, its value and the rule.

    request_id, owner: of the request. snapshot_id: what is sampled, None = the base model. vocab_size, max_context:
    of the model, in tokens. eos: the tokens that end a text; they stop a sequence where `stop` is absent, and nothing
    does where it is an empty list. An absent max_tokens means all that the context has left. The seed is brought to
    0 <= seed < 2**64.
    """
    prompt_T = _prompt(body.prompt.chunks, vocab_size, max_context)
    params = body.sampling_params
    if params.seed is None:
        raise broken("sampling_params.seed", None, "drawn before the request is stored")
    stop_tokens, stop_strings = _stops(params.stop, vocab_size, eos)
    if params.top_k == 0:
        raise broken("sampling_params.top_k", 0, "-1 (off) or at least 1")
    if params.top_p == 0.0:
        raise broken("sampling_params.top_p", 0.0, "> 0 and <= 1")
    return SampleRequest(
        request_id=request_id,
        owner=owner,
        snapshot_id=snapshot_id,
        prompt_T=prompt_T,
        num_samples=body.num_samples,
        max_tokens=_max_tokens(params.max_tokens, len(prompt_T), max_context),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed % 2**_SEED_BITS,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        prompt_logprobs=body.prompt_logprobs,
        prompt=_prompt_wishes(body, len(prompt_T), vocab_size),
        topk_sample=_listed("topk_sample_logprobs", body.topk_sample_logprobs, vocab_size),
    )


def _listed(name: str, count: int, vocab_size: int) -> int:
    most = min(MAX_LISTED, vocab_size)
    if count > most:
        raise broken(name, count, f"a whole number from 0 to {most}")
    return count


def _prompt_wishes(body: SampleBody, prompt: int, vocab_size: int) -> PromptWishes | None:
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n <= prompt - 1:
        raise broken("prompt_logprobs_last_n", last_n, f"1 to {prompt - 1}, the prompt's length less one")
    if last_n is not None and not body.prompt_logprobs:
        raise broken("prompt_logprobs_last_n", last_n, "absent without prompt_logprobs")
    top = _listed("topk_prompt_logprobs", body.topk_prompt_logprobs, vocab_size)
    targets_TK = target_tokens(body.target_prompt_logprobs, prompt, vocab_size)
    if last_n is None and targets_TK is None and not top and not body.prompt_alt_tokens_k:
        return None
    return PromptWishes(last_n, top, targets_TK, body.prompt_alt_tokens_k)


def _prompt(chunks: Any, vocab_size: int, max_context: int) -> Int32:
    if not isinstance(chunks, list):
        raise broken("prompt.chunks", chunks, "a list of chunks")
    parts = []
    for i, chunk in enumerate(chunks):
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else chunk
        if kind != "encoded_text":
            takes = "no images" if kind in ("image", "image_asset_pointer") else "text only"
            raise UserError(f"prompt.chunks[{i}].type is {shown(kind)}: must be encoded_text, the model takes {takes}")
        parts.append(_token_array(chunk.get("tokens"), f"prompt.chunks[{i}].tokens", vocab_size))
    prompt_T = np.concatenate(parts) if parts else np.empty(0, np.int32)
    if not 1 <= len(prompt_T) < max_context:
        raise UserError(
            f"prompt has {len(prompt_T)} tokens: must be 1 to {max_context - 1}, the model's context less one"
        )
    return prompt_T


def _token_array(tokens: Any, name: str, vocab_size: int) -> Int32:
    if not isinstance(tokens, list):
        raise broken(name, tokens, "a list of token ids")
    try:
        values = np.asarray(tokens)
    except ValueError as e:  # lists of different lengths
        raise broken(name, tokens, "a flat list of token ids") from e
    if len(tokens) and (values.ndim != 1 or values.dtype.kind not in "iu"):
        raise broken(name, tokens, "a flat list of whole numbers")
    bad = np.flatnonzero((values < 0) | (values >= vocab_size))
    if len(bad):
        raise broken(f"{name}[{bad[0]}]", int(values[bad[0]]), f">= 0 and < {vocab_size}, the model's vocabulary")
    return values.astype(np.int32)


def _max_tokens(asked: int | None, prompt: int, max_context: int) -> int:
    room = max_context - prompt
    if asked is not None and asked > room:
        raise UserError(
            f"sampling_params.max_tokens is {asked}: must be at most {room}, "
            f"what the context of {max_context} tokens has left after a prompt of {prompt}"
        )
    return room if asked is None else asked


def _stops(stop: Any, vocab_size: int, eos: Sequence[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    name = "sampling_params.stop"
    if stop is None:
        return tuple(eos), ()
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list) or len(stop) > MAX_STOPS:
        raise broken(name, stop, f"a string, or at most {MAX_STOPS} strings or token ids")
    if any(isinstance(item, str) and len(item) > MAX_STOP_CHARACTERS for item in stop):
        raise broken(name, stop, f"strings of at most {MAX_STOP_CHARACTERS} characters")
    if all(isinstance(item, str) and item for item in stop):
        return (), tuple(stop)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in stop):
        return tuple(_token_array(stop, name, vocab_size).tolist()), ()
    raise broken(name, stop, "non-empty strings only, or token ids only")
