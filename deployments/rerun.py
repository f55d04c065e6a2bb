"""Reruns and forks of a training run: a client that sends the run's requests again.

The history of a run (docs/history.md) contains its requests, and a digest of each result. A rerun creates a new run
with the same seed and sends the requests in order, with changes. Until the first change, each result must equal the
recorded one, byte for byte, and the first difference is noted.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.backend.spec.history import digest
from tinkerflow.backend.spec.losses import loss_named
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.backend.spec.run_metadata import for_repeats
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.deployments.recorded_run import NewRun, RecordedRequest, RecordedRun

_IN_FLIGHT = 8  # requests that are sent before the result of the first one is awaited
_FORWARD = ("forward", "forward_backward")
_COMPARED = (*_FORWARD, "optim_step")  # operations with results that do not name the run


# ------------------------------------------------------------------ changes
@dataclass(frozen=True)
class Change:
    """A new value of an optimizer's parameter. factor: multiply the recorded value by it instead of replacing it."""

    name: str
    value: float
    factor: bool = False

    @classmethod
    def parse(cls, text: str, optimizer: str) -> Change:
        """Parse `learning_rate=1e-5` or `learning_rate=*0.5`. UserError: an unknown parameter, or not a number."""
        name, _, value = text.partition("=")
        known = list(OPTIMIZERS[optimizer].bounds)
        if name not in known:
            raise UserError(f"--set {text!r}: {optimizer} has no parameter {name!r}{did_you_mean(name, known)}")
        try:
            return cls(name, float(value.removeprefix("*")), value.startswith("*"))
        except ValueError as error:
            raise UserError(f"--set {text!r}: must be {name}=NUMBER, or {name}=*NUMBER to multiply it") from error

    def of(self, params: Mapping[str, Any]) -> float:
        """The new value. UserError: `params` contain no value to multiply."""
        if not self.factor:
            return self.value
        if self.name not in params:
            raise UserError(f"--set {self.name}=*{self.value}: the request has no {self.name}; give a value")
        return float(params[self.name]) * self.value


@dataclass(frozen=True)
class Changes:
    """The changes of a rerun.

    first, last: the range of steps to execute; None = from the beginning, to the end. If the run has loaded an earlier
    state and made a step again, the last time counts. sets: changes of optimizer steps. without: steps to leave out, or
    rows of a step, by their numbers among the rows of the step.
    """

    first: int | None = None
    last: int | None = None
    sets: Sequence[Change] = ()
    without: Mapping[int, Collection[int] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.first is not None and self.last is not None and self.last < self.first:
            raise UserError(f"--to {self.last}: must be at least {self.first}, the first step (--from)")

    @staticmethod
    def parse_without(texts: Sequence[str]) -> dict[int, Collection[int] | None]:
        """Parse `812`, which leaves out step 812, and `812:3`, only row 3 of its data. UserError: another text."""
        found: dict[int, set[int] | None] = {}
        for text in texts:
            parts = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
            if parts is None:
                raise UserError(f"--without {text!r}: must be STEP, or STEP:ROW for one row of the step's data")
            step, row = int(parts[1]), parts[2]
            if row is None:
                found[step] = None
            elif (rows := found.setdefault(step, set())) is not None:
                rows.add(int(row))
        return dict(found)


@dataclass
class Report:
    """The result of a rerun.

    run_id: the new run. steps: number of steps made. compared: number of equal results. parted: the first request with
    a different result. ended: the optimizer step at the end of the new run.
    """

    run_id: str
    steps: int = 0
    compared: int = 0
    parted: RecordedRequest | None = None
    ended: int = 0


class Rerun:
    """Sends the requests of a run again, to a new run."""

    def __init__(
        self,
        run: RecordedRun,
        changes: Changes,
        progress: Callable[[Report], object] = bool,
        on_result: Callable[[RecordedRequest, bytes], object] | None = None,
    ) -> None:
        """progress: called after each optimizer step. on_result: called with each result; its errors end the rerun."""
        self._run, self._api, self._on_result = run, run.api, on_result
        self._changes, self._progress = changes, progress
        self._made: Mapping[int, int] = {}  # if rows or steps are left out: seq_ids by step
        self._rows = 0  # rows of the current step
        self._waiting: deque[tuple[str, RecordedRequest, bool]] = deque()
        self._changed = False

    def execute(self) -> Report:
        """Execute the new run. Before the first change, the results are compared with those of the recorded run."""
        before, last = self._range()
        requests = self._run.requests()
        self._new = self._begin(requests)
        report = self._report = Report(self._new.id)
        for recorded in requests:
            if recorded.seq_id > last:
                break
            if recorded.error is not None or recorded.kind not in (*_COMPARED, "load_weights"):
                continue
            if recorded.seq_id <= before:
                continue
            self._send(recorded)
            while len(self._waiting) >= _IN_FLIGHT:
                self._await_one()
        while self._waiting:
            self._await_one()
        return report

    def save(self, name: str) -> str:
        """Save the state of the new run. Returns its path."""
        return self._new.save(name)

    def _begin(self, requests: Iterator[RecordedRequest]) -> NewRun:
        """Create the new run. requests: the recorded run's; consumes the first one if needed."""
        about, first = self._run.about, self._changes.first
        metadata = {**for_repeats(about["user_metadata"]), "rerun_of": self._run.run_id}
        if first is not None and first > 1:
            return self._run.fork(first - 1, metadata)
        creation = next(requests, None)
        if creation is None or creation.seq_id != 0:
            raise NotFoundError(f"run {self._run.run_id!r}: its history does not begin with its creation")
        body = {**orjson.loads(creation.payload), "user_metadata": metadata}
        if creation.kind == "create_model":
            lora = {**(body.get("lora_config") or {}), "seed": about["seed"]}
            return NewRun(self._api, "create_model", {**body, "lora_config": lora})
        return NewRun(self._api, "load_weights", body)

    def _range(self) -> tuple[int, float]:
        """The seq_ids of the last request before the range of steps, and of the last one in it.

        UserError: a step that is to be left out is not in the range.
        """
        first, last, without = self._changes.first or 1, self._changes.last, self._changes.without
        if first == 1 and last is None and not without:
            return 0, math.inf
        made = self._made = self._run.made()
        before = made.get(first - 1, 0)
        within = {step: seq_id for step, seq_id in made.items() if seq_id > before and (last is None or step <= last)}
        if unknown := [step for step in without if step not in within]:
            steps = f"its steps are {min(within)} to {max(within)}" if within else "it has no step"
            raise UserError(f"--without {unknown[0]}: the rerun does not make this step: {steps}")
        end = math.inf if last is None else within.get(last, max(within.values(), default=before))
        return before, end

    def _send(self, recorded: RecordedRequest) -> None:
        without = self._changes.without.get(recorded.step, ())
        if without is None:
            self._changed = True
            return
        if recorded.kind in _FORWARD:
            body = self._data(recorded, without)
            if body is None:
                return
            request = self._new.submit("forward_backward", body)
        else:
            values = orjson.loads(recorded.payload)
            if self._made.get(recorded.step) == recorded.seq_id and max(without, default=-1) >= self._rows:
                wrong = f"--without {recorded.step}:{max(without)}"
                raise UserError(f"{wrong}: the step has {self._rows} rows, which are numbered from 0")
            self._rows = 0
            if recorded.kind == "optim_step":
                field_name = OPTIMIZERS[self._run.about["optimizer"]].request_field
                params = values.get(field_name) or {}
                new = {change.name: change.of(params) for change in self._changes.sets}
                self._changed |= any(params.get(name) != value for name, value in new.items())
                values = {**values, field_name: {**params, **new}}
            request = self._new.submit(recorded.kind, values)
        self._waiting.append((request, recorded, not self._changed))

    def _data(self, recorded: RecordedRequest, without: Collection[int]) -> pb.ForwardBackwardRequest | None:
        """The message of a forward_backward without some rows; None if no row is left."""
        message: pb.ForwardBackwardRequest = pb.ForwardBackwardRequest.FromString(recorded.payload)
        if loss_named(message.loss_fn).traced:
            raise UserError(f"request {recorded.seq_id} has a traced loss of its session: such runs cannot be rerun")
        if recorded.kind == "forward_backward":
            numbers = range(self._rows, self._rows + len(message.data))
            self._rows += len(message.data)
            kept = [datum for number, datum in zip(numbers, message.data, strict=True) if number not in without]
            if len(kept) < len(numbers):
                self._changed = True
                del message.data[:]
                message.data.extend(kept)
            if not kept:
                return None
        return message

    def _await_one(self) -> None:
        request, recorded, compared = self._waiting.popleft()
        try:
            result = self._api.result(request)
        except UserError as error:
            raise UserError(f"step {recorded.step}, {recorded.kind} (request {recorded.seq_id}): {error}") from error
        if self._on_result is not None:
            self._on_result(recorded, result)
        if compared and recorded.kind in _COMPARED and recorded.result_hash and self._report.parted is None:
            if digest(result) == recorded.result_hash:
                self._report.compared += 1
            else:
                self._report.parted = recorded
        if recorded.kind == "optim_step":
            self._report.steps += 1
            self._report.ended = int(orjson.loads(result)["metrics"]["optimizer_step"])
            self._progress(self._report)


def saved_fork(run: RecordedRun, step: int, name: str) -> str:
    """Save the state of a run after `step` under `name` in a new run. Returns the path."""
    metadata = {**for_repeats(run.about["user_metadata"]), "fork_of": run.run_id}
    return run.fork(step, metadata).save(name)
