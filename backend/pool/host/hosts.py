"""The driver's view of the hosts that joined its group. Each host is the connection of an agent (agent.py).

When a host is lost, the driver considers the host's processes ended. They may run until the agent notices the loss, but
their connections are closed, so they have no effect. When a driver ends, the agents keep its processes, and offer them
to the next driver together with their free capacity. The next driver takes over a group if all of its processes are
alive and have this driver's plan.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import signal
import socket
from collections.abc import Sequence
from typing import Self

from tinkerflow.backend.core.hosts import family_of, is_loopback
from tinkerflow.backend.pool.host.places import Launch, WorkerProcess, WorkerSlot, generation_secret
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.conversation import Conversation
from tinkerflow.backend.pool.protocol.frames import LARGEST_OF_HOSTS, LoopLink
from tinkerflow.backend.pool.protocol.handshake import HANDSHAKE_SECONDS, accept, next_connection
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
from tinkerflow.backend.supervise import Ending

log = logging.getLogger(__name__)


class HostProcess:
    """A worker on a host that has joined."""

    def __init__(self, host: Host, started: Spawned, ending: asyncio.Future[Ending]) -> None:
        """ending: resolved when the host reports the end of the process, or when the host is lost."""
        self.pid = started.pid
        self.coordinator = started.coordinator
        self._host = host
        self._number = started.process
        self._ending = ending

    def signal(self, number: int) -> None:
        self._host.conversation.send(Signal(self._number, number))

    async def ended(self) -> Ending:
        """Wait until the host reports the end of the process, or until the host is lost."""
        return await asyncio.shield(self._ending)


class HostSlot:
    """Capacity for one process on a host, or a process that an earlier driver left there."""

    def __init__(self, host: Host, held: OrphanedWorker | None = None) -> None:
        """Reserve capacity on `host`. held: the process to take over; None: start a new process."""
        self.host, self.name, self.capacity = host.offer.agent, host.offer.host, host.offer.processes
        self._host = host
        self._held = held
        self._released = False
        host.taken += 1

    async def spawn(self, launch: Launch, rank: int) -> WorkerProcess:
        """Start the process or take it over. OSError: a failure, or the host was lost meanwhile."""
        return await self._host.spawn(launch, rank, self._held)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._host.taken -= 1
            self._host.site.notify()

    def take_out(self, why: str) -> None:
        """Start no more processes on the host, for the reason `why`, until its agent is restarted."""
        self._host.site.taken_out[self.host] = why


class Host:
    """One agent's connection, from its offer until it is lost."""

    def __init__(self, site: Hosts, offer: Offer, conversation: Conversation) -> None:
        """Call `serve` next."""
        self.site = site
        self.offer = offer
        self.conversation = conversation
        self.taken = 0
        self.held = list(offer.held)
        self._starting: dict[int, asyncio.Future[Spawned]] = {}
        self._endings: dict[int, asyncio.Future[Ending]] = {}

    @property
    def free(self) -> int:
        """How many more processes the host can run."""
        return 0 if self.taken_out else max(0, self.offer.processes - self.taken)

    @property
    def taken_out(self) -> str:
        """Why no more processes may be started on the host; "" if they may."""
        return self.site.taken_out.get(self.offer.agent, "")

    def __str__(self) -> str:
        text = f"out of service: {self.taken_out}; restart its `tinkerflow worker`, or `tinkerflow up`, to use it again"
        return f"{self.offer.host}: {text if self.taken_out else self.free}"

    async def spawn(self, launch: Launch, rank: int, held: OrphanedWorker | None = None) -> WorkerProcess:
        """Start a process, or take over the process `held`. OSError: a failure, or the host was lost meanwhile."""
        if self.conversation.over is not None:
            raise OSError(f"host {self.offer.host} is lost: {self.conversation.over}")
        number, loop = next(self.site.numbers), asyncio.get_running_loop()
        starting = self._starting[number] = loop.create_future()
        ending = self._endings[number] = loop.create_future()
        self.site.launched.add(launch.salt)
        if held is None:
            self.held = [held for held in self.held if held.plan != launch.plan]  # the agent first ends these processes
            self.conversation.send(Spawn(number, launch.generation, rank, launch.port, launch.salt, launch.plan))
        else:
            self.conversation.send(TakeOver(number, held.pid, launch.generation, launch.port, launch.salt))
        try:
            return HostProcess(self, await starting, ending)
        except asyncio.CancelledError:
            self.conversation.send(Signal(number, signal.SIGKILL))
            raise
        finally:
            del self._starting[number]

    async def serve(self) -> str:
        """Exchange messages until the host is lost. Returns the reason for the loss."""
        try:
            return await self.conversation.run(self._handle)
        finally:
            how = f"was lost with host {self.offer.host}: {self.conversation.over}"
            for starting in self._starting.values():
                if not starting.done():
                    starting.set_exception(OSError(f"a process {how}"))
            for ending in self._endings.values():
                ending.set_result(Ending(how, crashed=False))

    async def _handle(self, message: object) -> None:
        match message:
            case Spawned() if (starting := self._starting.get(message.process)) is not None and not starting.done():
                starting.set_result(message)
            case Spawned():  # the start was cancelled, and the process was killed
                log.info("a process of host %s arrived too late", self.offer.host)
            case Ended() if message.process in self._endings:
                ending = Ending(f"{message.how} (on host {self.offer.host})", message.crashed)
                starting = self._starting.get(message.process)
                if starting is not None and not starting.done():
                    starting.set_exception(OSError(f"a process {ending.how}"))
                self._endings.pop(message.process).set_result(ending)
            case _:
                raise ValueError(f"unexpected {type(message).__name__}")


class Hosts:
    """All hosts that joined at one address, as a Site. Created by `listen`; to be used in that call's event loop."""

    def __init__(self, listener: socket.socket, secret: bytes, silence: float) -> None:
        """Use `listen`."""
        self.address = str(listener.getsockname()[0])
        self.port = int(listener.getsockname()[1])
        self.launched: set[bytes] = set()  # salts of this driver's generations; their processes are not taken over
        self.numbers = itertools.count(1)  # the numbers of new processes
        self.taken_out: dict[str, str] = {}  # reasons by agent, even while it is lost
        self._listener = listener
        self._secret = secret
        self._silence = silence
        self._hosts: list[Host] = []
        self._change = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._door = asyncio.create_task(self._welcome(), name="hosts")

    @classmethod
    async def listen(cls, address: str, port: int, secret: bytes, silence: float) -> Self:
        """Let hosts join at address:port (0: a free port).

        secret: the group's secret. silence: seconds after which a silent host is lost. OSError: the address is in use.
        """
        listener = socket.create_server((address, port), family=family_of(address))
        listener.setblocking(False)
        return cls(listener, secret, silence)

    async def close(self) -> None:
        """Stop accepting hosts, and disconnect all of them. The next driver may take over their processes."""
        self._door.cancel()
        tasks = {self._door, *self._connections}
        for host in self._hosts:
            host.conversation.end("the group is ending")
        await asyncio.wait(tasks, timeout=1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    # ------------------------------------------------------------------ as a Site
    def secret(self, salt: bytes) -> bytes:
        return generation_secret(self._secret, salt)

    def missing(self, processes: int) -> str:
        free = sum(host.free for host in self._hosts)
        if free < processes:
            joined = ", ".join(map(str, self._in_order())) or "none has joined"
            return f"waiting for hosts: {free} of {processes} processes ({joined})"
        inside = [host.offer for host in self._in_order() if is_loopback(host.offer.address)]
        if inside and len(inside) < len(self._hosts):
            names = ", ".join(offer.host for offer in inside)
            return (
                f"waiting for hosts: {names} joined through {inside[0].address}, where others cannot reach "
                "its processes: give its worker's --group the address that the other hosts use"
            )
        return ""

    async def changed(self) -> None:
        """Wait until a host joins or is lost, or capacity is released."""
        self._change.clear()
        await self._change.wait()

    def reserve(self, processes: int, plan: str) -> Sequence[WorkerSlot]:
        """The processes of a group that an earlier driver left, or else free slots, host by host.

        TPU hosts are in the order of their pod, because JAX numbers processes in this order. Other hosts are sorted by
        name.
        """
        if held := self._held_group(processes, plan):
            return held
        slots = [host for host in self._in_order() for _ in range(host.free)]
        return [HostSlot(host) for host in slots[:processes]]

    def _held_group(self, processes: int, plan: str) -> Sequence[WorkerSlot]:
        groups: dict[bytes, dict[int, tuple[Host, OrphanedWorker]]] = {}
        for host in self._in_order():
            for held in host.held:
                if held.plan == plan and held.salt not in self.launched:
                    groups.setdefault(held.salt, {})[held.rank] = host, held
        complete = next((group for group in groups.values() if len(group) == processes), {})
        for host, held in complete.values():
            host.held.remove(held)
        return [HostSlot(*complete[rank]) for rank in sorted(complete)]

    # ------------------------------------------------------------------ for its hosts
    def notify(self) -> None:
        """Wake `changed`, because a host joined or was lost, or capacity was released."""
        self._change.set()

    def _in_order(self) -> list[Host]:
        return sorted(self._hosts, key=lambda host: (host.offer.pod, _natural(host.offer.host), host.offer.agent))

    async def _welcome(self) -> None:
        while True:
            task = asyncio.create_task(self._serve(await next_connection(self._listener)), name="host")
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                link = await accept(sock, self._secret, 0, 1)
                offer = await self._receive_offer(link)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            log.warning("an unknown peer connected where hosts join: %r", error)
            return
        if offer is None:
            return
        for earlier in self._hosts:
            if earlier.offer.agent == offer.agent:
                earlier.conversation.end("it joined again")
        host = Host(self, offer, Conversation(link, self._silence))
        host.conversation.send(Welcome(self._silence))
        self._hosts.append(host)
        log.info("host %s joined from %s with capacity for %d process(es)", offer.host, offer.address, offer.processes)
        self.notify()
        try:
            why = await host.serve()
            log.warning("host %s is lost: %s", offer.host, why)
        except Exception:
            log.exception("host %s is lost through a fault of the driver", offer.host)
        finally:
            self._hosts.remove(host)
            self.notify()

    async def _receive_offer(self, link: LoopLink) -> Offer | None:
        """Receive the client's offer. A host with different software gets a Refusal, and None is returned."""
        try:
            offer = codec.decode((await link.read(LARGEST_OF_HOSTS)).body)
            if not isinstance(offer, Offer):
                raise ValueError(f"{type(offer).__name__} instead of an offer")
            if offer.software != software():
                why = f"host {offer.host} has {offer.software}, the driver has {software()}, and both must be the same"
                log.warning("refused: %s", why)
                await link.write(0, codec.encode(Refusal(why)))
                link.close()
                return None
        except BaseException:
            link.close()
            raise
        return offer


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key for names with numbers: host-2 comes before host-10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
