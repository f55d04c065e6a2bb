"""Requests made by the SDK's own converters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

Body = Callable[..., bytes]


def _body(
    data: Sequence[types.Datum],
    loss: str = "cross_entropy",
    config: dict[str, float | str] | None = None,
    forward_only: bool = False,
) -> bytes:
    given = ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=config)  # type: ignore[arg-type]
    message = forward_backward_request_to_proto(
        ForwardBackwardRequest(forward_backward_input=given, model_id="sess-1:train:0", seq_id=7)
    )
    message.forward_only = forward_only
    return message.SerializeToString()


@pytest.fixture
def body() -> Body:
    """body(data, loss, config, forward_only): a forward_backward body as the SDK sends it."""
    return _body


@pytest.fixture
def datum() -> Callable[..., types.Datum]:
    """datum(tokens, **inputs): a datum with these inputs. None leaves an input out."""

    def make(tokens: Sequence[int], **inputs: object) -> types.Datum:
        given = {"target_tokens": np.asarray(tokens, np.int64), "weights": np.ones(len(tokens), np.float32), **inputs}
        return types.Datum(
            model_input=types.ModelInput.from_ints(list(tokens)),
            loss_fn_inputs={key: value for key, value in given.items() if value is not None},
        )

    return make
