"""A person's approval: a flow run of its own is paused until somebody answers the form on its page in Prefect.

The run that asks stays in the state Running. Prefect takes a paused run's place within `concurrency_limit`, and a few
minutes later its client ends the run because the place cannot be renewed (`prefect.concurrency._leases`).
"""

from __future__ import annotations

import math

from prefect import flow, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import apause_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run
from prefect.states import Running
from pydantic import Field

LOOK_SECONDS = 2  # between two looks whether somebody has answered


class Approval(RunInput):
    """The form that Resume opens."""

    approve: bool = Field(False, description="Whether to do what is asked.")
    reason: str = Field("", max_length=1000, description="Why; it goes into the report.")


async def approval(question: str, hours: float) -> Approval | None:
    """The answer of a person to the form on the page of the run `approval of NAME`, NAME being the current flow run.

    question: Markdown that the form shows. None when nobody answers within so many hours.
    """
    return await _ask(question, hours, str(flow_run.name))


@flow(name="approval", flow_run_name="approval of {asker}")
async def _ask(question: str, hours: float, asker: str) -> Approval | None:
    """Pause this flow run until somebody answers."""
    form = Approval.with_initial_data(description=question)
    seconds = math.ceil(hours * 3600)
    key = f"approval-{flow_run.run_count}"  # a retry asks again
    try:
        return await apause_flow_run(form, timeout=seconds, poll_interval=LOOK_SECONDS, key=key)
    except FlowPauseTimeout:
        async with get_client() as client:  # else Prefect would fail a run whose pause was over
            state: State[None] = Running(message=f"nobody answered within {hours:g} hours")
            await client.set_flow_run_state(str(flow_run.id), state, force=True)
        return None
