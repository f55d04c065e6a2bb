"""One model's operations, from the journal through the NumPy pool and back, without Prefect."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pytest

from tinkerflow.backend.core.errors import StateLostError
from tinkerflow.backend.journal import Kind, ModelState
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.flows.runner import Why


@pytest.fixture
async def served(make_runner: Any, client: Any, running: Any) -> Any:
    """A served model, its runner, and the task of the runner."""
    model, request = client.submit_create()
    runner = make_runner(model)
    async with running(runner.serve()) as task, running(client.ring("model:", runner)):
        assert (await client.result(request)).error is None
        yield model, runner, task


def logprobs(result: Any) -> list[np.ndarray]:
    output = pb.ForwardBackwardOutput.FromString(result.result)
    (record,) = output.loss_fn_outputs
    tensor = record.fields["logprobs"]
    offsets = np.frombuffer(tensor.offsets, np.int64)
    return [np.frombuffer(tensor.data[a:b], np.float32) for a, b in pairwise(offsets)]


async def test_step_changes_the_logprobs_and_the_model_row(served: Any, client: Any) -> None:
    model, _, _ = served
    before, first, step, after = await client.results(
        client.forward_backward(model, [5, 5], forward_only=True),
        client.forward_backward(model, [5, 5]),
        client.optim_step(model),
        client.forward_backward(model, [5, 5], forward_only=True),
    )
    np.testing.assert_allclose(logprobs(before)[0], np.log(1 / 32), rtol=1e-6)
    assert np.array_equal(logprobs(before)[0], logprobs(first)[0])
    assert (logprobs(after)[0] > logprobs(before)[0]).all()
    assert orjson.loads(step.result)["metrics"]
    assert client.journal.models.get(model, None).step == 1
    assert client.journal.models.get(model, None).state == ModelState.LIVE


async def test_many_operations_are_in_flight_and_stay_in_order(served: Any, client: Any, pool: Any, until: Any) -> None:
    model, _, _ = served
    pool.hold = asyncio.Event()
    requests = []
    for _ in range(4):
        requests += [client.forward_backward(model, [1, 2]), client.optim_step(model)]
    await until(lambda: len(pool.log) == 9)
    assert pool.names == ["CreateAdapter", *["Forward", "OptimStep"] * 4]
    pool.hold.set()
    assert all(result.error is None for result in await client.results(*requests))


async def test_commands_are_charged_to_the_owner_of_the_model(
    served: Any, client: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool shares training time between owners."""
    model, _, _ = served
    owners: dict[str, str] = {}
    submit = pool.submit

    async def noting(command: Any, *args: Any, owner: str = "", **kwargs: Any) -> Any:
        owners[type(command).__name__] = owner
        return await submit(command, *args, owner=owner, **kwargs)

    monkeypatch.setattr(pool, "submit", noting)
    await client.results(client.forward_backward(model, [1, 2]), client.optim_step(model))
    assert owners == {"Forward": client.owner, "OptimStep": client.owner}


async def test_frequent_wake_ups_execute_every_operation_once(served: Any, client: Any, pool: Any) -> None:
    model, runner, _ = served

    async def wake() -> None:
        while True:
            runner.wake()
            await asyncio.sleep(0)

    waker = asyncio.create_task(wake())
    await client.results(*(client.optim_step(model) for _ in range(40)))
    waker.cancel()
    assert pool.names.count("OptimStep") == 40
    assert client.journal.models.get(model, None).step == 40


async def test_invalid_content_fails_only_its_request(served: Any, client: Any) -> None:
    model, _, _ = served
    bad, good = client.forward_backward(model, [5, 99]), client.optim_step(model)
    failed, fine = await client.results(bad, good)
    assert failed.category == "user" and "data[0]" in failed.error and "99" in failed.error
    assert fine.error is None


async def test_internal_error_fails_the_request_as_a_server_error_with_its_type(
    served: Any, client: Any, pool: Any
) -> None:
    model, _, _ = served
    pool.failing = RuntimeError("no such thing")
    failed = await client.result(client.optim_step(model))
    assert failed.category == "server" and "RuntimeError: no such thing" in failed.error


async def test_lost_state_ends_model_and_runner(served: Any, client: Any, pool: Any) -> None:
    model, _, task = served
    pool.failing = StateLostError("adapter gone")
    await client.result(client.optim_step(model))
    end = await asyncio.wait_for(task, 60)
    assert end.why is Why.FAILED and "adapter gone" in end.text
    assert client.journal.models.get(model, None).state == ModelState.LOST


async def test_model_saves_loads_and_is_created_from_a_checkpoint(
    served: Any, client: Any, make_runner: Any, running: Any
) -> None:
    model, _, _ = served
    client.forward_backward(model, [5, 5])
    client.optim_step(model)
    pending_grad = client.forward_backward(model, [7])
    saved = await client.result(client.submit(model, Kind.SAVE_WEIGHTS, {"path": "one", "ttl_seconds": 3600}))
    await client.result(pending_grad)
    path = orjson.loads(saved.result)["path"]
    assert path == f"tinker://{model}/weights/one"
    row = client.journal.checkpoints.get(path, "local")
    assert (row.step, row.base_model, row.size_bytes > 0, row.expires_at is not None) == (
        1,
        "folder/unigram",
        True,
        True,
    )

    again = await client.result(client.submit(model, Kind.SAVE_WEIGHTS, {"path": "one"}))
    assert again.category == "user" and "one" in again.error

    copy, request = client.load_model(1, path, optimizer=True)
    runner = make_runner(copy)
    async with running(runner.serve()), running(client.ring("model:", runner)):
        assert (await client.result(request)).error is None
        assert client.journal.models.get(copy, None).step == 1
        results = []
        for one in (model, copy):
            client.optim_step(one)
            results.append(await client.result(client.forward_backward(one, [5, 7], forward_only=True)))
        assert np.array_equal(logprobs(results[0])[0], logprobs(results[1])[0])

        back = await client.result(client.submit(copy, Kind.LOAD_WEIGHTS, {"path": path, "optimizer": False}))
        assert orjson.loads(back.result)["path"] == path
        assert client.journal.models.get(copy, None).step == 0


async def test_loading_a_missing_checkpoint_fails_the_creation(client: Any, make_runner: Any) -> None:
    model, request = client.load_model(0, "tinker://nobody/weights/none", optimizer=False)
    runner = make_runner(model)
    end = await asyncio.wait_for(runner.serve(), 60)
    result = await client.result(request)
    assert result.category == "user" and "tinker://nobody/weights/none" in result.error
    assert end.why is Why.FAILED
    assert client.journal.models.get(model, None).state == ModelState.FAILED


async def test_named_save_for_sampler_is_a_checkpoint_and_unnamed_is_a_snapshot(
    served: Any, client: Any, context: Any, pool: Any, until: Any
) -> None:
    model, _, _ = served
    named = await client.result(client.submit(model, Kind.SAVE_FOR_SAMPLER, {"path": "s1"}))
    assert orjson.loads(named.result) == {
        "type": "save_weights_for_sampler",
        "path": f"tinker://{model}/sampler_weights/s1",
    }
    assert "PublishSnapshot" not in pool.names
    unnamed = await client.result(client.submit(model, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": 4}))
    opened = orjson.loads(unnamed.result)["sampling_session_id"]
    assert opened == f"{client.session}:sample:4"
    snapshot = client.journal.samplers.get(opened, "local").snapshot_id
    assert context.snapshots.held(snapshot)
    await until(lambda: snapshot in context.snapshots.droppable)  # recorded just after the answer


async def test_externally_ended_model_is_dropped_before_the_runner_is_notified(
    served: Any, client: Any, pool: Any
) -> None:
    model, _, task = served
    assert (await client.result(client.optim_step(model))).error is None
    client.journal.models.end(model, ModelState.UNLOADED, "someone cancelled it")  # its notification wakes the runner
    end = await asyncio.wait_for(task, 60)
    assert end.why is Why.CANCELLED and end.text == "someone cancelled it"
    assert pool.names[-1] == "DropAdapter"


async def test_a_runner_ends_after_unload(served: Any, client: Any, pool: Any) -> None:
    model, _, task = served
    last = client.optim_step(model)
    client.journal.models.request_unload(model, "its session has ended")
    assert (await client.result(last)).error is None
    end = await asyncio.wait_for(task, 60)
    assert end.why is Why.DONE and "its session has ended" in end.text
    assert pool.names[-1] == "DropAdapter"
    assert (await client.result(client.optim_step(model))).category == "user"


async def test_failed_unload_can_be_requested_again(served: Any, client: Any, pool: Any) -> None:
    model, _, task = served
    pool.failing = RuntimeError("not now")
    unload = client.journal.models.request_unload(model, "its session has ended")
    assert "not now" in (await client.result(unload)).error
    pool.failing = None
    assert (await client.result(client.optim_step(model))).error is None
    assert client.journal.models.request_unload(model, "its session has ended") != unload
    assert (await asyncio.wait_for(task, 60)).why is Why.DONE


async def test_stopped_runner_answers_requests_in_flight_and_leaves_queued_ones(
    served: Any, client: Any, pool: Any, until: Any
) -> None:
    model, runner, task = served
    pool.hold = asyncio.Event()
    flying = client.optim_step(model)
    await until(lambda: "OptimStep" in pool.names)
    runner.stop()
    waiting = client.optim_step(model)
    pool.hold.set()
    assert (await asyncio.wait_for(task, 60)).why is Why.STOPPED
    assert (await client.result(flying)).error is None
    assert client.journal.results.get(waiting, "local") is None


async def test_gap_holds_back_later_requests(served: Any, client: Any) -> None:
    model, _, _ = served
    late = client.submit(model, Kind.OPTIM_STEP, {"adam_params": {"learning_rate": 0.1}}, skip=1)
    await asyncio.sleep(0.2)
    assert client.journal.results.get(late, "local") is None
    client.seqs[model] -= 2
    early = client.optim_step(model)
    assert [r.error for r in await client.results(early, late)] == [None, None]
