"""The samplers of the endpoints without sessions. Each key has one session, with a sampler for each model.

Requests, and long waits for their results, send the session's heartbeat. An unused session expires like any other
client's, and the next request begins a new one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tinkerflow import __version__
from tinkerflow.api.identity import Identity
from tinkerflow.backend.core.clock import Clock
from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.core.ids import sampler_id
from tinkerflow.backend.journal import CheckpointView, Journal, Limits, NewSampler, NewSession, SessionState

NAME = "OpenAI and Anthropic endpoints"  # the display name of these sessions
_MOST_SAMPLERS = 256  # samplers in one session. Then a new session begins, so that unused checkpoints are released


@dataclass
class _Sampler:
    id: str
    next_seq: int = 0


@dataclass
class _Session:
    """A session that was active at `beat_at`. samplers: by base model and checkpoint."""

    id: str
    beat_at: float
    samplers: dict[tuple[str, str, str], _Sampler] = field(default_factory=dict)


class EndpointSamplers:
    """The sessions and samplers of one API process. Only this process assigns their sequence ids."""

    def __init__(self, journal: Journal, clock: Clock, session_timeout: float) -> None:
        """session_timeout: seconds without a heartbeat after which the engine ends a session."""
        self._journal = journal
        self._clock = clock
        self.beat_seconds = session_timeout / 4  # seconds between two heartbeats of a session in use
        self._forgotten_after = session_timeout
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._opening: dict[tuple[str, str], asyncio.Lock] = {}

    async def address(
        self, identity: Identity, base_model: str, saved: CheckpointView | None, limits: Limits
    ) -> tuple[str, str, int]:
        """The address for a new request of a key: its session, its sampler, and a new sequence id.

        saved: the checkpoint to sample; None for the base model itself. UserError: the project has reached one of its
        `limits`.
        """
        key = (identity.owner, identity.key_id)
        async with self._opening.setdefault(key, asyncio.Lock()):
            session = await self._session(key, identity, limits)
            # A checkpoint that is saved again under the same path has a new attempt.
            weights = (base_model, "", "") if saved is None else (base_model, saved.path, saved.attempt)
            sampler = session.samplers.get(weights)
            if sampler is None:
                new = sampler_id(session.id, len(session.samplers))
                path = None if saved is None else saved.path
                row = NewSampler(new, session.id, identity.owner, base_model, path)
                sampler = _Sampler(await asyncio.to_thread(self._journal.samplers.open, row, limits))
                session.samplers[weights] = sampler
            sampler.next_seq += 1
            return session.id, sampler.id, sampler.next_seq - 1

    async def beat(self, session_id: str) -> bool:
        """Keep a session alive. Returns whether it is still active."""
        return await asyncio.to_thread(self._journal.sessions.heartbeat, session_id, None) is SessionState.ACTIVE

    async def _session(self, key: tuple[str, str], identity: Identity, limits: Limits) -> _Session:
        now, session = self._clock.monotonic(), self._sessions.get(key)
        if session is not None and len(session.samplers) < _MOST_SAMPLERS:
            if now - session.beat_at < self.beat_seconds:
                return session
            try:
                active = await self.beat(session.id)
            except NotFoundError:  # the journal was replaced
                active = False
            if active:
                session.beat_at = now
                return session
        new = NewSession(identity.owner, __version__, tags=("endpoints",), display_name=NAME, key_id=identity.key_id)
        session_id = await asyncio.to_thread(self._journal.sessions.create, new, limits)
        self._forget_idle(now)
        session = self._sessions[key] = _Session(session_id, now)
        return session

    def _forget_idle(self, now: float) -> None:
        idle = [key for key, session in self._sessions.items() if now - session.beat_at > self._forgotten_after]
        for key in idle:
            if not self._opening[key].locked():
                del self._sessions[key], self._opening[key]
