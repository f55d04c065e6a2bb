"""A driver process that tests kill. It starts a pool, prints the workers' process ids, and keeps the workers busy.

Its arguments are the executor and the number of processes. A port and the group's secret follow for hosts that join.
Each line of its standard input is a word. `busy` submits a command of a minute, and `brief` one of less than a second.
`steps` submits three commands, and `uneven` sends a command only to rank 0.
"""

from __future__ import annotations

import asyncio
import sys

from tinkerflow.backend.pool import Hosts, Pool, PoolConfig, ThisMachine
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.spec.commands import CreateAdapter, GroupConfig, LoraSpec, OptimStep
from tinkerflow.backend.spec.optimizers.adamw import AdamParams


async def main(executor: str, processes: int, port: int = 0, secret: str = "") -> None:
    busy = asyncio.Event()

    def show(text: str) -> None:
        print(text, file=sys.stderr)
        if text == "busy":  # a worker executes a CreateAdapter
            busy.set()

    config = GroupConfig("none", "float32", processes, 1, 64, 64, 4, 4, "")
    pool = await Pool.start(
        PoolConfig(config, processes, command_deadline=60, start_deadline=60, executor=f"pool_executors:{executor}"),
        await Hosts.listen("127.0.0.1", port, secret.encode(), 30.0) if port else ThisMachine(None),
        on_progress=show,
    )
    print(*pool.pids, flush=True)
    while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
        match word:
            case "busy":
                await pool.submit(CreateAdapter("a", LoraSpec(1), 60_000))
            case "steps":
                for _ in range(3):
                    print(await pool.submit(OptimStep("a", AdamParams(learning_rate=0.0))), flush=True)
            case "brief":
                task = asyncio.create_task(pool.submit(CreateAdapter("a", LoraSpec(1), 700)))
                await busy.wait()
                print("sent", flush=True)
                await task
            case "uneven":
                assert pool._generations._group is not None
                pool._generations._group._members[0].send(4, codec.encode(CreateAdapter("a", LoraSpec(1), 300)))
                await busy.wait()
                print("sent", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:4]), *sys.argv[4:]))
