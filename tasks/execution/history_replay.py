"""Executes the requests of a run's history again, in an adapter that only the replay uses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

from tinkerflow.backend.catalog.history import past_requests
from tinkerflow.backend.core.errors import GroupFailedError, NotFoundError, ServerError, TinkerflowError
from tinkerflow.backend.journal import Kind, ModelView, Pending
from tinkerflow.backend.spec.commands import Done, DropAdapter, ImportAdapter
from tinkerflow.backend.spec.history import PastRequest, digest
from tinkerflow.tasks.execution.operation import Execute, Execution, ExecutionContext
from tinkerflow.tasks.execution.sequencer import Slot, replay_in_order
from tinkerflow.tasks.execution.state_transfers import bring

log = logging.getLogger(__name__)

_PAGE = 16  # requests that are executed together; their payloads are in memory
_COMPARED = (Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP)  # results that depend on the weights and contain no run id


class HistoryReplay:
    """One replay. Call `drop` at the end.

    requests: number executed so far. differs: the first request whose result differs from the recorded one, or None.
    found: the digest of that result.
    """

    def __init__(
        self, context: ExecutionContext, model: ModelView, adapter_id: str, execute: Mapping[Kind, Execute]
    ) -> None:
        """Load nothing yet.

        context: bound to a worker group. adapter_id: the replay's adapter. execute: the operations that change a model.
        Other operations are skipped.
        """
        self.requests = 0
        self.differs: PastRequest | None = None
        self.found = ""
        self._context = replace(context, owner=model.owner)
        self._model, self._adapter, self._execute = model, adapter_id, execute

    async def load(self, path: str) -> None:
        """Begin with the state under `path`. Raises the errors of `bring`."""
        state, _ = await bring(self._context, self._adapter, path)
        await self._context.send(ImportAdapter(self._adapter, state), Done)

    async def run(self, start: int, last: int) -> None:
        """Execute the requests after `start` up to `last`. start: -1 for the creation.

        GroupFailedError: the group ended. NotFoundError: the history lacks some of these requests. StoreError: a part
        of the history is damaged. ServerError: a request that succeeded before fails.
        """
        run_id, reached = self._model.id, start
        history = past_requests(self._context.journal, self._context.store, run_id, after=start)
        while reached < last and (page := await self._context.in_store(lambda: list(islice(history, _PAGE)))):
            if reached == -1 and page[0].seq_id != 0:
                raise NotFoundError(f"the history of run {run_id} does not begin with its creation")
            # A failed request has changed nothing, and may have ended worker groups.
            chosen = [past for past in page if past.seq_id <= last and past.kind in self._execute and not past.error]
            await replay_in_order(self._adapter, [partial(self._execute_again, past) for past in chosen])
            self.requests, reached = self.requests + len(chosen), page[-1].seq_id
        if reached < last:
            raise NotFoundError(f"the history of run {run_id} ends at request {reached}, before request {last}")

    async def drop(self) -> None:
        """Free the adapter."""
        try:
            await self._context.send(DropAdapter(self._adapter), Done)
        except GroupFailedError as error:
            log.info("adapter %s ended with its worker group: %s", self._adapter, error)

    async def _execute_again(self, past: PastRequest, slot: Slot) -> None:
        kind, model = Kind(past.kind), self._model
        request = Pending(
            past.request_id, kind, model.owner, model.session_id, model.id, None, past.seq_id, past.payload
        )
        execution = Execution(self._context, request, slot, as_of=past.answered_at, fork=self._adapter)
        try:
            outcome = await self._execute[kind](execution)
            if kind not in _COMPARED or not past.result_hash:
                return
            found = digest(outcome.result or b"")
            if found != past.result_hash and (self.differs is None or past.seq_id < self.differs.seq_id):
                self.differs, self.found = past, found
        except GroupFailedError:
            raise
        except TinkerflowError as error:
            raise ServerError(f"the replay of {kind} (seq_id {past.seq_id}) of {model.id} failed: {error}") from error
        finally:
            await slot.end()
