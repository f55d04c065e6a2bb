"""Pools of real processes: order, errors, every way in which a group can fail, and recovery."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.pool.conftest import StartPool, is_alive, make_config, worker_pids
from tests.waiting import until

from tinkerflow.backend.core import errors
from tinkerflow.backend.core.errors import GroupFailedError, SuspectError, UserError
from tinkerflow.backend.core.retry import Restarts
from tinkerflow.backend.pool import GroupLost, Pool
from tinkerflow.backend.pool.host.places import LocalWorker
from tinkerflow.backend.spec.commands import (
    AdapterState,
    Command,
    CreateAdapter,
    Done,
    DropAdapter,
    Example,
    ExportAdapter,
    Forward,
    ForwardResult,
    ImportAdapter,
    LoraSpec,
    Loss,
    OptimResult,
    OptimStep,
    Ping,
    Reply,
    SampleProgress,
    SampleStep,
)
from tinkerflow.backend.spec.optimizers.adamw import AdamParams

both = pytest.mark.parametrize("processes", [1, 2])


def step(number: float = 0.0) -> OptimStep:
    return OptimStep("a", AdamParams(learning_rate=number))


def order(text: str) -> DropAdapter:
    """A command that makes the executor misbehave (pool_executors.Echo)."""
    return DropAdapter(text)


def sleep(seconds: float) -> CreateAdapter:
    return CreateAdapter("a", LoraSpec(1), int(seconds * 1000))


async def serves_again(pool: Pool, generation: int = 2) -> None:
    assert await pool.submit(step()) == OptimResult(0.0, 1)  # a new executor counts from 1
    assert pool.generation == generation


# ------------------------------------------------------------------ ordinary operation
@both
async def test_commands_execute_in_the_order_of_submission(start_pool: StartPool, processes: int) -> None:
    pool = await start_pool(processes=processes)
    tasks = [asyncio.create_task(pool.submit(step(i))) for i in range(200)]
    replies = await asyncio.gather(*tasks)
    assert replies == [OptimResult(float(i), i + 1) for i in range(200)]


def of_four(loss: Loss = "cross_entropy") -> Forward:
    """A forward of four micro-batches of 64 tokens, the size of make_config."""
    zeros = np.zeros(64, np.int32)
    return Forward("a", (Example(zeros, zeros[:, None], np.ones((64, 1), np.float32)),) * 4, loss)


async def test_a_forward_goes_by_micro_batch_and_lets_samples_in(start_pool: StartPool) -> None:
    lines: list[str] = []
    pool = await start_pool("ByMicroBatch", on_progress=lines.append)

    async def sample() -> None:
        for _ in range(3):
            await pool.submit(SampleStep())

    forward = asyncio.create_task(pool.submit(of_four(), generation=pool.generation))
    optim = asyncio.create_task(pool.submit(step(0)))
    await sample()
    assert await forward == ForwardResult((), 7.0)
    assert await optim == Done()
    executed = [line.removeprefix("executes ") for line in lines if line.startswith("executes ")]
    assert [name for name in executed if name != "SampleStep"] == ["Forward", *["NextMicroBatch"] * 3, "OptimStep"]
    assert executed.index("SampleStep") <= 2, "one micro-batch that was there, and one that is executed"
    assert "SampleStep SampleStep" not in " ".join(executed[: executed.index("OptimStep")])


async def test_removed_machine_starts_no_group_and_stops(start_pool: StartPool) -> None:
    said: list[str] = []
    pool = await start_pool(on_progress=said.append)
    assert pool.info.places == ("rank 0 on this machine",)
    pool.take_out(1, "step 5 was wrong")
    await until(lambda: pool.lacks_capacity)
    assert said[-1] == "this machine is out of service: step 5 was wrong; restart the service to use it"
    assert not pool.ready


async def test_failed_micro_batch_fails_only_its_forward(start_pool: StartPool) -> None:
    pool = await start_pool("ByMicroBatch")
    with pytest.raises(UserError, match="the second one is wrong"):
        await pool.submit(of_four("ppo"), generation=1)
    assert await pool.submit(of_four(), generation=1) == ForwardResult((), 7.0)
    with pytest.raises(SuspectError, match="ended with exit status 9") as caught:
        await pool.submit(of_four("cispo"), generation=1)
    assert caught.value.crashed
    assert await pool.submit(of_four(), generation=await pool.serving()) == ForwardResult((), 7.0)
    assert pool.generation == 2


async def test_cancelled_caller_leaves_the_forward_running(start_pool: StartPool) -> None:
    lines: list[str] = []
    pool = await start_pool("ByMicroBatch", on_progress=lines.append)
    forward = asyncio.create_task(pool.submit(of_four(), generation=pool.generation))
    await asyncio.sleep(0)
    forward.cancel()
    assert await pool.submit(step(0)) == Done()
    executed = [line.removeprefix("executes ") for line in lines if line.startswith("executes ")]
    assert executed == ["Forward", *["NextMicroBatch"] * 3, "OptimStep"]


# ------------------------------------------------------------------ commands that the devices still compute
def together(pool: Pool, *commands: Command) -> list[asyncio.Task[Reply]]:
    return [asyncio.create_task(pool.submit(command)) for command in commands]


async def test_command_starts_while_the_previous_one_is_computed(start_pool: StartPool) -> None:
    pool = await start_pool("Ahead", processes=2)
    replies = await asyncio.gather(*together(pool, step(), step(), Ping()))
    assert replies[0] in (OptimResult(2.0, 1), OptimResult(3.0, 1))
    assert replies[1:] == [OptimResult(3.0, 2), Done()]
    assert await pool.submit(Ping()) == Done()  # without an earlier command


async def test_late_user_error_fails_only_its_command(start_pool: StartPool) -> None:
    pool = await start_pool("Ahead", processes=2)
    first, second = together(pool, step(1), step())
    with pytest.raises(UserError, match="the norm is not finite"):
        await first
    assert (await second).step == 2
    assert pool.generation == 1


async def test_late_device_error_ends_the_group(start_pool: StartPool) -> None:
    pool = await start_pool("Ahead", processes=2)
    first, second = together(pool, step(2), step())
    with pytest.raises(SuspectError, match="OptimStep failed on the devices"):
        await first
    with pytest.raises(GroupFailedError):
        await second
    assert (await pool.submit(step())).step == 1
    assert pool.generation == 2


@both
async def test_command_that_exceeds_memory_is_blamed_instead_of_the_one_before(
    start_pool: StartPool, processes: int
) -> None:
    pool = await start_pool("Ahead", processes=processes)
    before, guilty = together(pool, step(), order("memory"))
    assert isinstance(await failure_of(guilty), SuspectError)
    (outcome,) = await asyncio.gather(before, return_exceptions=True)
    if processes == 2 and isinstance(outcome, GroupFailedError):  # rank 1 had answered it, but rank 0 had not
        assert not isinstance(outcome, SuspectError)
    else:
        assert outcome == OptimResult(2.0, 1)
    await pool.serving()
    replies = await asyncio.gather(*together(pool, step(), step()))
    assert replies == [OptimResult(2.0, 1), OptimResult(2.0, 2)], "it is known which one it was: no care is needed"


async def test_a_forward_is_blamed_for_the_part_that_ended_the_group(start_pool: StartPool) -> None:
    pool = await start_pool("Uneven", processes=2)
    with pytest.raises(SuspectError, match="NextMicroBatch failed on the devices"):
        await pool.submit(of_four(), generation=pool.generation)


async def test_rank_that_dies_after_its_commands_suspects_none_of_them(start_pool: StartPool) -> None:
    pool = await start_pool("Bystander", processes=2)
    with pytest.raises(SuspectError):
        await pool.submit(order("die"))
    await pool.serving()  # the new group gets its commands one at a time
    for task in together(pool, sleep(0), sleep(0)):
        assert not isinstance(await failure_of(task), SuspectError)


async def test_last_message_of_a_rank_is_read_although_sending_fails(start_pool: StartPool) -> None:
    pool = await start_pool()
    (pid,) = pool.pids
    (guilty,) = together(pool, order("memory"))
    for _ in range(10):
        await asyncio.sleep(0)
    innocent = together(pool, Ping(), Ping(), Ping())
    while is_alive(pid):
        time.sleep(0.01)  # noqa: ASYNC251  (this loop must read nothing before the process has ended)
    with pytest.raises(SuspectError, match="RESOURCE_EXHAUSTED"):
        await guilty
    for ended in await asyncio.gather(*innocent, return_exceptions=True):
        assert not isinstance(ended, SuspectError)
        assert isinstance(ended, GroupFailedError) or ended == Done(), (
            "the next group answers commands that were not sent before"
        )


async def test_after_a_crash_commands_go_one_at_a_time_and_the_right_one_is_blamed(start_pool: StartPool) -> None:
    pool = await start_pool("Ahead", probation=3)
    assert await pool.submit(SampleStep()) == SampleProgress((), active=0, waiting=0)
    innocent, guilty = together(pool, step(), order("die"))
    with pytest.raises(SuspectError):  # the first command was being computed, so it is suspected
        await innocent
    assert not isinstance(await failure_of(guilty), SuspectError)
    await pool.serving()
    assert await pool.submit(SampleStep()) == SampleProgress((), active=1, waiting=0), "it leaves no chunk undone"
    innocent, guilty, third = together(pool, step(), order("die"), step())
    assert await innocent == OptimResult(1.0, 1)
    assert isinstance(await failure_of(guilty), SuspectError)
    assert not isinstance(await failure_of(third), SuspectError)
    generation = await pool.serving()
    assert await pool.submit(step()) == OptimResult(1.0, 1)
    os.kill(pool.pids[0], signal.SIGKILL)
    await until(lambda: pool.ready and pool.generation > generation)
    replies = await asyncio.gather(*together(pool, step(), step()))
    assert replies == [OptimResult(1.0, 1), OptimResult(2.0, 2)], "the next group continues the probation"
    replies = await asyncio.gather(*together(pool, step(), step()))
    assert replies == [OptimResult(4.0, 3), OptimResult(4.0, 4)], "the probation is over"


async def failure_of(task: asyncio.Task[Reply]) -> GroupFailedError:
    with pytest.raises(GroupFailedError) as caught:
        await task
    return caught.value


async def test_arrays_and_megabytes_pass_unchanged(start_pool: StartPool) -> None:
    pool = await start_pool(processes=2)
    tokens = np.arange(5, dtype=np.int32)
    weights = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    reply = await pool.submit(Forward("a", (Example(tokens, tokens, weights),) * 2, "cross_entropy"))
    assert isinstance(reply, ForwardResult)
    assert [a.tobytes() for a in reply.logprobs] == [weights.tobytes()] * 2
    big = {"w": np.random.default_rng(1).normal(size=(3000, 1000)).astype(np.float32)}
    await pool.submit(ImportAdapter("a", AdapterState(LoraSpec(8), 3, big)))
    state = await pool.submit(ExportAdapter("a", True))
    assert isinstance(state, AdapterState)
    assert state.weights["w"].tobytes() == big["w"].tobytes()


async def test_progress_and_the_description_of_the_group_reach_the_driver(start_pool: StartPool) -> None:
    lines: list[str] = []
    pool = await start_pool(processes=2, on_progress=lines.append)
    assert pool.info.devices == ("fake:0", "fake:1")
    assert pool.info.parameters == 7
    assert pool.generation == pool.info.generation == 1
    assert pool.ready
    assert len(pool.pids) == 2
    assert lines[0] == "starting worker group 1: 2 process(es)"
    assert [x for x in lines if "weights" in x] == [f"loading weights {i}/3" for i in (1, 2, 3)]
    await pool.submit(order("progress"))
    await until(lambda: "compiling a step" in lines)


async def test_broken_progress_printer_is_harmless(start_pool: StartPool) -> None:
    def broken(text: str) -> None:
        raise BrokenPipeError(text)

    pool = await start_pool(on_progress=broken)
    assert await pool.submit(Ping()) == Done()


async def test_cancelling_the_caller_leaves_the_command_running(start_pool: StartPool) -> None:
    lines: list[str] = []
    pool = await start_pool(on_progress=lines.append)
    slow = asyncio.create_task(pool.submit(sleep(0.2)))
    counted = asyncio.create_task(pool.submit(step(1)))
    await until(lambda: "busy" in lines)
    slow.cancel()
    counted.cancel()
    assert await pool.submit(step(2)) == OptimResult(2.0, 2)


# ------------------------------------------------------------------ errors that are answers
@both
async def test_errors_that_all_ranks_raise_arrive_and_leave_the_group_alive(
    start_pool: StartPool, processes: int
) -> None:
    pool = await start_pool(processes=processes)
    for word, error in {
        "user": errors.UserError("rank 0 is too small for adapter 'a': it must be 1 or more"),
        "missing": errors.NotFoundError("no adapter 'a'"),
        "conflict": errors.ConflictError("id 'a' was used before"),
        "lost": errors.StateLostError("adapter 'a' went with generation 1"),
        "crash": errors.ServerError("ZeroDivisionError: on rank 0"),  # the texts of the ranks differ
    }.items():
        with pytest.raises(errors.TinkerflowError) as caught:
            await pool.submit(order(word))
        assert (type(caught.value), caught.value.message) == (type(error), error.message)
    with pytest.raises(TypeError, match="cannot encode a object"):  # the command is not sent
        await pool.submit(order(object()))  # type: ignore[arg-type]
    assert await pool.submit(step()) == OptimResult(0.0, 1)
    if processes == 1:
        await pool.submit(order("reply"))
        with pytest.raises(errors.ServerError, match="TypeError: cannot encode a object"):
            await pool.submit(Ping())
    assert pool.generation == 1


# ------------------------------------------------------------------ a group that fails
async def test_a_killed_rank_ends_the_group_and_a_new_one_serves(start_pool: StartPool) -> None:
    """The command that was being executed is suspected, and no other command."""
    lines: list[str] = []
    pool = await start_pool(processes=2, on_progress=lines.append)
    old = pool.pids
    executing, *waiting = together(pool, sleep(30), *[Ping()] * 5)
    await until(lambda: "busy" in lines)
    os.kill(old[-1], signal.SIGKILL)
    for task in (executing, *waiting):
        error = await failure_of(task)
        assert error.message == "worker group 1 ended: rank 1 was killed by SIGKILL"
        assert isinstance(error, SuspectError) == (task is executing)
        assert not (isinstance(error, SuspectError) and error.crashed)
    assert not pool.ready
    await serves_again(pool)
    assert not {*old} & {*pool.pids}
    with pytest.raises(SuspectError) as crashed:
        await pool.submit(order("die"))
    assert crashed.value.crashed


async def test_out_of_memory_ends_the_group_unless_all_ranks_report_it(start_pool: StartPool) -> None:
    pool = await start_pool(processes=2, agreement_seconds=0.2)
    with pytest.raises(errors.AllocationError, match="the devices had no memory left"):
        await pool.submit(order("full"))
    assert await pool.submit(Ping(), generation=1) == Done()
    with pytest.raises(SuspectError, match="RESOURCE_EXHAUSTED") as crashed:
        await pool.submit(order("memory"))
    assert crashed.value.crashed
    await serves_again(pool)
    with pytest.raises(SuspectError, match=r"rank 1 had no memory left for DropAdapter .*rank \[0\]") as suspect:
        await pool.submit(order("full:1"))
    assert suspect.value.out_of_memory
    await serves_again(pool, 3)


async def test_busy_rank_has_time_to_agree(start_pool: StartPool) -> None:
    pool = await start_pool("Lagging", processes=2, agreement_seconds=0.8)
    generation = await pool.serving()
    slow, full = together(pool, step(), order("full"))
    assert await slow == OptimResult(0.0, 1)
    with pytest.raises(errors.AllocationError):
        await full
    assert await pool.submit(Ping(), generation=generation) == Done()


async def test_a_command_for_an_ended_generation_is_not_given_to_the_next(start_pool: StartPool) -> None:
    pool = await start_pool()
    first = await pool.serving()
    assert await pool.submit(Ping(), generation=first) == Done()
    os.kill(pool.pids[0], signal.SIGKILL)
    await until(lambda: not pool.ready)
    assert await pool.serving() == first + 1
    with pytest.raises(errors.GroupFailedError, match=f"worker group {first} no longer serves"):
        await pool.submit(Ping(), generation=first)
    assert await pool.submit(Ping(), generation=first + 1) == Done()


async def test_command_for_an_ended_group_names_only_the_error_of_this_group(start_pool: StartPool) -> None:
    pool = await start_pool()
    os.kill(pool.pids[0], signal.SIGKILL)
    await until(lambda: not pool.ready)
    await pool.serving()
    pool.release("worker group 2 ended: rank 0 received SIGTERM")
    await until(lambda: not pool.ready)
    for has_ended in (lambda: True, lambda: pool.resting):  # at the end of the group, and of its processes
        await until(has_ended)
        with pytest.raises(GroupFailedError) as second:
            await pool.submit(Ping(), generation=2)
        cause = "worker group 2 ended: rank 0 received SIGTERM"
        assert second.value.message == f"worker group 2 no longer serves: {cause}"
        with pytest.raises(GroupFailedError, match="worker group 1 no longer serves") as first:
            await pool.submit(Ping(), generation=1)
        assert "worker group 2" not in first.value.message


async def test_group_error_names_the_rank_and_the_cause(start_pool: StartPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Restarts, "pause", lambda restarts, *, steady: 0.0)
    pool = await start_pool(processes=2)
    differ = "rank 1 and rank 0 differ on whether DropAdapter succeeded"
    texts = {
        "unasked:1": "rank 1 sent an invalid message: Ack for command 999",  # claims to be of generation 1
        "exit:1": "rank 1 failed: SystemExit: 3",
        "die:1": "rank 1 ended with exit status 9",
        "thread:1": "rank 1 failed: ZeroDivisionError: in a thread",
        "exit:0": "rank 0 failed: SystemExit: 3",
        "user:1": differ,
        "user:0": differ,
        "crash:1": differ,
        "garbage:0": "rank 0 sent an invalid message: invalid bytes instead of a frame",
        "garbage:1": "rank 1 sent an invalid message: invalid bytes instead of a frame",
        "generation:1": "rank 1 sent an invalid message: a frame of generation 77",
    }
    for generation, (word, text) in enumerate(texts.items(), 1):
        with pytest.raises(errors.GroupFailedError, match=f"^worker group {generation} ended: {text}"):
            await pool.submit(order(word))
        await serves_again(pool, generation + 1)


async def test_hanging_command_misses_its_deadline(start_pool: StartPool, tmp_path: Path) -> None:
    pool = await start_pool(processes=2)
    hanging = asyncio.create_task(pool.submit(order("hang:1"), deadline=1.0))
    behind = asyncio.create_task(pool.submit(Ping()))
    with pytest.raises(errors.DeadlineError, match=r"DropAdapter did not answer within 1 s: no answer from rank \[1\]"):
        await hanging
    with pytest.raises(errors.GroupFailedError, match="missed the deadline of a command") as caught:
        await behind
    assert not isinstance(caught.value, errors.DeadlineError)
    assert "in misbehave" in (tmp_path / "logs" / "worker-1.log").read_text()
    await serves_again(pool)


async def test_error_names_the_cause_when_a_late_commands_group_ends(start_pool: StartPool, tmp_path: Path) -> None:
    pool = await start_pool(processes=2, stack_seconds=30.0)
    late = asyncio.create_task(pool.submit(order("hang:1"), deadline=1.0))
    await until(lambda: "in misbehave" in (tmp_path / "logs" / "worker-1.log").read_text())  # its stack was logged
    os.kill(pool.pids[1], signal.SIGKILL)
    with pytest.raises(SuspectError, match="rank 1 was killed by SIGKILL") as caught:
        await late
    assert not caught.value.crashed
    await serves_again(pool)


async def test_deadline_starts_when_the_earlier_commands_were_answered(start_pool: StartPool) -> None:
    pool = await start_pool(command_deadline=5.0)
    tasks = [asyncio.create_task(pool.submit(sleep(0.35))) for _ in range(17)]  # one more than a micro-batch's worth
    assert await asyncio.gather(*tasks) == [Done()] * 17
    assert pool.generation == 1


async def test_answer_received_before_the_deadline_check_is_in_time(start_pool: StartPool) -> None:
    pool = await start_pool()
    late = asyncio.create_task(pool.submit(Ping(), deadline=0.2))
    behind = asyncio.create_task(pool.submit(sleep(2.5)))
    for _ in range(10):
        await asyncio.sleep(0)
    time.sleep(1.5)  # noqa: ASYNC251  (this loop must read no answers meanwhile)
    assert await late == Done()
    assert await behind == Done()
    assert pool.generation == 1


async def test_stopped_rank_is_detected_without_commands(start_pool: StartPool) -> None:
    pool = await start_pool(processes=2, heartbeat_timeout=3.0)
    await pool.submit(sleep(3.5))  # a busy rank is not suspected
    assert pool.generation == 1
    first = aiter(pool.losses())
    os.kill(pool.pids[1], signal.SIGSTOP)
    async with asyncio.timeout(60):
        lost = await anext(first)
    assert lost == GroupLost(1, "worker group 1 ended: rank 1 sent no heartbeat for 3 s (stopped?)")
    await first.aclose()  # type: ignore[attr-defined]
    await serves_again(pool)


# ------------------------------------------------------------------ losses
async def test_next_generation_waits_for_readers_of_losses(start_pool: StartPool) -> None:
    lines: list[str] = []
    pool = await start_pool(on_progress=lines.append)
    seen: list[GroupLost] = []
    go_on = asyncio.Event()

    async def read() -> None:
        async for lost in pool.losses():
            seen.append(lost)
            await go_on.wait()

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    os.kill(pool.pids[0], signal.SIGKILL)
    await until(lambda: seen)
    assert seen == [GroupLost(1, "worker group 1 ended: rank 0 was killed by SIGKILL")]
    early = asyncio.create_task(pool.submit(step(1)))
    await until(lambda: lines.count("loading weights 3/3") == 2)  # the next generation has started
    assert not early.done()
    assert pool.pids == ()
    go_on.set()
    assert await early == OptimResult(1.0, 1)
    assert pool.ready
    await pool.stop()
    async with asyncio.timeout(60):
        await reader  # the loop ends with the pool


async def test_waiting_commands_keep_their_order(start_pool: StartPool) -> None:
    pool = await start_pool()
    os.kill(pool.pids[0], signal.SIGKILL)
    with pytest.raises(errors.GroupFailedError):
        await pool.submit(Ping())
    tasks = [asyncio.create_task(pool.submit(step(i))) for i in range(50)]
    bad = asyncio.create_task(pool.submit(order(object())))  # type: ignore[arg-type]
    tasks[7].cancel()
    await asyncio.sleep(0)
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    kept = [i for i in range(50) if i != 7]
    assert [r for i, r in enumerate(replies) if i != 7] == [OptimResult(float(i), n + 1) for n, i in enumerate(kept)]
    with pytest.raises(TypeError):
        await bad


# ------------------------------------------------------------------ starts that fail
async def test_refused_configuration_is_a_user_error(start_pool: StartPool) -> None:
    with pytest.raises(errors.UserError, match=r"model_path 'none': there is no config.json in it"):
        await start_pool("Refusing", processes=2)
    assert not worker_pids()


async def test_a_broken_executor_is_tried_three_times(start_pool: StartPool) -> None:
    lines: list[str] = []
    with pytest.raises(
        errors.GroupFailedError, match="worker group 3 ended: rank 0 failed: ZeroDivisionError: while loading"
    ):
        await start_pool("Broken", on_progress=lines.append)
    assert [x for x in lines if x.startswith("starting")] == [
        f"starting worker group {i}: 1 process(es)" for i in (1, 2, 3)
    ]
    assert not worker_pids()


async def test_failed_launch_is_retried(
    start_pool: StartPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "blob").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to(tmp_path / "blob")
    pool = await start_pool(config=make_config(model_path=str(tmp_path / "model")))
    (tmp_path / "blob").unlink()
    os.kill(pool.pids[0], signal.SIGKILL)
    await until(lambda: "cannot be started" in caplog.text)
    (tmp_path / "blob").touch()
    assert await pool.serving() > 2
    assert await pool.submit(step()) == OptimResult(0.0, 1)


async def test_a_pool_on_demand_has_a_group_between_begin_and_release(start_pool: StartPool) -> None:
    pool = await start_pool(on_demand=True)
    await asyncio.sleep(0)
    assert pool.resting and not worker_pids()
    for generation in (1, 2):
        waiting = asyncio.create_task(pool.submit(step()))
        pool.begin()
        assert not pool.resting
        assert await waiting == OptimResult(0.0, 1)
        assert pool.generation == generation
        pool.release("others have their turn")
        assert pool.draining and not pool.resting
        await until(lambda: pool.resting)
        assert not pool.draining and not worker_pids()


async def test_a_group_can_be_released_while_snapshots_of_the_group_before_are_taken(start_pool: StartPool) -> None:
    pool = await start_pool(on_demand=True)
    causes: list[str] = []

    async def save() -> None:
        async for cause in pool.notices():
            causes.append(cause)
            if pool.generation == 1:
                await asyncio.Event().wait()  # like a snapshot in a store that is away

    saving = asyncio.create_task(save())
    pool.begin()
    assert await pool.serving() == 1
    pool.release("the machine is preempted")
    await until(lambda: causes)
    os.kill(pool.pids[0], signal.SIGKILL)
    await until(lambda: pool.resting)
    pool.begin()
    assert await pool.serving() == 2
    saving.cancel()
    await asyncio.gather(saving, return_exceptions=True)
    pool.release("others have their turn")
    await until(lambda: pool.resting)


async def test_on_demand_pool_rests_after_a_failed_start(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Restarts, "pause", lambda restarts, *, steady: 0.0 if steady else 1000.0)
    pool = await start_pool("Broken", on_demand=True)
    pool.begin()
    await until(lambda: pool.resting)
    assert "ZeroDivisionError: while loading" in pool.trouble
    assert pool.pausing


async def test_an_unknown_executor_is_named(start_pool: StartPool) -> None:
    with pytest.raises(errors.GroupFailedError, match="has no attribute 'Nobody'"):
        await start_pool("Nobody")


async def test_a_start_has_a_deadline(start_pool: StartPool) -> None:
    with pytest.raises(errors.DeadlineError, match=r"was not ready within 1 s: no message from rank \[0, 1\]"):
        await start_pool("Sleepy", processes=2, start_deadline=1.0)
    assert not worker_pids()


async def test_a_cancelled_start_leaves_no_process(start_pool: StartPool) -> None:
    starting = asyncio.create_task(start_pool("Sleepy", processes=2))
    await until(lambda: len(worker_pids()) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not worker_pids()


async def test_group_that_gets_sigterm_while_starting_is_started_again(start_pool: StartPool, tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        pool = await start_pool("Taken", config=make_config(model_path=str(tmp_path / "taken")))
    assert pool.generation == 2


async def test_starts_are_repeated_until_one_succeeds(start_pool: StartPool, tmp_path: Path) -> None:
    pool = await start_pool("Flaky", config=make_config(model_path=str(tmp_path / "starts")))
    os.kill(pool.pids[0], signal.SIGKILL)
    await until(lambda: not pool.ready)
    await serves_again(pool, generation=4)


async def test_commands_waiting_for_a_group_time_out(start_pool: StartPool, tmp_path: Path) -> None:
    pool = await start_pool("Flaky", config=make_config(model_path=str(tmp_path / "starts")), start_deadline=15.0)
    (tmp_path / "starts").unlink()
    (tmp_path / "starts").mkdir()  # makes all further starts fail
    os.kill(pool.pids[0], signal.SIGKILL)
    await until(lambda: not pool.ready)
    with pytest.raises(errors.GroupFailedError, match=r"no worker group was ready within 15 s: .*IsADirectoryError"):
        await pool.submit(Ping())


async def test_machine_without_room_for_a_process_is_retried(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await start_pool(processes=2)
    spawned = 0

    def spawn(*args: Any, **kwargs: Any) -> LocalWorker:
        nonlocal spawned
        spawned += 1
        if spawned in (2, 3):
            raise OSError(11, "Resource temporarily unavailable")
        return LocalWorker(*args, **kwargs)

    monkeypatch.setattr("tinkerflow.backend.pool.host.places.LocalWorker", spawn)
    os.kill(pool.pids[0], signal.SIGKILL)
    await until(lambda: not pool.ready)
    await serves_again(pool, generation=4)
    assert len(worker_pids()) == 2


# ------------------------------------------------------------------ the end
async def test_stop_ends_everything(start_pool: StartPool) -> None:
    lines: list[str] = []
    pool = await start_pool(processes=2, on_progress=lines.append)
    pids = pool.pids
    busy = asyncio.create_task(pool.submit(sleep(30)))
    await until(lambda: "busy" in lines)
    await pool.stop()
    assert not [pid for pid in pids if is_alive(pid)]
    assert not worker_pids()
    with pytest.raises(errors.GroupFailedError, match="the worker pool was stopped"):
        await busy
    with pytest.raises(errors.GroupFailedError, match="the worker pool was stopped"):
        await pool.submit(Ping())
    await pool.stop()


async def test_stop_while_a_generation_starts(start_pool: StartPool) -> None:
    async with await start_pool(processes=2) as pool:
        first = {*pool.pids}
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(errors.GroupFailedError):
            await pool.submit(Ping())
        waiting = asyncio.create_task(pool.submit(Ping()))
        await until(lambda: {*worker_pids()} - first)
    assert not worker_pids()
    with pytest.raises(errors.GroupFailedError, match="the worker pool was stopped"):
        await waiting
