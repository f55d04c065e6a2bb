"""Samples of several samplers in one decode batch, on the NumPy pool, without Prefect."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import numpy as np
import orjson
import pytest

from tinkerflow.backend.journal import Kind, UsageKind
from tinkerflow.backend.journal.streams import Listener
from tinkerflow.backend.spec.commands import MoveSnapshot, NewTokens, SampleStep
from tinkerflow.backend.wire import SampleBody
from tinkerflow.backend.wire import sample as wire_sample
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.flows.dispatcher import observed
from tinkerflow.flows.prefect.mirror import Mirror, RunMirror
from tinkerflow.flows.runner import Why
from tinkerflow.flows.sampling_runner import SamplingRunner
from tinkerflow.tasks.execution.operation import ExecutionContext, Operation
from tinkerflow.tasks.operations import sample as sample_module


@pytest.fixture
async def sampling(context: Any, mirror: Mirror, client: Any, running: Any) -> Any:
    runner = SamplingRunner(context, mirror.observe_sampling(context.card.name), most_waiting=8)
    async with running(runner.serve()) as task:
        yield runner, task


def tokens(result: Any) -> list[list[int]]:
    assert result.error is None, result.error
    response = pb.SampleResponse.FromString(result.result)
    return [np.frombuffer(sequence.tokens, np.int32).tolist() for sequence in response.sequences]


async def trained(make_runner: Any, client: Any, number: int, token: int) -> tuple[str, str]:
    """Train a model to sample `token`. Returns the id of its sampler and the path of its sampler checkpoint."""
    model, created = client.submit_create(number)
    requests = [created, client.forward_backward(model, [token]), client.optim_step(model)]
    requests.append(client.submit(model, Kind.SAVE_FOR_SAMPLER, {"path": f"says-{token}"}))
    requests.append(client.submit(model, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": 100 + number}))
    runner = make_runner(model)
    serving = asyncio.create_task(runner.serve())
    results = await client.results(*requests)
    runner.stop()
    await serving
    return orjson.loads(results[-1].result)["sampling_session_id"], orjson.loads(results[-2].result)["path"]


async def test_snapshots_checkpoints_and_the_base_model_share_a_batch(
    sampling: Any, context: Any, make_runner: Any, client: Any, pool: Any
) -> None:
    first, path = await trained(make_runner, client, 0, 5)
    second, _ = await trained(make_runner, client, 1, 9)
    loaded, base = client.sampler(0, path), client.sampler(1)
    results = await client.results(*(client.sample(one) for one in (first, second, loaded, base, loaded)))
    assert [tokens(result)[0] for result in results] == [[5] * 6, [9] * 6, [5] * 6, [0] * 6, [5] * 6]
    assert pool.names.count("LoadSnapshot") == 1
    row = client.journal.samplers.get(loaded, "local")
    assert context.snapshots.held(row.snapshot_id)


async def test_full_models_load_one_after_another_if_host_memory_is_small(
    sampling: Any, make_runner: Any, client: Any, pool: Any, running: Any
) -> None:
    """Host memory fits one model, so each model is loaded after the samples of earlier models are answered."""
    model, created = client.submit_create(0, rank=0)
    runner, paths, said = make_runner(model), [], [5, 9, 3, 7]
    async with running(runner.serve()):
        assert (await client.result(created)).error is None
        for number, token in enumerate(said):
            requests = [client.forward_backward(model, [token] * 4), client.optim_step(model)]
            requests.append(client.submit(model, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": 100 + number}))
            requests.append(client.submit(model, Kind.SAVE_FOR_SAMPLER, {"path": f"says-{token}"}))
            runner.wake()
            results = await client.results(*requests)
            paths.append(orjson.loads(results[-1].result)["path"])
        runner.stop()
    published = [f"{client.session}:sample:{100 + number}" for number in range(4)]
    samplers = [*(client.sampler(number, path) for number, path in enumerate(paths)), *published]
    most, submit = [], pool.submit

    async def counting(command: Any, *args: Any, **more: Any) -> Any:
        reply = await submit(command, *args, **more)
        most.append(len(pool.executor.snapshots))
        return reply

    pool.submit = counting
    results = await client.results(*(client.sample(one) for one in (*samplers, *samplers)))
    assert [tokens(result)[0] for result in results] == [[token] * 6 for token in said] * 4
    assert most[-1] == 1 and max(most[most.index(1) :]) == 1, "those of the saves go when the first is loaded"


async def test_inflight_samplers_and_their_requests_take_up_later_publications(
    sampling: Any, make_runner: Any, client: Any, pool: Any, running: Any, monkeypatch: Any
) -> None:
    model, created = client.submit_create(0)
    runner = make_runner(model)

    async def publish(token: int, *samplers: tuple[int, str]) -> None:
        """Train the model to sample `token`, then save it. samplers: the number and kind of each save."""
        requests = [client.forward_backward(model, [token] * 4), client.optim_step(model)]
        bodies = [{"sampling_session_seq_id": number, "kind": kind} for number, kind in samplers]
        requests += [client.submit(model, Kind.SAVE_FOR_SAMPLER, body) for body in bodies]
        runner.wake()
        assert [result.error for result in await client.results(*requests)] == [None] * len(requests)

    began, moved, submit = asyncio.Event(), asyncio.Event(), pool.submit

    async def pausing(command: Any, *args: Any, **more: Any) -> Any:
        """Pause the batch after its first chunk until the next weights are published."""
        if isinstance(command, SampleStep) and began.is_set():
            async with asyncio.timeout(30):
                await moved.wait()
        reply = await submit(command, *args, **more)
        if isinstance(command, SampleStep):
            began.set()
        if isinstance(command, MoveSnapshot):
            moved.set()
        return reply

    old, fixed, new = (f"{client.session}:sample:{number}" for number in (100, 101, 102))
    async with running(runner.serve()):
        assert (await client.result(created)).error is None
        await publish(5, (100, "inflight"))
        assert tokens(await client.result(client.sample(old)))[0] == [5] * 6
        monkeypatch.setattr(pool, "submit", pausing)
        spanning = client.sample(old, max_tokens=10)
        async with asyncio.timeout(30):
            await began.wait()
        await publish(9, (101, "snapshot"), (102, "inflight"))
        assert tokens(await client.result(spanning))[0] == [5] * 4 + [9] * 6
        await publish(3)
        await publish(3, (103, "inflight"), (104, "inflight"))
        said = await client.results(*(client.sample(one) for one in (old, fixed, new)))
        assert [tokens(result)[0][0] for result in said] == [3, 9, 3]
        runner.stop()


async def test_samples_of_one_prompt_are_counted_as_one_prefill_and_hits(sampling: Any, client: Any) -> None:
    request = client.sample(client.sampler(0), of={"num_samples": 8})
    assert len(tokens(await client.result(request))) == 8
    day = timedelta(days=1)
    now = datetime.now(UTC)
    counted = {row.kind: row.quantity for row in client.journal.usage.hourly("local", now - day, now + day)}
    # A prompt of 3 tokens, and 6 tokens sampled in each of 8 sequences.
    assert counted == {UsageKind.PREFILL: 3, UsageKind.CACHED_PREFILL: 7 * 3, UsageKind.SAMPLE: 8 * 6}


async def test_large_request_read_during_a_group_loss_is_read_again(
    sampling: Any,
    context: Any,
    make_runner: Any,
    client: Any,
    pool: Any,
    until: Any,
    running: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, path = await trained(make_runner, client, 0, 5)
    loaded = client.sampler(0, path)
    assert tokens(await client.result(client.sample(loaded)))[0][0] == 5
    decode, entered, release = ExecutionContext.decode, asyncio.Event(), asyncio.Event()

    async def slow(self: ExecutionContext, owner: str, size: int, function: Any) -> Any:
        if size > 64 * 1024:
            entered.set()
            await release.wait()
        return await decode(self, owner, size, function)

    async def mourn() -> None:
        async for _ in pool.losses():
            context.snapshots.lost()

    monkeypatch.setattr(ExecutionContext, "decode", slow)
    async with running(mourn()):
        pool.hold, begun = asyncio.Event(), len(pool.names)
        small = client.sample(client.sampler(1), max_tokens=9)
        await until(lambda: "SampleStep" in pool.names[begun:])
        large = client.sample(loaded, of={"pad": "x" * 70000})
        await entered.wait()
        pool.die()
        pool.hold.set()
        assert (await client.result(small)).error is None  # on the next group
        release.set()
        assert (await client.result(large)).error is None


async def test_an_idle_group_prefills_answers(
    sampling: Any, client: Any, pool: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, idle_steps, looked, idle = pool.executor.sample, 0, 0, False

    def prefilling(command: SampleStep) -> Any:
        nonlocal idle_steps
        idle_steps += command.idle
        assert not (command.idle and command.admit)
        return sample(command).copy_with(answers=idle_steps < 3)

    def look(_: Any) -> bool:
        nonlocal looked
        looked += 1
        return idle

    monkeypatch.setattr(type(pool), "idle", property(look))
    monkeypatch.setattr(pool.executor, "sample", prefilling)
    sampler = client.sampler(0)
    assert (await client.result(client.sample(sampler))).error is None
    await until(lambda: looked > 2)
    assert not idle_steps, "training goes before answers"
    idle = True
    await until(lambda: idle_steps == 3)
    assert (await client.result(client.sample(sampler))).error is None


async def test_setting_disables_answer_prefill(
    context: Any, mirror: Mirror, client: Any, pool: Any, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = pool.executor.sample
    monkeypatch.setattr(pool.executor, "sample", lambda command: sample(command).copy_with(answers=True))
    monkeypatch.setattr(sample_module, "_IDLE_SECONDS", 0.0)
    for prefills in (False, True):
        log, own = len(pool.log), replace(context, prefill_answers=prefills)
        runner = SamplingRunner(own, mirror.observe_sampling(context.card.name), most_waiting=8)
        async with running(runner.serve()):
            sampler = client.sampler(int(prefills))
            for _ in range(2):
                assert (await client.result(client.sample(sampler))).error is None
        assert any(command.idle for command in pool.log[log:] if isinstance(command, SampleStep)) == prefills


async def test_requests_join_between_chunks(sampling: Any, client: Any, pool: Any, until: Any) -> None:
    sampler = client.sampler(0)
    long = client.sample(sampler, max_tokens=60)
    await until(lambda: pool.names.count("SampleStep") >= 2)
    short = await client.result(client.sample(sampler, max_tokens=1))
    assert len(tokens(short)[0]) == 1
    assert len(tokens(await client.result(long))[0]) == 60


async def test_requests_over_the_waiting_limit_are_all_answered(sampling: Any, client: Any) -> None:
    sampler = client.sampler(0)
    results = await client.results(*(client.sample(sampler, max_tokens=3) for _ in range(40)))
    assert all(len(tokens(result)[0]) == 3 for result in results)


async def test_small_requests_do_not_wait_for_all_requests_of_another_owner(
    sampling: Any, client: Any, pool: Any, connect: Any
) -> None:
    other = await connect(client.journal, owner="another")
    mine, its = client.sampler(0), other.sampler(0)
    many = [client.sample(mine, max_tokens=12) for _ in range(200)]
    await client.result(many[0])
    pool.hold = asyncio.Event()
    little = other.sample(its, max_tokens=12)
    pool.hold.set()
    assert len(tokens(await other.result(little))[0]) == 12
    assert len(client.journal.results.finished(many)) <= 100
    assert all(len(tokens(result)[0]) == 12 for result in await client.results(*many))


async def test_projects_take_turns_to_compile_constraints(
    sampling: Any, client: Any, pool: Any, connect: Any, until: Any
) -> None:
    runner, _ = sampling
    other = await connect(client.journal, owner="another")
    mine, its = client.sampler(0), other.sampler(0)

    def constrained(value: str) -> dict[str, Any]:
        return {"constraint": {"type": "regex", "value": value}}

    pool.hold = asyncio.Event()
    requests = [client.sample(mine, max_tokens=60)]
    await until(lambda: pool.log)
    admitted = runner._taken.batch._admit
    for place, value in enumerate(("a", "b", "b", "c")):  # one by one, because threads parse bodies in any order
        requests.append(client.sample(mine, **constrained(value)))
        await until(lambda place=place: len(admitted) == place + 1)
    asked = []
    for place, of in enumerate((constrained("a"), {}), start=len(admitted)):
        asked.append(other.sample(its, **of))
        await until(lambda place=place: len(admitted) == place + 1)
    pool.hold.set()
    assert all(len(tokens(result)[0]) == 6 for result in await other.results(*asked))
    await client.results(*requests)
    steps = [
        [(one.owner, one.constraint and one.constraint.text) for one in command.admit]
        for command in pool.log
        if isinstance(command, SampleStep) and command.admit
    ]
    assert steps == [
        [("local", None)],
        [("local", "a"), ("another", None)],
        [("another", "a")],
        [("local", "b"), ("local", "b")],
        [("local", "c")],
    ]


async def test_interactive_request_precedes_a_batch_of_its_project(sampling: Any, client: Any, pool: Any) -> None:
    sampler = client.sampler(0)
    many = [client.sample(sampler, max_tokens=12) for _ in range(200)]
    await client.result(many[0])
    pool.hold = asyncio.Event()
    asked = client.sample(sampler, {"priority": "interactive"}, max_tokens=12)
    pool.hold.set()
    assert len(tokens(await client.result(asked))[0]) == 12
    assert len(client.journal.results.finished(many)) <= 100
    assert all(len(tokens(result)[0]) == 12 for result in await client.results(*many))


async def test_invalid_request_fails_alone(sampling: Any, client: Any) -> None:
    sampler = client.sampler(0)
    bad, good = client.sample(sampler, max_tokens=1_000_000), client.sample(sampler)
    failed, fine = await client.results(bad, good)
    assert failed.category == "user" and "max_tokens" in failed.error
    assert len(tokens(fine)[0]) == 6


async def test_request_with_an_answer_that_cannot_be_stored_fails_alone(
    sampling: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_sample, "MAX_RECORDED_BYTES", 8 * 6)  # a token and its logprob take 8 bytes
    sampler = client.sampler(0)
    failed, fine = await client.results(client.sample(sampler, max_tokens=7), client.sample(sampler, max_tokens=6))
    assert (failed.category, failed.error[:50]) == ("user", "the answer has 56 bytes: must have at most 48; low")
    assert len(tokens(fine)[0]) == 6


async def test_answers_are_encoded_alone_and_long_ones_in_threads(sampling: Any, client: Any, monkeypatch: Any) -> None:
    threads: dict[int, str] = {}

    def broken(result: Any, *args: Any) -> bytes:
        threads[length := len(result.sequences[0].tokens_T)] = threading.current_thread().name[:6]
        return wire_sample.encode_sample(result if length != 7 else result.missing, *args)

    monkeypatch.setattr("tinkerflow.tasks.execution.operation.INLINE_BYTES", 8 * 6)  # a token takes 8 bytes
    monkeypatch.setattr(sample_module, "encode_sample", broken)
    failed, *fine = await client.results(*(client.sample(client.sampler(n), max_tokens=n) for n in (7, 6, 8)))
    assert failed.error.startswith("sample failed in the service (AttributeError: ")
    assert [len(tokens(result)[0]) for result in fine] == [6, 8] and threads[6] != "decode" == threads[7] == threads[8]


async def test_missing_checkpoint_fails_only_its_sampler(sampling: Any, client: Any) -> None:
    lost, fine = client.sampler(0, "tinker://nobody/sampler_weights/none"), client.sampler(1)
    first, second = await client.results(client.sample(lost), client.sample(fine))
    assert first.category == "user" and "tinker://nobody/sampler_weights/none" in first.error
    assert second.error is None


async def test_lost_group_only_delays_the_requests_in_the_batch(
    sampling: Any, client: Any, pool: Any, until: Any
) -> None:
    sampler = client.sampler(0)
    pool.hold = asyncio.Event()
    requests = [client.sample(sampler, max_tokens=20) for _ in range(3)]
    await until(lambda: pool.log)
    pool.die()
    pool.hold.set()
    assert [result.error for result in await client.results(*requests)] == [None] * 3


async def test_request_lost_by_the_sampler_fails_as_a_server_error(
    sampling: Any, client: Any, pool: Any, until: Any
) -> None:
    sampler = client.sampler(0)
    pool.hold = asyncio.Event()
    request = client.sample(sampler, max_tokens=50)
    await until(lambda: pool.log)
    execute = pool.executor.execute
    steps = 0

    def forgetful(command: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2:
            pool.executor.batch.clear()
        return execute(command)

    pool.executor.execute = forgetful
    pool.hold.set()
    failed = await client.result(request)
    assert failed.category == "server" and "no longer has this request" in failed.error


async def test_a_failed_step_fails_its_requests_and_takes_them_from_the_batch(
    sampling: Any, client: Any, pool: Any, until: Any
) -> None:
    runner, _ = sampling
    sampler, execute = client.sampler(0), pool.executor.execute
    pool.hold = asyncio.Event()
    request = client.sample(sampler, max_tokens=50)
    await until(lambda: pool.log)
    later = client.sample(sampler)
    await until(lambda: later in [one.item.request_id for one in runner._taken.batch._admit])

    def failing(command: Any) -> Any:
        pool.executor.execute = execute
        execute(command)
        raise RuntimeError("a fault")

    pool.executor.execute = failing
    pool.hold.set()
    failed = await client.result(request)
    assert failed.category == "server" and "a fault" in failed.error
    assert len(tokens(await client.result(later))[0]) == 6
    assert pool.executor.batch == {}


async def test_requests_of_an_ended_session_leave_the_batch(sampling: Any, client: Any, pool: Any, until: Any) -> None:
    runner, _ = sampling
    pool.hold = asyncio.Event()
    request = client.sample(client.sampler(0), max_tokens=60)
    await until(lambda: pool.log)
    client.journal.sessions.finish(client.session, "local", None)
    assert (await client.result(request)).category == "user"
    await runner.cancel_ended()
    pool.hold.set()
    await until(lambda: any(getattr(command, "cancel", None) == (request,) for command in pool.log))
    assert pool.executor.batch == {}


async def test_a_cancelled_request_leaves_with_the_next_chunk(
    sampling: Any, client: Any, pool: Any, until: Any
) -> None:
    runner, _ = sampling
    pool.hold = asyncio.Event()
    sampler = client.sampler(0)
    request = client.sample(sampler, max_tokens=60)
    await until(lambda: pool.log)
    joining = client.sample(sampler, max_tokens=60)
    await until(lambda: joining in [one.item.request_id for one in runner._taken.batch._admit])
    for one in (request, joining):
        client.journal.requests.cancel(one, "local")
        runner.cancel(one)
        runner.cancel(one)
    chunks = len(pool.log)
    pool.hold.set()
    await until(lambda: len(pool.log) > chunks)
    first, second = pool.log[chunks - 1], pool.log[chunks]
    assert [one.request_id for one in first.admit] == [request]
    # one leaves with the next chunk, and the other never joins
    assert (second.cancel, second.admit) == ((request,), ())
    assert pool.executor.batch == {}
    failed = await client.result(request)
    assert (failed.error, failed.category) == ("cancelled by the client", "user")
    assert len(tokens(await client.result(client.sample(sampler)))[0]) == 6


async def test_stopped_sampling_runner_answers_requests_it_has_taken(
    sampling: Any, client: Any, pool: Any, until: Any
) -> None:
    runner, task = sampling
    sampler = client.sampler(0)
    pool.hold = asyncio.Event()
    taken = client.sample(sampler)
    await until(lambda: pool.log)
    runner.stop()
    await asyncio.sleep(0.05)
    waiting = client.sample(sampler)
    pool.hold.set()
    assert (await asyncio.wait_for(task, 60)).why is Why.STOPPED
    assert tokens(await client.result(taken))
    assert client.journal.results.get(waiting, "local") is None


class Shown:
    """An observer that records samples and the end of its runner."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.samples: list[str] = []

    def sampled(self, operation: Operation) -> None:
        self.samples.append(operation.request.id)

    def ended(self, state: str, text: str, *, over: bool) -> None:
        assert not over  # another engine may continue the run
        self.ends.append(state)


async def test_runner_cancelled_while_decoding_reports_its_end(
    context: Any, client: Any, pool: Any, running: Any, until: Any
) -> None:
    shown = Shown()
    runner = SamplingRunner(context, [cast(RunMirror, shown)], most_waiting=8)
    pool.hold = asyncio.Event()
    client.sample(client.sampler(0))
    async with running(observed(runner.serve, runner.observers)):
        await until(lambda: "SampleStep" in pool.names)
        runner.stop()
        await asyncio.sleep(0)
    assert shown.ends == ["Cancelled"]


async def test_batch_and_interactive_requests_take_turns_for_one_place(context: Any, client: Any, running: Any) -> None:
    shown, sampler = Shown(), client.sampler(0)
    batch = [client.sample(sampler) for _ in range(3)]
    people = [client.sample(sampler, {"priority": "interactive"}) for _ in range(3)]
    runner = SamplingRunner(context, [cast(RunMirror, shown)], most_waiting=1)
    async with running(runner.serve()):
        await client.results(*batch, *people)
    assert sorted(shown.samples[:2]) == sorted([people[0], batch[0]])
    assert sorted(shown.samples[2:4]) == sorted([people[1], batch[1]])


async def test_runner_cancelled_before_the_group_serves_reports_its_end(context: Any, pool: Any, running: Any) -> None:
    shown = Shown()
    pool.die(down=True)
    runner = SamplingRunner(context, [cast(RunMirror, shown)], most_waiting=8)
    async with running(observed(runner.serve, runner.observers)):
        await asyncio.sleep(0)
    assert shown.ends == ["Cancelled"]


async def test_waiting_request_does_not_keep_its_parsed_body(sampling: Any, client: Any, pool: Any, until: Any) -> None:
    pool.hold = asyncio.Event()
    waiting = client.sample(client.sampler(0))
    await until(lambda: pool.log)
    gc.collect()
    kept = sum(type(parsed) is SampleBody for parsed in gc.get_objects())
    pool.hold.set()
    assert (await client.result(waiting)).error is None
    assert kept == 0


async def test_only_streaming_samples_are_published_chunk_by_chunk(
    sampling: Any, client: Any, pool: Any, until: Any
) -> None:
    sampler = client.sampler(0)
    seen = client.journal.streams.last()
    streaming = client.sample(sampler, of={"stream": True, "num_samples": 2}, max_tokens=10)
    silent = client.sample(sampler, max_tokens=10)
    said = [tokens(result) for result in await client.results(streaming, silent)]

    def ended() -> bool:  # tokens may be written after the answer
        return sum(one.new.stop_reason is not None for one in client.journal.streams.after(seen)[0]) == 2

    await until(ended)
    found, _ = client.journal.streams.after(seen)
    assert {one.stream for one in found} == {f"{sampler}#0"}
    for index in range(2):
        mine = [one.new for one in found if one.new.index == index]
        assert [one.start for one in mine] == [0, 4, 8], "the group decodes four at a time"
        assert [token for one in mine for token in one.tokens_T.tolist()] == said[0][index]
        assert [one.stop_reason for one in mine] == [None, None, "length"]


async def test_same_tokens_are_published_again_after_a_crash(sampling: Any, client: Any, pool: Any, until: Any) -> None:
    sampler, seen = client.sampler(0), client.journal.streams.last()

    def written() -> list[NewTokens]:
        return [one.new for one in client.journal.streams.after(seen)[0]]

    def crashes(command: Any) -> bool:
        """Crash in the eighth step, after a thread has written some of the tokens."""
        if pool.deaths or pool.names.count("SampleStep") < 8:
            return False
        while not written():
            time.sleep(0.001)
        return isinstance(command, SampleStep)

    pool.poison = crashes
    request = client.sample(sampler, of={"stream": True}, max_tokens=40)
    assert (await client.result(request)).error is None
    assert pool.deaths == 1
    taken = sampling[0]._taken
    await until(lambda: not taken.ids)
    assert not taken.batch._suspects, "an answered request is suspected no more"
    await until(lambda: written()[-1].stop_reason is not None)  # tokens may be written after the answer
    listener = Listener()
    found = written()
    assert [new.start for new in found].count(0) == 2, "it began again"
    for new in found:
        listener.put(new)
    heard = [token for new in listener.take() for token in new.tokens_T.tolist()]
    assert heard == tokens(client.journal.results.get(request, "local"))[0]


async def test_long_samples_leave_queue_places_to_other_projects(
    journal: Any, connect: Any, context: ExecutionContext, running: Any, pool: Any, until: Any
) -> None:
    first, second, third = [await connect(journal, owner=owner) for owner in ("one", "two", "three")]
    runner, pool.hold = SamplingRunner(context, (), most_waiting=4), asyncio.Event()
    long = {"pad": "x" * 70_000}
    async with running(runner.serve()):
        asked = [(client, client.sample(client.sampler(1), long)) for client in [first] * 4 + [second] * 4]
        await until(lambda: runner._taken is not None and sum(s.waits for s in runner._taken._samples.values()) == 8)
        asked.append((third, third.sample(third.sampler(1))))
        await until(lambda: asked[-1][1] in runner._taken.ids)
        pool.hold.set()
        assert [(await client.result(request)).error for client, request in asked] == [None] * 9
