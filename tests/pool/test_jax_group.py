"""Groups that use JAX: devices, a collective between two processes, and the compilation cache."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.pool.conftest import StartPool, make_config

from tinkerflow.backend.core.errors import GroupFailedError, SuspectError
from tinkerflow.backend.spec.commands import (
    Example,
    Forward,
    ForwardResult,
    GroupConfig,
    SampleProgress,
    SampleRequest,
    SampleStep,
)
from tinkerflow.deployments.tiny_model import make_tiny


def total(values: int) -> Forward:
    """A command that sums 0 … values-1 over all devices."""
    tokens = np.zeros(values, np.int32)
    return Forward("a", (Example(tokens, tokens, np.arange(values, dtype=np.float32)[:, None]),), "cross_entropy")


@pytest.mark.parametrize("processes", [1, 2])
async def test_two_devices_sum_together(start_pool: StartPool, processes: int) -> None:
    lines: list[str] = []
    pool = await start_pool("Collective", processes=processes, config=make_config(fsdp=2), on_progress=lines.append)
    assert len(pool.info.devices) == 2
    assert pool.info.parameters == processes  # the executor reports jax.process_count()
    replies = [await pool.submit(total(8)) for _ in range(5)]
    assert replies == [ForwardResult((), 28.0)] * 5
    assert "importing pool_executors" in lines
    assert ("joining 2 processes" in lines) == (processes == 2)


async def test_a_rank_killed_during_collectives_ends_the_group_at_once(start_pool: StartPool) -> None:
    pool = await start_pool("Collective", processes=2, config=make_config(fsdp=2))
    await pool.submit(total(8))
    tasks = [asyncio.create_task(pool.submit(total(1 << 18))) for _ in range(200)]
    await asyncio.sleep(0.05)
    began = time.perf_counter()
    os.kill(pool.pids[1], signal.SIGKILL)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert time.perf_counter() - began < 30.0
    failed = [r for r in results if isinstance(r, BaseException)]
    assert failed
    assert {type(r) for r in failed} <= {GroupFailedError, SuspectError}  # SuspectError: the command was being executed
    assert {str(r) for r in failed} == {"worker group 1 ended: rank 1 was killed by SIGKILL"}
    assert await pool.submit(total(8)) == ForwardResult((), 28.0)
    assert pool.generation == 2


async def test_damaged_compilation_cache_is_repaired(
    start_pool: StartPool, config: GroupConfig, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cached = replace(config, compile_cache_dir=str(cache))
    log = tmp_path / "logs" / "worker-0.log"

    async def run_once() -> dict[str, int]:
        async with await start_pool("Collective", config=cached) as pool:
            assert await pool.submit(total(8)) == ForwardResult((), 28.0)
        return {p.name: p.stat().st_size for p in cache.iterdir() if p.name.endswith("-cache")}

    entries = await run_once()
    assert entries
    for name in entries:
        os.truncate(cache / name, 100)  # as after a kill while writing
    assert set((await run_once()).values()) & {100} == set()
    assert log.read_text().count("deleting the truncated entry") == len(entries)
    await run_once()
    assert log.read_text().count("deleting the truncated entry") == len(entries)


async def test_second_generation_finds_all_compiled_programs_of_the_first(
    start_pool: StartPool, tmp_path: Path
) -> None:
    config = replace(make_config(str(tmp_path), fsdp=2), compile_cache_dir=str(tmp_path / "cache"))
    pool = await start_pool("Counting", processes=2, config=config)

    async def found() -> list[str]:
        assert await pool.submit(total(8)) == ForwardResult((), 28.0)
        return [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)]

    first = await found()
    asked = [int(text.rpartition(" ")[2]) for text in first]
    assert first == [f"0 of {count}" for count in asked] and all(asked)
    os.kill(pool.pids[1], signal.SIGKILL)
    assert (await anext(pool.losses())).generation == 1
    assert await pool.serving() == 2
    assert await found() == [f"{count} of {count}" for count in asked]


async def test_a_rank_that_lacks_programs_compiles_them(start_pool: StartPool, tmp_path: Path) -> None:
    config = replace(make_config(str(tmp_path), fsdp=2), compile_cache_dir=str(tmp_path / "cache"))

    async def missing() -> list[int]:
        """The number of programs that each rank did not find in its cache."""
        async with await start_pool("Counting", processes=2, config=config) as pool:
            assert await pool.submit(total(8)) == ForwardResult((), 28.0)
            counts = [(tmp_path / f"rank-{rank}").read_text().split(" of ") for rank in (0, 1)]
        return [int(requests) - int(hits) for hits, requests in counts]

    assert min(await missing()) > 0
    (folder,) = (tmp_path / "cache").glob("*/rank-1")
    os.truncate(next(folder.glob("jit__lambda*-cache")), 100)
    assert await missing() == [0, 1]
    shutil.rmtree(folder)
    assert (await missing())[0] == 0
    assert await missing() == [0, 0]


async def test_rank_that_gets_sigterm_finishes_its_commands_first(start_pool: StartPool) -> None:
    """The notice arrives although the main thread waits for the devices."""
    pool = await start_pool("Collective", processes=2, config=make_config(fsdp=2))
    await pool.submit(total(8))
    work = [asyncio.create_task(pool.submit(total(1 << 18))) for _ in range(20)]
    await asyncio.sleep(0)
    os.kill(pool.pids[1], signal.SIGTERM)
    async for cause in pool.notices():
        assert cause == "worker group 1 ended: rank 1 received SIGTERM"
        await asyncio.gather(*work)  # all commands still succeed
        assert await pool.submit(total(8)) == ForwardResult((), 28.0)
        assert pool.generation == 1
        break
    lost = await anext(pool.losses())
    assert (lost.generation, lost.cause) == (1, cause)
    assert await pool.serving() == 2
    assert await pool.submit(total(8)) == ForwardResult((), 28.0)


async def test_kill_with_an_unread_chunk_changes_no_token(start_pool: StartPool, tmp_path: Path) -> None:
    config = replace(make_config(str(make_tiny(tmp_path / "tiny"))), compile_cache_dir=str(tmp_path / "cache"))
    pool = await start_pool("running_ahead:RunsAhead", config=config)
    prompt_T = np.arange(1, 20, dtype=np.int32)
    drawn = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 7, "stream": True}
    requests = tuple(
        SampleRequest(name, "owner", None, prompt_T, num_samples=samples, max_tokens=24, **drawn)  # type: ignore[arg-type]
        for name, samples in (("a", 1), ("b", 2))
    )

    async def answers(steps: int = 1000) -> tuple[dict[str, list[list[int]]], int]:
        """Sample for at most `steps` steps. Returns the finished answers, and the number of streamed tokens."""
        found: dict[str, list[list[int]]] = {}
        told, command = 0, SampleStep(requests)
        while len(found) < len(requests) and steps:
            progress = await pool.submit(command)
            assert isinstance(progress, SampleProgress)
            found |= {one.request_id: [each.tokens_T.tolist() for each in one.sequences] for one in progress.finished}
            told += sum(len(new.tokens_T) for new in progress.streamed)
            steps, command = steps - 1, SampleStep()
        return found, told

    expected, told = await answers()
    assert told == 3 * 24
    steps = 3
    assert await answers(steps) == ({}, (steps - 1) * 3 * config.decode_chunk), "the last chunk is not read"
    os.kill(pool.pids[0], signal.SIGKILL)
    assert (await anext(pool.losses())).generation == 1
    assert await pool.serving() == 2
    assert await answers() == (expected, told)
