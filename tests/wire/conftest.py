"""Requests made by the SDK's own converters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest


def forward_body(
    data: Sequence[types.Datum],
    loss: str = "cross_entropy",
    config: dict[str, float | str] | None = None,
    forward_only: bool = False,
) -> bytes:
    """A forward_backward body as the SDK sends it."""
    given = ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=config)  # type: ignore[arg-type]
    message = forward_backward_request_to_proto(
        ForwardBackwardRequest(forward_backward_input=given, model_id="sess-1:train:0", seq_id=7)
    )
    message.forward_only = forward_only
    return message.SerializeToString()


def datum(tokens: Sequence[int], **inputs: object) -> types.Datum:
    """A datum with these inputs, and all weights 1. None leaves an input out."""
    given = {"target_tokens": np.asarray(tokens, np.int64), "weights": np.ones(len(tokens), np.float32), **inputs}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={key: value for key, value in given.items() if value is not None},
    )
