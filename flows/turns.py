"""Which base models have a worker group, where there are more base models than groups that may run at a time.

A base model that is asked for gets in line, and has its turn when a group may run for it. The line goes on when a group
has nothing to do: the one that was unused longest ends first. When all have something to do, the one that began first
takes nothing new after TURN_SECONDS, ends when what it runs is done, and gets in line again. A group that ends saves
its models first, so a turn costs clients a pause, as the loss of a group does.

A group that cannot be started gives its turn up, and is in line again after a pause that doubles up to 30 s. When that
goes on for too long, requests that wait for it fail with the reason. A group that has its turn, but no room on the
hosts (one of them may be lost), has others end for it like those in line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from tinkerflow.backend.core.clock import Clock
from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.core.retry import repeat
from tinkerflow.backend.journal import AWAY, Journal, Kind, ModelEnded, ModelState, Outcome
from tinkerflow.flows.groups import ServedModel

log = logging.getLogger(__name__)

UPDATE_SECONDS = 1.0
IDLE_SECONDS = 5.0  # without anything to do until a group makes room for another one: clients pause between two steps
TURN_SECONDS = 300.0  # of a group that always has something to do, while others wait
STARTS = 3  # that fail in a row before requests fail with them
_AT_ONCE = 256
RESTING = "no worker group runs for this base model: one is started for it"


@dataclass
class Turn:
    """A base model's time with a worker group; times are monotonic. asked: when there was something to do last."""

    began: float
    asked: float
    ending: bool = False


@dataclass
class Turns:
    """The line, and whose turn it is.

    places: how many groups may run. release: seconds after which an unused group ends although nobody waits; 0 = none
    does. idle, turn: IDLE_SECONDS, TURN_SECONDS. held: by base model that has its turn. line: who waits, in order.
    """

    places: int
    release: float = 0.0
    idle: float = IDLE_SECONDS
    turn: float = TURN_SECONDS
    held: dict[str, Turn] = field(default_factory=dict)
    line: list[str] = field(default_factory=list)

    def look(
        self, wanted: Sequence[str], ready: Collection[str], now: float, roomless: Collection[str] = ()
    ) -> tuple[list[str], list[str], list[str]]:
        """Whose turn begins, whose idle group ends now, and whose busy group ends when what it runs is done.

        wanted: base models that have something to do, longest waiting first. ready: those whose group serves.
        now: monotonic. roomless: those whose turn it is, and for whose group no host has room.
        """
        self.line = [name for name in self.line if name in wanted]
        self.line += [name for name in wanted if name not in self.held and name not in self.line]
        for name in self.held.keys() & set(wanted):
            self.held[name].asked = now
        free = max(0, self.places - len(self.held))
        begin, self.line = self.line[:free], self.line[free:]
        self.held |= {name: Turn(now, now) for name in begin}
        waiting = len(self.line) + len(self.held.keys() & set(wanted) & set(roomless))
        short = waiting - sum(turn.ending for turn in self.held.values())
        going = {name: turn for name, turn in self.held.items() if name in ready and not turn.ending}
        unused = sorted((turn.asked, name) for name, turn in going.items() if name not in wanted)
        spare = [name for asked, name in unused if now - asked >= self.idle]
        over = [name for asked, name in unused if self.release and now - asked >= self.release]
        idle = spare[: max(short, len(over), 0)]
        used = sorted((turn.began, name) for name, turn in going.items() if name in wanted)
        busy = [name for began, name in used if now - began >= self.turn][: max(short - len(idle), 0)]
        for name in (*idle, *busy):
            self.held[name].ending = True
        return begin, idle, busy


class GroupTurns:
    """Begins and ends worker groups as the turns say, and tells clients what they wait for."""

    def __init__(
        self,
        journal: Journal,
        served: Sequence[ServedModel],
        turns: Turns,
        is_busy: Callable[[str], bool],
        clock: Clock,
        patience: float,
    ) -> None:
        """Nothing happens before `watch`.

        journal: knows what waits. served: every base model, with a pool that was opened on demand. turns: of nobody.
        is_busy: whether anything of a base model is being executed. clock: of the turns. patience: seconds from the
        first failed start in a row until requests fail with them, after STARTS of them at the earliest.
        """
        self._journal = journal
        self._pools = {model.card.name: model.pool for model in served}
        self._turns = turns
        self._is_busy = is_busy
        self._clock = clock
        self._patience = patience
        self._failures: dict[str, tuple[float, int]] = {}  # starts that failed in a row: since when, how many
        self._told: dict[str, str | None] = {}

    async def watch(self) -> None:
        """Begin and end groups until cancelled."""
        await repeat(self.update, UPDATE_SECONDS, on=AWAY, what="the journal cannot be read", log=log)

    async def update(self) -> None:
        """Begin and end groups as the turns require now."""
        turns, pools = self._turns, self._pools
        asked = [name for name in await asyncio.to_thread(self._journal.queue.wanted) if name in pools]
        for name in [name for name in turns.held if pools[name].resting]:
            del turns.held[name]  # its group has ended, or could not be started: others come first
            if pools[name].trouble:
                await self._note_failure(name, pools[name].trouble)
        wanted = [name for name in asked if name in turns.held or not pools[name].pausing]
        roomless = {name for name, pool in pools.items() if pool.lacks_capacity}
        for name, turn in turns.held.items():
            turn.ending &= pools[name].ending  # unless it crashed before it was released, and was started again
        ready = {name for name, pool in pools.items() if pool.ready}
        for name in ready:
            self._failures.pop(name, None)
        begin, idle, busy = turns.look(wanted, ready, self._clock.monotonic(), roomless)
        for name in begin:
            pools[name].begin()
        for name in idle:
            log.info("%s: its worker group is unused, and ends", name)
            pools[name].release("its worker group was unused")
        for name in busy:
            log.info("%s: its worker group ends when what it runs is done: others wait", name)
            pools[name].drain()
        for name in turns.held:
            if pools[name].draining and not self._is_busy(name):
                pools[name].release("other base models have their turn")
        for name in pools:
            await self._tell(name, self._waits_for(name, ready))

    async def _note_failure(self, name: str, trouble: str) -> None:
        """Count a start that failed; what waits for too many of them fails."""
        now = self._clock.monotonic()
        first, count = self._failures.get(name, (now, 0))
        self._failures[name] = first, count + 1
        if count + 1 >= STARTS and now - first >= self._patience:
            error = ServerError(f"base model {name!r} cannot be served, its worker group does not start: {trouble}")
            failed = await asyncio.to_thread(fail_waiting, self._journal, name, error)
            log.error("%s: %d requests that waited have failed: %s", name, failed, trouble)

    def _waits_for(self, name: str, ready: Collection[str]) -> str | None:
        """What requests for a base model wait for beside their place in line; None = nothing."""
        turns, pool = self._turns, self._pools[name]
        if name in turns.held and name in ready:
            others = f"{len(turns.line)} other base model(s) wait"
            return f"its worker group takes nothing new: {others}" if pool.draining else None
        if name in turns.held:
            lacking = "waits for room on a host" if pool.lacks_capacity else "is being started"
            text = f"its worker group {lacking}"
        elif name in turns.line:
            before = turns.line.index(name)
            text = f"waiting for one of {turns.places} worker group(s), with {before} base model(s) before it"
        elif pool.trouble and pool.pausing:
            text = "its worker group could not be started, and is started again after a pause"
        else:
            text = RESTING
        return f"{text}; the last start failed: {pool.trouble}" if pool.trouble else text

    async def _tell(self, name: str, text: str | None) -> None:
        if self._told.get(name) != text:
            await asyncio.to_thread(self._journal.base_models.note_progress, name, text)
            self._told[name] = text


def fail_waiting(journal: Journal, base_model: str, error: ServerError) -> int:
    """Answer all requests that wait for a base model with an error: how many. None of them is being executed.

    Models that were to be created end with it. Others stay as they are: later requests are executed if a group starts.
    Paused ones wait on.
    """
    failed = 0

    def answer(outcomes: Sequence[Outcome]) -> bool:
        nonlocal failed
        failed += len(outcomes)
        journal.results.finish(outcomes)
        return bool(outcomes)

    while answer([one.failed(error) for one in journal.requests.pending_samples(_AT_ONCE, base_model=base_model)]):
        continue
    for model_id in journal.queue.pending_models(base_model):
        model = journal.models.get(model_id, None)
        if model.paused is not None:
            continue  # it waits for somebody
        ends = model.state is ModelState.CREATING
        effects = (ModelEnded(model_id, ModelState.FAILED, error.message),) if ends else ()
        while answer(
            [one.failed(error, None, *effects) for one in journal.requests.ready(model_id) if one.kind != Kind.UNLOAD]
        ):
            continue
    return failed
