"""The pipeline `sft`: supervised fine-tuning on chats or prompts with completions."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from tinkerflow.flows.pipelines.preparation import or_cancelled, prepared
from tinkerflow.flows.pipelines.training import Trained, train
from tinkerflow.tasks.pipelines.imitate import Imitate
from tinkerflow.tasks.pipelines.parameters import SftParameters


@flow(name="sft", flow_run_name="sft {parameters.name}", log_prints=False, validate_parameters=True)
async def sft(parameters: SftParameters) -> Trained | State[None]:
    """Check the data, render it, train in segments, and save the weights; Cancelled when somebody asks to stop."""
    return await or_cancelled(fine_tune(parameters))


async def fine_tune(parameters: SftParameters, *, pipeline: str = "sft") -> Trained:
    """What the flow does; StoppedError when somebody asks to stop."""
    async with prepared(pipeline, parameters, "chat", "prompt_completion") as ready:
        key, examples = ready.examples("data")
        _, held_out = ready.examples("held_out")
        recipe = Imitate(
            examples,
            batch_size=parameters.training.batch_size,
            seed=parameters.model.seed,
            shown=ready.shown,
            held_out=held_out,
        )
        return await train(ready.setting(key), recipe)
