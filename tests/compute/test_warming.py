"""The warm-up compiles the programs that requests need, yields to requests, and never fails them."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.compute.conftest import SHAPE, VOCAB, build, examples, forward, random_example, run_all
from tests.compute.shapes import QWEN3_4B, config_like
from tests.waiting import wait_for

from tinkerflow.backend.compute import executor as executor_module
from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.platforms import CUDA, TPU, Platform, compiling_for
from tinkerflow.backend.compute.sampler.programs import SamplerPrograms
from tinkerflow.backend.compute.sampler.shapes import make_shapes
from tinkerflow.backend.compute.sampler.snapshot_cache import usual_spec
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.compute.training.full_parameters import weights_like
from tinkerflow.backend.compute.training.packing import pack
from tinkerflow.backend.compute.training.train import make_steps, needs_tree_program
from tinkerflow.backend.compute.training.train_programs import adapter_like, training_programs
from tinkerflow.backend.compute.warming import Program, WarmUp
from tinkerflow.backend.spec.commands import (
    CompileStatus,
    CreateAdapter,
    DropSnapshot,
    Example,
    ExportAdapter,
    ImportAdapter,
    LoadSnapshot,
    LoraSpec,
    OptimStep,
    PublishSnapshot,
    ReadCompileStatus,
    SampleRequest,
    SampleStep,
)
from tinkerflow.backend.spec.drift import AGREEMENT
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.backend.spec.packing import Grid
from tinkerflow.backend.spec.supports import Supports

CONTEXT_OF_4B = 32768
CONTEXT = 32  # few shapes of one layer, because each takes a second to compile
PATIENCE = 600.0


@pytest.mark.thorough
def test_mixed_traffic_compiles_nothing_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPE, "num_hidden_layers", 1)
    monkeypatch.setattr(executor_module, "memory_maps_used", lambda: 0.0)  # other tests leave programs in this process
    executor = build(tmp_path, "qwen3", tied=True).executor(
        max_context=CONTEXT, microbatch_tokens=32, sample_slots=2, warm_up=True
    )

    def warmth() -> CompileStatus:
        reply = executor.execute(ReadCompileStatus())
        assert isinstance(reply, CompileStatus)
        return reply

    wait_for(lambda: warmth().ready == warmth().planned)
    assert warmth().failed == warmth().needed == 0 < warmth().planned
    rng = np.random.default_rng(0)

    def sample(name: str, snapshot: str | None, prompt: int, most: int, count: int = 1) -> SampleRequest:
        tokens = rng.integers(0, VOCAB, prompt).astype(np.int32)
        return SampleRequest(name, "owner", snapshot, tokens, count, most, 1.0, -1, 1.0, 7, prompt_logprobs=prompt > 18)

    def decode(*requests: SampleRequest) -> None:
        progress = executor.execute(SampleStep(requests))
        while progress.active or progress.waiting:
            assert not any(result.error for result in progress.finished)
            assert not progress.active or 0 < warmth().kv_pages_used <= warmth().kv_pages
            progress = executor.execute(SampleStep())
        assert warmth().kv_pages_used == 0

    executor.execute(CreateAdapter("a", LoraSpec(32), 0))
    for step, lengths in enumerate(((5,), (30, 20, 3), (32, 31, 32, 1))):
        forward(executor, "a", examples(lengths, seed=step), "cross_entropy", backward=True)
        forward(executor, "a", examples(lengths, seed=step), "importance_sampling")
        executor.execute(OptimStep("a", AdamParams(learning_rate=1e-3)))
        executor.execute(PublishSnapshot("a", f"s{step}"))
        decode(sample("one", f"s{step}", 1 + step, 9), sample("base", None, 20, 5))
        decode(
            sample("group", f"s{step}", 22, 10, count=6), *(sample(f"r{i}", f"s{i}", 9, 3 * i + 1) for i in range(step))
        )
    state = executor.execute(ExportAdapter("a", optimizer=True))
    executor.execute(ImportAdapter("b", state))
    executor.execute(OptimStep("b", AdamParams()))
    executor.execute(LoadSnapshot("loaded", executor.execute(ExportAdapter("b", optimizer=False))))
    executor.execute(DropSnapshot("s0"))
    decode(*(sample(f"last{i}", "loaded", 20 - i, 12) for i in range(3)))
    told = warmth()
    assert told == CompileStatus(told.planned, told.planned, failed=0, needed=0, late=0, kv_pages=told.kv_pages)

    forward(executor, "a", (random_example(rng, 8, targets=3),))  # not a planned program
    assert warmth().late > 0


@pytest.mark.parametrize("what", ["experts", "supports"])
def test_the_warm_up_has_the_programs_of_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """After a step without replay, and with these programs, a step with replay compiles nothing."""
    monkeypatch.setitem(SHAPE, "num_hidden_layers", 1)
    wanted: list[Program] = []
    monkeypatch.setattr(WarmUp, "want", lambda self, programs, owner=None: wanted.extend(programs))
    moe = build(tmp_path, "qwen3_moe", tied=True)
    executor = moe.executor(
        max_context=CONTEXT,
        microbatch_tokens=32,
        sample_slots=2,
        warm_up=True,
        routing_replay=what == "experts",
        support_replay=what == "supports",
    )
    executor.execute(CreateAdapter("a", usual_spec(load_config(moe.folder), "divided"), 0))
    executor.execute(PublishSnapshot("a", "s"))
    prompt_T = np.arange(3, 12, dtype=np.int32)
    plain = SampleRequest("r", "owner", "s", prompt_T, 2, 9, 1.0, -1, 0.9, seed=1)

    def step(request: SampleRequest) -> dict[str, float]:
        data = []
        for sequence in run_all(executor, request)["r"].sequences:
            whole = np.concatenate([prompt_T, sequence.tokens_T])
            routes_Tn = supports = None
            if sequence.supports is not None:
                supports = Supports.joined([Supports.unrestricted(len(prompt_T) - 1), sequence.supports])
            if sequence.routes_Tn is not None:
                routes_Tn = np.full((len(whole) - 1, sequence.routes_Tn.shape[1]), -1, np.int16)
                routes_Tn[len(prompt_T) - 1 :] = sequence.routes_Tn
            weights_TK = np.ones((len(whole) - 1, 1), np.float32)
            data.append(Example(whole[:-1], whole[1:, None], weights_TK, routes_Tn=routes_Tn, supports=supports))
        metrics: dict[str, float] = forward(executor, "a", tuple(data), backward=True).metrics
        return metrics

    for _ in range(2):  # the second finds the prompt in the cache
        assert AGREEMENT not in step(plain)
    for program in wanted:
        of_decode = f"32 columns, with {what}" in program.name
        if of_decode or (program.name.startswith("forward_backward") and f"with recorded {what}" in program.name):
            program.make()
    before = executor._compiles.here
    assert (AGREEMENT in step(replace(plain, **{"routes" if what == "experts" else what: True}))) == (what == "experts")
    assert executor._compiles.here == before


@pytest.mark.parametrize("few", [False, True])
def test_packing_produces_only_listed_shapes(few: bool) -> None:
    rng = np.random.default_rng(1)
    for microbatch, longest, multiple in ((64, 128, 1), (256, 100, 2), (1024, 32, 1), (32, 512, 4)):
        listed = Grid(microbatch, multiple, few=few).shapes(longest)
        assert len(listed) == len(set(listed)) < 40
        for _ in range(100):
            lengths = rng.integers(1, longest + 1, rng.integers(1, 40))
            data = [random_example(rng, int(length)) for length in lengths]
            for batch in pack(data, microbatch_tokens=microbatch, row_multiple=multiple, few_shapes=few):
                assert batch.tokens_BT.shape in listed


def programs_of(target: Platform) -> list[str]:
    """The names of the programs for a model with 4B parameters on one such device, in the order of compilation."""
    cfg, mesh = config_like(QWEN3_4B), make_mesh(1, 1, 1)
    spec = usual_spec(cfg, "divided")
    with compiling_for(target):
        host: Any = weights_like(cfg, mesh)  # the programs are listed, not compiled
        shapes = make_shapes(max_slots=64, fsdp=1, pieces=target.prefill_tokens)
        pool: Any = SimpleNamespace(states=None)
        how = {"accelerated": True, "host_decides": target.host_decides, "kv_cache": "full"}
        how |= {"routes": False, "supports": False}
        sampler = SamplerPrograms(cfg, mesh, shapes, host, pool, 8, CONTEXT_OF_4B, spec, **how)  # type: ignore[arg-type]
        adapter = adapter_like(cfg, mesh, spec)
        budget, trees = Budget(4096, 0), needs_tree_program(cfg)
        limits = {"optimizer": DEFAULT_OPTIMIZER, "budget": budget, "max_context": CONTEXT_OF_4B, "trees": trees}
        steps = make_steps(cfg, mesh, budget)
        training = training_programs(mesh, host, steps, adapter, **limits)  # type: ignore[arg-type]
        wanted = [*sampler.all(), *sampler.publishing(spec, cast("Lora", adapter)), *training]
    return [program.name for program in sorted(wanted, key=lambda program: program.distance)]


def test_accelerators_compile_the_dozen_commonest_programs_first() -> None:
    names = programs_of(CUDA)
    assert sorted(names[:12]) == sorted(
        (
            "prefill of 1x128 tokens, 32 columns",
            "prefill of 1x512 tokens, 32 columns",
            "decode, 1 slots, 32 columns",
            "decode, 64 slots, 32 columns",
            "copies of pages",
            "publish, rank 32",
            "publish into 32 columns, rank 32",
            "optim_step, rank 32, adamw",
            "a copy of gradients, rank 32, adamw",
            "forward_backward of 2x2048 tokens, rank 32, adamw",
            "forward_backward of 4x1024 tokens, rank 32, adamw",
            "prefill of 1x128 tokens, 0 columns",
        )
    )
    rare = ("forward of", "128 columns", "adjusted", "filters, 4 slots")
    assert not any(kind in name for kind in rare for name in names[: len(names) // 4])


@pytest.mark.parametrize(("target", "training", "sampling"), [(CUDA, 22, 76), (TPU, 42, 39)])
def test_accelerators_have_few_programs(target: Platform, training: int, sampling: int) -> None:
    """Ten shapes, forward and backward, and on TPUs also with shared tokens. docs/accelerators.md lists the counts."""
    names = programs_of(target)
    trains = [name for name in names if name.startswith(("forward", "optim_step", "a copy of"))]
    assert (len(trains), len(names) - len(trains)) == (training, sampling)


def test_warm_up_compiles_the_nearest_first_and_pauses_during_commands() -> None:
    made: list[int] = []
    warm_up = WarmUp(on=True, calm_seconds=0.0)
    with warm_up.pause(lambda: 0):
        warm_up.want([Program("", distance, partial(made.append, distance)) for distance in (3, 1, 2)])
        time.sleep(0.05)
        assert not made and warm_up.warmth.planned == 3
    wait_for(lambda: warm_up.warmth.ready == 3)
    assert made == [1, 2, 3]


def test_warm_up_pauses_while_memory_maps_are_scarce() -> None:
    made: list[str] = []
    used = iter((0.49, 0.5, 0.1))
    warm_up = WarmUp(on=True, calm_seconds=0.0, maps_used=lambda: next(used))
    warm_up.want([Program(name, 0, partial(made.append, name)) for name in "abc"])
    wait_for(lambda: warm_up.warmth.ready == 3)
    assert made == ["a", "c"] and warm_up.warmth.failed == 0


def test_forgotten_programs_are_neither_compiled_nor_kept() -> None:
    made: list[str] = []
    warm_up = WarmUp(on=True, calm_seconds=0.0)
    of_a, of_b = partial(made.append, "a"), partial(made.append, "b")
    kept = [weakref.ref(of_a), weakref.ref(of_b)]
    with warm_up.pause(lambda: 0):
        warm_up.want([Program("a", 0, of_a)], owner="a")
        warm_up.want([Program("b", 1, of_b)], owner="b")
        warm_up.forget("a")
    wait_for(lambda: warm_up.warmth.ready == 1)
    assert made == ["b"] and warm_up.warmth.planned == 1
    del of_a, of_b
    assert [function() for function in kept] == [None, None]


def test_warm_up_waits_for_all_running_commands() -> None:
    made = threading.Event()
    warm_up = WarmUp(on=True, calm_seconds=0.0)
    with warm_up.pause(lambda: 0):
        with warm_up.pause(lambda: 0):
            warm_up.want([Program("one", 0, made.set)])
        assert not made.wait(0.05)
    assert made.wait(PATIENCE)


def test_failed_compile_is_counted_and_the_next_one_runs() -> None:
    warm_up, done = WarmUp(on=True, calm_seconds=0.0), threading.Event()

    def bad() -> None:
        raise ValueError("no")

    warm_up.want([Program("bad", 0, bad), Program("good", 1, done.set)])
    assert done.wait(PATIENCE)
    wait_for(lambda: warm_up.warmth.ready == 2)
    assert warm_up.warmth.failed == 1


@pytest.mark.parametrize("on", [True, False])
def test_compiles_during_commands_count_as_late_only_after_the_warm_up(on: bool) -> None:
    counts = iter((0, 2, 2, 5))
    warm_up = WarmUp(on=on, calm_seconds=0.0)
    with warm_up.pause(lambda: next(counts)):
        pass
    warm_up.want([Program("one", 0, lambda: None)])
    wait_for(lambda: warm_up.warmth.ready == warm_up.warmth.planned)
    with warm_up.pause(lambda: next(counts)):
        pass
    assert (warm_up.warmth.needed, warm_up.warmth.late) == ((2, 3) if on else (5, 0))
