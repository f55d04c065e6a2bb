"""The search for the rows that spoiled a step: each row of the step is computed alone, from the state before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import orjson

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.spec.history import digest
from tinkerflow.backend.spec.losses import loss_named
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.deployments.recorded_run import RecordedRun

_WORST = 5  # tokens of a row


@dataclass(frozen=True)
class BlamedRow:
    """A row of a step, computed alone.

    number: its place among the rows of the step. tokens: their number. loss: the sum over the tokens. grad_norm: of the
    row's gradients. worst: position, target and logprob of its least likely weighted tokens. repeats: the number of an
    earlier equal row of the step.
    """

    number: int
    tokens: int
    loss: float
    grad_norm: float
    worst: tuple[tuple[int, int, float], ...]
    repeats: int | None


def rows_of_step(run: RecordedRun, step: int) -> list[pb.ForwardBackwardRequest]:
    """A request for each row of the step's forward_backwards. NotFoundError: the history has no such step."""
    rows = []
    for recorded in run.requests():
        if recorded.step == step and recorded.kind == "forward_backward" and recorded.error is None:
            message = pb.ForwardBackwardRequest.FromString(recorded.payload)
            for datum in message.data:
                alone = pb.ForwardBackwardRequest()
                alone.CopyFrom(message)
                del alone.data[:]
                alone.data.append(datum)
                rows.append(alone)
    if not rows:
        raise NotFoundError(f"run {run.run_id!r}: its history has no forward_backward of step {step}")
    return rows


def blame(run: RecordedRun, step: int) -> Iterator[BlamedRow]:
    """Compute each row of `step` alone, from the state before the step, and yield its figures.

    The optimizer takes a step of learning rate 0 after each row, which reports the norm of the row's gradients and
    leaves the weights as they are.
    """
    api, optimizer = run.api, OPTIMIZERS[run.about["optimizer"]]
    metadata = {"rerun_of": run.run_id, "name": f"blame of step {step}"}
    body = {"path": run.checkpoint(step - 1), "optimizer": True, "user_metadata": metadata}
    rows = rows_of_step(run, step)
    model_id = api.new_model("load_weights", body)
    params = {name: 0.0 for name in ("learning_rate", "weight_decay") if name in optimizer.bounds}
    kind = {} if optimizer.request_field == "adam_params" else {"type": optimizer.name}
    seen: dict[str, int] = {}
    for number, message in enumerate(rows):
        message.model_id, message.seq_id = model_id, 2 * number + 1
        forward = api.submit("forward_backward", message.SerializeToString())
        address = {"model_id": model_id, "seq_id": 2 * number + 2}
        made = api.submit("optim_step", {**address, optimizer.request_field: {**kind, **params}})
        output = pb.ForwardBackwardOutput.FromString(api.result(forward))
        metrics = orjson.loads(api.result(made))["metrics"]
        (datum,) = message.data
        repeats = seen.setdefault(digest(datum.SerializeToString(deterministic=True)), number)
        yield BlamedRow(
            number,
            sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input),
            output.metrics.get("loss:sum", float("nan")),
            metrics.get("grad_norm", float("nan")),
            _worst(datum, output) if not loss_named(message.loss_fn).traced else (),
            None if repeats == number else repeats,
        )


def _worst(datum: pb.Datum, output: pb.ForwardBackwardOutput) -> tuple[tuple[int, int, float], ...]:
    """Position, target and logprob of the least likely tokens with a weight, the least likely first."""
    inputs = datum.loss_fn_inputs
    if "target_tokens" not in inputs or not output.loss_fn_outputs:
        return ()
    logprobs_T = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
    kind = {pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}.get(inputs["target_tokens"].dtype)
    if kind is None or inputs["target_tokens"].WhichOneof("encoding") != "dense":
        return ()
    targets_T = np.frombuffer(inputs["target_tokens"].dense, kind)
    if targets_T.shape != logprobs_T.shape:
        return ()
    order = np.argsort(logprobs_T, kind="stable")[:_WORST]
    return tuple((int(place), int(targets_T[place]), float(logprobs_T[place])) for place in order)
