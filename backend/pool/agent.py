"""A host's part in a group: join, start and end processes as the driver asks, and join again when it is lost.

When the driver is silent, or the connection ends, all processes are killed first: a host that offers room runs nothing
of an earlier generation. They do not outlive this process either (spawn.py).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backend.errors import UserError
from backend.pool import codec
from backend.pool.conversation import Conversation
from backend.pool.host_messages import Ended, Offer, Refusal, Signal, Spawn, Spawned, Welcome
from backend.pool.places import generation_secret
from backend.pool.software import software
from backend.pool.spawn import ChildProcess, spawn_worker
from backend.pool.transport import LoopLink, WorkerLink
from backend.processes import backoff, free_port

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_LONGEST_PAUSE = 5.0  # between attempts to join: a link that is mended is found soon


@dataclass(frozen=True)
class Post:
    """Where a host's agent joins, and what it offers. compile_cache_dir: of this host's processes."""

    driver: str
    port: int
    secret: bytes
    processes: int
    log_dir: Path | None
    compile_cache_dir: str


async def serve_group(post: Post, say: Callable[[str], None]) -> None:
    """Offer this host's room to the group at post.driver, for ever; cancel it to end, with all processes.

    `say` gets lines for people. UserError when the driver has another secret or other software.
    """
    agent, where, failures = uuid.uuid4().hex, f"{post.driver}:{post.port}", 0
    while True:
        failures += 1
        try:
            link, silence = await _join(post, agent)
        except PermissionError as error:
            raise UserError(f"the group at {where} has another secret: {error}") from error
        except (OSError, EOFError) as error:
            if failures == 1:
                say(f"the group at {where} cannot be reached ({error}); trying again until it can")
        else:
            say(f"joined the group at {where} from {link.address} with room for {post.processes} process(es)")
            if doubt := await asyncio.to_thread(_doubt, link.address):
                say(doubt)
            began = asyncio.get_running_loop().time()
            why = await _Visit(post, link.address, Conversation(link, silence)).run()
            say(f"left the group at {where}: {why}; its processes here have ended")
            if asyncio.get_running_loop().time() - began > silence:
                failures = 0
        await asyncio.sleep(min(_LONGEST_PAUSE, backoff(max(1, failures))))


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


async def _join(post: Post, agent: str) -> tuple[LoopLink, float]:
    """Connect and be welcomed: the connection, and the seconds after which a silent end is lost."""
    link = await _connect(post)
    try:
        offer = Offer(agent, socket.gethostname(), link.address, post.processes, software())
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


async def _connect(post: Post) -> LoopLink:
    ours = (post.driver, post.port, post.secret, 0, 0, _CONNECT_SECONDS)
    connecting = asyncio.create_task(asyncio.to_thread(WorkerLink.connect, *ours))
    try:
        return (await asyncio.shield(connecting)).to_loop()
    except asyncio.CancelledError:
        (made,) = await asyncio.gather(connecting, return_exceptions=True)  # a thread cannot be cancelled
        if isinstance(made, WorkerLink):
            made.close()
        raise


class _Visit:
    """One connection to the driver, and the processes that were started through it."""

    def __init__(self, post: Post, address: str, talk: Conversation) -> None:
        self._post = post
        self._address = address
        self._talk = talk
        self._processes: dict[int, ChildProcess] = {}
        self._watches: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> str:
        """Do as the driver says until it is lost: why it was. No process is left afterwards."""
        try:
            return await self._talk.run(self._obey)
        finally:
            for process in self._processes.values():
                process.signal(signal.SIGKILL)
            await asyncio.gather(*self._watches.values())

    async def _obey(self, message: object) -> None:
        match message:
            case Spawn():
                await self._spawn(message)
            case Signal():
                if (process := self._processes.get(message.process)) is not None:  # else it has ended already
                    process.signal(message.number)
            case _:
                raise ValueError(f"{type(message).__name__}, which is not for us")

    async def _spawn(self, asked: Spawn) -> None:
        post = self._post
        try:
            coordinator = f"{self._address}:{free_port(self._address)}"
            started = await spawn_worker(
                host=post.driver,
                port=asked.port,
                secret=generation_secret(post.secret, asked.salt),
                generation=asked.generation,
                rank=asked.rank,
                log_dir=post.log_dir,
                compile_cache_dir=post.compile_cache_dir,
            )
        except OSError as error:
            log.exception("rank %d of generation %d cannot be started", asked.rank, asked.generation)
            self._talk.tell(Ended(asked.process, f"could not be started: {error}", crashed=False))
            return
        process = self._processes[asked.process] = ChildProcess(started, coordinator)
        self._talk.tell(Spawned(asked.process, process.pid, coordinator))
        self._watches[asked.process] = asyncio.create_task(self._watch(asked.process, process))

    async def _watch(self, number: int, process: ChildProcess) -> None:
        ending = await process.ended()
        self._talk.tell(Ended(number, ending.how, ending.crashed))
        del self._processes[number], self._watches[number]
