"""Ranks killed in the middle of the warm-up, while they write their compilation caches."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinkerflow.backend.pool import Pool
from tinkerflow.backend.spec.commands import (
    CompileStatus,
    CreateAdapter,
    Example,
    Forward,
    ForwardResult,
    GroupConfig,
    LoraSpec,
    ReadCompileStatus,
)
from tinkerflow.deployments.tiny_model import make_tiny

KILLS = int(os.environ.get("WARM_UP_KILLS", "2"))


async def status(pool: Pool) -> CompileStatus:
    found = await pool.submit(ReadCompileStatus())
    assert isinstance(found, CompileStatus)
    return found


@pytest.mark.thorough
async def test_kills_during_the_warm_up_do_not_break_the_group(
    start_pool: Callable[..., Coroutine[Any, Any, Pool]], tmp_path: Path
) -> None:
    """Each generation reuses the programs that both ranks have. WARM_UP_KILLS sets the number of kills."""
    make_tiny(tmp_path / "tiny")
    config = GroupConfig(str(tmp_path / "tiny"), "float32", 0, 1, 16, 16, 1, 1, str(tmp_path / "cache"), warm_up=True)
    pool = await start_pool(
        "tinkerflow.backend.compute.executor:Executor", processes=2, config=config, start_deadline=600.0
    )
    chosen, begun = random.Random(0), await status(pool)
    for kill in range(KILLS):
        async with asyncio.timeout(300):
            while (await status(pool)).ready < min(begun.planned - 1, 1 + kill):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(chosen.random())  # a random point of a compilation, or of the write of its result
        os.kill(pool.pids[chosen.randrange(2)], signal.SIGKILL)
        assert "was killed by SIGKILL" in (await anext(pool.losses())).cause
        assert await pool.serving() == kill + 2
    async with asyncio.timeout(600):
        while (found := await status(pool)).ready < found.planned:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert found.failed == 0
    await pool.submit(CreateAdapter("a", LoraSpec(32), 0))
    tokens = np.arange(16, dtype=np.int32)
    example = Example(tokens, tokens[:, None], np.ones((16, 1), np.float32))
    result = await pool.submit(Forward("a", (example,), "cross_entropy"))
    assert isinstance(result, ForwardResult) and np.isfinite(result.loss_sum)
    # the status comes from rank 0, and the other rank may have one program less
    async with asyncio.timeout(60):
        while (ranks := (noted(tmp_path, 0), noted(tmp_path, 1)))[0] != ranks[1]:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert ranks[0].total() >= found.planned


def noted(folder: Path, rank: int) -> Counter[str]:
    """The number of programs of each name in a rank's compilation cache."""
    return Counter(entry.name.rsplit("-", 2)[0] for entry in folder.glob(f"cache/*/rank-{rank}/*-cache"))
