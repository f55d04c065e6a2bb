"""forward and forward_backward: logprobs and loss, and gradients where asked for."""

from __future__ import annotations

from dataclasses import replace

from backend.commands import ForwardResult
from backend.journal import Outcome, Pending
from backend.wire import decode_forward, encode_forward
from tasks.runtime import Runtime
from tasks.turns import Turn


async def execute(runtime: Runtime, request: Pending, turn: Turn) -> Outcome:
    """Check the data, run it through the model, answer with one record per datum and the sum of the loss."""
    card, size = runtime.card, len(request.payload)
    command = await runtime.decode(
        size, lambda: decode_forward(request.payload, vocab_size=card.vocab_size, max_context=card.max_context)
    )
    async with turn:
        reply = runtime.send(replace(command, adapter_id=str(request.model_id)), ForwardResult)
    result = await reply
    answer = await runtime.decode(sum(array.nbytes for array in result.logprobs), lambda: encode_forward(result))
    return request.done(answer, "proto")
