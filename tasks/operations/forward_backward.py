"""forward and forward_backward: logprobs and loss; forward_backward also accumulates gradients."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from tinkerflow.backend.catalog.model_card import image_processor
from tinkerflow.backend.journal import Effect, LossMeasured, Outcome, UsageKind, Used
from tinkerflow.backend.spec.commands import Forward, ForwardResult
from tinkerflow.backend.spec.drift import KL_MEAN, worst_tokens
from tinkerflow.backend.wire import (
    decode_forward,
    drift_metrics,
    encode_forward,
    load_custom_loss,
    read_forward,
    sampled_tokens,
)
from tinkerflow.tasks.execution.operation import INLINE_BYTES, Execution

log = logging.getLogger(__name__)


async def execute(execution: Execution) -> Outcome:
    """Check the data, run it through the model, and answer with one record per datum and the sum of the loss.

    A traced loss or sampled sequences that the request refers to by id must belong to the same session.
    """
    context, request = execution.context, execution.request
    card, size = context.card, len(request.payload)
    replay = context.routing_replay and card.experts_per_token > 0
    read = await context.decode(request.owner, size, lambda: read_forward(request.payload, replay=replay))
    custom, recorded = None, {}
    if read.loss_id is not None:
        stored = await context.read(context.journal.custom_losses.definition, read.loss_id, request.session_id)
        custom = load_custom_loss(stored)
    if read.sequence_ids:
        recorded = await context.read(
            context.journal.custom_losses.stability,
            request.session_id,
            read.sequence_ids,
            card.name if replay else None,
        )
    processor = image_processor(card.path) if read.image_tokens is not None else None

    def decode() -> Forward:
        return decode_forward(
            read,
            vocab_size=card.vocab_size,
            max_context=card.max_context,
            context_rule=card.context_rule,
            custom=custom,
            recorded=recorded,
            processor=processor,
        )

    if processor is None:
        command = await context.decode(request.owner, size, decode)
        async with execution.slot:
            reply = execution.send(command.copy_with(adapter_id=execution.adapter_id), ForwardResult)
        result = await reply
    else:
        pixels = processor.bytes_of(read.image_tokens or 0)
        async with AsyncExitStack() as held:
            async with execution.slot:  # no later operation of the model may take the quota that this one waits for
                decoding = await held.enter_async_context(context.image_memory.reserve(request.owner, pixels))
                async with decoding:
                    command = await context.decode(request.owner, INLINE_BYTES + 1, decode)
                reply = execution.send(command.copy_with(adapter_id=execution.adapter_id), ForwardResult)
            result = await reply

    def encode() -> tuple[bytes, dict[str, float], list[str]]:
        drift = drift_metrics(command, result)
        drifts = 0 < context.most_drift < drift.get(KL_MEAN, 0.0)
        worst = worst_tokens(sampled_tokens(command, result)) if drifts else []
        return encode_forward(result.copy_with(metrics={**result.metrics, **drift})), drift, worst

    answer, drift, worst = await context.decode(request.owner, sum(array.nbytes for array in result.logprobs), encode)
    if worst:
        log.warning(
            "model %s trains on samples of another policy, of older weights or computed differently: %s; %s",
            execution.model_id,
            ", ".join(f"{name} {value:.3g}" for name, value in drift.items()),
            "; ".join(worst),
        )
    tokens = sum(len(example.tokens_T) for example in command.examples)
    effects: list[Effect] = [Used(request.session_id, card.name, UsageKind.TRAINING, tokens)]
    if command.backward:
        weight = float(sum(example.weights_TK.sum(dtype=float) for example in command.examples))
        effects.append(LossMeasured(execution.model_id, tokens, weight, result.loss_sum, drift.get(KL_MEAN)))
    return request.done(answer, "proto", *effects)
