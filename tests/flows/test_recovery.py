"""Worker groups and engines may end at any time: models continue bit for bit, and no answer changes."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from prefect.events import Event
from sqlalchemy.exc import OperationalError

from tinkerflow.backend.core.errors import ServerError, StoreAwayError, StoreError
from tinkerflow.backend.core.ids import sampler_id
from tinkerflow.backend.journal import Kind, ModelState, SamplerOpened
from tinkerflow.backend.journal.base_models import BaseModels
from tinkerflow.backend.journal.recovery import Recovery
from tinkerflow.backend.journal.requests import Requests
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.commands import (
    ExportAdapter,
    ImportAdapter,
    LoadSnapshot,
    MoveSnapshot,
    OptimStep,
    SampleStep,
)
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.flows.dispatcher import Dispatcher
from tinkerflow.flows.groups import ServedModel
from tinkerflow.flows.prefect.connection import PrefectConnection
from tinkerflow.flows.prefect.mirror import Mirror
from tinkerflow.flows.sampling_runner import SamplingRunner
from tinkerflow.tasks.execution import restore
from tinkerflow.tasks.execution.operation import ExecutionContext
from tinkerflow.tasks.execution.sampling_snapshots import Snapshots
from tinkerflow.tasks.execution.sequencer import Saves


@pytest.fixture
def serve(
    context: Any, mirror: Mirror, journal: Any, tmp_path: Path, running: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """`async with serve(pool, steps=…)`: run the dispatcher of a new engine on that pool.

    steps: the number of steps between snapshots. prefect: the URL of an unreachable Prefect server; models can be
    paused only if it is set. emit: receives the events. others: fields of the engine's context.
    """

    def serve(
        pool: Any,
        *,
        steps: int = 1000,
        prefect: str = "",
        emit: Callable[..., None] = lambda *_, **__: None,
        **others: Any,
    ) -> Any:
        saves = Saves()
        own = replace(context, pool=pool, saves=saves, snapshots=Snapshots(saves), **others)
        connection = PrefectConnection(prefect)
        connection.note_reachable(False, "it is away")
        if prefect:  # otherwise an event that finds no server would start one
            monkeypatch.setattr(connection, "emit", emit)
        shown = Mirror(connection, mirror.pacing)
        served = ServedModel(
            own.card, own, pool, SamplingRunner(own, shown.observe_sampling(own.card.name), most_waiting=8)
        )
        settings = Settings(data_dir=tmp_path, prefect="off", snapshot_steps=steps, snapshot_seconds=1000.0)
        dispatcher = Dispatcher(settings, journal, shown, [served])
        return running(dispatcher.serve(lambda: None))

    return serve


def work(client: Any, model: str, steps: int) -> list[str]:
    """Submit `steps` steps whose results depend on all earlier steps."""
    requests = []
    for step in range(steps):
        for token in (step % 7, step % 5):
            requests.append(client.forward_backward(model, [token, 3, token]))
        requests.append(client.optim_step(model, 0.1 + step / 10))
    return requests


async def answers(client: Any, requests: list[str]) -> list[bytes]:
    results = await client.results(*requests)
    assert [result.error for result in results] == [None] * len(results)
    return [result.result for result in results]


def state(pool: Any, model: str) -> tuple[bytes, ...]:
    adapter = pool.executor.adapters[model]
    return tuple(array.tobytes() for array in (*adapter.weights.values(), *adapter.moments.values()))


@pytest.mark.parametrize("steps", [1000, 2])
async def test_crashes_at_any_moment_change_nothing(
    serve: Any, client: Any, pool: Any, connect: Any, journal: Any, steps: int, until: Any
) -> None:
    chance = random.Random(steps)
    async with serve(pool, steps=steps):
        disturbed = await client.create(1)
        requests = work(client, disturbed, 3)
        await answers(client, requests)
        requests += work(client, disturbed, 3)
        await answers(client, requests)
        if steps == 2:
            await until(lambda: bool(journal.recovery.snapshots(disturbed)))
        for _ in range(3):
            requests += work(client, disturbed, 3)
            for _ in range(2):
                pool.die(down=True)
                await asyncio.sleep(chance.random() * 0.05)
                pool.come_back()
                await asyncio.sleep(chance.random() * 0.05)
        got = await answers(client, requests)
        other = await client.create(2)
        again = [request for _ in range(5) for request in work(client, other, 3)]
        assert await answers(client, again) == got
        await answers(client, [client.forward_backward(disturbed, [1], forward_only=True)])  # restores the model
        assert state(pool, other) == state(pool, disturbed)
        assert journal.models.get(disturbed, None).step == 15
    if steps == 2:
        assert any(isinstance(command, ImportAdapter) for command in pool.log), "a snapshot was used"
        assert 1 <= len(journal.recovery.snapshots(disturbed)) <= 6


async def test_consecutive_crashes_do_not_grow_the_replay(
    serve: Any, client: Any, pool: Any, journal: Any, until: Any
) -> None:
    async with serve(pool, steps=4):
        model = await client.create()
        for _ in range(4):  # no group executes four new steps
            await answers(client, work(client, model, 2))
            pool.die()
        await answers(client, work(client, model, 2))
        await until(lambda: bool(journal.recovery.snapshots(model)))
    (newest, *_) = journal.recovery.snapshots(model)
    assert journal.recovery.count_executed(model, newest.seq_id) <= 3 * 4


async def test_next_engine_continues_after_the_previous_one(serve: Any, client: Any, pool: Any, journal: Any) -> None:
    async with serve(pool, steps=2):
        model = await client.create()
        await answers(client, work(client, model, 5))
        saved = client.submit(model, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": 1})
        sampler = orjson.loads((await client.result(saved)).result)["sampling_session_id"]
        first = await client.result(client.sample(sampler))
        before = state(pool, model)
    pool.die()
    waiting = [*work(client, model, 2), client.sample(sampler)]  # accepted while no engine runs
    async with serve(pool):
        await answers(client, waiting)
        again = journal.results.get(waiting[-1], "local")
        assert pb.SampleResponse.FromString(again.result) == pb.SampleResponse.FromString(first.result)
        assert state(pool, model) != before
        assert any(isinstance(command, LoadSnapshot) for command in pool.log)


@dataclass
class Stuck:
    """Makes the store's saves of published weights wait or fail."""

    monkeypatch: pytest.MonkeyPatch
    store: Any
    go: threading.Event = field(default_factory=threading.Event)
    failing: Exception | None = None
    tried: int = 0

    def __post_init__(self) -> None:
        save = type(self.store).save

        def stuck(store: Any, run_id: str, kind: Any, name: str, state: Any, meta: Any, **how: Any) -> Any:
            if meta.request_id:  # a publication; recovery snapshots have no request id
                self.tried += 1
                if self.failing is not None:
                    raise self.failing
                assert self.go.wait(60)
            return save(store, run_id, kind, name, state, meta, **how)

        self.monkeypatch.setattr(type(self.store), "save", stuck)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch, context: Any) -> Iterator[Stuck]:
    found = Stuck(monkeypatch, context.store)
    yield found
    found.go.set()


def publish(client: Any, model: str, number: int) -> str:
    return client.submit(model, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": number})


def said(journal: Any, request: str) -> bytes:
    result = journal.results.get(request, "local")
    assert result.error is None, result.error
    return pb.SampleResponse.FromString(result.result).SerializeToString()


async def test_sampler_does_not_wait_for_the_store_and_survives_its_group(
    serve: Any, client: Any, pool: Any, journal: Any, stuck: Stuck, until: Any
) -> None:
    async with serve(pool, steps=2):
        model = await client.create()
        await answers(client, work(client, model, 1))
        await answers(client, [publish(client, model, 1), *work(client, model, 5)])
        sampler = sampler_id(client.session, 1)
        before = client.sample(sampler)
        await client.result(before)
        assert journal.recovery.unstored_models() == [model]
        assert journal.recovery.snapshots(model) == [], "a replay must pass what is not stored"
        pool.die()
        after = client.sample(sampler)  # waits until the weights are in the store
        await answers(client, work(client, model, 1))
        assert journal.results.get(after, "local") is None
        stuck.go.set()
        await client.result(after)
        assert said(journal, after) == said(journal, before)
        assert stuck.tried == 1, "the copy from before the end of the group is written, and not made again"
        await until(lambda: bool(journal.recovery.snapshots(model)))
        assert journal.recovery.unstored_models() == []


@pytest.mark.parametrize("held", [False, True])
async def test_next_engine_stores_a_publication_that_the_previous_one_did_not(
    serve: Any, client: Any, pool: Any, journal: Any, stuck: Stuck, held: bool
) -> None:
    async with serve(pool, steps=2):
        model = await client.create()
        await answers(client, [*work(client, model, 1), publish(client, model, 1), *work(client, model, 3)])
        await answers(client, [publish(client, model, 2)])
        before = [client.sample(sampler_id(client.session, number)) for number in (1, 2)]
        await client.results(*before)
        weights = state(pool, model)
    pool.die()
    stuck.go.set()
    if held:
        journal.models.pause(model, "for the night")
    waiting = [client.sample(sampler_id(client.session, number)) for number in (1, 2)]
    async with serve(pool, prefect="http://127.0.0.1:1/api" if held else ""):  # the samples start the runner
        await client.results(*waiting)
        assert [said(journal, one) for one in waiting] == [said(journal, one) for one in before]
        assert said(journal, waiting[0]) != said(journal, waiting[1])
        assert state(pool, model) == weights
        assert journal.recovery.unstored_models() == []
        more = work(client, model, 1)
        if held:
            await asyncio.sleep(0.2)
            assert journal.results.get(more[-1], "local") is None
        else:
            await answers(client, more)


async def test_group_loss_before_the_copy_of_weights_changes_nothing(
    serve: Any, client: Any, pool: Any, journal: Any, until: Any
) -> None:
    async with serve(pool):
        model = await client.create()
        await answers(client, work(client, model, 2))
        published, executor = publish(client, model, 1), pool.executor

        def dies_with(command: Any) -> bool:
            return isinstance(command, ExportAdapter) and pool.executor is executor

        pool.poison = dies_with
        await answers(client, [published])
        sample = client.sample(sampler_id(client.session, 1))
        await client.result(sample)
        first = said(journal, sample)
        again = publish(client, model, 2)  # the same weights
        await answers(client, [again])
        sample = client.sample(sampler_id(client.session, 2))
        await client.result(sample)
        assert said(journal, sample) == first
        await until(lambda: journal.recovery.unstored_models() == [])


async def test_group_loss_during_a_publication_changes_nothing(
    serve: Any, client: Any, pool: Any, journal: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, deaths = ExecutionContext.answer, []

    def hold_later_commands(command: Any) -> bool:
        if isinstance(command, ExportAdapter) and not deaths:
            pool.hold = asyncio.Event()
        return False

    async def answer(context: Any, outcome: Any) -> None:
        if outcome.replays and any(isinstance(effect, SamplerOpened) for effect in outcome.effects) and not deaths:
            await until(lambda: isinstance(pool.log[-1], OptimStep) and pool.hold is not None)
            deaths.append(pool.die())
            pool.hold.set()
            await asyncio.sleep(0.05)  # gives later operations time to be interrupted
        await put(context, outcome)

    monkeypatch.setattr(ExecutionContext, "answer", answer)
    pool.poison = hold_later_commands
    async with serve(pool):
        model = await client.create()
        await answers(client, work(client, model, 2))
        await answers(client, [publish(client, model, 1), *work(client, model, 2)])
        assert deaths
        sample = client.sample(sampler_id(client.session, 1))
        assert (await client.result(sample)).error is None
        await until(lambda: journal.recovery.unstored_models() == [])


@pytest.mark.parametrize("error", [StoreError("no space is left"), RuntimeError("can't start new thread")])
async def test_failed_store_writes_are_retried_and_later_publications_are_refused(
    serve: Any, client: Any, pool: Any, journal: Any, stuck: Stuck, until: Any, error: Exception
) -> None:
    stuck.failing = error
    async with serve(pool):
        model = await client.create()
        await answers(client, [*work(client, model, 1), publish(client, model, 1)])
        await until(lambda: stuck.tried > 2)
        refused = await client.result(publish(client, model, 2))
        assert refused.error is not None and str(error) in refused.error
        assert [*pool.executor.snapshots] == [one.id for one in journal.recovery.unstored(model)]
        stuck.failing = None
        stuck.go.set()
        await until(lambda: journal.recovery.unstored(model) == [])
        await answers(client, [*work(client, model, 1), publish(client, model, 3)])


async def test_unsampled_publication_is_given_up(
    serve: Any, client: Any, pool: Any, journal: Any, stuck: Stuck, until: Any
) -> None:
    stuck.failing = StoreError("no space is left")
    async with serve(pool):
        model = await client.create()
        await answers(client, [*work(client, model, 1), publish(client, model, 1)])
        client.journal.sessions.finish(client.session, "local", None)
        await until(lambda: journal.models.get(model, None).state is ModelState.UNLOADED)
    assert journal.recovery.unstored_models() == []


async def test_failed_export_ends_no_model(serve: Any, client: Any, pool: Any, journal: Any, until: Any) -> None:
    execute = pool.executor.execute

    def refuse(command: Any) -> Any:
        if isinstance(command, ExportAdapter):
            raise ServerError("no memory is left")
        return execute(command)

    async with serve(pool):
        model = await client.create()
        pool.executor.execute = refuse
        await answers(client, [*work(client, model, 1), publish(client, model, 1), *work(client, model, 1)])
        sample = client.sample(sampler_id(client.session, 1))
        assert (await client.result(sample)).error is None
        pool.die()
        again = client.sample(sampler_id(client.session, 1))
        await answers(client, work(client, model, 1))
        await client.result(again)
        assert said(journal, again) == said(journal, sample)
        await until(lambda: journal.recovery.unstored_models() == [])


async def test_inflight_samplers_return_with_the_last_published_weights(
    serve: Any, client: Any, pool: Any, journal: Any, context: Any, until: Any
) -> None:
    def said(result: Any) -> set[int]:
        assert result.error is None, result.error
        return set(np.frombuffer(pb.SampleResponse.FromString(result.result).sequences[0].tokens, np.int32).tolist())

    async with serve(pool):
        model = await client.create()
        for number, token in enumerate((5, 9)):
            client.forward_backward(model, [token] * 8)
            client.optim_step(model, 0.5 + number)
            body = {"sampling_session_seq_id": number, "kind": "inflight"}
            saved = await client.result(client.submit(model, Kind.SAVE_FOR_SAMPLER, body))
            assert saved.error is None
        old, new = (sampler_id(client.session, number) for number in (0, 1))
        pool.hold = asyncio.Event()
        requests = [client.sample(one) for one in (old, new)]
        await until(lambda: isinstance(pool.log[-1], SampleStep))
        pool.die()
        pool.hold.set()
        assert [said(one) for one in await client.results(*requests)] == [{9}, {9}]
        # The store contains only the weights of the second publication.
        shared = journal.samplers.get(old, None).snapshot_id
        assert shared == journal.samplers.get(new, None).snapshot_id
        await until(lambda: journal.recovery.superfluous() == [])
        assert context.store.load(journal.recovery.sampler_snapshot(shared).path)
        # After its session, the shared snapshot leaves the group and the store.
        client.journal.sessions.finish(client.session, "local", None)
        await until(lambda: pool.executor.snapshots == {} and journal.recovery.sampler_snapshot(shared) is None)


async def test_publication_replaced_during_its_lookup_is_found_again(
    serve: Any, client: Any, pool: Any, journal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(pool):
        model = await client.create()
        for number in range(2):
            body = {"sampling_session_seq_id": number, "kind": "inflight"}
            assert (await client.result(client.submit(model, Kind.SAVE_FOR_SAMPLER, body))).error is None
            client.seqs.setdefault(sampler_id(client.session, number), 0)
        find, found = journal.recovery.sampler_snapshot, []

        def outdated(snapshot_id: str) -> Any:
            """Return a deleted publication at the first call."""
            found.append(find(snapshot_id))
            return replace(found[0], path=f"{found[0].path}-gone") if len(found) == 1 else found[-1]

        monkeypatch.setattr(journal.recovery, "sampler_snapshot", outdated)
        pool.die()
        assert (await client.result(client.sample(sampler_id(client.session, 0)))).error is None
        assert len(found) >= 2


@pytest.mark.parametrize(
    ("setting", "asked", "recompute"),
    [("keep", {}, False), ("recompute", {}, True), ("recompute", {"kv_cache": "keep"}, False)],
)
async def test_save_option_or_setting_decides_whether_to_recompute_the_kv_cache(
    serve: Any, client: Any, pool: Any, setting: str, asked: dict[str, str], recompute: bool
) -> None:
    async with serve(pool, inflight_kv_cache=setting):
        body = {"sampling_session_seq_id": 0, "kind": "inflight", **asked}
        save = client.submit(await client.create(), Kind.SAVE_FOR_SAMPLER, body)
        assert (await client.result(save)).error is None
        assert [command.recompute for command in pool.log if isinstance(command, MoveSnapshot)] == [recompute]


async def test_failed_save_publishes_nothing(
    serve: Any, client: Any, pool: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise StoreError("no space is left")

    async with serve(pool):
        model = await client.create()
        saves = [{"sampling_session_seq_id": number, "kind": "inflight"} for number in (0, 1, 2)]
        assert (await client.result(client.submit(model, Kind.SAVE_FOR_SAMPLER, saves[0]))).error is None
        before = {name: bias.tobytes() for name, bias in pool.executor.snapshots.items()}
        await answers(client, work(client, model, 1))
        with monkeypatch.context() as patch:
            patch.setattr(type(context.store), "save", full)
            failed = await client.result(client.submit(model, Kind.SAVE_FOR_SAMPLER, saves[1]))
        assert "no space is left" in failed.error
        assert {name: bias.tobytes() for name, bias in pool.executor.snapshots.items()} == before
        assert (await client.result(client.submit(model, Kind.SAVE_FOR_SAMPLER, saves[2]))).error is None
        assert {name: bias.tobytes() for name, bias in pool.executor.snapshots.items()}.keys() == before.keys()


async def test_failed_request_fails_again_in_a_replay_and_changes_nothing(serve: Any, client: Any, pool: Any) -> None:
    async with serve(pool):
        model = await client.create()
        bad = client.forward_backward(model, [5000])
        assert (await client.result(bad)).category == "user"
        await answers(client, work(client, model, 2))
        before = state(pool, model)
        pool.die()
        await answers(client, [client.forward_backward(model, [1], forward_only=True)])
        assert state(pool, model) == before


async def test_loaded_model_no_longer_needs_its_checkpoint(
    serve: Any, client: Any, pool: Any, journal: Any, context: Any
) -> None:
    async with serve(pool):
        source = await client.create(0)
        await answers(client, work(client, source, 2))
        saved = await client.result(client.submit(source, Kind.SAVE_WEIGHTS, {"path": "one"}))
        path = orjson.loads(saved.result)["path"]
        model, request = client.load_model(1, path, optimizer=True)
        await answers(client, [request, *work(client, model, 1)])
        before = state(pool, model)
        context.store.delete(path)
        pool.die()
        await answers(client, [client.forward_backward(model, [1], forward_only=True)])
        assert state(pool, model) == before


def damage(context: Any, path: str) -> None:
    """Change a byte of the weights in the store."""
    saved = context.store.find(path)
    (file,) = Path(context.store.url.removeprefix("file://")).rglob(f"{saved.attempt}/adapter_model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("older", ["snapshot", "creation"])
async def test_damaged_newest_snapshot_causes_a_longer_replay(
    serve: Any,
    client: Any,
    pool: Any,
    journal: Any,
    context: Any,
    until: Any,
    older: str,
    caplog: Any,
) -> None:
    told: dict[str, dict[str, Any]] = {}

    def emit(event: Event) -> None:
        told[event.event] = event.payload

    times = 2 if older == "snapshot" else 1
    async with serve(pool, steps=3):
        model = await client.create(0)
        for number in range(times):
            await answers(client, work(client, model, 3))
            await answers(client, [client.forward_backward(model, [2])])  # a snapshot is due now
            await until(lambda number=number: len(journal.recovery.snapshots(model)) == number + 1)
        await answers(client, work(client, model, 1))
        before = state(pool, model)
    newest, *rest = journal.recovery.snapshots(model)
    assert len(rest) == times - 1
    damage(context, newest.path)
    pool.die()
    with caplog.at_level("ERROR"):
        async with serve(pool, prefect="http://127.0.0.1:1/api", emit=emit):
            await answers(client, [client.forward_backward(model, [1], forward_only=True)])
            assert state(pool, model) == before
    assert "adapter_model.safetensors does not have the SHA-256" in caplog.text
    assert journal.recovery.snapshots(model) == rest
    assert context.store.exists(newest.path), "it is left for people to look at"
    assert "adapter_model.safetensors" in told["tinkerflow.snapshot.unreadable"]["why"]
    at = told["tinkerflow.model.restored"]["snapshot_at_request"]
    assert at == (rest[0].seq_id if rest else None)


@pytest.mark.parametrize("since", ["unchanged", "overwritten"])
async def test_load_is_replayed_from_its_checkpoint_only_if_it_is_unchanged(
    serve: Any, client: Any, pool: Any, journal: Any, context: Any, since: str
) -> None:
    async with serve(pool):
        model = await client.create(0)
        await answers(client, work(client, model, 2))
        saved = await client.result(client.submit(model, Kind.SAVE_WEIGHTS, {"path": "one"}))
        path = orjson.loads(saved.result)["path"]
        await answers(client, [*work(client, model, 1), client.submit(model, Kind.LOAD_WEIGHTS, {"path": path})])
        await answers(client, work(client, model, 1))
        before = state(pool, model)
        (of_load,) = journal.recovery.snapshots(model)
        damage(context, of_load.path)
        if since == "overwritten":
            again = client.submit(model, Kind.SAVE_WEIGHTS, {"path": "one", "overwrite": True})
            await answers(client, [again])
        pool.die()
        if since == "overwritten":
            assert "was replaced after it was loaded" in (await client.result(client.optim_step(model))).error
            return
        await answers(client, [client.forward_backward(model, [1], forward_only=True)])
        assert state(pool, model) == before
        (again,) = journal.recovery.snapshots(model)
        assert again.path != of_load.path and context.store.upkeep.problems(again.path) == []


async def test_unrestorable_model_fails_alone(
    serve: Any, client: Any, pool: Any, journal: Any, context: Any, until: Any
) -> None:
    async with serve(pool, steps=1):
        good, bad = await client.create(0), await client.create(1)
        for model in (good, bad):
            await answers(client, [*work(client, model, 1)])
            await answers(client, [client.forward_backward(model, [1])])
            await until(lambda model=model: bool(journal.recovery.snapshots(model)))
        await answers(client, [*work(client, bad, 1)])
        await answers(client, [client.forward_backward(bad, [1])])
        await until(lambda: len(journal.recovery.snapshots(bad)) >= 2)
        for view in journal.recovery.snapshots(bad):
            context.store.delete(view.path)
        pool.die()
        failed = await client.result(client.optim_step(bad))
        assert "could not be restored" in failed.error and "none of its snapshots can be read" in failed.error
        assert journal.models.get(bad, None).state is ModelState.FAILED
        await answers(client, [client.optim_step(good)])


async def test_request_that_kills_groups_fails_alone(serve: Any, client: Any, pool: Any) -> None:
    async with serve(pool):
        model, other = await client.create(0), await client.create(1)
        pool.poison = lambda command: isinstance(command, OptimStep) and command.params.learning_rate == 0.66
        requests = [client.optim_step(model, 0.66), client.optim_step(model, 0.1)]
        bad, good = await client.results(*requests)
        assert "is not retried" in bad.error and bad.category == "server"
        assert good.error is None
        assert pool.deaths == 2
        await answers(client, work(client, other, 1))


async def test_short_store_outage_loses_no_snapshot(
    serve: Any, client: Any, pool: Any, journal: Any, context: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, away = type(context.store).load, 2

    def failing(*args: Any, **more: Any) -> Any:
        nonlocal away
        away -= 1
        if away >= 0:
            raise StoreAwayError("store gs://bucket: cannot load a snapshot (503)")
        return load(*args, **more)

    monkeypatch.setattr(restore, "_PAUSES", (0.01,) * 5)
    monkeypatch.setattr(type(context.store), "load", failing)
    async with serve(pool, steps=1):
        model = await client.create()
        await answers(client, work(client, model, 2))
        await until(lambda: journal.recovery.snapshots(model))
        kept = journal.recovery.snapshots(model)
        pool.die()
        await answers(client, [client.forward_backward(model, [1, 2])])
        assert {one.path for one in kept} <= {one.path for one in journal.recovery.snapshots(model)}
        assert "ImportAdapter" in pool.names
    assert away < 0


@pytest.mark.parametrize(
    ("owner", "method"), [(Requests, "ready"), (Recovery, "executed"), (BaseModels, "note_progress")]
)
async def test_short_database_outage_loses_no_model(
    serve: Any,
    client: Any,
    pool: Any,
    journal: Any,
    until: Any,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
) -> None:
    asked, away = getattr(owner, method), 0

    def ask(*args: Any, **more: Any) -> Any:
        nonlocal away
        if away:
            away -= 1
            raise OperationalError("SELECT", {}, Exception("the server closed the connection"))
        return asked(*args, **more)

    monkeypatch.setattr(owner, method, ask)
    async with serve(pool):
        model = await client.create()
        await answers(client, work(client, model, 2))
        pool.die()
        away = 3
        assert all(result.error is None for result in await client.results(*work(client, model, 1)))
        assert journal.models.get(model, None).state is ModelState.LIVE
        await until(lambda: not away)


async def test_database_outage_during_an_answer_ends_the_engine_but_no_model(
    serve: Any, client: Any, pool: Any, journal: Any, context: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(outcomes: Any) -> None:
        raise OperationalError("INSERT", {}, Exception("the server closed the connection"))

    finish = context.answers._finish
    monkeypatch.setattr(context.answers, "_pauses", (0.01,))
    with pytest.raises(ExceptionGroup) as ended:
        async with serve(pool) as task:
            model = await client.create()
            await answers(client, work(client, model, 2))
            monkeypatch.setattr(context.answers, "_finish", away)
            request = client.optim_step(model)
            await until(task.done)
    assert ended.value.subgroup(OperationalError)
    assert journal.models.get(model, None).state is ModelState.LIVE
    monkeypatch.setattr(context.answers, "_finish", finish)
    async with serve(pool):
        await answers(client, [request, *work(client, model, 1)])


async def test_sample_that_kills_groups_fails_alone(serve: Any, client: Any, pool: Any) -> None:
    async with serve(pool):
        pool.hold = asyncio.Event()
        samples = [client.sample(client.sampler(number), max_tokens=40) for number in range(3)]
        pool.poison = lambda command: (
            isinstance(command, SampleStep) and any(request.request_id == samples[1] for request in command.admit)
        )
        await asyncio.sleep(0.1)
        pool.hold.set()
        results = await client.results(*samples)
        assert [result.error is None for result in results] == [True, False, True]
        assert "is not retried" in results[1].error


async def test_waiting_clients_see_the_reason(serve: Any, client: Any, pool: Any, journal: Any, until: Any) -> None:
    journal.base_models.register([(client.base_model, "{}")])
    async with serve(pool):
        model = await client.create()
        pool.die(down=True)
        request = client.optim_step(model)
        await until(lambda: journal.queue.waits_for(request) is not None)
        assert "a new one is being started" in str(journal.queue.waits_for(request))
        pool.come_back()
        await answers(client, [request])
        await until(lambda: journal.queue.waits_for(request) is None)


async def test_a_planned_stop_takes_snapshots(
    context: Any, mirror: Mirror, client: Any, pool: Any, journal: Any, tmp_path: Path
) -> None:
    served = ServedModel(
        context.card, context, pool, SamplingRunner(context, mirror.observe_sampling(context.card.name), most_waiting=8)
    )
    dispatcher = Dispatcher(Settings(data_dir=tmp_path, prefect="off"), journal, mirror, [served])
    serving = asyncio.create_task(dispatcher.serve(lambda: None))
    model = await client.create()
    await answers(client, work(client, model, 1))
    dispatcher.stop()
    await asyncio.wait_for(serving, 60)
    assert [view.seq_id for view in journal.recovery.snapshots(model)] == [3]
    assert journal.recovery.executed(model, 3, 10) == [], "nothing is left to be replayed"
