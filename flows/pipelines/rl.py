"""The pipeline `rl`: reinforcement learning on groups of answers to the same prompt, as in GRPO."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from tinkerflow.flows.pipelines.preparation import or_cancelled, prepared
from tinkerflow.flows.pipelines.training import Trained, train
from tinkerflow.tasks.pipelines.environments import environment_maker
from tinkerflow.tasks.pipelines.explore import Explore
from tinkerflow.tasks.pipelines.parameters import RlParameters
from tinkerflow.tasks.pipelines.rollouts import Rollouts


@flow(name="rl", flow_run_name="rl {parameters.name}", validate_parameters=True)
async def rl(parameters: RlParameters) -> Trained | State[None]:
    """As `sft`, with prompts and a reward or an environment for the answers."""
    return await or_cancelled(_train(parameters))


async def _train(parameters: RlParameters) -> Trained:
    make = environment_maker(parameters.reward, parameters.environment)
    async with prepared("rl", parameters, "prompt", "prompt_completion", "chat") as ready:
        key, rows = ready.prompts("data")
        recipe = Explore(
            rows,
            Rollouts(ready.renderer, make, parameters.group_size, parameters.answer_tokens, parameters.max_turns),
            ready.base,
            batch_size=parameters.training.batch_size,
            seed=parameters.model.seed,
            shown=ready.shown,
            kl="kl_to_base",
            coefficient=parameters.kl_coefficient,
            by_deviation=parameters.by_deviation,
            loss=parameters.loss,
            held_out_rows=ready.prompts("held_out")[1],
        )
        return await train(ready.setting(key), recipe)
