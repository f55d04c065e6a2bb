"""The agent of a host: joins a group, starts and ends processes for the driver, and rejoins after a loss.

When the driver closes the connection, it has most likely ended. The agent keeps the processes for the next driver, so
that it finds the base model in their memory. Processes that no driver takes over are ended after
HostConfig.keep_seconds. (A driver that did not end recognizes its own processes, and starts new ones instead.)

When the driver is silent, it is unknown which commands its processes have executed. The agent kills them before it
offers the host's capacity again. No process outlives the agent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.hosts import is_loopback, with_port
from tinkerflow.backend.core.retry import Restarts
from tinkerflow.backend.pool.host.devices import place_in_pod
from tinkerflow.backend.pool.host.places import LocalWorker, generation_secret
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.conversation import Conversation
from tinkerflow.backend.pool.protocol.frames import LARGEST_OF_HOSTS, LoopLink, WorkerLink
from tinkerflow.backend.pool.protocol.handshake import LaunchSpec, connect
from tinkerflow.backend.pool.protocol.messages import (
    Ended,
    Offer,
    OrphanedWorker,
    Refusal,
    Signal,
    Spawn,
    Spawned,
    TakeOver,
    Welcome,
)
from tinkerflow.backend.pool.protocol.software import software
from tinkerflow.backend.spec.pool_message import PoolMessage
from tinkerflow.backend.supervise.processes import free_port

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_END_SECONDS = 10.0  # the longest wait for the end of a killed process


@dataclass(frozen=True)
class HostConfig:
    """The group that a host's agent joins, and the capacity that it offers.

    driver, port: the address of the group's driver.
    secret: the group's secret.
    processes: how many worker processes the host can run.
    log_dir: the folder of the workers' logs, worker-<rank>.log; None: workers write to our stderr.
    compile_cache_dir: the folder for compiled programs on this host; "": the folder that the driver names.
    longest_pause: the longest pause in seconds between two attempts to join.
    keep_seconds: how long processes wait for the next driver. Meanwhile they occupy device memory.
    platform: the setting `platform`.
    leave_seconds: how long processes may run after the agent is cancelled, so that their driver can save models.
    """

    driver: str
    port: int
    secret: bytes = field(repr=False)
    processes: int
    log_dir: Path | None
    compile_cache_dir: str
    longest_pause: float = 2.0
    keep_seconds: float = 120.0
    platform: str = "auto"
    leave_seconds: float = 25.0


async def serve_group(config: HostConfig, say: Callable[[str], None]) -> None:
    """Offer this host's capacity to the group at config.driver until cancelled.

    When cancelled, notify the driver, wait until it has saved the state of its processes, and end them.

    say: called with lines for people. UserError: the driver has a different secret or different software.
    """
    where = with_port(config.driver, config.port)
    processes = HostProcesses(config)
    serving = asyncio.create_task(_serve(config, processes, where, say), name="host")
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        await processes.give_notice()
        raise
    finally:
        serving.cancel()
        await asyncio.wait((serving,))
        await processes.end()


async def _serve(config: HostConfig, processes: HostProcesses, where: str, say: Callable[[str], None]) -> None:
    agent, clock = uuid.uuid4().hex, asyncio.get_running_loop().time
    restarts, reached = Restarts(), True
    while True:
        began = clock()
        try:
            link, silence = await _join(config, agent, processes)
        except (OSError, EOFError) as error:
            if isinstance(error, PermissionError) and error.errno is None:  # not an error of the system or a firewall
                raise UserError(f"the group at {where} has a different secret: {error}") from error
            if reached:
                say(f"the group at {where} cannot be reached ({error}); trying again")
            reached = steady = False
        else:
            say(f"joined the group at {where} from {link.address} with capacity for {config.processes} process(es)")
            doubting = asyncio.create_task(_say_doubt(link.address, say))  # heartbeats do not wait for a slow lookup
            conversation = Conversation(link, silence)
            try:
                why = await processes.serve(conversation, link.address)
            finally:
                doubting.cancel()
            if conversation.closed and processes.leave():
                kept = f"are kept for its next driver, {config.keep_seconds:g} s"
            else:
                await processes.end()
                kept = "have ended"
            say(f"left the group at {where}: {why}; its processes here {kept}")
            reached, steady = True, clock() - began > silence
        await asyncio.sleep(min(config.longest_pause, restarts.pause(steady=steady)))


async def _say_doubt(address: str, say: Callable[[str], None]) -> None:
    if doubt := await asyncio.to_thread(doubt_about_name, address):
        say(doubt)


def doubt_about_name(address: str) -> str:
    """A warning if other hosts, which use `address`, probably cannot reach this host's processes; else ""."""
    name = socket.gethostname()
    try:
        found = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        found = "nothing"
    if is_loopback(address) or not (found == "nothing" or is_loopback(found)):
        return ""
    return (
        f"the name of this host, {name}, resolves to {found} here, so other hosts cannot reach JAX's collectives on "
        f"CPUs: map {name} to {address} in /etc/hosts"
    )


async def _join(config: HostConfig, agent: str, processes: HostProcesses) -> tuple[LoopLink, float]:
    """Connect, and make an offer. Returns the connection, and the seconds after which a silent peer counts as lost."""
    pod = await asyncio.to_thread(place_in_pod)
    link = await _connect(config)
    try:
        offer = Offer(agent, socket.gethostname(), link.address, config.processes, software(), processes.held, pod)
        async with asyncio.timeout(_CONNECT_SECONDS):
            await link.write(0, codec.encode(offer))
            answer = codec.decode((await link.read(LARGEST_OF_HOSTS)).body)
    except BaseException as error:
        link.close()
        if isinstance(error, ValueError):
            raise ConnectionError(str(error)) from error
        raise
    if isinstance(answer, Welcome):
        return link, answer.silence
    link.close()
    if isinstance(answer, Refusal):
        raise UserError(answer.why)
    raise ConnectionError(f"the driver answered our offer with {type(answer).__name__}")


async def _connect(config: HostConfig) -> LoopLink:
    ours = (config.driver, config.port, config.secret, 0, 0, _CONNECT_SECONDS)
    connecting = asyncio.create_task(asyncio.to_thread(connect, *ours))
    try:
        return (await asyncio.shield(connecting)).to_loop()
    except asyncio.CancelledError:
        (made,) = await asyncio.gather(connecting, return_exceptions=True)  # a thread cannot be cancelled
        if isinstance(made, WorkerLink):
            made.close()
        raise


@dataclass(eq=False)
class _Worker:
    """A worker that runs on this host.

    salt, plan: its generation's. number: the driver's number for the worker, or None without a driver. doomed: whether
    this agent has killed it.
    """

    child: LocalWorker
    rank: int
    salt: bytes
    plan: str
    number: int | None
    doomed: bool = False


class HostProcesses:
    """The processes that run on this host, with and without a driver."""

    def __init__(self, config: HostConfig) -> None:
        self._conversation: Conversation | None = None  # with the current driver
        self._address = ""
        self._config = config
        self._watches: dict[_Worker, asyncio.Task[None]] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self._leaving = False

    @property
    def held(self) -> tuple[OrphanedWorker, ...]:
        """The processes without a driver."""
        return tuple(
            OrphanedWorker(worker.child.pid, worker.rank, worker.salt, worker.plan) for worker in self._without_driver()
        )

    async def serve(self, conversation: Conversation, address: str) -> str:
        """Obey the driver at the other end of `conversation` until it is lost. Returns the reason for the loss.

        address: this host's address in the driver's network.
        """
        self._conversation, self._address = conversation, address
        try:
            return await conversation.run(self._obey)
        finally:
            self._conversation = None

    async def _obey(self, message: object) -> None:
        match message:
            case Spawn():
                try:
                    child = await self._spawn(message)
                except OSError as error:
                    log.exception("rank %d of generation %d cannot be started", message.rank, message.generation)
                    self._send(Ended(message.process, f"could not be started: {error}", crashed=False))
                else:
                    self._send(Spawned(message.process, child.pid, child.coordinator))
            case TakeOver():
                self._send(self._take_over(message))
            case Signal():
                for worker in self._watches:  # if none matches, the process has ended
                    if worker.number == message.process:
                        worker.child.signal(message.number)
            case _:
                raise ValueError(f"unexpected {type(message).__name__}")

    def _send(self, message: PoolMessage) -> None:
        if self._conversation is not None:
            self._conversation.send(message)

    async def _spawn(self, asked: Spawn) -> LocalWorker:
        """Start a process. First end the processes without a driver that have the same plan, or all processes without
        a driver if capacity would be missing otherwise. OSError: the start fails.
        """
        if self._leaving:
            raise OSError("the host is shutting down")
        old = [worker for worker in self._without_driver() if worker.plan == asked.plan]
        if len(self._watches) - len(old) >= self._config.processes:
            old = self._without_driver()
        await self._end(old)
        spec = self._spec(asked.port, asked.salt, asked.generation, asked.rank)
        coordinator = with_port(self._address, free_port(self._address))
        child = LocalWorker(spec, coordinator, log_dir=self._config.log_dir, keep=True, platform=self._config.platform)
        worker = _Worker(child, asked.rank, asked.salt, asked.plan, asked.process)
        self._watches[worker] = asyncio.create_task(self._watch(worker))
        return child

    def _take_over(self, asked: TakeOver) -> Spawned | Ended:
        """Let a process without a driver serve the current driver, unless it has ended."""
        for worker in self._without_driver():
            if worker.child.pid == asked.pid:
                worker.salt, worker.number = asked.salt, asked.process
                worker.child.serve(self._spec(asked.port, asked.salt, asked.generation, worker.rank))
                return Spawned(asked.process, worker.child.pid, worker.child.coordinator)
        return Ended(asked.process, "has ended", crashed=False)

    def leave(self) -> bool:
        """Keep the processes for keep_seconds after their driver has ended. Returns whether there are any."""
        for worker in self._watches:
            worker.number = None
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(self._config.keep_seconds, self._expire)
        return bool(self._watches)

    async def give_notice(self) -> None:
        """Notify the driver that its processes must end, and wait up to leave_seconds for it to end them."""
        self._leaving = True
        serving = [(worker, watch) for worker, watch in self._watches.items() if worker.number is not None]
        for worker, _ in serving:
            worker.child.signal(signal.SIGTERM)
        if serving:
            await asyncio.wait([watch for _, watch in serving], timeout=self._config.leave_seconds)

    async def end(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        await self._end(self._watches)

    def _spec(self, port: int, salt: bytes, generation: int, rank: int) -> LaunchSpec:
        return LaunchSpec(
            host=self._config.driver,
            port=port,
            secret=generation_secret(self._config.secret, salt).hex(),
            generation=generation,
            rank=rank,
            parent=os.getpid(),
            compile_cache_dir=self._config.compile_cache_dir,
        )

    def _without_driver(self) -> list[_Worker]:
        return [worker for worker in self._watches if worker.number is None and not worker.doomed]

    def _expire(self) -> None:
        for worker in self._without_driver():
            log.warning("ending rank %d, which had no driver for %g s", worker.rank, self._config.keep_seconds)
            self._kill(worker)

    async def _end(self, processes: Iterable[_Worker]) -> None:
        ending = [self._watches[worker] for worker in processes]
        for worker in tuple(processes):
            self._kill(worker)
        if ending:
            _, late = await asyncio.wait(ending, timeout=_END_SECONDS)
            if late:
                log.error("%d killed process(es) have not ended in %g s", len(late), _END_SECONDS)

    def _kill(self, worker: _Worker) -> None:
        worker.doomed = True
        worker.child.signal(signal.SIGKILL)

    async def _watch(self, worker: _Worker) -> None:
        ending = await worker.child.ended()
        del self._watches[worker]
        if worker.number is not None:
            self._send(Ended(worker.number, ending.how, ending.crashed))
