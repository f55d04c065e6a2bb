"""Real pools of real processes, with the executors of pool_executors.py."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tinkerflow.backend.pool import Pool, PoolConfig, ThisMachine
from tinkerflow.backend.spec.commands import GroupConfig

HERE = Path(__file__).parent
StartPool = Callable[..., Coroutine[Any, Any, Pool]]


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not run."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.fixture
def config() -> GroupConfig:
    return make_config()


def make_config(model_path: str = "none", fsdp: int = 1) -> GroupConfig:
    return GroupConfig(
        model_path=model_path,
        dtype="float32",
        fsdp=fsdp,
        tensor=1,
        max_context=64,
        microbatch_tokens=64,
        sample_slots=4,
        decode_chunk=4,
        compile_cache_dir="",
    )


@pytest.fixture
async def start_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[StartPool]:
    """Start pools. After the test they are stopped, and none of their processes may remain."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    pools: list[Pool] = []
    pids: set[int] = set()

    async def start(
        executor: str = "Echo",
        *,
        processes: int = 1,
        config: GroupConfig | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
        on_demand: bool = False,
        **patience: Any,
    ) -> Pool:
        settings = PoolConfig(
            config or make_config(fsdp=processes),
            processes,
            executor=executor if ":" in executor else f"pool_executors:{executor}",
            **{"command_deadline": 60.0, "start_deadline": 60.0} | patience,
        )
        site = ThisMachine(tmp_path / "logs")
        pool = await Pool.start(settings, site, on_progress=on_progress, on_demand=on_demand)
        pools.append(pool)
        pids.update(pool.pids)
        return pool

    yield start
    for pool in pools:
        pids.update(pool.pids)
        await pool.stop()
    assert not [pid for pid in pids if is_alive(pid)]
    assert not worker_pids()


def worker_pids() -> list[int]:
    """The worker processes that this test process started and that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == os.getpid() and b"tinkerflow.backend.pool.worker" in command:
                found.append(int(entry.name))
    return found


async def start_driver(executor: str, processes: int, *joined: str) -> asyncio.subprocess.Process:
    """Start pool_driver.py. joined: the port and the secret, if hosts join it."""
    path = os.pathsep.join((str(HERE), str(HERE.parents[1] / ".package")))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / "pool_driver.py"), executor, str(processes), *joined),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
