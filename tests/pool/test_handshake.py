"""Frames and proofs of the secret, over real sockets."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from tests.pool.conftest import StartPool

from tinkerflow.backend.pool.host import places
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.frames import LoopLink, WorkerLink, header
from tinkerflow.backend.pool.protocol.handshake import LaunchSpec, accept, connect, next_connection
from tinkerflow.backend.pool.protocol.messages import Progress
from tinkerflow.backend.spec.commands import ForwardResult

SECRET = b"a secret of this generation"


@pytest.fixture
async def listener() -> AsyncIterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


async def meet(
    listener: socket.socket, *, theirs: bytes = SECRET, generation: int = 3, rank: int = 1
) -> tuple[LoopLink | BaseException, WorkerLink | BaseException]:
    """Connect a worker with secret `theirs` to a driver of generation 3 with 2 ranks. Returns each end's result."""
    port = listener.getsockname()[1]
    worker = asyncio.to_thread(connect, "127.0.0.1", port, theirs, generation, rank, timeout=5.0)

    async def drive() -> LoopLink:
        sock = await next_connection(listener)
        return await accept(sock, SECRET, 3, 2)

    driver_end, worker_end = await asyncio.gather(drive(), worker, return_exceptions=True)
    return driver_end, worker_end


async def linked(listener: socket.socket) -> tuple[LoopLink, WorkerLink]:
    driver, worker = await meet(listener)
    assert isinstance(driver, LoopLink)
    assert isinstance(worker, WorkerLink)
    return driver, worker


async def test_frames_are_exchanged_in_both_directions(listener: socket.socket) -> None:
    driver, worker = await linked(listener)
    assert driver.rank == 1
    big = np.arange(3_000_000, dtype=np.float32)
    sending = asyncio.create_task(driver.write(7, codec.encode(ForwardResult((big,), 1.0))))
    frame = await asyncio.to_thread(worker.read)
    await sending
    assert frame.index == 7
    result = codec.decode(frame.body)
    assert isinstance(result, ForwardResult)
    assert result.logprobs[0].tobytes() == big.tobytes()
    await asyncio.to_thread(worker.write, 2**63, codec.encode(Progress("back")))
    answer = await driver.read()
    assert answer.index == 2**63
    assert codec.decode(answer.body) == Progress("back")
    driver.close()
    with pytest.raises(EOFError, match="closed"):
        await asyncio.to_thread(worker.read)
    worker.close()


async def test_large_frame_reports_progress_while_it_is_sent(listener: socket.socket) -> None:
    driver, worker = await linked(listener)
    size = 32 << 20  # much more than the buffers of the connection
    for part in (size, 3 << 10):  # one large part, and many small parts
        body = codec.encode(ForwardResult((np.zeros(part // 4, np.float32),) * (size // part), 0.0))
        before = driver.signs
        sending = asyncio.create_task(driver.write(1, body))
        await asyncio.to_thread(worker.read)
        await sending
        assert 30 <= driver.signs - before <= 33
        before = driver.signs
        answering = asyncio.create_task(asyncio.to_thread(worker.write, 1, body))
        await driver.read()
        await answering
        assert driver.signs - before >= 3
    driver.close()
    worker.close()


async def test_failed_accept_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    class Exhausted(socket.socket):
        left = 1

        def accept(self) -> tuple[socket.socket, Any]:
            self.left -= 1
            if self.left >= 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with Exhausted() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        with socket.create_connection(listener.getsockname()):
            (await next_connection(listener, retry_seconds=0.01)).close()
    assert "Too many open files" in caplog.text


async def test_worker_with_a_different_secret_is_refused(listener: socket.socket) -> None:
    driver, worker = await meet(listener, theirs=b"another")
    assert isinstance(worker, PermissionError)  # the worker refuses the driver's proof
    assert "lacks the secret of generation 3" in str(worker)
    assert isinstance(driver, (PermissionError, EOFError))


@pytest.mark.parametrize(("generation", "rank"), [(2, 0), (4, 0), (3, 2)])
async def test_different_generation_or_rank_is_refused(listener: socket.socket, generation: int, rank: int) -> None:
    driver, worker = await meet(listener, generation=generation, rank=rank)
    assert isinstance(driver, PermissionError)
    assert "not a worker of generation 3" in str(driver)
    assert isinstance(worker, ConnectionRefusedError)
    assert f"refused rank {rank} of generation {generation}" in str(worker)


async def test_reflected_proof_is_refused(listener: socket.socket) -> None:
    def mirror(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"TkF1" + (3).to_bytes(4, "big") + (0).to_bytes(4, "big") + bytes(32))
            answer = sock.recv(64, socket.MSG_WAITALL)
            sock.sendall(answer[32:])
            assert sock.recv(1) == b""

    reflected = asyncio.create_task(asyncio.to_thread(mirror, listener.getsockname()[1]))
    sock = await next_connection(listener)
    with pytest.raises(PermissionError, match="lacks the secret"):
        await accept(sock, SECRET, 3, 1)
    await reflected


def test_self_connection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP connects a socket to itself if its own port is the unused target port."""

    def to_itself(address: tuple[str, int], timeout: float) -> socket.socket:
        sock = socket.socket()
        sock.bind(address)
        sock.connect(address)
        return sock

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setattr(socket, "create_connection", to_itself)
    with pytest.raises(ConnectionRefusedError, match=f"no process listens on port {port}"):
        connect("127.0.0.1", port, SECRET, 0, 0)
    socket.create_server(("127.0.0.1", port)).close()  # a restarted driver finds its port free


async def test_connection_survives_a_cancelled_wait(listener: socket.socket) -> None:
    waiting = asyncio.create_task(next_connection(listener))
    await asyncio.sleep(0)
    with socket.create_connection(listener.getsockname()) as client:
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the loop has noticed the connection, but the task has not run yet
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(10):
            sock = await next_connection(listener)
        assert sock.getpeername() == client.getsockname()
        sock.close()


async def test_closed_connection_is_an_end_of_file(listener: socket.socket) -> None:
    socket.create_connection(listener.getsockname()).close()
    sock = await next_connection(listener)
    with pytest.raises(EOFError):
        await accept(sock, SECRET, 3, 1)
    assert sock.fileno() == -1


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n", "invalid bytes instead of a frame: b'GET"),
        (header(4, 1, [b""]), "a frame of generation 4 in generation 3"),
        (b"TkF1" + b"\x00\x00\x00\x03" + b"\xff" * 16, f"a frame of {2**64 - 1} bytes is over the limit of"),
    ],
)
async def test_garbage_raises_a_value_error_at_both_ends(raw: bytes, named: str) -> None:
    for end in ("driver", "worker"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(raw)
            theirs.shutdown(socket.SHUT_WR)
            ours.setblocking(end == "worker")
            with pytest.raises(ValueError, match=named):
                await (LoopLink(ours, 3, 0).read() if end == "driver" else asyncio.to_thread(WorkerLink(ours, 3).read))


async def test_group_starts_despite_foreign_connections(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = places.LocalWorker

    def probe_then_spawn(spec: LaunchSpec, coordinator: str, **options: Any) -> places.LocalWorker:
        with socket.create_connection((spec.host, spec.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" + bytes(64))
        return worker(spec, coordinator, **options)

    monkeypatch.setattr(places, "LocalWorker", probe_then_spawn)
    pool = await start_pool(processes=2)
    assert pool.ready
    assert caplog.text.count("an unknown peer connected to worker group 1") == 2


async def test_silent_connections_do_not_delay_a_rank(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker, silent = places.LocalWorker, []

    def connect_then_spawn(spec: LaunchSpec, coordinator: str, **options: Any) -> places.LocalWorker:
        silent.extend(socket.create_connection((spec.host, spec.port)) for _ in range(4))
        return worker(spec, coordinator, **options)

    monkeypatch.setattr(places, "LocalWorker", connect_then_spawn)
    monkeypatch.setattr("tinkerflow.backend.pool.rendezvous.HANDSHAKE_SECONDS", 3600.0)
    try:
        pool = await start_pool(processes=2)
        assert pool.ready and len(silent) == 8
        await pool.stop()
        assert [stranger.recv(1) for stranger in silent] == [b""] * 8
    finally:
        for stranger in silent:
            stranger.close()
    assert "an unknown peer connected" not in caplog.text
