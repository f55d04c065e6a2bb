"""The worker process: its end with its driver, its service to a next driver, and its environment."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pool.conftest import is_alive, start_driver
from tests.waiting import until

from tinkerflow.backend.pool.host.places import LocalWorker, worker_environment
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.frames import LoopLink
from tinkerflow.backend.pool.protocol.handshake import LaunchSpec, accept, next_connection
from tinkerflow.backend.pool.protocol.messages import Fatal, KeepAlive, Progress, Ready, Rejoined, Start
from tinkerflow.backend.spec.commands import Done, GroupConfig, OptimStep, Ping
from tinkerflow.backend.spec.optimizers.adamw import AdamParams

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SECRET = b"s" * 32


async def test_workers_end_with_their_killed_driver() -> None:
    driver = await start_driver("Echo", 2)
    assert driver.stdout
    pids = [int(word) for word in (await driver.stdout.readline()).split()]
    assert len(pids) == 2
    assert all(is_alive(pid) for pid in pids)
    assert driver.stdin
    driver.stdin.write(b"busy\n")
    os.kill(pids[1], signal.SIGSTOP)  # so that only the kernel can end it
    driver.kill()
    await driver.communicate()
    await until(lambda: not any(is_alive(pid) for pid in pids))


async def test_workers_end_when_their_driver_is_killed_during_start() -> None:
    driver = await start_driver("Sleepy", 2)
    assert driver.stderr
    assert (await driver.stderr.readline()).startswith(b"starting worker group 1")
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
    await until(lambda: len(children.read_text().split()) == 2)
    pids = [int(word) for word in (await asyncio.to_thread(children.read_text)).split()]
    driver.kill()
    await driver.communicate()
    await until(lambda: not any(is_alive(pid) for pid in pids))


def spec(listener: socket.socket, secret: bytes) -> LaunchSpec:
    """A launch spec for a child of this process that connects to `listener`."""
    return LaunchSpec("127.0.0.1", listener.getsockname()[1], secret.hex(), 5, 0, os.getpid(), "")


@pytest.fixture(autouse=True)
def executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import `pool_executors` from this folder."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))


async def begin(config: GroupConfig, tmp_path: Path, executor: str) -> tuple[LocalWorker, LoopLink]:
    """Start a worker with `executor`. Returns it with the driver's end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        process = LocalWorker(spec(listener, SECRET), "", log_dir=tmp_path)
        sock = await next_connection(listener)
    link = await accept(sock, SECRET, 5, 1)
    await link.write(0, codec.encode(Start(config, 1, "", f"pool_executors:{executor}", 30.0, (0,))))
    return process, link


async def next_message(link: LoopLink) -> object:
    async with asyncio.timeout(20):
        return codec.decode((await link.read()).body)


async def test_worker_ends_with_its_connection(config: GroupConfig, tmp_path: Path) -> None:
    process, link = await begin(config, tmp_path, "Echo")
    while not isinstance(await next_message(link), Ready):
        pass
    link.close()
    assert (await process.ended()).how == "ended with exit status 0"
    assert (
        "rank 0 generation 5 tinkerflow.backend.pool.worker: the connection to the driver ended"
        in (tmp_path / "worker-0.log").read_text()
    )


async def test_worker_reports_commands_received_from_all_earlier_drivers(config: GroupConfig, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        to_us = spec(listener, SECRET)
        worker = LocalWorker(to_us, "", log_dir=tmp_path, keep=True)

        async def next_driver() -> LoopLink:
            return await accept(await next_connection(listener), SECRET, 5, 1)

        first = await next_driver()
        await first.write(0, codec.encode(Start(config, 1, "", "pool_executors:Echo", 30.0, (0,))))
        for index in (1, 2):
            await first.write(index, codec.encode(Ping()))
        while not isinstance(await next_message(first), Done):
            pass
        first.close()
        for _ in range(2):  # the first of these drivers sends no commands
            worker.serve(to_us)
            link = await next_driver()
            assert await next_message(link) == Rejoined(2)
            link.close()
        worker.serve_no_other()
        assert (await worker.ended()).how == "ended with exit status 0"


async def test_device_error_under_one_driver_ends_the_worker_before_the_next_driver(
    config: GroupConfig, tmp_path: Path
) -> None:
    start = codec.encode(Start(config, 1, "", "pool_executors:Ahead", 30.0, (0,)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        to_us = spec(listener, SECRET)
        worker = LocalWorker(to_us, "", log_dir=tmp_path, keep=True)
        first = await accept(await next_connection(listener), SECRET, 5, 1)
        await first.write(0, start)
        while not isinstance(await next_message(first), Ready):
            pass
        await first.write(1, codec.encode(OptimStep("a", AdamParams(learning_rate=2))))  # fails in two seconds
        first.close()
        worker.serve(to_us)
        async with asyncio.timeout(60):
            second = await accept(await next_connection(listener), SECRET, 5, 1)
        await second.write(0, start)
        assert await next_message(second) == Rejoined(1)
        last = await next_message(second)
        assert isinstance(last, Fatal) and "failed on the devices" in last.failed.message
        assert (await worker.ended()).how == "ended with exit status 70"
        second.close()


async def test_worker_answers_heartbeats_while_its_main_thread_is_busy(config: GroupConfig, tmp_path: Path) -> None:
    process, link = await begin(config, tmp_path, "Sleepy")
    assert await next_message(link) == Progress("importing pool_executors")
    await link.write(0, codec.encode(Ping()))  # queued behind the start
    await link.write(0, codec.encode(KeepAlive()))
    assert await next_message(link) == KeepAlive()
    link.close()
    assert (await process.ended()).how == "ended with exit status 0"


async def test_secret_is_in_neither_arguments_nor_environment(config: GroupConfig, tmp_path: Path) -> None:
    process, link = await begin(config, tmp_path, "Sleepy")
    for name in ("cmdline", "environ"):
        seen = await asyncio.to_thread(Path(f"/proc/{process.pid}/{name}").read_bytes)
        assert seen
        assert SECRET.hex().encode() not in seen
    link.close()
    await process.ended()


async def test_a_worker_with_a_wrong_secret_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        process = LocalWorker(spec(listener, b"wrong"), "", log_dir=tmp_path)
        sock = await next_connection(listener)
        with pytest.raises((PermissionError, EOFError)):  # the worker refuses the driver's proof first
            await accept(sock, SECRET, 5, 1)
    assert (await process.ended()).how == "ended with exit status 70"
    assert "lacks the secret of generation 5" in (tmp_path / "worker-0.log").read_text()


FAULTS = """
import resource
import numpy as np

def work():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for megabytes in (8, 96, 40):
        np.ones(megabytes << 20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

work()
print(work())
"""


def test_worker_reuses_freed_memory() -> None:
    again = subprocess.run(
        [sys.executable, "-c", FAULTS], env=worker_environment(os.environ), capture_output=True, text=True, check=True
    )
    assert int(again.stdout) < 50, "of 36,864 small pages, or 72 huge ones"


def test_worker_environment_asks_for_huge_pages_and_keeps_variables_that_are_set():
    plain = worker_environment({"HOME": "/h"})
    tunables = plain["GLIBC_TUNABLES"].split(":")
    assert "glibc.malloc.hugetlb=1" in tunables and plain["PYTHONPATH"] == str(ROOT / ".package")
    ours = worker_environment({"PYTHONPATH": "/x", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})
    assert ours["GLIBC_TUNABLES"].split(":") == [*tunables, "glibc.malloc.hugetlb=0"]  # glibc: the last one wins
    assert ours["PYTHONPATH"] == f"{ROOT / '.package'}{os.pathsep}/x"
    assert "GLIBC_TUNABLES" not in worker_environment({"HOME": "/h"}, "cuda")
