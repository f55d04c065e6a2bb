"""The start of a group: spawn its processes, accept their connections, and wait until they are ready."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec.structs import asdict

from tinkerflow.backend.core.errors import TinkerflowError
from tinkerflow.backend.core.hosts import family_of
from tinkerflow.backend.pool.config import PoolConfig
from tinkerflow.backend.pool.host.places import Launch, Site, WorkerSlot
from tinkerflow.backend.pool.member import Member
from tinkerflow.backend.pool.outstanding import set_failure
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.frames import LoopLink
from tinkerflow.backend.pool.protocol.handshake import HANDSHAKE_SECONDS, accept, next_connection
from tinkerflow.backend.pool.protocol.messages import Ready, Rejoined
from tinkerflow.backend.spec.commands import GroupInfo

log = logging.getLogger(__name__)

_JOIN_SECONDS = 60.0  # the time for a rank to connect, and to finish the commands of an earlier driver


class Rendezvous:
    """Creates the members of one group, and waits until all of them are ready.

    members: the spawned ranks, in order.
    """

    def __init__(
        self,
        config: PoolConfig,
        site: Site,
        generation: int,
        run: Callable[[Coroutine[None, None, None]], None],
        fail: Callable[..., None],
    ) -> None:
        """Nothing is spawned yet.

        config: the configuration of all generations. site: where the processes are started. generation: the group's
        number. run: runs a task until the group has ended. fail: ends the group with a cause; crashed=False: an outside
        event ended it.
        """
        self.members: list[Member] = []
        self._config = config
        self._site = site
        self._generation = generation
        self._run = run
        self._fail = fail
        self._places: tuple[str, ...] = ()
        self._info: asyncio.Future[GroupInfo] = asyncio.get_running_loop().create_future()

    @property
    def late(self) -> list[int]:
        """The ranks that are not ready."""
        ready = {member.rank for member in self.members if member.ready is not None}
        return [rank for rank in range(self._config.processes) if rank not in ready]

    async def meet(
        self,
        slots: Sequence[WorkerSlot],
        plan: str,
        on_spawn: Callable[[Member], None],
        on_connection: Callable[[Member, LoopLink], None],
    ) -> GroupInfo:
        """Spawn a process in each slot, wait until all are ready, and return the description of the group.

        plan: PoolConfig.digest. on_spawn: called for each rank once all are spawned. on_connection: called for each
        rank once it has connected. Raises the error given to `give_up` if the group ends meanwhile, and any error of a
        process's start.
        """
        salt = secrets.token_bytes(32)
        address = self._site.address
        self._places = tuple(f"rank {rank} on {slot.name}" for rank, slot in enumerate(slots))
        with socket.create_server((address, 0), family=family_of(address)) as listener:
            listener.setblocking(False)
            launch = Launch(self._generation, listener.getsockname()[1], salt, plan)
            for rank, slot in enumerate(slots):
                self.members.append(Member(rank, await slot.spawn(launch, rank)))
            for member in self.members:
                on_spawn(member)
            self._run(self._watch_absence())
            coordinator = self.members[0].process.coordinator if self._config.processes > 1 else ""
            start = codec.encode(self._config.start_message(coordinator, slots))
            welcoming = asyncio.create_task(self._welcome(listener, self._site.secret(salt), start, on_connection))
            try:
                waiting: set[asyncio.Future[Any]] = {welcoming, self._info}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                welcoming.cancel()
                await asyncio.gather(welcoming, return_exceptions=True)  # before its socket is closed
        return await asyncio.shield(self._info)

    def give_up(self, error: TinkerflowError) -> None:
        """Make `meet` raise `error`, because the group has ended."""
        set_failure(self._info, error)

    def note_ready(self, member: Member, message: Ready) -> bool:
        """Record that a rank is ready. Returns whether all ranks are ready and the group was not given up."""
        member.ready = message
        ready = [each.ready for each in self.members if each.ready is not None]
        complete = len(ready) == self._config.processes and not self._info.done()
        if complete:
            first = ready[0].copy_with(reaches_store=all(each.reaches_store for each in ready))
            self._info.set_result(GroupInfo(**asdict(first), generation=self._generation, places=self._places))
        return complete

    def note_rejoined(self, member: Member, message: Rejoined) -> None:
        """Record how many commands a rank has received from earlier drivers.

        If the numbers differ, the ranks would wait for each other in collectives, so the group ends. Ranks without a
        command may still be loading the base model for an earlier driver, so only start_deadline limits their time.
        """
        member.rejoined = message
        counts = [each.rejoined.commands for each in self.members if each.rejoined is not None]
        if len(set(counts)) > 1:
            self._fail(f"an earlier driver left its ranks at different commands: {sorted(set(counts))}", crashed=False)
        elif len(counts) == self._config.processes and counts[0]:
            asyncio.get_running_loop().call_later(_JOIN_SECONDS, self._give_up_rejoined)

    def _give_up_rejoined(self) -> None:
        if not self._info.done():
            self._fail(f"the commands of an earlier driver took longer than {_JOIN_SECONDS:g} s")

    async def _watch_absence(self) -> None:
        await asyncio.sleep(_JOIN_SECONDS)
        if absent := [member.rank for member in self.members if member.link is None]:
            self._fail(f"rank {absent} did not connect in {_JOIN_SECONDS:g} s (stopped?)", crashed=False)

    async def _welcome(
        self,
        listener: socket.socket,
        secret: bytes,
        start: Sequence[codec.Buffer],
        on_connection: Callable[[Member, LoopLink], None],
    ) -> None:
        while any(member.link is None for member in self.members):  # one task for each, so a stranger delays no rank
            self._run(self._admit(await next_connection(listener), secret, start, on_connection))

    async def _admit(
        self,
        sock: socket.socket,
        secret: bytes,
        start: Sequence[codec.Buffer],
        on_connection: Callable[[Member, LoopLink], None],
    ) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                link = await accept(sock, secret, self._generation, len(self.members))
        except (OSError, EOFError, TimeoutError) as error:
            log.warning("an unknown peer connected to worker group %d: %r", self._generation, error)
            return
        member = self.members[link.rank]
        if member.link is not None:
            log.warning("a second rank %d connected to worker group %d", link.rank, self._generation)
            link.close()
            return
        member.link = link
        member.send(0, start)
        on_connection(member, link)
