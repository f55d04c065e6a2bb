"""Forks at any step of a run, remade from its history, and rechecks: real tasks, journal and store, a unigram model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import orjson
import pytest

from tinkerflow.backend.catalog.card import card, trained_data
from tinkerflow.backend.catalog.history import past_requests
from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.journal import HistoryRules, Kind, ModelState
from tinkerflow.backend.journal import history as journal_history
from tinkerflow.backend.store.history import HistoryStore
from tinkerflow.flows.runner import ModelRunner
from tinkerflow.flows.sampling_runner import SamplingRunner
from tinkerflow.flows.snapshots import SnapshotPolicy
from tinkerflow.flows.sweeps import delete_histories, write_histories
from tinkerflow.tasks.execution.fork import make_fork
from tinkerflow.tasks.execution.history_replay import HistoryReplay
from tinkerflow.tasks.execution.recheck import Difference
from tinkerflow.tasks.operations import CHANGES

STEPS = 8


@pytest.fixture(autouse=True)
def segments_due_after_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_history, "_DUE_REQUESTS", 1)


@pytest.fixture
async def serve(make_runner: Any, client: Any, running: Any) -> AsyncIterator[Any]:
    """serve(model): start the runner of a submitted model."""
    async with AsyncExitStack() as stack:

        async def serve(model: str) -> None:
            runner = make_runner(model, snapshots=SnapshotPolicy(3, 1000.0))
            await stack.enter_async_context(running(runner.serve()))
            await stack.enter_async_context(running(client.ring("model:", runner)))

        yield serve


async def loaded(client: Any, serve: Any, number: int, path: str) -> Any:
    """Look up a path in the journal, load it into a new model, and return the result."""
    client.journal.checkpoints.get(path, "local")
    model, request = client.load_model(number, path, optimizer=True)
    await serve(model)
    return await client.result(request)


async def train(client: Any, model: str, context: Any) -> None:
    """Train eight steps of one or two chunks. Save after each step and within odd steps. Write two segments."""
    await client.result(client.submit(model, Kind.SAVE_WEIGHTS, {"path": "saved-0"}))
    for step in range(1, STEPS + 1):
        requests = [client.forward_backward(model, [step % 5, 3])]
        if step % 2:
            requests.append(client.submit(model, Kind.SAVE_WEIGHTS, {"path": f"middle-{step}"}))
            requests.append(client.forward_backward(model, [4, step % 7], [1, 1]))
        requests.append(client.forward_backward(model, [2, 2], forward_only=True))
        requests.append(client.optim_step(model, 0.1 + step / 10))
        requests.append(client.submit(model, Kind.SAVE_WEIGHTS, {"path": f"saved-{step}"}))
        assert [result.error for result in await client.results(*requests)] == [None] * len(requests)
        if step in (3, 6):
            write_histories(client.journal, context.store)


@pytest.fixture
async def run(client: Any, serve: Any, context: Any) -> str:
    model, request = client.submit_create(history=True)
    await serve(model)
    assert (await client.result(request)).error is None
    await train(client, model, context)
    return str(model)


def forget_states(client: Any, context: Any, run: str) -> None:
    """Leave only the history to fork from. The files of the saves stay for comparisons."""
    for view in client.journal.checkpoints.page("local", run_id=run).rows:
        client.journal.checkpoints.delete(view.path, "local")
    for snapshot in client.journal.recovery.snapshots(run):
        context.store.delete(snapshot.path)


def files(context: Any, run: str, name: str) -> Any:
    saved = context.store.find(f"tinker://{run}/weights/{name}")
    assert saved is not None
    return saved.step, saved.files


@pytest.mark.parametrize("without", ["", "snapshots and saves"])
async def test_fork_at_each_step_equals_the_checkpoint_saved_there(
    run: str, client: Any, serve: Any, context: Any, without: str
) -> None:
    wanted = {step: files(context, run, f"saved-{step}") for step in range(STEPS + 1)}
    assert len(client.journal.histories.segments(run)) == 2, "the rest is in the journal"
    if without:
        forget_states(client, context, run)
    for number, step in enumerate((8, 1, 5, 0, 2), start=1):
        context.pool.log.clear()
        path = f"tinker://{run}/weights/@{step}"
        result = await loaded(client, serve, number, path)
        assert result.error is None
        assert files(context, run, f"@{step}") == wanted[step]
        assert client.journal.checkpoints.get(path, "local").attempt, "it is a checkpoint now"
        names = context.pool.names
        assert names.count("OptimStep") == (step if without else 0)
        assert "DropAdapter" in names
    assert set(context.pool.executor.adapters) == {run, *(f"{client.session}:train:{n}" for n in range(1, 6))}
    assert client.journal.models.get(run, None).step == STEPS


async def test_a_loaded_state_is_a_step_of_the_run_that_loaded_it(
    run: str, client: Any, serve: Any, context: Any
) -> None:
    model, created = client.submit_create(1, history=True)
    await serve(model)
    load = {"path": f"tinker://{run}/weights/saved-3", "optimizer": True}
    steps = [client.submit(model, Kind.LOAD_WEIGHTS, load), client.forward_backward(model, [1, 3])]
    results = await client.results(created, *steps, client.optim_step(model))
    assert [result.error for result in results] == [None] * 4
    assert (await loaded(client, serve, 2, f"tinker://{model}/weights/@3")).error is None
    assert files(context, model, "@3") == files(context, run, "saved-3")
    data = trained_data(client.journal, context.store, context.store.find(f"tinker://{model}/weights/@3"))
    assert data is not None and (data.steps, data.rows, data.loaded) == (0, {}, load["path"])
    with pytest.raises(NotFoundError, match="@2' does not exist"):
        client.journal.checkpoints.get(f"tinker://{model}/weights/@2", "local")


async def test_a_step_that_was_made_again_is_forked_again(run: str, client: Any, serve: Any, context: Any) -> None:
    steps = [f"tinker://{run}/weights/@{step}" for step in (3, 4)]
    for number, path in enumerate(steps, start=1):
        assert (await loaded(client, serve, number, path)).error is None
    before = files(context, run, "@4")
    attempts = [client.journal.checkpoints.get(path, "local").attempt for path in steps]
    load = client.submit(run, Kind.LOAD_WEIGHTS, {"path": f"tinker://{run}/weights/saved-3", "optimizer": True})
    again = [load, client.forward_backward(run, [1, 3]), client.optim_step(run)]
    again.append(client.submit(run, Kind.SAVE_WEIGHTS, {"path": "again"}))
    assert [result.error for result in await client.results(*again)] == [None] * 4
    assert client.journal.checkpoints.get(steps[0], "local").attempt == attempts[0]
    assert (await loaded(client, serve, 3, steps[1])).error is None
    assert files(context, run, "@4") == files(context, run, "again") != before


async def test_a_step_that_is_made_again_during_its_fork_is_forked_again(
    run: str, client: Any, serve: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, drop, pending = f"tinker://{run}/weights/@4", HistoryReplay.drop, iter((True,))

    async def make_again(replay: HistoryReplay) -> None:
        await drop(replay)
        if next(pending, False):
            load = client.submit(run, Kind.LOAD_WEIGHTS, {"path": f"tinker://{run}/weights/saved-3", "optimizer": True})
            again = [load, client.forward_backward(run, [1, 3]), client.optim_step(run)]
            again.append(client.submit(run, Kind.SAVE_WEIGHTS, {"path": "again"}))
            assert [result.error for result in await client.results(*again)] == [None] * 4

    monkeypatch.setattr(HistoryReplay, "drop", make_again)
    assert (await loaded(client, serve, 1, path)).error is None
    assert files(context, run, "@4") == files(context, run, "again") != files(context, run, "saved-4")
    assert client.journal.checkpoints.get(path, "local").attempt == context.store.find(path).attempt


async def test_a_fork_of_a_run_that_is_deleted_meanwhile_leaves_nothing(
    run: str, client: Any, serve: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop = HistoryReplay.drop

    async def delete(replay: HistoryReplay) -> None:
        await drop(replay)
        client.journal.run_deletions.delete([run], "local")

    path, row = f"tinker://{run}/weights/@4", client.journal.checkpoints.get(f"tinker://{run}/weights/@4", "local")
    client.journal.sessions.finish(client.session, "local")
    client.journal.models.end(run, ModelState.UNLOADED, "over")
    monkeypatch.setattr(HistoryReplay, "drop", delete)
    with pytest.raises(NotFoundError, match=f"model '{run}' does not exist"):
        await make_fork(context.bound_to(context.pool.generation), row, CHANGES)
    assert client.journal.checkpoints.page("local").rows == ()
    assert not context.store.exists(path)


async def test_fork_is_created_once_and_sampled(run: str, sampling: Any, client: Any, context: Any) -> None:
    path = f"tinker://{run}/weights/@4"
    saved = client.sampler(0, f"tinker://{run}/weights/saved-4")
    samplers = [client.sampler(number, path) for number in (1, 2)]
    expected, *answers = await client.results(client.sample(saved), *map(client.sample, samplers))
    assert [answer.result for answer in answers] == [expected.result] * 2
    assert [row.path for row in client.journal.checkpoints.page("local", run_id=run).rows].count(path) == 1


@pytest.fixture
async def sampling(context: Any, mirror: Any, client: Any, running: Any) -> AsyncIterator[None]:
    runner = SamplingRunner(context, mirror.observe_sampling(context.card.name), most_waiting=8)
    async with running(runner.serve()):
        yield


async def test_a_fork_survives_the_end_of_its_worker_group(run: str, client: Any, serve: Any, context: Any) -> None:
    pool, deaths = context.pool, iter((True,))
    forget_states(client, context, run)
    step = (f"{run}@6", "OptimStep")
    pool.poison = lambda command: (
        (getattr(command, "adapter_id", ""), type(command).__name__) == step and next(deaths, False)
    )
    result = await loaded(client, serve, 1, f"tinker://{run}/weights/@6")
    assert (pool.deaths, result.error) == (1, None)
    assert files(context, run, "@6") == files(context, run, "saved-6")


async def test_only_the_owner_of_a_run_with_a_history_can_load_its_steps(
    run: str, client: Any, serve: Any, context: Any, connect: Any
) -> None:
    get = client.journal.checkpoints.get
    with pytest.raises(NotFoundError, match="@9' does not exist: its run is at step 8"):
        get(f"tinker://{run}/weights/@9", "local")
    with pytest.raises(NotFoundError, match="does not exist"):
        get(f"tinker://{run}/weights/@3", "another")
    plain, request = client.submit_create(5)
    await serve(plain)
    assert (await client.result(request)).error is None
    with pytest.raises(NotFoundError, match="no history of its run was kept"):
        get(f"tinker://{plain}/weights/@0", "local")
    delete_histories(client.journal, context.store, HistoryRules(0, 1))
    assert client.journal.histories.segments(run) == []
    with pytest.raises(NotFoundError, match="no history of its run was kept"):
        get(f"tinker://{run}/weights/@3", "local")
    assert context.store.blobs.children(f"history/{run}") == []


async def test_fork_counts_against_the_quota_of_its_project(
    run: str, client: Any, make_runner: Any, context: Any
) -> None:
    row = client.journal.checkpoints.get(f"tinker://{run}/weights/@3", "local")
    with pytest.raises(UserError, match=r"max_stored_bytes|stored"):
        await make_fork(replace(context, max_stored_bytes=1), row, CHANGES)
    await make_fork(replace(context.bound_to(1), max_stored_bytes=10**9), row, CHANGES)
    assert client.journal.checkpoints.get(row.path, "local").size_bytes > 1


async def test_damaged_history_fails_only_its_load(
    run: str, client: Any, serve: Any, context: Any, tmp_path: Any
) -> None:
    forget_states(client, context, run)
    segment = client.journal.histories.segments(run)[0]
    file = tmp_path / "store" / "history" / run / segment.name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    context.store.histories = HistoryStore(context.store.url, context.store.blobs)
    result = await loaded(client, serve, 1, f"tinker://{run}/weights/@7")
    assert f"history of run {run}" in result.error and "damaged" in result.error
    assert (await client.result(client.optim_step(run))).error is None


async def test_the_history_has_every_request_once_and_in_order(run: str, client: Any, context: Any) -> None:
    requests = list(past_requests(client.journal, context.store, run))
    assert [past.seq_id for past in requests] == list(range(client.seqs[run]))
    assert [past.kind for past in requests[:3]] == ["create_model", "save_weights", "forward_backward"]
    assert all(past.error is None and past.result_hash for past in requests)
    optim_steps = [orjson.loads(past.payload) for past in requests if past.kind == Kind.OPTIM_STEP]
    assert [body["adam_params"]["learning_rate"] for body in optim_steps] == [0.1 + n / 10 for n in range(1, STEPS + 1)]
    assert [past.seq_id for past in past_requests(client.journal, context.store, run, after=30)] == list(
        range(31, client.seqs[run])
    )


# ------------------------------------------------------------------ operations that are executed a second time
class Seen:
    """Records the differences that a runner reports."""

    def __init__(self) -> None:
        self.differences: list[Difference] = []

    def differed(self, difference: Difference) -> None:
        self.differences.append(difference)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture
async def watched(context: Any, client: Any, running: Any) -> AsyncIterator[Any]:
    """watched(number): a run whose intervals of three steps are all rechecked, and its recorded differences."""
    async with AsyncExitStack() as stack:

        async def watched(number: int) -> tuple[str, Seen]:
            seen = Seen()
            model, request = client.submit_create(number, history=True)
            runner = ModelRunner(replace(context, recheck_share=1.0), [seen], SnapshotPolicy(3, 1000.0), model, 0)
            await stack.enter_async_context(running(runner.serve()))
            await stack.enter_async_context(running(client.ring("model:", runner)))
            assert (await client.result(request)).error is None
            return model, seen

        yield watched


async def steps(client: Any, model: str, count: int) -> list[str | None]:
    """Train `count` steps with a save after each step. Returns the error of each request."""
    errors = []
    for _ in range(count):
        requests = [client.forward_backward(model, [2, 3]), client.optim_step(model)]
        requests.append(client.submit(model, Kind.SAVE_WEIGHTS, {"path": f"at-{client.seqs[model]}"}))
        errors += [result.error for result in await client.results(*requests)]
    return errors


def flip(pool: Any, adapter: str) -> None:
    (weights,) = pool.executor.adapters[adapter].weights.values()
    weights.view("uint32").reshape(-1)[2] ^= 1 << 22


async def test_rechecked_intervals_are_equal(context: Any, client: Any, watched: Any, until: Any) -> None:
    model, seen = await watched(0)
    for interval in range(1, 4):
        assert await steps(client, model, 3) == [None] * 9
        await steps(client, model, 1)  # the snapshot is due when the next step begins
        await until(lambda count=interval: context.pool.names.count("DropAdapter") >= count)
    assert (seen.differences, context.pool.taken_out) == ([], "")
    assert set(context.pool.executor.adapters) == {model}


@pytest.mark.parametrize("flipped", [2, 5])
async def test_run_with_wrong_results_is_stopped_and_its_hosts_are_removed(
    context: Any, client: Any, watched: Any, until: Any, serve: Any, flipped: int
) -> None:
    pool = context.pool
    (model, seen), (other, others) = [await watched(number) for number in range(2)]
    assert await steps(client, model, flipped - 1) == [None] * 3 * (flipped - 1)
    assert await steps(client, other, 2) == [None] * 6
    await until(lambda: pool.names.count("DropAdapter") == (flipped > 4))
    flip(pool, model)
    errors = await steps(client, model, 4 if flipped == 2 else 3)
    await until(lambda: bool(pool.taken_out))
    (difference,) = seen.differences
    found = (difference.kind, difference.step, difference.devices, difference.places, difference.wrong)
    assert found == ("forward_backward", flipped, ("cpu:0",), pool.info.places, "recorded")
    assert f"run {model}, step {flipped}: the result of forward_backward" in pool.taken_out
    ended = client.journal.models.get(model, None)
    assert ended.state == "failed" and "on rank 0 on this machine (cpu:0)" in ended.detail
    assert f"tinkerflow rerun {model} --from {flipped}, or load tinker://{model}/weights/@{flipped - 1}" in ended.detail
    assert [error for error in errors if error and ended.detail not in error] == []

    pool.come_back()  # on another host
    assert await steps(client, other, 3) == [None] * 9
    assert client.journal.models.get(other, None).step == 5 and others.differences == []
    result = await loaded(client, serve, 2, f"tinker://{model}/weights/@{flipped - 1}")
    assert result.error is None
    last_saved = f"at-{3 * (flipped - 1)}"
    assert files(context, model, f"@{flipped - 1}") == files(context, model, last_saved), "nothing is lost"


async def test_run_continues_if_only_its_recheck_was_wrong(context: Any, client: Any, watched: Any, until: Any) -> None:
    pool, (model, seen) = context.pool, await watched(0)
    flips = iter((False, True))  # at the second step

    def flipping(command: Any) -> bool:
        again = "@recheck" in getattr(command, "adapter_id", "") and type(command).__name__ == "Forward"
        if again and next(flips, False):
            flip(pool, command.adapter_id)
        return False

    pool.poison = flipping
    assert await steps(client, model, 4) == [None] * 12
    await until(lambda: bool(pool.taken_out))
    assert [(one.step, one.wrong) for one in seen.differences] == [(2, "repeated")]
    pool.come_back()
    assert await steps(client, model, 2) == [None] * 6
    assert client.journal.models.get(model, None).step == 6


async def test_runs_without_history_or_recheck_cost_nothing(context: Any, client: Any, running: Any) -> None:
    for number, (share, history) in enumerate(((1.0, False), (0.0, True))):
        model, request = client.submit_create(number, history=history)
        runner = ModelRunner(replace(context, recheck_share=share), [], SnapshotPolicy(1, 1000.0), model, 0)
        async with running(runner.serve()), running(client.ring("model:", runner)):
            await client.result(request)
            for _ in range(3):
                await client.results(client.forward_backward(model, [2, 3]), client.optim_step(model))
    assert context.pool.names.count("OptimStep") == 6


async def test_a_model_card_has_data_curve_and_evaluation_of_the_checkpoint(
    run: str, client: Any, context: Any, tmp_path: Any
) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    client.journal.run_metrics.record(
        run, "local", {2: {"held_out_loss": 1.5}, 3: {"held_out_loss": 1.25}, 8: {"x": 1}}
    )
    saved = context.store.find(f"tinker://{run}/weights/saved-3")
    text = card(client.journal, context.store, saved, tmp_path)
    assert text.startswith(
        "---\nbase_model: folder/unigram\nlibrary_name: peft\nlicense: mit\ntags:\n- tinkerflow\n---\n\n# saved-3\n"
    )
    assert "- trained on 7 rows, 6 of them different, 14 tokens\n- digest of the rows: " in text
    assert "- began with a fresh adapter" in text
    points = [line for line in text.splitlines() if line.startswith(("| 1 |", "| 2 |", "| 3 |", "| 4 |"))]
    assert len(points) == 3 and "| held_out_loss | 3 | 1.25 |" in text and "| x |" not in text
    assert text.endswith("## License\n\nBase model: mit (its README.md).\n")
    last = trained_data(client.journal, context.store, context.store.find(f"tinker://{run}/weights/saved-8"))
    assert last is not None and (last.steps, sum(last.rows.values())) == (8, 16)
    middle = trained_data(client.journal, context.store, context.store.find(f"tinker://{run}/weights/middle-3"))
    assert middle is not None and (middle.steps, sum(middle.rows.values()), middle.tokens) == (2, 4, 8)
    client.journal.histories.end(run)
    client.journal.histories.forget(run)
    assert "The run has no history of its data." in card(client.journal, context.store, saved, tmp_path)
    assert "## Curve" not in card(None, context.store, saved, tmp_path)
