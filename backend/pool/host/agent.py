"""A host's part in a group: join, start and end processes as the driver asks, and join again when it is lost.

When the driver has closed the connection, it has most likely ended: its processes are kept for the next one, which
finds the base model in their memory, or ended after KEEP_SECONDS. (A driver that lives on knows them again, and starts
new ones.) When it is silent, nobody knows what they are in the middle of, and they are killed before this host offers
its room again. They do not outlive this process either (spawn.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tinkerflow.backend.errors import UserError
from tinkerflow.backend.pool.host.places import generation_secret
from tinkerflow.backend.pool.host.spawn import ChildProcess, spawn_worker
from tinkerflow.backend.pool.protocol import frames
from tinkerflow.backend.pool.protocol.conversation import Conversation
from tinkerflow.backend.pool.protocol.frames import LoopLink, WorkerLink
from tinkerflow.backend.pool.protocol.handshake import LaunchSpec, connect
from tinkerflow.backend.pool.protocol.messages import (
    Ended,
    Held,
    Offer,
    Refusal,
    Signal,
    Spawn,
    Spawned,
    TakeOver,
    Welcome,
)
from tinkerflow.backend.pool.protocol.software import software
from tinkerflow.backend.processes import free_port
from tinkerflow.backend.retry import backoff

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
KEEP_SECONDS = 120.0  # processes without a driver hold memory of the devices
_END_SECONDS = 10.0  # that a killed process may take to end; we go on without it


@dataclass(frozen=True)
class HostConfig:
    """Where a host's agent joins, and what it offers.

    compile_cache_dir: of this host's processes, in place of the one that the driver names; "" = that one.
    longest_pause: seconds between attempts to join; a link that is mended is found so soon.
    """

    driver: str
    port: int
    secret: bytes
    processes: int
    log_dir: Path | None
    compile_cache_dir: str
    longest_pause: float = 5.0


async def serve_group(config: HostConfig, say: Callable[[str], None]) -> None:
    """Offer this host's room to the group at config.driver, for ever; cancel it to end, with all processes.

    `say` gets lines for people. UserError when the driver has another secret or other software.
    """
    where = f"{config.driver}:{config.port}"
    processes = HostProcesses(config)
    try:
        await _serve(config, processes, where, say)
    finally:
        await processes.end()


async def _serve(config: HostConfig, processes: HostProcesses, where: str, say: Callable[[str], None]) -> None:
    agent, failures, clock = uuid.uuid4().hex, 0, asyncio.get_running_loop().time
    while True:
        failures += 1
        try:
            link, silence = await _join(config, agent, processes)
        except PermissionError as error:
            raise UserError(f"the group at {where} has another secret: {error}") from error
        except (OSError, EOFError) as error:
            if failures == 1:
                say(f"the group at {where} cannot be reached ({error}); trying again until it can")
        else:
            say(f"joined the group at {where} from {link.address} with room for {config.processes} process(es)")
            if doubt := await asyncio.to_thread(_doubt, link.address):
                say(doubt)
            began = clock()
            talk = Conversation(link, silence)
            why = await AgentSession(processes, link.address, talk).run()
            if talk.closed and processes.leave():
                kept = f"are kept for its next driver, {KEEP_SECONDS:g} s"
            else:
                await processes.end()
                kept = "have ended"
            say(f"left the group at {where}: {why}; its processes here {kept}")
            if clock() - began > silence:
                failures = 0
        await asyncio.sleep(min(config.longest_pause, backoff(max(1, failures))))


def _doubt(address: str) -> str:
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
    link = await _connect(config)
    try:
        offer = Offer(agent, socket.gethostname(), link.address, config.processes, software(), processes.held)
        async with asyncio.timeout(_CONNECT_SECONDS):
            await link.write(0, frames.encode(offer))
            answer = frames.decode((await link.read()).body)
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
class _Process:
    """A worker that runs here.

    salt, plan: of its generation. number: its driver's, for it; None: it has no driver. doomed: we have killed it.
    """

    child: ChildProcess
    rank: int
    salt: bytes
    plan: str
    number: int | None
    doomed: bool = False


class HostProcesses:
    """The processes that run here, with and without a driver."""

    def __init__(self, config: HostConfig) -> None:
        """Nobody yet."""
        self.talk: Conversation | None = None  # with the driver that is there
        self._config = config
        self._watches: dict[_Process, asyncio.Task[None]] = {}
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def held(self) -> tuple[Held, ...]:
        """Those without a driver."""
        return tuple(Held(one.child.pid, one.rank, one.salt, one.plan) for one in self._without_driver())

    def find(self, number: int) -> ChildProcess | None:
        """The process that the driver knows by `number`; None when it has ended."""
        return next((one.child for one in self._watches if one.number == number), None)

    async def spawn(self, asked: Spawn, address: str) -> ChildProcess:
        """Start one, in place of those without a driver that have its plan, or of all. OSError when that fails."""
        old = [one for one in self._without_driver() if one.plan == asked.plan]
        if len(self._watches) - len(old) >= self._config.processes:
            old = self._without_driver()
        await self._end(old)
        spec = self._spec(asked.port, asked.salt, asked.generation, asked.rank)
        coordinator = f"{address}:{free_port(address)}"
        child = await spawn_worker(spec, coordinator, log_dir=self._config.log_dir, keep=True)
        one = _Process(child, asked.rank, asked.salt, asked.plan, asked.process)
        self._watches[one] = asyncio.create_task(self._watch(one))
        return child

    def take_over(self, asked: TakeOver) -> ChildProcess | None:
        """Let one without a driver serve the one that is there; None when it has ended."""
        for one in self._without_driver():
            if one.child.pid == asked.pid:
                one.salt, one.number = asked.salt, asked.process
                one.child.serve(self._spec(asked.port, asked.salt, asked.generation, one.rank))
                return one.child
        return None

    def leave(self) -> bool:
        """The driver has ended: keep what there is for the next one, for a while. Whether there is anything."""
        for one in self._watches:
            one.number = None
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(KEEP_SECONDS, self._expire)
        return bool(self._watches)

    async def end(self) -> None:
        """End all."""
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

    def _without_driver(self) -> list[_Process]:
        return [one for one in self._watches if one.number is None and not one.doomed]

    def _expire(self) -> None:
        for one in self._without_driver():
            log.warning("rank %d had no driver for %g s: it is ended", one.rank, KEEP_SECONDS)
            self._kill(one)

    async def _end(self, processes: Iterable[_Process]) -> None:
        ending = [self._watches[one] for one in processes]
        for one in tuple(processes):
            self._kill(one)
        if ending:
            _, late = await asyncio.wait(ending, timeout=_END_SECONDS)
            if late:
                log.error("%d killed process(es) have not ended in %g s", len(late), _END_SECONDS)

    def _kill(self, one: _Process) -> None:
        one.doomed = True
        one.child.signal(signal.SIGKILL)

    async def _watch(self, one: _Process) -> None:
        ending = await one.child.ended()
        del self._watches[one]
        if one.number is not None and self.talk is not None:
            self.talk.tell(Ended(one.number, ending.how, ending.crashed))


class AgentSession:
    """One connection to the driver."""

    def __init__(self, processes: HostProcesses, address: str, talk: Conversation) -> None:
        self._processes = processes
        self._address = address
        self._talk = talk

    async def run(self) -> str:
        """Do as the driver says until it is lost: why it was."""
        self._processes.talk = self._talk
        try:
            return await self._talk.run(self._obey)
        finally:
            self._processes.talk = None

    async def _obey(self, message: object) -> None:
        match message:
            case Spawn():
                await self._spawn(message)
            case TakeOver():
                self._tell(message.process, self._processes.take_over(message))
            case Signal():
                if (process := self._processes.find(message.process)) is not None:  # else it has ended already
                    process.signal(message.number)
            case _:
                raise ValueError(f"{type(message).__name__}, which is not for us")

    async def _spawn(self, asked: Spawn) -> None:
        try:
            self._tell(asked.process, await self._processes.spawn(asked, self._address))
        except OSError as error:
            log.exception("rank %d of generation %d cannot be started", asked.rank, asked.generation)
            self._talk.tell(Ended(asked.process, f"could not be started: {error}", crashed=False))

    def _tell(self, number: int, child: ChildProcess | None) -> None:
        """Say that it runs, or does not any more."""
        if child is None:
            self._talk.tell(Ended(number, "has ended", crashed=False))
        else:
            self._talk.tell(Spawned(number, child.pid, child.coordinator))
