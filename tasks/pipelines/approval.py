"""A person's approval: a separate flow run is paused until someone answers the form on its page in Prefect.

The requesting run stays in the state Running. If it were paused, Prefect would take its slot within
`concurrency_limit`, and a few minutes later the client would end the run because the slot cannot be renewed
(`prefect.concurrency._leases`).
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

LOOK_SECONDS = 2  # seconds between two checks for an answer


class Approval(RunInput):
    """The form that Resume opens."""

    approve: bool = Field(False, description="Whether to approve.")
    reason: str = Field("", max_length=1000, description="The reason, which the report shows.")


async def approval(question: str, hours: float) -> Approval | None:
    """Wait for a person's answer to the form on the page of the run `approval of NAME`. NAME is this flow run's name.

    question: Markdown that the form shows. hours: the time limit. Returns None if no one answers within it.
    """
    return await _ask(question, hours, str(flow_run.name))


@flow(name="approval", flow_run_name="approval of {asker}")
async def _ask(question: str, hours: float, asker: str) -> Approval | None:
    """Pause this flow run until someone answers."""
    form = Approval.with_initial_data(description=question)
    seconds = math.ceil(hours * 3600)
    key = f"approval-{flow_run.run_count}"  # a retry asks again
    try:
        return await apause_flow_run(form, timeout=seconds, poll_interval=LOOK_SECONDS, key=key)
    except FlowPauseTimeout:
        async with get_client() as client:  # otherwise Prefect would fail a run after its pause has expired
            state: State[None] = Running(message=f"no one answered within {hours:g} hours")
            await client.set_flow_run_state(str(flow_run.id), state, force=True)
        return None
