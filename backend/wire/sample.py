"""sample: from the request's JSON to the pool's SampleRequest, with every check of its content."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from tinkerflow.backend.commands import Int32, PromptWishes, SampleRequest
from tinkerflow.backend.errors import UserError, broken, shown
from tinkerflow.backend.wire.fields import Fields
from tinkerflow.backend.wire.targets import MAX_LISTED, target_tokens

MAX_SAMPLES = 1024  # sequences of one request
MAX_STOPS = 256  # stop tokens or stop strings of one request
_SEED_BITS = 64
MAX_STOP_CHARACTERS = 1024  # of one stop string


def num_samples(values: Fields) -> int:
    """How many sequences a sample request asks for, 1 when it does not say."""
    return values.optional_whole("num_samples", 1, MAX_SAMPLES) or 1


def with_seed(body: bytes) -> bytes:
    """`body`, with a seed drawn for it when it has none: stored with the request, so that a replay repeats it."""
    values = orjson.loads(body)
    params = values.setdefault("sampling_params", {})
    if isinstance(params, dict) and params.get("seed") is None:
        params["seed"] = secrets.randbits(_SEED_BITS)
        return orjson.dumps(values)
    return body


def decode_sample(
    payload: bytes,
    *,
    request_id: str,
    owner: str,
    snapshot_id: str | None,
    vocab_size: int,
    max_context: int,
    eos: Sequence[int],
) -> SampleRequest:
    """The command for a sample request. An absent `stop` means `eos`; an empty list means nothing stops it.

    An absent max_tokens means all that the context has left; the seed is brought to 0 <= seed < 2**64.
    UserError names the field, its value and the rule.
    """
    values = Fields.parse(payload)
    prompt_T = _prompt(values, vocab_size, max_context)
    params = values.object("sampling_params") or Fields({}, "sampling_params.")
    seed = params.optional_whole("seed", -(2**63), 2**64 - 1)
    if seed is None:
        raise broken("sampling_params.seed", None, "drawn before the request is stored")
    stop_tokens, stop_strings = _stops(params.get("stop"), vocab_size, eos)
    top_k = params.optional_whole("top_k", -1, 2**31 - 1)
    top_p = params.number("top_p", 1.0, 0.0, 1.0)
    if top_k == 0:
        raise broken("sampling_params.top_k", 0, "-1 (off) or at least 1")
    if top_p == 0.0:
        raise broken("sampling_params.top_p", 0.0, "> 0 and <= 1")
    return SampleRequest(
        request_id=request_id,
        owner=owner,
        snapshot_id=snapshot_id,
        prompt_T=prompt_T,
        num_samples=num_samples(values),
        max_tokens=_max_tokens(params, len(prompt_T), max_context),
        temperature=params.number("temperature", 1.0, 0.0),
        top_k=-1 if top_k is None else top_k,
        top_p=top_p,
        seed=seed % 2**_SEED_BITS,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        prompt_logprobs=values.flag("prompt_logprobs", False),
        prompt=_prompt_wishes(values, len(prompt_T), vocab_size),
        topk_sample=_listed(values, "topk_sample_logprobs", vocab_size),
    )


def records_stability(payload: bytes) -> bool:
    """Whether a sample request wants its sequences recorded for stable_reinforce."""
    return Fields.parse(payload).flag("record_stability_info", False)


def _listed(values: Fields, name: str, vocab_size: int) -> int:
    return values.optional_whole(name, 0, min(MAX_LISTED, vocab_size)) or 0


def _prompt_wishes(values: Fields, prompt: int, vocab_size: int) -> PromptWishes | None:
    last_n = values.optional_whole("prompt_logprobs_last_n", -(2**63), 2**63 - 1)
    if last_n is not None and not 1 <= last_n <= prompt - 1:
        raise broken("prompt_logprobs_last_n", last_n, f"1 to {prompt - 1}, the prompt's length less one")
    if last_n is not None and not values.flag("prompt_logprobs", False):
        raise broken("prompt_logprobs_last_n", last_n, "absent without prompt_logprobs")
    top = _listed(values, "topk_prompt_logprobs", vocab_size)
    targets_TK = target_tokens(values, prompt, vocab_size)
    alternatives = values.optional_whole("prompt_alt_tokens_k", 0, MAX_LISTED) or 0
    if last_n is None and targets_TK is None and not top and not alternatives:
        return None
    return PromptWishes(last_n, top, targets_TK, alternatives)


def _prompt(values: Fields, vocab_size: int, max_context: int) -> Int32:
    prompt = values.object("prompt")
    chunks = prompt.get("chunks") if prompt else None
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


def _max_tokens(params: Fields, prompt: int, max_context: int) -> int:
    room = max_context - prompt
    asked = params.optional_whole("max_tokens", 1, 2**31 - 1)
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
