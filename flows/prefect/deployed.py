"""Flow runs of a deployment, executed here: Prefect's UI offers Cancel, Suspend and Retry for such runs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from prefect import Flow, get_client
from prefect.context import TagsContext
from prefect.flow_engine import run_flow_async
from prefect.states import Pending

_ABOUT = """\
The runs of a Tinkerflow engine, which executes them itself. They begin when a client creates a model, and not by
_Run_. _Cancel_ ends a model, _Suspend_ and _Resume_ hold it and let it go on, _Retry_ takes a model that failed or
crashed up again, from the journal."""


async def run_deployed(flow: Flow[..., Any], names: Mapping[str, str], mark: str, again: UUID | None) -> object:
    """Execute a run of `flow` as one of the deployment of this engine (`mark`), or the run `again`; its final state."""
    async with get_client() as client:
        if again is None:
            deployment = await client.create_deployment(
                await client.create_flow(flow),
                name=mark,
                description=_ABOUT,
                tags=["tinkerflow", mark],
                enforce_parameter_schema=False,
            )
            run = await client.create_flow_run_from_deployment(
                deployment, parameters=dict(names), state=Pending(), tags=TagsContext.get().current_tags
            )
        else:
            run = await client.read_flow_run(again)
    # Prefect would watch the run of a deployment from a thread and a connection of its own, to end it when it is
    # suspended. We do that for all of them by one request (buttons.py), and a run that is held goes on here.
    run.deployment_id = None
    return await run_flow_async(flow, flow_run=run, parameters=dict(names), return_type="state")
