"""A driver process to be killed: starts a pool, prints the workers' process ids, and keeps them busy."""

from __future__ import annotations

import asyncio
import sys

from backend.commands import CreateAdapter, GroupConfig, LoraSpec
from backend.pool import Pool


async def main(executor: str, processes: int) -> None:
    config = GroupConfig("none", "float32", processes, 1, 64, 64, 4, 4, "")
    pool = await Pool.start(
        config,
        processes=processes,
        command_deadline=60,
        start_deadline=60,
        on_progress=lambda text: print(text, file=sys.stderr),
        executor=f"pool_executors:{executor}",
    )
    print(*pool.pids, flush=True)
    await pool.submit(CreateAdapter("a", LoraSpec(1), 60_000))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
