"""The rows of a step, from the requests of its history."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.deployments.blame import rows_of_step


def test_equal_rows_of_several_requests_are_equal() -> None:
    def requested(seq_id: int, *losses: str) -> Any:
        message = pb.ForwardBackwardRequest(model_id="run", seq_id=seq_id, loss_fn="cross_entropy")
        for loss in losses:
            message.data.add().loss_fn_inputs[loss].dense = b"1234"
        payload = message.SerializeToString()
        return SimpleNamespace(step=7, kind="forward_backward", error=None, payload=payload)

    run: Any = SimpleNamespace(run_id="run", requests=lambda: [requested(1, "a", "b"), requested(2, "a")])
    first, second, third = (row.SerializeToString(deterministic=True) for row in rows_of_step(run, 7))
    assert first == third != second
