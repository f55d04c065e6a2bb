"""The rows of a step, from the requests of its history, and the search for the step that spoiled the weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.deployments.blame import origin, rows_of_step
from tinkerflow.deployments.recorded_run import NewRun, RecordedRun


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


def test_requests_after_a_load_belong_to_the_steps_of_the_loaded_state() -> None:
    kinds: list[tuple[str, int | None, str | None]] = [
        ("load_model", None, None),  # the state after step 40
        ("forward_backward", None, None),
        ("load_weights", None, "there is no such checkpoint"),
        ("forward_backward", None, None),
        ("optim_step", 41, None),
        ("forward_backward", None, None),
        ("optim_step", 42, None),
        ("load_weights", None, None),  # the state after step 7
        ("forward_backward", None, None),
        ("optim_step", 8, None),
        ("load_weights", None, None),
        ("forward", None, None),
    ]
    rows = [
        {"seq_id": i, "request_id": "", "kind": kind, "step": step, "payload": "", "result_hash": "", "error": error,
         "payload_hash": ""}
        for i, (kind, step, error) in enumerate(kinds)
    ]  # fmt: skip

    def ask(path: str, *, after: int, **_: Any) -> Any:
        page = rows[after + 1 : after + 4]
        return {"requests": page, "next": page[-1]["seq_id"] if after + 4 < len(rows) else None}

    run = RecordedRun(SimpleNamespace(ask=ask), "run", {})  # type: ignore[arg-type]
    assert [recorded.step for recorded in run.requests()] == [41] * 5 + [42] * 2 + [8] * 3 + [1] * 2
    assert run.made() == {41: 4, 42: 6, 8: 9}


class Forks:
    """Forks of a run whose step 4 made its data unlikely, as `Api` gives them. most: loaded at the same time."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.most = 0

    def new_model(self, _: str, body: dict[str, Any]) -> str:
        name = f"fork-{body['path']}"
        self.live[name] = int(body["path"])
        self.most = max(self.most, len(self.live))
        return name

    def unload(self, name: str) -> None:
        del self.live[name]

    def submit(self, _: str, body: bytes) -> str:
        return pb.ForwardBackwardRequest.FromString(body).model_id

    def result(self, name: str) -> bytes:
        output = pb.ForwardBackwardOutput()
        logprobs = np.full(2, -9.0 if self.live[name] >= 4 else -1.0, "<f4")
        output.loss_fn_outputs.add().fields["logprobs"].data = logprobs.tobytes()
        return output.SerializeToString()


def test_search_for_the_origin_loads_one_fork_at_a_time() -> None:
    message = pb.ForwardBackwardRequest(model_id="run", loss_fn="cross_entropy")
    message.data.add()
    recorded = SimpleNamespace(step=9, kind="forward_backward", error=None, payload=message.SerializeToString())
    forks = Forks()
    run: Any = SimpleNamespace(
        run_id="run",
        requests=lambda: [recorded],
        made=lambda: {1: 2},
        fork=lambda step, _: NewRun(forks, "load_weights", {"path": step}),  # type: ignore[arg-type]
        api=forks,
    )
    assert origin(run, 9, 16) == 4
    assert (forks.most, forks.live) == (1, {}), "a project may have a limit of live models"
