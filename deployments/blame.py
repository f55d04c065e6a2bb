"""The search for the rows that spoiled a step: each row of the step is computed alone, from the state before it."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import orjson

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.spec.history import digest
from tinkerflow.backend.spec.losses import loss_named
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.backend.spec.outliers import BlamedRow, for_pages, least_likely, ranked
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.deployments.recorded_run import RecordedRun, quoted

_IN_FLIGHT = 8  # rows whose results are not awaited yet


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


def blame(run: RecordedRun, step: int) -> list[BlamedRow]:
    """Compute each row of `step` alone, from the state before the step. Returns their figures, the worst row first.

    The optimizer takes a step of learning rate 0 after each row, which reports the norm of the row's gradients and
    leaves the weights as they are. Equal rows are computed once. The pages of the run show the result.
    """
    api, optimizer = run.api, OPTIMIZERS[run.about["optimizer"]]
    metadata = {"rerun_of": run.run_id, "name": f"blame of step {step}"}
    body = {"path": run.checkpoint(step - 1), "optimizer": True, "user_metadata": metadata}
    equal: dict[str, list[int]] = {}
    rows = rows_of_step(run, step)
    for number, message in enumerate(rows):
        equal.setdefault(digest(message.SerializeToString(deterministic=True)), []).append(number)
    model_id = api.new_model("load_weights", body)
    params = {name: 0.0 for name in ("learning_rate", "weight_decay") if name in optimizer.bounds}
    kind = {} if optimizer.request_field == "adam_params" else {"type": optimizer.name}
    waiting: deque[tuple[list[int], str, str]] = deque()
    found: list[BlamedRow] = []

    def answered(most: int) -> None:
        """Wait until at most `most` rows have no figures."""
        while len(waiting) > most:
            (number, *repeated), forward, made = waiting.popleft()
            output = pb.ForwardBackwardOutput.FromString(api.result(forward))
            norm = orjson.loads(api.result(made))["metrics"].get("grad_norm")
            found.append(_row(number, rows[number], output, norm, tuple(repeated)))

    for place, numbers in enumerate(equal.values()):
        message = rows[numbers[0]]
        message.model_id, message.seq_id = model_id, 2 * place + 1
        forward = api.submit("forward_backward", message.SerializeToString())
        address = {"model_id": model_id, "seq_id": 2 * place + 2}
        made = api.submit("optim_step", {**address, optimizer.request_field: {**kind, **params}})
        waiting.append((numbers, forward, made))
        answered(_IN_FLIGHT)
    answered(0)
    worst = ranked(found)
    api.ask(f"training_runs/{quoted(run.run_id)}/blames", {"step": step, "rows": for_pages(worst)})
    return worst


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
    worst = _worst(datum, output) if not loss_named(message.loss_fn).traced else ()
    return BlamedRow(number, size, loss if math.isfinite(loss) else None, norm, worst, repeated)


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
    weights_T = None
    if "weights" in inputs and inputs["weights"].dtype == pb.DTYPE_FLOAT32 and inputs["weights"].dense:
        weights_T = np.frombuffer(inputs["weights"].dense, "<f4").tolist()
    return least_likely(targets_T.tolist(), logprobs_T.tolist(), weights_T)
