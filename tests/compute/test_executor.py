"""The executor copies results to the host once per command, reports the effects of failures, and runs ahead."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import replace
from typing import Any, get_args

import jax
import numpy as np
import pytest
from tests.compute.closeness import close
from tests.compute.conftest import add_adapter, ask, examples, forward, gradients, result_of

from tinkerflow.backend.compute.executor import Executor
from tinkerflow.backend.compute.planning import training_memory
from tinkerflow.backend.compute.sampler import snapshot_cache
from tinkerflow.backend.compute.training import adapters, forward_backward, train
from tinkerflow.backend.core.errors import AllocationError, DevicesError, NotFoundError, ServerError, UserError
from tinkerflow.backend.pool.scheduler import in_parts
from tinkerflow.backend.pool.worker import ReplyCollector
from tinkerflow.backend.spec.commands import (
    AdapterState,
    Command,
    CreateAdapter,
    Done,
    DropAdapter,
    ExportAdapter,
    Forward,
    LoraSpec,
    NextMicroBatch,
    OptimStep,
    Ping,
    PublishSnapshot,
    SampleStep,
    SnapshotHeld,
)
from tinkerflow.backend.spec.optimizers.adamw import AdamParams

LENGTHS = (100, 90, 80, 70, 60)  # several micro-batches of 256 tokens


def test_results_are_copied_to_the_host_once(executor, monkeypatch):
    add_adapter(executor, "once")
    copied: list[Any] = []
    monkeypatch.setattr(forward_backward, "to_host", lambda tree: copied.append(tree) or jax.device_get(tree))
    result = forward(executor, "once", examples(LENGTHS), backward=True)
    assert len(copied) == 1
    assert len(copied[0]) > 1
    assert [len(logprobs) for logprobs in result.logprobs] == list(LENGTHS)


def test_failed_backward_reports_lost_gradients(qwen3, monkeypatch):
    executor = qwen3.executor()
    executor.execute(CreateAdapter("a", LoraSpec(4), 0))
    forward(executor, "a", examples((9,)), backward=True)
    calls: list[int] = []

    def no_room(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("INTERNAL")
        return train.to_devices(*args, **more)

    monkeypatch.setattr(forward_backward, "to_devices", no_room)
    with pytest.raises(ServerError, match=r"INTERNAL.* gradients that adapter 'a' had accumulated are cleared"):
        forward(executor, "a", examples(LENGTHS), backward=True)
    monkeypatch.undo()
    assert gradients(executor, "a") == {}
    assert executor.execute(OptimStep("a", AdamParams())).grad_norm == 0.0
    assert forward(executor, "a", examples((9,)), backward=True).loss_sum != 0.0


NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes."


@pytest.mark.parametrize("accumulated", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("late", [True, False], ids=["when it is read", "when it is begun"])
def test_backward_without_memory_fails_only_its_request(qwen3, monkeypatch, accumulated, late):
    executor, steps = qwen3.executor(), []
    executor.execute(CreateAdapter("a", LoraSpec(4), 0))
    executor.execute(CreateAdapter("b", LoraSpec(4), 1))
    forward(executor, "b", examples((30, 9)), backward=True)
    if accumulated:
        forward(executor, "a", examples((9,)), backward=True)
    before = {name: executor.execute(ExportAdapter(name, optimizer=True)) for name in "ab"}
    steps_of_a = executor._programs.steps_of(LoraSpec(4))
    backward = steps_of_a.backward

    def no_room(params: Any, lora: Any, grads: Any, batch: Any) -> Any:
        steps.append(1)
        grads, scored = backward(params, lora, grads, batch)  # donated buffers are deleted
        if len(steps) == 2:
            raise RuntimeError(NO_MEMORY)
        return grads, scored

    def no_result(tree: Any) -> Any:
        raise RuntimeError(NO_MEMORY)

    with monkeypatch.context() as patched:
        if late:
            patched.setattr(forward_backward, "to_host", no_result)
            patched.setattr(adapters.jax, "block_until_ready", no_result)
        else:
            failing = replace(steps_of_a, backward=no_room)
            trainer = executor._trainer
            patched.setattr(trainer, "_training", replace(trainer._training, steps=lambda spec: failing))
        with pytest.raises(AllocationError, match=r"^data of 5 examples, the longest of 100 tokens: the devices"):
            forward(executor, "a", examples(LENGTHS), backward=True)
        executor._adapters.get("a")  # as the adapter's next command would
    after = {name: executor.execute(ExportAdapter(name, optimizer=True)) for name in "ab"}
    for name in "ab":
        assert_same(before[name].weights, after[name].weights)
        assert_same(before[name].moments, after[name].moments)
    assert forward(executor, "a", examples(LENGTHS), backward=True).loss_sum != 0.0
    assert executor.execute(OptimStep("a", AdamParams())).grad_norm > 0.0


def test_previous_gradients_are_held_until_the_next_ones_are_computed(qwen3):
    executor = qwen3.executor()
    executor.execute(CreateAdapter("a", LoraSpec(4), 0))
    forward(executor, "a", examples((9,)), backward=True)
    first, executor.ahead = executor._adapters.get("a").grads, True
    reply = forward(executor, "a", examples((30,)), backward=True)
    computing = executor._adapters._adapters["a"].computing
    assert computing.before is first
    assert reply().loss_sum != 0.0
    assert computing.before is None, "before the next command about the adapter"


def assert_same(one: Any, other: Any) -> None:
    """Assert that tensors are equal, bit for bit."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array.view(np.uint32), other[name].view(np.uint32), err_msg=name)


@pytest.mark.parametrize(
    "command", [CreateAdapter("new", LoraSpec(4), 0), PublishSnapshot("a", "s"), ExportAdapter("a", optimizer=True)]
)
def test_command_without_memory_creates_nothing(qwen3, command, monkeypatch):
    executor = qwen3.executor()
    executor.execute(CreateAdapter("a", LoraSpec(4), 0))

    def no_room(*args: Any, **more: Any) -> Any:
        raise RuntimeError(NO_MEMORY)

    with monkeypatch.context() as patched:
        patched.setattr(adapters, "put", no_room)
        patched.setattr(adapters, "whole_to_host", no_room)
        patched.setattr(snapshot_cache, "frozen", no_room)
        with pytest.raises(AllocationError, match=f"{type(command).__name__}: the devices had no memory left"):
            executor.execute(command)
    assert isinstance(executor.execute(command), Done | SnapshotHeld | AdapterState)


def test_adapters_that_do_not_fit_are_refused_with_their_size(qwen3):
    executor = qwen3.executor(device_memory=0.05)
    room = executor.plan.uses.adapters
    one = training_memory.adapter_bytes(executor._cfg, executor._config, LoraSpec(8), "adamw")
    many = room // one
    assert many > 1
    for number in range(many):
        executor.execute(CreateAdapter(str(number), LoraSpec(8), 0))
    rule = r"lora rank 8: the adapter takes \S+ GB of each device with .* GB are free of the \S+ GB for adapters: must"
    with pytest.raises(AllocationError, match=rule):  # so a replay waits for room instead of answering with this error
        executor.execute(CreateAdapter("one more", LoraSpec(8), 0))
    executor.execute(CreateAdapter("0", LoraSpec(8), 0))  # replaces the existing one
    executor.execute(DropAdapter("1"))
    executor.execute(CreateAdapter("one more", LoraSpec(8), 0))
    executor.clear()
    executor.execute(CreateAdapter("one more", LoraSpec(8), 0))


@pytest.mark.parametrize("loss", ["cross_entropy", "gspo"])
@pytest.mark.parametrize("backward", [True, False])
def test_a_forward_by_micro_batch_gives_the_same_bits(executor, loss, backward):
    data = examples(3 * LENGTHS)
    for name in ("whole", "parts", "other"):
        add_adapter(executor, name)
    whole = forward(executor, "whole", data, loss, backward=backward)
    executor.execute(SampleStep(admit=(ask("r", [1, 2, 3], max_tokens=40),)))
    command = Forward("parts", data, loss, {}, backward)
    first, *others = in_parts(command, executor.microbatch_tokens, 1)
    assert len(others) >= 2
    *answers, result = [execute_before_other_commands(executor, part, data) for part in (first, *others)]
    assert answers == [Done()] * len(others)
    assert result.loss_sum == whole.loss_sum
    assert all((one == other).all() for one, other in zip(result.logprobs, whole.logprobs, strict=True))
    if backward:
        made, wanted = (gradients(executor, name) for name in ("parts", "whole"))
        assert all((array == wanted[name]).all() for name, array in made.items())
    with pytest.raises(ServerError, match="adapter 'parts' has no forward in progress"):
        executor.execute(NextMicroBatch("parts"))
    while executor.execute(SampleStep()).active:
        pass


@pytest.mark.parametrize("loss", ["cross_entropy", pytest.param("gspo", marks=pytest.mark.thorough)])
def test_commands_begun_ahead_give_the_same_answers(qwen3, loss):
    commands: list[Any] = []
    for step in range(3):
        for name in "ab":
            commands += in_parts(Forward(name, examples(3 * LENGTHS, seed=step), loss, {}, True), 256, 1)
        commands += [OptimStep(name, AdamParams(learning_rate=0.01 * step)) for name in "ab"]
        commands += [Forward("a", examples((50,)), loss, {}, False), PublishSnapshot("a", f"s{step}")]
    commands += [OptimStep("nobody", AdamParams())]
    commands += [ExportAdapter(name, optimizer=True) for name in "ab"]

    def answers(*, ahead: bool) -> list[tuple[int, bytes]]:
        executor = qwen3.executor()
        executor.ahead = ahead
        add_adapter(executor, "a")
        add_adapter(executor, "b")
        sent: list[tuple[int, bytes]] = []
        desk = ReplyCollector(lambda index, body, driver: sent.append((index, b"".join(body))), 0)
        for index, command in enumerate(commands):
            desk.give(None, index, command, executor.execute)
        desk.drain()
        return sent

    assert answers(ahead=True) == answers(ahead=False)


def test_refused_step_is_not_counted_by_later_commands(qwen3):
    executor = qwen3.executor()
    executor.ahead = True
    executor.execute(CreateAdapter("a", LoraSpec(4), 0))
    too_much = Forward("a", examples((9,)), "cross_entropy", {}, True)
    too_much.examples[0].weights_TK[:] = np.inf
    begun = []
    for command in (OptimStep("a", AdamParams()), too_much, *[OptimStep("a", AdamParams())] * 2):
        begun.append(executor.execute(command))
    made, _, refused, after = begun
    assert made().step == 1
    with pytest.raises(UserError, match=r"gradient norm is (nan|inf)"):
        refused()
    assert after().step == 2
    assert executor.execute(ExportAdapter("a", optimizer=False)).step == 2


@pytest.mark.parametrize("ahead", [True, False])
def test_failure_on_the_devices_raises_devices_error(qwen3, monkeypatch, ahead):
    executor = qwen3.executor()
    executor.ahead = ahead
    executor.execute(CreateAdapter("a", LoraSpec(4), 0))

    def lost(tree: Any) -> Any:
        raise RuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(forward_backward, "to_host", lost)
    for backward in (True, False):
        for loss in ("cross_entropy", "gspo"):
            with pytest.raises(DevicesError, match=r"failed on the devices .*the device is gone"):
                later = executor.execute(Forward("a", examples((9,)), loss, {}, backward))
                later()


def test_failed_custom_loss_is_an_error_of_its_request(qwen3, monkeypatch):
    executor = qwen3.executor()
    executor.execute(CreateAdapter("a", LoraSpec(4), 0))

    def bad(*args: Any) -> Any:
        raise TypeError("no such shape")

    monkeypatch.setattr(forward_backward.SequenceLosses, "compute", bad)
    for backward in (True, False):
        with pytest.raises(TypeError, match="no such shape"):
            forward(executor, "a", examples((9,)), "gspo", backward=backward)


def execute_before_other_commands(executor, command, data):
    """Execute `command`, and then others that use the devices. Returns the reply to `command`."""
    reply = executor.execute(command)
    executor.execute(SampleStep())
    forward(executor, "other", data[:2], backward=True)
    return reply


def test_forward_that_fails_between_micro_batches_is_not_continued(qwen3, monkeypatch):
    executor = qwen3.executor()
    executor.execute(CreateAdapter("a", LoraSpec(4), 0))
    first, *others = in_parts(Forward("a", examples(3 * LENGTHS), "cross_entropy"), executor.microbatch_tokens, 1)
    executor.execute(first)

    def no_room(*args: Any, **more: Any) -> Any:
        raise RuntimeError("INTERNAL")

    with monkeypatch.context() as patched:
        patched.setattr(forward_backward, "to_devices", no_room)
        with pytest.raises(ServerError, match="gradients that adapter 'a' had accumulated are cleared"):
            executor.execute(others[0])
    with pytest.raises(ServerError, match="an earlier part failed"):
        executor.execute(others[1])
    assert gradients(executor, "a") == {}
    assert forward(executor, "a", examples((9,)), backward=True).loss_sum != 0.0


def test_cleared_executor_gives_the_results_of_a_new_one(qwen3):
    executor = qwen3.executor()

    def live() -> tuple[Any, ...]:
        add_adapter(executor, "a", seed=3)
        executor.execute(PublishSnapshot("a", "s"))
        sampled = result_of(executor, ask("r", range(1, 40), snapshot_id="s"))
        result = forward(executor, "a", examples((20, 9)), backward=True)
        norm = executor.execute(OptimStep("a", AdamParams(learning_rate=0.01))).grad_norm
        return sampled, result.loss_sum, norm

    first = live()
    executor.execute(SampleStep(admit=(ask("unfinished", [1, 2, 3], max_tokens=50),)))
    made = executor.compiles
    executor.clear()
    for command in (ExportAdapter("a", optimizer=False), Forward("a", examples((9,)), "cross_entropy")):
        with pytest.raises(NotFoundError):
            executor.execute(command)
    assert "not in the sampler's snapshot cache" in result_of(executor, ask("r", [1], snapshot_id="s")).error
    assert repr(live()) == repr(first)  # prompt_cache_hit_tokens is equal, too
    assert executor.compiles == made


def test_hyper_parameters_must_be_finite(executor):
    executor.execute(CreateAdapter("hyper", LoraSpec(4), 0))
    with pytest.raises(
        UserError, match=r"learning_rate is 1e\+300, which is inf in float32: must be a finite number >= 0"
    ):
        executor.execute(OptimStep("hyper", AdamParams(learning_rate=1e300)))


def test_every_command_has_a_case():
    tree = ast.parse(textwrap.dedent(inspect.getsource(Executor._execute)))
    cases = {ast.unparse(node.cls) for node in ast.walk(tree) if isinstance(node, ast.MatchClass)}
    assert cases == {command.__name__ for command in get_args(Command)}


def test_empty_commands_are_answered(executor):
    executor.execute(CreateAdapter("idle", LoraSpec(4), 0))
    assert executor.execute(Ping()) == Done()
    assert executor.execute(Forward("idle", (), "cross_entropy")).logprobs == ()


def test_layers_computed_again_give_the_same_gradients(qwen3, monkeypatch):
    found = []
    for kept in (2**30, 0):
        monkeypatch.setattr(training_memory, "_KEPT_ON_CPUS", kept)
        executor = qwen3.executor()
        add_adapter(executor, "a")
        forward(executor, "a", examples((40, 9)), backward=True)
        found.append(gradients(executor, "a"))
    for name, array in found[0].items():
        close(array, found[1][name], ulps=1024)
