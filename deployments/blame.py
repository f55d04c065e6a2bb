"""Find the rows that spoiled a step, by computing each row alone from the state before the step.

An earlier step may have spoiled the weights instead. Then no row differs from the others, and bisection finds the
earlier step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.spec.history import digest
from tinkerflow.backend.spec.losses import loss_named
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.backend.spec.outliers import BlamedRow, examined, for_pages, ranked
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.deployments.recorded_run import LOADS, NewRun, RecordedRun, quoted

_IN_FLIGHT = 8  # rows with results that are not awaited yet
_DTYPES = {pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4", pb.DTYPE_FLOAT32: "<f4"}


def rows_of_step(run: RecordedRun, step: int) -> list[pb.ForwardBackwardRequest]:
    """One request per row of the step's forward_backwards. NotFoundError: the history contains no such step."""
    rows = []
    for message in _requests(run, step):
        data = list(message.data)
        del message.data[:]
        message.ClearField("seq_id")  # so that equal rows of different requests compare equal
        for datum in data:
            alone = pb.ForwardBackwardRequest()
            alone.CopyFrom(message)
            alone.data.append(datum)
            rows.append(alone)
    return rows


def _requests(run: RecordedRun, step: int) -> list[pb.ForwardBackwardRequest]:
    """The forward_backwards of a step. If the run has made the step several times, the last time counts."""
    found: list[bytes] = []
    waiting: list[bytes] = []  # since the last optim_step or load
    for recorded in run.requests():
        if recorded.error is not None:
            continue
        if recorded.kind == "forward_backward" and recorded.step == step:
            waiting.append(recorded.payload)
        elif recorded.kind == "optim_step" or recorded.kind in LOADS:
            found = waiting if recorded.kind == "optim_step" and waiting else found
            waiting = []
    if not (found := found or waiting):
        raise NotFoundError(f"run {run.run_id!r}: its history has no forward_backward of step {step}")
    return list(map(pb.ForwardBackwardRequest.FromString, found))


def blame(run: RecordedRun, step: int) -> list[BlamedRow]:
    """Compute each row of `step` alone, from the state before the step. Returns the rows as `ranked` orders them.

    After each row, an optimizer step of learning rate 0 reports the norm of the row's gradients and leaves the weights
    unchanged. Equal rows are computed once. The run's pages show the result.
    """
    optimizer = OPTIMIZERS[run.about["optimizer"]]
    equal: dict[str, list[int]] = {}
    rows = rows_of_step(run, step)
    for number, message in enumerate(rows):
        equal.setdefault(digest(message.SerializeToString(deterministic=True)), []).append(number)
    probe = _fork(run, step - 1, f"blame of step {step}")
    params = {name: 0.0 for name in ("learning_rate", "weight_decay") if name in optimizer.bounds}
    kind = {} if optimizer.request_field == "adam_params" else {"type": optimizer.name}
    waiting: deque[tuple[list[int], str, str]] = deque()
    found: list[BlamedRow] = []

    def answered(most: int) -> None:
        """Collect results until at most `most` rows are pending."""
        while len(waiting) > most:
            (number, *repeated), forward, made = waiting.popleft()
            output = pb.ForwardBackwardOutput.FromString(run.api.result(forward))
            norm = orjson.loads(run.api.result(made))["metrics"].get("grad_norm")
            found.append(_row(number, rows[number], output, norm, tuple(repeated)))

    for numbers in equal.values():
        forward = probe.submit("forward_backward", rows[numbers[0]])
        waiting.append((numbers, forward, probe.submit("optim_step", {optimizer.request_field: {**kind, **params}})))
        answered(_IN_FLIGHT)
    answered(0)
    run.api.unload(probe.id)  # so that the next fork fits into the project's limit of live models
    worst = ranked(found)
    run.api.ask(f"training_runs/{quoted(run.run_id)}/blames", {"step": step, "rows": for_pages(worst)})
    return worst


def origin(run: RecordedRun, step: int, back: int) -> int | None:
    """The step, among the `back` steps before `step`, that made its data unlikely; None if the data are not unlikely.

    Bisects the states after these steps. The data are unlikely under a state if their mean nats per token exceed the
    midpoint between the first and the last state. These two must be more than log 4 nats apart.
    """
    data = _requests(run, step)
    begin = min(run.made(), default=1) - 1  # the step of the state that the run began with
    first, last = max(begin, step - 1 - back), step - 1
    usual, unlikely = _nats(run, first, data), _nats(run, last, data)
    if not unlikely - usual > math.log(4):  # the difference is NaN for data without logprobs
        return None
    while last - first > 1:
        middle = (first + last) // 2
        if _nats(run, middle, data) > (usual + unlikely) / 2:
            last = middle
        else:
            first = middle
    return last


def _fork(run: RecordedRun, step: int, name: str) -> NewRun:
    return run.fork(step, {"rerun_of": run.run_id, "name": name})


def _nats(run: RecordedRun, step: int, data: Sequence[pb.ForwardBackwardRequest]) -> float:
    """Mean nats per counted token of the data under the state after `step`; NaN without logprobs."""
    if any(loss_named(message.loss_fn).traced for message in data):
        return math.nan
    probe, total, count = _fork(run, step, f"search for the origin at step {step}"), 0.0, 0
    for message in data:
        message.forward_only = True
        output = pb.ForwardBackwardOutput.FromString(run.api.result(probe.submit("forward_backward", message)))
        logprobs = np.concatenate([_logprobs(record) for record in output.loss_fn_outputs])
        parts = [part for datum in message.data if (part := _weights(datum)) is not None]
        counted = np.ones(len(logprobs), bool) if len(parts) < len(message.data) else np.concatenate(parts) != 0
        total, count = total - float(logprobs[counted].sum()), count + int(counted.sum())
    run.api.unload(probe.id)
    return total / count if count else math.nan


def _row(
    number: int,
    message: pb.ForwardBackwardRequest,
    output: pb.ForwardBackwardOutput,
    norm: float | None,
    repeated: tuple[int, ...],
) -> BlamedRow:
    (datum,) = message.data
    size = sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)
    loss = output.metrics.get("loss:sum", math.nan)
    row = BlamedRow(number, size, loss if math.isfinite(loss) else None, norm, repeated=repeated)
    targets = _tensor(datum, "target_tokens")
    if loss_named(message.loss_fn).traced or targets is None or not output.loss_fn_outputs:
        return row
    logprobs, weights, sampled = _logprobs(output.loss_fn_outputs[0]), _weights(datum), _tensor(datum, "logprobs")
    if any(one is not None and one.shape != targets.shape for one in (logprobs, weights, sampled)):
        return row
    return examined(
        row,
        targets.tolist(),
        logprobs.tolist(),
        None if weights is None else weights.tolist(),
        None if sampled is None else sampled.tolist(),
    )


def _logprobs(record: pb.ArrayRecord) -> npt.NDArray[np.float32]:
    return np.frombuffer(record.fields["logprobs"].data, "<f4")


def _weights(datum: pb.Datum) -> npt.NDArray[Any] | None:
    """The tokens' weights in the loss: weights, advantages, or their product; None if all tokens count equally."""
    weights, advantages = _tensor(datum, "weights"), _tensor(datum, "advantages")
    if weights is None or advantages is None or weights.shape != advantages.shape:
        return advantages if weights is None else weights
    product: npt.NDArray[Any] = weights * advantages
    return product


def _tensor(datum: pb.Datum, name: str) -> npt.NDArray[Any] | None:
    """An input of the loss; None if it is absent, not dense, or of another dtype than `_DTYPES`."""
    tensor = datum.loss_fn_inputs.get(name)
    if tensor is None or tensor.WhichOneof("encoding") != "dense" or tensor.dtype not in _DTYPES:
        return None
    values: npt.NDArray[Any] = np.frombuffer(tensor.dense, _DTYPES[tensor.dtype])
    return values
