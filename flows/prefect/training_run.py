"""The flow run of one model: everything that is done to it, from its creation to its unloading."""

from __future__ import annotations

from typing import cast
from uuid import UUID

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from tinkerflow.flows.prefect.tracking import Tracking, run_body
from tinkerflow.flows.runner import End, ModelRunner, Why

# Task runs of one flow run: with 500, its page takes more than six seconds to open (tests/benchmarks/RESULTS.md).
MOST_RUNS = 150


@flow(
    name="training_run",
    flow_run_name="{model_id}",
    retries=0,
    persist_result=False,
    validate_parameters=False,
    log_prints=False,
)
async def training_run(model_id: str, base_model: str) -> State[None]:
    """One model's training run; its task runs are named `model-ab12-0/step-000017/forward_backward`."""
    end = cast(End, await run_body())
    match end.why:
        case Why.FAILED:
            return Failed(message=end.text)
        case Why.STOPPED | Why.CANCELLED:
            return Cancelled(message=end.text)
        case _:
            return Completed(message=end.text)


async def serve_model(lane: ModelRunner, tracking: Tracking, base_model: str, again: UUID | None = None) -> End:
    """Serve a model to its end, in as many flow runs as it takes; the first of them is `again`, if that is one."""
    while True:
        end = await tracking.run(
            training_run,
            lambda: lane.serve(MOST_RUNS),
            ("tinkerflow", base_model),
            deployed=True,
            again=again,
            model_id=lane.model_id,
            base_model=base_model,
        )
        if end.why is not Why.ROLL_OVER:
            return end
        again = None
