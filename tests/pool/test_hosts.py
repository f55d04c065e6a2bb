"""Groups of processes on hosts that joined. The hosts are agents on 127.0.0.1 with real workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.pool.conftest import is_alive, make_config, start_driver, worker_pids
from tests.waiting import until

from tinkerflow.backend.core import errors
from tinkerflow.backend.pool import HostConfig, Hosts, Pool, PoolConfig, rendezvous, serve_group
from tinkerflow.backend.pool.host import agent
from tinkerflow.backend.pool.host.places import LocalWorker
from tinkerflow.backend.pool.member import Member
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.frames import LoopLink, header
from tinkerflow.backend.pool.protocol.handshake import LaunchSpec, connect
from tinkerflow.backend.pool.protocol.messages import Offer, Rejoined, Spawned, Welcome
from tinkerflow.backend.pool.protocol.software import software
from tinkerflow.backend.spec.commands import (
    CreateAdapter,
    DropAdapter,
    Example,
    Forward,
    ForwardResult,
    LoraSpec,
    OptimResult,
    OptimStep,
)
from tinkerflow.backend.spec.optimizers.adamw import AdamParams

HERE = Path(__file__).parent
SECRET = b"the secret of the group"


class Driver:
    """Another process (pool_driver.py) that drives the hosts of a bench until it is killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        assert process.stdin is not None and process.stdout is not None
        self.stdin, self.stdout = process.stdin, process.stdout

    async def line(self) -> list[str]:
        return (await self.stdout.readline()).decode().split()

    def do(self, word: str) -> None:
        self.stdin.write(f"{word}\n".encode())

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


class Bench:
    """Hosts at a free port, agents that join them, and pools. All of them end after the test."""

    def __init__(self, hosts: Hosts, tmp_path: Path) -> None:
        self.hosts = hosts
        self.tmp_path = tmp_path
        self.pools: list[Pool] = []
        self.agents: list[asyncio.Task[None]] = []
        self.drivers: list[Driver] = []
        self.said: list[str] = []  # by agents
        self.waits: list[str] = []

    def join(
        self, name: str, processes: int = 1, *, port: int = 0, secret: bytes = SECRET, **patience: Any
    ) -> asyncio.Task[None]:
        """Start an agent. Its workers log to a folder with its name."""
        driver = (self.hosts.address, port or self.hosts.port)
        post = HostConfig(*driver, secret, processes, self.tmp_path / name, "", **patience)
        task = asyncio.create_task(serve_group(post, self.said.append))
        self.agents.append(task)
        return task

    async def start(self, processes: int, executor: str = "Echo", *, on_demand: bool = False, **patience: Any) -> Pool:
        async def waits(text: str) -> None:
            self.waits.append(text)

        config = PoolConfig(
            make_config(fsdp=processes),
            processes,
            command_deadline=60.0,
            start_deadline=60.0,
            executor=f"pool_executors:{executor}",
            **patience,
        )
        pool = await Pool.start(
            config, self.hosts, on_progress=lambda text: None, on_waiting=waits, on_demand=on_demand
        )
        self.pools.append(pool)
        return pool

    async def drive(self, processes: int, executor: str = "Echo") -> tuple[Driver, set[int]]:
        """Let another process drive the hosts. Returns it, and the PIDs of its workers."""
        await self.hosts.close()
        driver = Driver(await start_driver(executor, processes, str(self.hosts.port), SECRET.decode()))
        self.drivers.append(driver)
        return driver, {int(word) for word in await driver.line()}

    async def drive_again(self) -> None:
        """Drive the hosts after another process."""
        self.hosts = await Hosts.listen(self.hosts.address, self.hosts.port, SECRET, 3.0)

    async def close(self) -> None:
        for driver in self.drivers:
            await driver.kill()
        for pool in self.pools:
            await pool.stop()
        await self.hosts.close()
        for task in self.agents:
            if not task.cancelling():  # a second cancellation would interrupt the end
                task.cancel()
        await asyncio.gather(*self.agents, return_exceptions=True)


@pytest.fixture
async def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Bench]:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    made = Bench(await Hosts.listen(getattr(request, "param", "127.0.0.1"), 0, SECRET, 3.0), tmp_path)
    yield made
    await made.close()
    assert not worker_pids()


def step(number: float = 0.0) -> OptimStep:
    return OptimStep("a", AdamParams(learning_rate=number))


async def serves(pool: Pool, generation: int) -> None:
    assert await pool.submit(step(2)) == OptimResult(2.0, 1)  # a new executor counts from 1
    assert pool.generation == generation


async def busy(pool: Pool) -> asyncio.Task[object]:
    """Submit a long command, and let its task begin."""
    task = asyncio.create_task(pool.submit(CreateAdapter("a", LoraSpec(1), 60_000)))
    await asyncio.sleep(0)
    return task


async def test_a_group_starts_when_enough_hosts_have_joined(bench: Bench) -> None:
    starting = asyncio.create_task(bench.start(3))
    await until(lambda: bench.waits)
    bench.join("two", 2)
    await until(lambda: len(bench.waits) == 2)
    bench.join("one")
    pool = await starting
    assert bench.waits[0] == "waiting for hosts: 0 of 3 processes (none has joined)"
    assert bench.waits[1].startswith("waiting for hosts: 2 of 3 processes (")
    assert bench.waits[2:] == ["worker group 1 is being started"]
    assert len(set(pool.pids)) == 3
    replies = await asyncio.gather(*(asyncio.create_task(pool.submit(step(i))) for i in range(50)))
    assert replies == [OptimResult(float(i), i + 1) for i in range(50)]
    logs = {path.relative_to(bench.tmp_path).parts for path in bench.tmp_path.glob("*/worker-*.log")}
    assert sorted(name for _, name in logs) == ["worker-0.log", "worker-1.log", "worker-2.log"]
    assert sorted(host for host, _ in logs) == ["one", "two", "two"]


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("bench", ["::1"], indirect=True)
async def test_group_computes_over_ipv6(bench: Bench) -> None:
    bench.join("one")
    bench.join("two")
    pool = await bench.start(2, "Collective")
    assert pool.info.parameters == 2  # the executor reports jax.process_count()
    weights_TK = np.arange(8, dtype=np.float32)[:, None]
    tokens_T = np.zeros(8, np.int32)
    over_all = Forward("a", (Example(tokens_T, tokens_T[:, None], weights_TK),), "cross_entropy")
    assert await pool.submit(over_all) == ForwardResult((), 28.0)
    assert bench.said[0].startswith(f"joined the group at [::1]:{bench.hosts.port} from ::1 with capacity for 1")


async def test_group_without_room_on_any_host_reports_it(bench: Bench) -> None:
    starting = asyncio.create_task(bench.start(1))
    await until(lambda: bench.waits)
    bench.join("one")
    first = await starting
    second = await bench.start(1, on_demand=True)
    second.begin()
    await until(lambda: second.lacks_capacity)
    assert not second.resting and not second.ready
    await first.stop()
    await second.serving()
    assert not second.lacks_capacity


async def test_a_killed_process_is_named_with_its_host(bench: Bench) -> None:
    bench.join("a", 2)
    pool = await bench.start(2)
    executing = await busy(pool)
    os.kill(pool.pids[1], signal.SIGKILL)
    with pytest.raises(errors.SuspectError, match=r"rank 1 was killed by SIGKILL \(on host .+\)") as suspect:
        await executing
    assert not suspect.value.crashed
    await serves(pool, 2)
    assert "joined" in bench.said[0]
    assert len(bench.said) == 1  # the host itself stayed


async def test_group_continues_after_a_lost_host_is_replaced(bench: Bench) -> None:
    bench.join("a")
    lost = bench.join("b")
    pool = await bench.start(2)
    executing = await busy(pool)
    lost.cancel()
    with pytest.raises(errors.SuspectError, match=r"worker group 1 ended: rank \d .*") as suspect:
        await executing
    assert not suspect.value.crashed
    await until(lambda: any(text.startswith("waiting for hosts: 1 of 2") for text in bench.waits))
    assert not pool.ready
    bench.join("c")
    await serves(pool, 2)
    assert (bench.tmp_path / "c").exists()


async def test_next_driver_takes_over_a_group(bench: Bench) -> None:
    bench.join("a", 2)
    bench.join("b", 1)
    driver, pids = await bench.drive(3)
    driver.do("steps")
    assert [await driver.line() for _ in range(3)][-1][-1] == "step=3)"
    driver.do("brief")
    assert await driver.line() == ["sent"]
    await driver.kill()  # its commands are executed first, on every rank
    await bench.drive_again()
    pool = await bench.start(3)
    assert set(pool.pids) == pids
    await serves(pool, 1)  # the steps left no state
    assert sum("are kept for its next driver, 120 s" in text for text in bench.said) == 2
    os.kill(pool.pids[2], signal.SIGKILL)  # the group fails like any other group
    await until(lambda: not pool.ready)
    await serves(pool, 2)
    assert not set(pool.pids) & pids


async def test_a_group_of_jax_outlives_its_driver(bench: Bench) -> None:
    bench.join("a", 2)
    driver, pids = await bench.drive(2, "Collective")
    driver.do("steps")
    for _ in range(3):
        await driver.line()
    await driver.kill()
    await bench.drive_again()
    pool = await bench.start(2, "Collective")
    assert set(pool.pids) == pids
    tokens, weights = np.zeros(2, np.int32), np.array([[3], [4]], np.float32)
    reply = await pool.submit(Forward("a", (Example(tokens, tokens[:, None], weights),), "cross_entropy"))
    assert isinstance(reply, ForwardResult)
    assert reply.loss_sum == 7


async def test_ranks_left_at_different_commands_are_not_reused(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.join("a", 2)
    driver, pids = await bench.drive(2)
    driver.do("uneven")
    assert await driver.line() == ["sent"]
    await driver.kill()
    await bench.drive_again()
    pool = await bench.start(2)
    assert "an earlier driver left its ranks at different commands: [0, 1]" in caplog.text
    assert not set(pool.pids) & pids
    await serves(pool, 2)


@pytest.mark.parametrize("commands", [0, 3])
async def test_only_commands_of_an_earlier_driver_must_end_soon(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, commands: int
) -> None:
    """Ranks without a command may still be loading the base model, which takes minutes."""
    monkeypatch.setattr(rendezvous, "_JOIN_SECONDS", 0.0)
    faults: list[str] = []
    config = PoolConfig(make_config(), 1, command_deadline=60.0, start_deadline=60.0)
    met = rendezvous.Rendezvous(config, bench.hosts, 1, lambda task: None, lambda cause, **_: faults.append(cause))
    process: Any = None
    met.members.append(Member(0, process))
    met.note_rejoined(met.members[0], Rejoined(commands))
    for _ in range(3):
        await asyncio.sleep(0)
    assert faults == ["the commands of an earlier driver took longer than 0 s"][: bool(commands)]


async def test_slowly_dying_process_does_not_cost_its_host(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    task = bench.join("a")
    driver, pids = await bench.drive(1)
    await driver.kill()
    signals = LocalWorker.signal

    def signal_late(child: LocalWorker, number: int) -> None:
        if child.pid in pids:  # longer than a driver waits for a heartbeat
            asyncio.get_running_loop().call_later(4.5, signals, child, number)
        else:
            signals(child, number)

    monkeypatch.setattr(LocalWorker, "signal", signal_late)
    await bench.drive_again()
    pool = await bench.start(1, "ByMicroBatch")
    assert not set(pool.pids) & pids
    assert not task.done()


def test_pool_digest_changes_with_the_model_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> str:
        return PoolConfig(make_config(str(tmp_path)), 1, command_deadline=1.0, start_deadline=1.0).digest()

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    before = digest()
    os.utime(weights, (0, 0))  # as after another download
    assert digest() == before
    weights.write_bytes(b"Weights")
    assert digest() != before
    monkeypatch.setattr("tinkerflow.backend.pool.protocol.software.WHOLE_BYTES", 2**20)
    seen = set()
    for size, number in ((2**22, 0), (2**22, 1), (2**22 + 1, 0)):  # only parts of these files are read
        weights.write_bytes(bytes([number]) * size)
        seen.add(digest())
    assert len(seen) == 3


@pytest.mark.parametrize("why", ["a rank is missing", "another plan"])
async def test_leftover_processes_that_do_not_fit_are_ended(bench: Bench, why: str) -> None:
    bench.join("a", 2)
    driver, pids = await bench.drive(2)
    if why == "a rank is missing":
        lost = min(pids)
        await driver.kill()
        os.kill(lost, signal.SIGKILL)
        await until(lambda: not is_alive(lost))
        await bench.drive_again()
        pool = await bench.start(2)
    else:
        await driver.kill()
        await bench.drive_again()
        pool = await bench.start(2, "ByMicroBatch")
    assert not set(pool.pids) & pids
    assert not any(map(is_alive, pids))


async def test_processes_without_a_driver_are_ended(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.join("a", keep_seconds=0.2)
    driver, pids = await bench.drive(1)
    await driver.kill()
    await until(lambda: not any(map(is_alive, pids)))
    assert "ending rank 0, which had no driver for 0.2 s" in caplog.text


async def test_process_that_ends_during_its_takeover_is_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.join("a")
    driver, pids = await bench.drive(1)
    await driver.kill()
    serve = LocalWorker.serve

    def serve_dying(child: LocalWorker, spec: LaunchSpec) -> None:
        if child.pid in pids:
            child.signal(signal.SIGKILL)
        serve(child, spec)

    monkeypatch.setattr(LocalWorker, "serve", serve_dying)
    await bench.drive_again()
    pool = await bench.start(1)
    assert not set(pool.pids) & pids
    await serves(pool, 2)


class Cable:
    """A connection between an agent and the driver. A cut stops its bytes without closing it."""

    def __init__(self, port: int) -> None:
        self.intact = asyncio.Event()
        self.intact.set()
        self._port = port

    async def lay(self) -> int:
        """Listen. Returns the port that the agent connects to."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def remove(self) -> None:
        self._server.close()
        self._server.close_clients() if hasattr(self._server, "close_clients") else None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(self._carry(reader, back), self._carry(there, writer))
        except OSError:
            pass
        finally:
            for end in (writer, back):
                end.close()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await self.intact.wait()
            sink.write(data)
            await sink.drain()
        await self.intact.wait()
        sink.close()


async def test_cut_link_is_detected_at_both_ends_and_recovers(bench: Bench) -> None:
    cable = Cable(bench.hosts.port)
    bench.join("a", port=await cable.lay())
    pool = await bench.start(1)
    (pid,) = pool.pids
    executing = await busy(pool)
    cable.intact.clear()
    with pytest.raises(errors.SuspectError, match=r"rank 0 was lost with host .+: it sent no heartbeat for 3 s \("):
        await executing
    await until(lambda: len(bench.said) == 2)
    assert "it sent no heartbeat for 3 s" in bench.said[1]
    assert not is_alive(pid)
    cable.intact.set()
    await serves(pool, 2)
    await bench.close()
    await cable.remove()


async def test_lost_connection_is_not_reported_as_a_crash(
    bench: Bench,
) -> None:
    bench.join("a")
    pool = await bench.start(1, exit_seconds=0.5)
    with pytest.raises(errors.SuspectError, match="rank 0 closed its connection") as caught:
        await pool.submit(DropAdapter("cut"))
    assert not caught.value.crashed
    await serves(pool, 2)


async def test_different_secret_is_refused(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(errors.UserError, match=r"the group at 127.0.0.1:\d+ has a different secret"):
        await bench.join("a", secret=b"some other secret")
    await until(lambda: "an unknown peer connected where hosts join" in caplog.text)
    assert "none has joined" in bench.hosts.missing(1)


@pytest.mark.parametrize(
    ("secret", "raw", "error"),
    [
        (b"", b"GET / HTTP/1.1\r\n" + bytes(64), "not a worker of generation 0"),
        (SECRET, b"GET / HTTP/1.1\r\n" + bytes(64), "invalid bytes instead of a frame"),
        (
            SECRET,
            b"TkF1" + bytes(12) + (2**36).to_bytes(8, "big"),
            f"a frame of {2**36} bytes is over the limit of {2**20} bytes",
        ),
        (SECRET, header(0, 0, [bytes(9)]) + bytes(9), "9 bytes are not a message"),
    ],
)
async def test_malformed_frame_causes_one_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture, secret: bytes, raw: bytes, error: str
) -> None:
    """The driver closes the connection, and allocates nothing for the length that a frame claims."""

    def talk() -> bytes:
        if not secret:
            with socket.create_connection(("127.0.0.1", bench.hosts.port)) as sock:
                sock.sendall(raw)
                return sock.recv(1)
        link = connect("127.0.0.1", bench.hosts.port, secret, 0, 0)
        try:
            link._sock.sendall(raw)
            return link._sock.recv(1)
        finally:
            link.close()

    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.to_thread(talk) == b""
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 1
    assert error in lines[0]


async def test_a_firewall_is_not_mistaken_for_a_different_secret(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local rules refuse a connection with EPERM, for example until a new pod's policies are applied."""
    create, refusals = socket.create_connection, [PermissionError(1, "Operation not permitted")]

    def create_later(*where: Any, **options: Any) -> socket.socket:
        if refusals:
            raise refusals.pop()
        return create(*where, **options)

    monkeypatch.setattr(socket, "create_connection", create_later)
    bench.join("a")
    await until(lambda: len(bench.said) == 2)
    assert bench.said[0].endswith("cannot be reached ([Errno 1] Operation not permitted); trying again")
    assert bench.said[1].startswith("joined the group")


async def test_different_software_version_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkerflow.backend.pool.host.agent.software", lambda: "python 2.7")
    with pytest.raises(
        errors.UserError, match=r"host .+ has python 2.7, the driver has python 3.+, and both must be the same"
    ):
        await bench.join("a")
    assert "none has joined" in bench.hosts.missing(1)


async def test_missing_driver_is_waited_for(bench: Bench) -> None:
    await bench.hosts.close()
    bench.join("a")
    await until(lambda: bench.said)
    assert "cannot be reached" in bench.said[0]
    await bench.drive_again()
    await serves(await bench.start(1), 1)


async def test_two_groups_share_the_hosts(bench: Bench) -> None:
    bench.join("a", 2)
    first = await bench.start(2)
    starting = asyncio.create_task(bench.start(1))
    await until(lambda: bench.waits and bench.waits[-1].startswith("waiting for hosts: 0 of 1 processes ("))
    await first.stop()
    second = await starting
    await serves(second, 1)


async def test_host_that_cannot_start_a_process_is_retried(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def spawn(*args: Any, **kwargs: Any) -> LocalWorker:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise OSError(11, "Resource temporarily unavailable")
        return LocalWorker(*args, **kwargs)

    monkeypatch.setattr("tinkerflow.backend.pool.host.agent.LocalWorker", spawn)
    bench.join("a", 2)
    await serves(await bench.start(2), 2)
    assert not bench.hosts.missing(0)
    assert "0 of 1" in bench.hosts.missing(1)


async def test_start_that_waits_for_hosts_can_be_cancelled(bench: Bench) -> None:
    starting = asyncio.create_task(bench.start(1))
    await until(lambda: bench.waits)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def visit(bench: Bench, offer: Offer) -> LoopLink:
    """Join without an agent."""
    port = bench.hosts.port
    link = (await asyncio.to_thread(connect, "127.0.0.1", port, SECRET, 0, 0)).to_loop()
    await link.write(0, codec.encode(offer))
    assert codec.decode((await link.read()).body) == Welcome(3.0)
    return link


async def test_hosts_that_cannot_reach_each_other_are_refused(bench: Bench) -> None:
    links = [
        await visit(bench, Offer(n, n, address, 1, software(), ()))
        for n, address in (("a", "10.0.0.9"), ("b", "127.0.0.1"))
    ]
    assert bench.hosts.missing(2).startswith("waiting for hosts: b joined through 127.0.0.1, where others cannot reach")
    links[0].close()
    await until(lambda: not bench.hosts.missing(1))
    links[1].close()
    await until(lambda: "none has joined" in bench.hosts.missing(1))


async def test_ranks_follow_the_numbers_of_hosts_and_in_a_pod_of_tpus_its_order(bench: Bench) -> None:
    async def order(*offers: tuple[str, tuple[int, ...]]) -> list[str]:
        links = [await visit(bench, Offer(n, n, "10.0.0.9", 1, software(), (), pod)) for n, pod in offers]
        await until(lambda: not bench.hosts.missing(len(offers)))
        slots = bench.hosts.reserve(len(offers), "plan")
        for slot in slots:
            slot.release()
        for link in links:
            link.close()
        await until(lambda: bool(bench.hosts.missing(1)))
        return [slot.host for slot in slots]

    assert await order(("host-10", ()), ("host-2", ()), ("a", ())) == ["a", "host-2", "host-10"]
    in_pod = [("w-a", (0, 10)), ("w-b", (0, 2)), ("w-c", (1, 0))]
    assert await order(*in_pod) == ["w-b", "w-a", "w-c"]


async def test_rejoining_agent_is_counted_once(bench: Bench) -> None:
    offer = Offer("same", "a", "127.0.0.1", 1, software(), ())
    links = [await visit(bench, offer) for _ in range(2)]
    await until(lambda: "(a: 1)" in bench.hosts.missing(2))
    await links[1].write(0, codec.encode(Spawned(7, 1, "")))  # the host is too late, so the driver ignores it
    await links[1].write(0, codec.encode(offer))
    await until(lambda: "none has joined" in bench.hosts.missing(1))
    for link in links:
        link.close()


async def test_removed_host_is_replaced_by_another(bench: Bench) -> None:
    bench.join("a")
    pool = await bench.start(1)
    other = await bench.start(1, on_demand=True)
    bench.join("b", 2)
    await until(lambda: "(" in bench.hosts.missing(9) and bench.hosts.missing(2) == "")
    other.begin()
    await other.serving()
    pool.take_out(2, "another generation")
    await serves(pool, 1)
    (place,) = pool.info.places
    pool.take_out(1, "step 5 was wrong")
    with pytest.raises(errors.GroupFailedError, match="worker group 1"):
        await pool.submit(step(), generation=1)
    await serves(pool, 2)
    assert pool.pids and (place, other.ready) == (f"rank 0 on {socket.gethostname()}", True)

    pool.take_out(2, "step 9 was wrong")
    await until(lambda: pool.lacks_capacity)
    assert other.generation == 1 and other.ready, "groups that run go on"
    why = "out of service: step 9 was wrong; restart its `tinkerflow worker`, or `tinkerflow up`, to use it again"
    assert "waiting for hosts: 0 of 1 processes (" in bench.waits[-1] and why in bench.waits[-1]
    bench.agents[0].cancel()
    bench.join("a, restarted")
    await serves(pool, 3)


async def test_slow_lookup_of_the_host_name_does_not_lose_the_host(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = threading.Event()

    def lookup(address: str) -> str:
        looked_up.wait(600)
        return "the name is misleading"

    monkeypatch.setattr(agent, "doubt_about_name", lookup)
    try:
        async with asyncio.timeout(120):
            bench.join("one")
            await serves(await bench.start(1), 1)
        assert len(bench.said) == 1
    finally:
        looked_up.set()
    await until(lambda: bench.said[1:] == ["the name is misleading"])


@pytest.mark.parametrize(
    ("address", "found", "doubtful"),
    [
        ("10.0.0.9", "127.0.1.1", True),
        ("10.0.0.9", "10.0.0.9", False),
        ("127.0.0.1", "127.0.1.1", False),
        ("2001:db8::9", "127.0.1.1", True),
        ("2001:db8::9", "::1", True),
        ("2001:db8::9", "2001:db8::9", False),
    ],
)
def test_misleading_host_name_is_reported(
    monkeypatch: pytest.MonkeyPatch, address: str, found: str, doubtful: bool
) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda name, *_, **__: [(0, 0, 0, "", (found, 0))])
    assert (f"map vm to {address} in /etc/hosts" in agent.doubt_about_name(address)) == doubtful
