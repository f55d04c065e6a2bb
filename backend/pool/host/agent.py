"""A host's part in a group: join, start and end processes as the driver asks, and join again when it is lost.

When the driver closes the connection, it has most likely ended. Its processes are kept for the next driver, which finds
the base model in their memory; processes that no driver takes over are ended after HostConfig.keep_seconds. (A driver
that lives on recognises the processes, and starts new ones.) When the driver is silent, nobody knows what its processes
are in the middle of: they are killed before this host offers its room again. No process outlives the agent.
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
from tinkerflow.backend.core.retry import Restarts
from tinkerflow.backend.pool.host.devices import place_in_pod
from tinkerflow.backend.pool.host.places import LocalWorker, generation_secret
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.conversation import Conversation
from tinkerflow.backend.pool.protocol.frames import LoopLink, WorkerLink
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
_END_SECONDS = 10.0  # that a killed process may take to end; we go on without it


@dataclass(frozen=True)
class HostConfig:
    """Where a host's agent joins, and what it offers.

    driver, port: the address of the group's driver.
    secret: the group's.
    processes: how many worker processes the host runs.
    log_dir: where workers append worker-<rank>.log; None = to our stderr.
    compile_cache_dir: of this host's processes, in place of the folder that the driver names; "" = the driver's.
    longest_pause: seconds between two attempts to join; a link that is mended is found so soon.
    keep_seconds: how long processes wait for the next driver; meanwhile they hold memory of the devices.
    platform: the setting. leave_seconds: how long processes may go on when the agent is to end: their driver saves what
    they hold.
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
    """Offer this host's room to the group at config.driver, for ever.

    Cancelled, it tells the driver that its processes are to end, and ends them when the driver has saved their state.

    `say` gets lines for people. UserError when the driver has another secret or other software.
    """
    where = f"{config.driver}:{config.port}"
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
        except PermissionError as error:
            raise UserError(f"the group at {where} has another secret: {error}") from error
        except (OSError, EOFError) as error:
            if reached:
                say(f"the group at {where} cannot be reached ({error}); trying again until it can")
            reached = steady = False
        else:
            say(f"joined the group at {where} from {link.address} with room for {config.processes} process(es)")
            if doubt := await asyncio.to_thread(doubt_about_name, link.address):
                say(doubt)
            talk = Conversation(link, silence)
            why = await processes.serve(talk, link.address)
            if talk.closed and processes.leave():
                kept = f"are kept for its next driver, {config.keep_seconds:g} s"
            else:
                await processes.end()
                kept = "have ended"
            say(f"left the group at {where}: {why}; its processes here {kept}")
            reached, steady = True, clock() - began > silence
        await asyncio.sleep(min(config.longest_pause, restarts.pause(steady=steady)))


def doubt_about_name(address: str) -> str:
    """What would keep other hosts from the processes of this one, which they know by `address`; "" = nothing."""
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError:
        found = "nothing"
    if address.startswith("127.") or not found.startswith(("127.", "nothing")):
        return ""
    return (
        f"the name of this host, {name}, resolves to {found} here: JAX's collectives on CPUs will not be reached from "
        f"other hosts; have /etc/hosts say {address}"
    )


async def _join(config: HostConfig, agent: str, processes: HostProcesses) -> tuple[LoopLink, float]:
    """Connect and be welcomed: the connection, and the seconds after which a silent end is lost."""
    pod = await asyncio.to_thread(place_in_pod)
    link = await _connect(config)
    try:
        offer = Offer(agent, socket.gethostname(), link.address, config.processes, software(), processes.held, pod)
        async with asyncio.timeout(_CONNECT_SECONDS):
            await link.write(0, codec.encode(offer))
            answer = codec.decode((await link.read()).body)
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
    raise ConnectionError(f"{type(answer).__name__} in answer to our offer")


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
    """A worker that runs here.

    salt, plan: of its generation. number: its driver's, for it; None: it has no driver. doomed: we have killed it.
    """

    child: LocalWorker
    rank: int
    salt: bytes
    plan: str
    number: int | None
    doomed: bool = False


class HostProcesses:
    """The processes that run here, with and without a driver."""

    def __init__(self, config: HostConfig) -> None:
        """No process runs yet."""
        self._talk: Conversation | None = None  # with the driver that is there, which knows us by the address
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

    async def serve(self, talk: Conversation, address: str) -> str:
        """Do as the driver at the other end of `talk` says until it is lost: why it was. address: of this host."""
        self._talk, self._address = talk, address
        try:
            return await talk.run(self._obey)
        finally:
            self._talk = None

    async def _obey(self, message: object) -> None:
        match message:
            case Spawn():
                try:
                    child = await self._spawn(message)
                except OSError as error:
                    log.exception("rank %d of generation %d cannot be started", message.rank, message.generation)
                    self._tell(Ended(message.process, f"could not be started: {error}", crashed=False))
                else:
                    self._tell(Spawned(message.process, child.pid, child.coordinator))
            case TakeOver():
                self._tell(self._take_over(message))
            case Signal():
                for worker in self._watches:  # none of this number: it has ended already
                    if worker.number == message.process:
                        worker.child.signal(message.number)
            case _:
                raise ValueError(f"{type(message).__name__}, which is not for us")

    def _tell(self, message: PoolMessage) -> None:
        if self._talk is not None:
            self._talk.tell(message)

    async def _spawn(self, asked: Spawn) -> LocalWorker:
        """Start a process. First the processes without a driver that have its plan are ended, or all processes without
        a driver when there is no room otherwise. OSError when the start fails.
        """
        if self._leaving:
            raise OSError("the host is about to end")
        old = [worker for worker in self._without_driver() if worker.plan == asked.plan]
        if len(self._watches) - len(old) >= self._config.processes:
            old = self._without_driver()
        await self._end(old)
        spec = self._spec(asked.port, asked.salt, asked.generation, asked.rank)
        coordinator = f"{self._address}:{free_port(self._address)}"
        child = LocalWorker(spec, coordinator, log_dir=self._config.log_dir, keep=True, platform=self._config.platform)
        worker = _Worker(child, asked.rank, asked.salt, asked.plan, asked.process)
        self._watches[worker] = asyncio.create_task(self._watch(worker))
        return child

    def _take_over(self, asked: TakeOver) -> Spawned | Ended:
        """Let a process without a driver serve the present driver, unless it has ended."""
        for worker in self._without_driver():
            if worker.child.pid == asked.pid:
                worker.salt, worker.number = asked.salt, asked.process
                worker.child.serve(self._spec(asked.port, asked.salt, asked.generation, worker.rank))
                return Spawned(asked.process, worker.child.pid, worker.child.coordinator)
        return Ended(asked.process, "has ended", crashed=False)

    def leave(self) -> bool:
        """Keep the processes of a driver that has ended for the next driver, for a while; whether there are any."""
        for worker in self._watches:
            worker.number = None
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(self._config.keep_seconds, self._expire)
        return bool(self._watches)

    async def give_notice(self) -> None:
        """Let the driver know that its processes are to end, and wait until it has ended them, for a while."""
        self._leaving = True
        serving = [(worker, watch) for worker, watch in self._watches.items() if worker.number is not None]
        for worker, _ in serving:
            worker.child.signal(signal.SIGTERM)
        if serving:
            await asyncio.wait([watch for _, watch in serving], timeout=self._config.leave_seconds)

    async def end(self) -> None:
        """End all processes."""
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
            log.warning("rank %d had no driver for %g s: it is ended", worker.rank, self._config.keep_seconds)
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
            self._tell(Ended(worker.number, ending.how, ending.crashed))
