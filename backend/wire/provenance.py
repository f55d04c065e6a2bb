"""Provenance: whether each position of a datum belongs to a prompt or was sampled, and in which sequence.

Letter: T tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.core.errors import UserError, broken
from tinkerflow.backend.spec.commands import Example, Float32, Int16, Int32, StabilityInfo
from tinkerflow.backend.spec.supports import Supports
from tinkerflow.backend.wire import tinker_pb2 as pb

Span = pb.PromptProvenanceSpan | pb.SampledProvenanceSpan


class PlacedRecords(NamedTuple):
    """The records of a datum's positions.

    logprobs_T, sampled_T: the sampler's logprobs, and whether a position was sampled. routes_Tn, supports: as in
    `Example`.
    """

    logprobs_T: Float32
    sampled_T: npt.NDArray[np.bool_]
    routes_Tn: Int16 | None
    supports: Supports | None


def sequences_named(datum: pb.Datum, index: int) -> set[str]:
    """The sequence ids that a datum's spans name. UserError: a span is invalid."""
    named: set[str] = set()
    for field in ("model_input_spans", "loss_fn_input_spans"):
        for where, _, span in _spans(datum, index, field):
            if not span.sequence_id or "\0" in span.sequence_id:
                raise broken(f"{where}.sequence_id", span.sequence_id, "a sequence's id")
            if min(span.offset, span.length) < 0:
                raise UserError(f"{where} has offset {span.offset} and length {span.length}: must both be >= 0")
            named.add(span.sequence_id)
    return named


def attribute(example: Example, datum: pb.Datum, index: int, recorded: Mapping[str, StabilityInfo]) -> Example:
    """The example with the sampler's logprobs, experts and supports, and weight 0 for tokens that were not sampled.

    recorded: the sequences that its spans name. UserError: a list does not tile its field, a sampled span is outside
    its sequence, or a token differs from the sampled token.
    """
    if not example.flat:
        raise UserError(
            f"data[{index}].loss_fn_inputs['target_tokens'] has shape {list(example.targets_TK.shape)}: "
            "stable_reinforce takes [T], the tokens that were sampled"
        )
    _place(datum, index, "model_input_spans", example.tokens_T, recorded)
    found = _place(datum, index, "loss_fn_input_spans", example.targets_TK[:, 0], recorded)
    return replace(
        example,
        weights_TK=np.where(found.sampled_T[:, None], example.weights_TK, np.float32(0)),
        inputs={**example.inputs, "logprobs": found.logprobs_T[:, None]},
        routes_Tn=found.routes_Tn,
        supports=found.supports,
    )


def with_records(example: Example, datum: pb.Datum, index: int, recorded: Mapping[str, StabilityInfo]) -> Example:
    """The example with the sampler's experts and supports, if its datum has spans and one target per position.

    recorded: the sequences that the spans name. UserError as in `attribute`.
    """
    if not datum.loss_fn_input_spans or not example.flat:
        return example
    found = _place(datum, index, "loss_fn_input_spans", example.targets_TK[:, 0], recorded)
    return replace(example, routes_Tn=found.routes_Tn, supports=found.supports)


def _place(
    datum: pb.Datum, index: int, field: str, tokens_T: Int32, recorded: Mapping[str, StabilityInfo]
) -> PlacedRecords:
    covered = sum(span.length for _, _, span in _spans(datum, index, field))
    if covered != len(tokens_T):
        raise UserError(
            f"data[{index}].{field} cover {covered} positions: must tile the field exactly, {len(tokens_T)}"
        )
    logprobs_T, sampled_T = np.zeros(covered, np.float32), np.zeros(covered, np.bool_)
    start, routes_Tn, supported = 0, None, False
    parts: list[Supports] = []
    for where, sampled, span in _spans(datum, index, field):
        here = slice(start, start + span.length)
        start += span.length
        if not sampled:
            parts.append(Supports.unrestricted(span.length))
            continue
        info = recorded[span.sequence_id]
        there = slice(span.offset, span.offset + span.length)
        if there.stop > len(info.tokens_T):
            raise UserError(
                f"{where} covers [{there.start}, {there.stop}) of sequence {span.sequence_id!r}: "
                f"{len(info.tokens_T)} tokens were sampled"
            )
        if not np.array_equal(tokens_T[here], info.tokens_T[there]):
            at = int(np.argmax(tokens_T[here] != info.tokens_T[there]))
            raise UserError(
                f"{where}: position {here.start + at} is token {tokens_T[here][at]}, "
                f"but {info.tokens_T[there][at]} was sampled there in {span.sequence_id!r}"
            )
        logprobs_T[here], sampled_T[here] = info.logprobs_T[there], True
        if info.routes_Tn is not None:
            if routes_Tn is None:
                routes_Tn = np.full((covered, info.routes_Tn.shape[1]), -1, np.int16)
            routes_Tn[here] = info.routes_Tn[there]
        supported |= info.supports is not None
        supports = info.supports or Supports.unrestricted(len(info.tokens_T))
        parts.append(supports.part(there.start, there.stop))
    return PlacedRecords(logprobs_T, sampled_T, routes_Tn, Supports.joined(parts) if supported else None)


def _spans(datum: pb.Datum, index: int, field: str) -> Iterator[tuple[str, bool, Span]]:
    """Each span with its name for errors, and whether it was sampled."""
    for j, span in enumerate(getattr(datum, field)):
        where, kind = f"data[{index}].{field}[{j}]", span.WhichOneof("span")
        if kind is None:
            raise broken(where, "empty", "prompt_tokens or sampled_tokens")
        yield where, kind == "sampled_tokens", getattr(span, kind)
