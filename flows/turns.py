"""Turns of base models with a worker group, if there are more base models than groups that may run at a time.

A base model with requests is queued, and gets its turn when a group may run for it. The queue advances when a group is
idle; the group that was unused longest ends first. If no group is idle, the oldest group accepts no more work after
TURN_SECONDS. It ends when its current work is done, and its base model is queued again. A group saves its models before
it ends, so the end of a turn is a pause for clients, like the loss of a group.

A group that cannot be started gives up its turn, and its base model is queued again after a pause that doubles up to
30 s. If starts fail for too long, requests that wait for the group fail with the reason. A group that has its turn may
lack capacity on the hosts, for example after a host was lost. Other groups then end for it, as they do for the queue.
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
IDLE_SECONDS = 5.0  # seconds without work before a group ends for another one, since clients pause between two steps
TURN_SECONDS = 300.0  # length of a turn with constant work, while other base models wait
STARTS = 3  # starts that must fail in a row before requests fail
_AT_ONCE = 256
RESTING = "no worker group runs this base model: one will be started"


@dataclass
class Turn:
    """A base model's time with a worker group. Times are monotonic. asked: when the base model last had work."""

    began: float
    asked: float
    ending: bool = False


@dataclass
class Turns:
    """The queue of base models, and the base models that have their turn.

    places: the number of groups that may run. release: seconds after which an unused group ends even if no base model
    waits; 0 for never. idle, turn: IDLE_SECONDS, TURN_SECONDS. held: by base model that has its turn. line: the base
    models that wait, in order.
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
        """Update the turns. Returns three lists of base models, and marks those of the last two as ending.

        The first list contains base models whose turn begins. The idle groups of the second list end now, and the busy
        groups of the third list end when their current work is done.

        wanted: base models that have work, longest waiting first. ready: base models whose group serves. now: the
        monotonic time. roomless: base models that have their turn, but no capacity for their group on the hosts.
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
    """Begins and ends worker groups according to the turns, and shows clients the reason why they wait."""

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

        journal: lists the base models with requests. served: every base model, with a pool that was opened on demand.
        turns: in which no base model has its turn. is_busy: whether an operation of a base model is being executed.
        clock: gives the times of the turns. patience: seconds from the first of several failed starts in a row until
        requests fail, after at least STARTS failures.
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
            del turns.held[name]  # the group ended or could not be started, so other base models come first
            if pools[name].trouble:
                await self._note_failure(name, pools[name].trouble)
        wanted = [name for name in asked if name in turns.held or not pools[name].pausing]
        roomless = {name for name, pool in pools.items() if pool.lacks_capacity}
        for name, turn in turns.held.items():
            turn.ending &= pools[name].ending  # False if the group crashed before its release, and was started again
        ready = {name for name, pool in pools.items() if pool.ready}
        for name in ready:
            self._failures.pop(name, None)
        begin, idle, busy = turns.look(wanted, ready, self._clock.monotonic(), roomless)
        for name in begin:
            pools[name].begin()
        for name in idle:
            log.info("%s: stopping its unused worker group", name)
            pools[name].release("its worker group was unused")
        for name in busy:
            log.info("%s: its worker group stops after its current operations, because other base models wait", name)
            pools[name].drain()
        for name in turns.held:
            if pools[name].draining and not self._is_busy(name):
                pools[name].release("other base models take their turn")
        for name in pools:
            await self._tell(name, self._waits_for(name, ready))

    async def _note_failure(self, name: str, trouble: str) -> None:
        """Count a failed start. After too many failures, the waiting requests fail."""
        now = self._clock.monotonic()
        first, count = self._failures.get(name, (now, 0))
        self._failures[name] = first, count + 1
        if count + 1 >= STARTS and now - first >= self._patience:
            error = ServerError(f"base model {name!r} cannot be served: its worker group does not start: {trouble}")
            failed = await asyncio.to_thread(fail_waiting, self._journal, name, error)
            log.error("%s: %d waiting requests failed: %s", name, failed, trouble)

    def _waits_for(self, name: str, ready: Collection[str]) -> str | None:
        """The reason why requests for a base model wait, other than earlier requests; None if there is none."""
        turns, pool = self._turns, self._pools[name]
        if name in turns.held and name in ready:
            others = f"{len(turns.line)} other base model(s) wait"
            return f"its worker group accepts no new operations: {others}" if pool.draining else None
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
    """Answer all requests that wait for a base model with an error. Returns their number. None may be in execution.

    Models that wait for their creation end with the error. Other models stay as they are, so that later requests are
    executed if a group starts. Requests of paused models continue to wait.
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
            continue  # a person has paused it
        ends = model.state is ModelState.CREATING
        effects = (ModelEnded(model_id, ModelState.FAILED, error.message),) if ends else ()
        while answer(
            [one.failed(error, None, *effects) for one in journal.requests.ready(model_id) if one.kind != Kind.UNLOAD]
        ):
            continue
    return failed
