"""A session's timeline through the SDK: a trace for Perfetto, which anyone with the link can read."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import tinker
from tinker import types

from tinkerflow.api.trace import _Process, trace
from tinkerflow.backend.journal import Kind, Timed

BASE = "tiny/bigram"
ZERO = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_trace_shows_every_request_of_the_session(server: Any, engine: Any) -> None:
    service = tinker.ServiceClient(base_url=server.url)
    model = service.create_lora_training_client(BASE, rank=8).result()
    for _ in range(3):
        model.optim_step(types.AdamParams(learning_rate=0.1)).result()
    sampler = model.save_weights_and_get_sampling_client().result()
    sampler.sample(types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=2)).result()
    service.close("success").result()
    session = model.model_id.split(":")[0]
    url = tinker.RestClient(base_url=server.url).export_session_trace(session).result()
    answer = server.http.get(url)
    events = answer.json()["traceEvents"]
    assert int(answer.headers["content-length"]) == len(answer.content)
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) + len(names) == len(events)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    assert all(isinstance(event[key], int) for event in slices for key in ("ts", "dur", "pid", "tid"))
    assert [event["ts"] for event in slices] == sorted(event["ts"] for event in slices)
    by_process = [(names[event["pid"]], event["name"]) for event in slices]
    steps = [name for process, name in by_process if process == model.model_id]
    assert {"create_model 0", "optim_step 1", "optim_step 2", "optim_step 3", "save_for_sampler 4"} <= set(steps)
    assert (f"{session}:sample:0", "sample 0") in by_process


def test_trace_link_is_given_only_to_the_owner_of_the_session(server: Any, journal: Any) -> None:
    ours, theirs = (journal.keys.create(name, name)[1] for name in ("a", "b"))
    server.clock.advance(1.0)
    session = server.session(ours)
    assert server.get(f"sessions/{session}/trace_export", ours).json()["status"] == "ready"
    assert server.get(f"sessions/{session}/trace_export", theirs).status_code == 404
    assert server.get("sessions/sess-none/trace_export", ours).status_code == 404
    assert server.get(f"session_traces/{session}", ours).status_code == 403


def test_a_session_without_requests_has_an_empty_trace(server: Any) -> None:
    url = server.get(f"sessions/{server.session('tml-test')}/trace_export", "tml-test").json()["url"]
    assert server.http.get(url).json()["traceEvents"] == []


def test_trace_separates_waiting_from_executing_and_overlaps_by_thread() -> None:
    def timed(seq: int, came: int, began: int | None, done: int | None) -> Timed:
        moments = [None if second is None else ZERO + timedelta(seconds=second) for second in (came, began, done)]
        return Timed(f"req-{seq}", Kind.OPTIM_STEP, "m", None, seq, "done", "tiny", ZERO, *moments[1:])

    made = json.loads(trace([timed(1, 0, 2, 4), timed(2, 0, 4, None)], ZERO + timedelta(seconds=7)))["traceEvents"]
    found = {(e["pid"], e["tid"], e["name"], e["ts"] // 10**6, e["dur"] // 10**6) for e in made if e["ph"] == "X"}
    assert found == {
        (1, 1, "optim_step 1", 0, 4), (1, 1, "queued", 0, 2), (1, 1, "executing", 2, 2),
        (1, 2, "optim_step 2", 0, 7), (1, 2, "queued", 0, 4), (1, 2, "executing", 4, 3),
        (2, 1, "optim_step", 2, 2), (2, 1, "optim_step", 4, 3),
    }  # fmt: skip


def test_overlapping_requests_are_not_compared_with_each_other() -> None:
    compared = 0

    class Moment(int):
        def __lt__(self, other: int) -> bool:
            nonlocal compared
            compared += 1
            return int(self) < int(other)

        def __le__(self, other: int) -> bool:
            nonlocal compared
            compared += 1
            return int(self) <= int(other)

    process = _Process(1, "m")
    for n in range(1000):
        process.add([("sample", Moment(n), Moment(n + 1000))], {})
    process.add([("sample", Moment(1001), Moment(1002))], {})
    threads = [json.loads(event)["tid"] for _, event in process.events]
    assert threads == [0, *range(1, 1001), 1], "two threads are free again, and the lower one is used"
    assert compared < 20_000
