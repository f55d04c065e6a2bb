"""Sends the values of a pipeline's steps to the server as metrics, for the page of its training run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import islice
from urllib.parse import quote

import httpx

from tinkerflow.backend.spec.run_metadata import LARGEST_METRIC, Outcome
from tinkerflow.tasks.pipelines.connection import ServerClients

log = logging.getLogger(__name__)

_AT_ONCE = 500  # steps in one request
_REASON = 1000  # characters
_SECONDS = 10.0  # time limit of one request
_OWN_CHARTS = ("grad_norm", "learning_rate")  # figures that the server measures itself


class ReportedMetrics:
    """Sends metrics of steps, and never fails: steps that the server did not store are sent again with the next ones.

    The server stores a value once, so sending it again is harmless.
    """

    def __init__(self, server: ServerClients) -> None:
        """server: the server's URL and key."""
        self._http = server.http(_SECONDS)
        self._waiting: dict[str, dict[int, dict[str, float]]] = {}
        self._warned = False

    async def send(self, run_id: str, steps: Mapping[int, Mapping[str, float]]) -> None:
        """Send values of a training run by step and name. Leaves out values that the server refuses, such as NaN."""
        waiting = self._waiting.setdefault(run_id, {})
        for step, values in steps.items():
            kept = {name: v for name, v in values.items() if name not in _OWN_CHARTS and abs(v) <= LARGEST_METRIC}
            if kept:
                waiting.setdefault(step, {}).update(kept)
        for run, steps_of_run in self._waiting.items():
            await self._send(run, steps_of_run)

    async def end(self, run_id: str, outcome: Outcome, reason: str) -> None:
        """Send how the pipeline ended with a training run, and why."""
        body = {"outcome": outcome, "reason": reason[:_REASON]}
        try:
            answer = await self._http.post(f"api/v1/training_runs/{quote(run_id, safe='')}/outcome", json=body)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            log.warning("the page of the training run does not show that it is %s: %s", outcome, error)

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(self, run_id: str, waiting: dict[int, dict[str, float]]) -> None:
        while some := dict(islice(waiting.items(), _AT_ONCE)):
            body = {"steps": [{"step": step, "values": values} for step, values in some.items()]}
            try:
                answer = await self._http.post(f"api/v1/training_runs/{quote(run_id, safe='')}/metrics", json=body)
            except httpx.HTTPError as error:
                self._warn(f"{type(error).__name__}: {error}")
                return
            if answer.status_code != 200:
                self._warn(f"the server answered {answer.status_code}: {answer.text[:200]}")
            if answer.status_code >= 500 or answer.status_code == 429:
                return  # the server may take the values later
            for step in some:
                del waiting[step]

    def _warn(self, reason: str) -> None:
        if not self._warned:
            log.warning("the page of the training run does not show the values of its steps: %s", reason)
        self._warned = True
