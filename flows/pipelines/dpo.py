"""The pipeline `dpo`: direct preference optimization on pairs of a better and a worse answer."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from tinkerflow.flows.pipelines.preparation import or_cancelled, prepared
from tinkerflow.flows.pipelines.training import Trained, train
from tinkerflow.tasks.pipelines.parameters import DpoParameters
from tinkerflow.tasks.pipelines.prefer import Prefer


@flow(name="dpo", flow_run_name="dpo {parameters.name}", validate_parameters=True)
async def dpo(parameters: DpoParameters) -> Trained | State[None]:
    """As `sft`, with preferences; the reference is the model that the run begins with."""
    return await or_cancelled(_train(parameters))


async def _train(parameters: DpoParameters) -> Trained:
    async with prepared("dpo", parameters, "preference") as ready:
        key, examples = ready.examples("data")
        _, held_out = ready.examples("held_out")
        recipe = Prefer(
            examples,
            beta=parameters.beta,
            batch_size=parameters.training.batch_size,
            seed=parameters.model.seed,
            shown=ready.shown,
            held_out=held_out,
        )
        return await train(ready.setting(key), recipe)
