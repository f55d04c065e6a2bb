"""The dispatcher wakes runners, cancels samples and evicts snapshots, with the NumPy pool and without Prefect."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import pytest
from sqlalchemy.exc import OperationalError

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import Kind, ModelState
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.commands import DropSnapshot
from tinkerflow.flows.dispatcher import Dispatcher
from tinkerflow.flows.groups import ServedModel
from tinkerflow.flows.prefect.mirror import Mirror
from tinkerflow.flows.sampling_runner import SamplingRunner
from tinkerflow.flows.sweeps import drop_from_group


@pytest.fixture
async def dispatcher(context: Any, mirror: Mirror, journal: Any, pool: Any, tmp_path: Path, running: Any) -> Any:
    served = ServedModel(
        context.card, context, pool, SamplingRunner(context, mirror.observe_sampling(context.card.name), most_waiting=8)
    )
    dispatcher = Dispatcher(Settings(data_dir=tmp_path, prefect="off"), journal, mirror, [served])
    ready = asyncio.Event()
    async with running(dispatcher.serve(ready.set)) as task:
        await ready.wait()
        yield dispatcher, task


async def test_models_and_samples_are_served_side_by_side(
    dispatcher: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(client.journal.models, "label", lambda model: asked.append(model) or "")
    models = await asyncio.gather(*(client.create(number) for number in range(5)))
    requests = [client.optim_step(model) for model in models for _ in range(3)]
    requests.append(client.sample(client.sampler(9)))
    assert all(result.error is None for result in await client.results(*requests))
    assert asked == [], "names are read for Prefect's page alone"


async def test_cancelled_sample_frees_its_place_immediately(
    dispatcher: Any, client: Any, pool: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_sweep(_: Any) -> None:
        """Do nothing, so that only the notification can cancel."""

    monkeypatch.setattr(SamplingRunner, "cancel_ended", no_sweep)
    pool.hold = asyncio.Event()
    request = client.sample(client.sampler(9), max_tokens=60)
    await until(lambda: pool.log)
    client.journal.requests.cancel(request, "local")
    assert (await client.result(request)).error == "cancelled by the client"
    (served,) = dispatcher[0]._served.values()
    await until(lambda: served.sampling._taken.batch._cancel)
    pool.hold.set()
    await until(lambda: any(getattr(command, "cancel", None) == (request,) for command in pool.log))
    assert pool.executor.batch == {}


async def test_lost_notification_delays_but_loses_no_answer(
    dispatcher: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await client.create()
    monkeypatch.setattr(client.journal.notifier, "publish", lambda *topics: None)
    request, sample = client.optim_step(model), client.sample(client.sampler(1))
    for one in (request, sample):
        assert (await client.result(one)).error is None


async def test_unused_snapshots_are_dropped(dispatcher: Any, client: Any, pool: Any, connect: Any, until: Any) -> None:
    other = await connect(client.journal)
    kept = []
    for one in (client, other):
        model = await one.create()
        saved = await one.result(one.submit(model, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": 1}))
        kept.append(one.journal.samplers.get(orjson.loads(saved.result)["sampling_session_id"], None).snapshot_id)
    client.journal.sessions.finish(client.session, "local", None)
    await until(lambda: DropSnapshot(kept[0]) in pool.log)
    assert DropSnapshot(kept[1]) not in pool.log
    assert (await other.result(other.sample(f"{other.session}:sample:1"))).error is None


async def test_sweeps_do_not_wait_for_a_replacement_group(dispatcher: Any, pool: Any) -> None:
    (served,) = dispatcher[0]._served.values()
    pool.down = asyncio.Event()  # no group serves again, as when base models take turns
    async with asyncio.timeout(60):
        await drop_from_group(served, ["one", "two"])
    assert pool.log == []


async def test_surplus_snapshots_are_evicted_until_sampled_again(
    dispatcher: Any, client: Any, pool: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, _ = dispatcher
    few = {"resident_snapshots": 2, "host_snapshot_bytes": 0}
    monkeypatch.setattr(serving._sweeps, "_settings", serving._settings.model_copy(update=few))
    model = await client.create()
    said: dict[str, Any] = {}
    for number in range(5):
        await client.result(client.forward_backward(model, [number]))
        await client.result(client.optim_step(model))
        saved = await client.result(client.submit(model, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": number}))
        sampler = orjson.loads(saved.result)["sampling_session_id"]
        said[sampler] = (await client.result(client.sample(sampler))).result
    await until(lambda: len(pool.executor.snapshots) == 2)
    dropped = [command.snapshot_id for command in pool.log if isinstance(command, DropSnapshot)]
    kept = [client.journal.samplers.get(sampler, None).snapshot_id for sampler in said]
    assert dropped == kept[:3]  # least recently used first
    pool.hold = asyncio.Event()  # snapshots stay while they are sampled
    again = [client.sample(sampler) for sampler in said]
    await until(lambda: len(serving._served) and all(not snapshots_idle(serving, one) for one in kept))
    pool.hold.set()
    results = await client.results(*again)
    assert [result.result for result in results] == [*said.values()]
    await until(lambda: len(pool.executor.snapshots) == 2)


def snapshots_idle(serving: Dispatcher, snapshot_id: str) -> bool:
    (model,) = serving._served.values()
    return not model.context.snapshots._users[snapshot_id]


async def test_error_of_one_model_ends_only_that_model(
    dispatcher: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = await client.create(0)
    ready = client.journal.requests.ready

    def broken(model_id: str, limit: int = 64) -> Any:
        if model_id.endswith(":1") and limit > 1:
            raise RuntimeError("cannot be read")
        return ready(model_id, limit)

    monkeypatch.setattr(client.journal.requests, "ready", broken)
    bad, request = client.submit_create(1)
    failed = await client.result(request)
    assert failed.category == "server" and "the model cannot be served" in failed.error
    assert client.journal.models.get(bad, None).state == ModelState.FAILED
    assert (await client.result(client.optim_step(good))).error is None


@pytest.mark.parametrize("base_model", ["folder/unigram", "folder/other"])
async def test_engine_outlives_an_outage_of_the_database_while_it_begins_to_serve_a_model(
    dispatcher: Any, connect: Any, journal: Any, base_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, outage = await connect(journal, base_model), OperationalError("SELECT", {}, Exception("away"))

    def failing(call: Any) -> Any:
        left = [outage, outage]

        def fail(*args: Any, **more: Any) -> Any:
            if left:
                raise left.pop()
            return call(*args, **more)

        return fail

    for part, name in (("models", "get"), ("curves", "trained"), ("requests", "ready")):
        monkeypatch.setattr(getattr(journal, part), name, failing(getattr(getattr(journal, part), name)))
    _, request = client.submit_create()
    error = (await client.result(request)).error
    assert error is None if base_model == "folder/unigram" else "is not served here" in error
    assert not dispatcher[1].done()


async def test_model_of_an_unserved_base_model_is_not_resumed(
    dispatcher: Any, connect: Any, journal: Any, until: Any
) -> None:
    serving, _ = dispatcher
    client = await connect(journal, "folder/other")
    model, request = client.submit_create()
    assert "'folder/other' is not served here" in (await client.result(request)).error
    await until(lambda: model not in serving.models)
    with pytest.raises(UserError, match="'folder/other' is not served here: folder/unigram"):
        await serving.retry(model, uuid4())


async def test_stopped_dispatcher_answers_requests_in_flight(dispatcher: Any, client: Any) -> None:
    serving, task = dispatcher
    model = await client.create()
    request = client.optim_step(model)
    await asyncio.sleep(0.05)
    serving.stop()
    await asyncio.wait_for(task, 60)
    assert client.journal.results.get(request, "local") is not None


async def test_a_store_that_does_not_answer_delays_no_other_model_and_no_sweep_of_the_journal(
    dispatcher: Any, client: Any, connect: Any, context: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # as on a small machine, with many saves
    model = await client.create()
    saved = await client.result(client.submit(model, Kind.SAVE_WEIGHTS, {"path": "one"}))
    arrived, opened = set[str](), threading.Event()

    def hanging(name: str) -> Any:
        def hang(*args: Any) -> Any:
            arrived.add(name)
            assert opened.wait(120)
            return calls[name](*args)

        return hang

    calls = {name: getattr(context.store.blobs, name) for name in ("create", "remove")}
    for name in calls:
        monkeypatch.setattr(context.store.blobs, name, hanging(name))
    try:
        client.journal.checkpoints.delete(orjson.loads(saved.result)["path"], "local")
        later = client.submit(model, Kind.SAVE_WEIGHTS, {"path": "two"})
        await until(lambda: arrived == {"create", "remove"})
        other = await connect(client.journal)
        await other.create()
        gone = await connect(client.journal)
        left = await gone.create()
        client.journal.sessions.finish(gone.session, "local", None)
        await until(lambda: client.journal.models.get(left, "local").state is ModelState.UNLOADED)
        assert client.journal.results.get(later, "local") is None
    finally:
        opened.set()
    assert (await client.result(later)).error is None


async def test_samples_of_an_unserved_base_model_fail(dispatcher: Any, connect: Any, journal: Any) -> None:
    """The engine was restarted without the base model while they were waiting."""
    client = await connect(journal, "folder/other")
    request = client.sample(client.sampler(9))
    assert "'folder/other' is not served here: folder/unigram" in (await client.result(request)).error
