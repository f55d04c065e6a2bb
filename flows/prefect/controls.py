"""The buttons of Prefect's UI for training runs: Cancel, Suspend, Resume, Retry.

Prefect itself does not act on the buttons for runs that our engine executes. Requests every POLL_SECONDS find all runs
of this engine whose state a person has changed.
"""

from __future__ import annotations

import logging
import time
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Failed, Running

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.retry import repeat
from tinkerflow.flows.observers import RunControls
from tinkerflow.flows.prefect.client import get_client
from tinkerflow.flows.prefect.connection import PrefectConnection

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0
_ASKED = ("CANCELLING", "PAUSED", "SCHEDULED")
PAUSED = "the run was paused in Prefect"
CANCELLED = "the run was cancelled in Prefect"
_UNCHANGED = "; Retry changed nothing"


class ControlsWatch:
    """Watches the states of our flow runs, and applies people's changes."""

    def __init__(self, connection: PrefectConnection, controls: RunControls) -> None:
        """Nothing is read before `watch`. controls: executes what the buttons request."""
        self._connection = connection
        self._controls = controls
        self._paused: dict[UUID, str] = {}  # flow run -> model
        self._retried: dict[UUID, UUID] = {}  # flow run -> its state that was handled as a Retry

    async def watch(self) -> None:
        """Handle pressed buttons every POLL_SECONDS while Prefect can be reached, until cancelled."""
        await repeat(self._poll, POLL_SECONDS, on=Exception, what="Prefect's buttons have no effect now", log=log)

    async def _poll(self) -> None:
        if self._connection.reachable:
            async with get_client() as client:
                await self.obey_all(client)

    async def obey_all(self, client: PrefectClient) -> None:
        """Apply all changes that people have made since the last call."""
        ours = {"tags": {"all_": [self._connection.mark]}, "state": {"type": {"any_": _ASKED}}}
        asked, found = FlowRunFilter.model_validate(ours), list[FlowRun]()
        while page := await client.read_flow_runs(flow_run_filter=asked, offset=len(found)):
            found += page
        seen = {run.id for run in found}
        self._retried = {run: state for run, state in self._retried.items() if run in seen}
        for run in found:
            await self._obey(client, run)
        for missing in self._paused.keys() - seen:
            try:
                run = await client.read_flow_run(missing)
            except ObjectNotFound:  # the flow run was deleted together with its Resume button
                await self._go_on(missing, self._paused[missing])
            else:
                await self._obey(client, run)

    async def _obey(self, client: PrefectClient, run: FlowRun) -> None:
        model_id = str(run.parameters.get("model_id", ""))
        paused, now_shown = run.id in self._paused, self._controls.shown_in(model_id) == run.id
        match run.state.type if run.state else None:
            case StateType.CANCELLING | StateType.CANCELLED:
                self._paused.pop(run.id, None)
                log.info("model %s: %s", model_id, CANCELLED)
                await self._controls.cancel(model_id, CANCELLED)
                if not now_shown:  # otherwise the run itself shows that it has ended
                    await _set_state(client, run, Cancelled(message=CANCELLED))
            case StateType.PAUSED if now_shown:
                if _is_over(run.state):
                    await self._go_on(run.id, model_id)
                    await _set_state(client, run, Running(message="its pause has ended"))
                elif not paused:
                    log.info("model %s: %s", model_id, PAUSED)
                    await self._controls.pause(model_id, f"{PAUSED} (flow run {run.name}); Resume continues it")
                    self._paused[run.id] = model_id
            case StateType.SCHEDULED if paused and now_shown:  # a suspended run that is resumed
                await _set_state(client, run, Running(message="resumed"))
                await self._go_on(run.id, model_id)
            case StateType.SCHEDULED if not now_shown:
                await self._retry(client, run, model_id)
            case _ if paused:
                await self._go_on(run.id, model_id)

    async def _go_on(self, flow_run: UUID, model_id: str) -> None:
        await self._controls.pause(model_id, None)  # if this fails, the next poll tries again
        self._paused.pop(flow_run, None)
        log.info("model %s was resumed", model_id)

    async def _retry(self, client: PrefectClient, run: FlowRun, model_id: str) -> None:
        """Resume the model. If Retry is impossible, the run gets its previous state back."""
        if (shown := self._controls.shown_in(model_id)) is not None:
            await _restore_state(client, run, f"the model is already being served, in flow run {shown}")
            return
        state = run.state.id if run.state is not None else run.id
        if self._retried.get(run.id) == state:
            return  # the run's new state is on its way to the server
        try:
            await self._controls.retry(model_id, run.id)
            self._retried[run.id] = state
        except UserError as error:
            await _restore_state(client, run, error.message)


async def _restore_state(client: PrefectClient, run: FlowRun, why: str) -> None:
    """Give the run back its last final state before Retry."""
    final = [state for state in await client.read_flow_run_states(run.id) if state.is_final()]
    last: State[Any] = max(final, key=lambda state: state.timestamp) if final else Failed()
    message = f"{(last.message or str(last.name)).partition(_UNCHANGED)[0]}{_UNCHANGED}: {why}"
    await _set_state(client, run, State(type=last.type, name=last.name, message=message))


def _is_over(state: State[Any] | None) -> bool:
    """Whether a pause ends before the next poll. After its end, Prefect would fail a run that is resumed."""
    until = state.state_details.pause_timeout if state is not None else None
    return until is not None and until.timestamp() - time.time() < 2 * POLL_SECONDS


async def _set_state(client: PrefectClient, run: FlowRun, state: State[Any]) -> None:
    await client.set_flow_run_state(run.id, state, force=True)
