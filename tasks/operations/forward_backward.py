"""forward and forward_backward: logprobs and loss; forward_backward also accumulates gradients."""

from __future__ import annotations

import logging
import math
from contextlib import AsyncExitStack

from tinkerflow.backend.catalog.model_card import image_processor
from tinkerflow.backend.journal import Effect, LossMeasured, Outcome, UsageKind, Used
from tinkerflow.backend.spec.commands import Forward, ForwardResult
from tinkerflow.backend.spec.drift import DRIFT_FIGURES, KL_MEAN, drift_means, worst_tokens
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
    """Check the data, run it through the model, and answer with one record for each datum and the summed loss.

    A traced loss or sampled sequences that the request refers to by id must belong to the same session.
    """
    context, request = execution.context, execution.request
    card, size = context.card, len(request.payload)
    routes, supports = context.routing_replay and card.experts_per_token > 0, context.support_replay
    read = await context.decode(
        request.owner, size, lambda: read_forward(request.payload, routes=routes, supports=supports)
    )
    custom, recorded = None, {}
    if read.loss_id is not None:
        stored = await context.read(context.journal.custom_losses.definition, read.loss_id, request.session_id)
        custom = load_custom_loss(stored)
    if read.sequence_ids:
        recorded = await context.read(
            context.journal.custom_losses.stability,
            request.session_id,
            read.sequence_ids,
            routes_of=card.name if routes else None,
            supports_of=card.name if supports else None,
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
        metrics = {**result.metrics, **drift_metrics(command, result)}
        means = drift_means(metrics)
        wrong = [one for one in DRIFT_FIGURES if one.is_wrong(means.get(one.column), context.drift_limits)]
        alarms = [one.alarm(means[one.column], context.drift_limits) for one in wrong]
        if alarms and KL_MEAN in metrics:
            alarms += worst_tokens(sampled_tokens(command, result))
        return encode_forward(result.copy_with(metrics=metrics)), means, alarms

    answer, means, alarms = await context.decode(request.owner, sum(array.nbytes for array in result.logprobs), encode)
    if alarms:
        log.warning("model %s trains on samples of another policy: %s", execution.model_id, "; ".join(alarms))
    tokens = sum(len(example.tokens_T) for example in command.examples)
    effects: list[Effect] = [Used(request.session_id, card.name, UsageKind.TRAINING, tokens)]
    if command.backward:
        weight, loss = float(sum(example.weights_TK.sum(dtype=float) for example in command.examples)), result.loss_sum
        if math.isfinite(loss) and any((example.weights_TK < 0).any() for example in command.examples):
            weight = loss = 0.0  # over weights of both signs, as of DPO, the loss has no mean
        effects.append(LossMeasured(execution.model_id, tokens, weight, loss, **means))
    return request.done(answer, "proto", *effects)
