"""The pipeline `distill`: on-policy distillation of a teacher's log probabilities into the student."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import flow
from prefect.client.schemas.objects import State

from tinkerflow.backend.errors import UserError
from tinkerflow.flows.pipelines.preparation import Prepared, or_cancelled, prepared
from tinkerflow.flows.pipelines.training import Trained, train
from tinkerflow.tasks.pipelines.environments import unrewarded
from tinkerflow.tasks.pipelines.explore import Explore
from tinkerflow.tasks.pipelines.parameters import DistillParameters, TeacherParameters
from tinkerflow.tasks.pipelines.render import Renderer
from tinkerflow.tasks.pipelines.rollouts import Rollouts

if TYPE_CHECKING:
    import tinker


@flow(name="distill", flow_run_name="distill {parameters.name}", validate_parameters=True)
async def distill(parameters: DistillParameters) -> Trained | State[None]:
    """As `rl`; in place of rewards, each token counts by how much likelier the teacher finds it than the student."""
    return await or_cancelled(_train(parameters))


async def _train(parameters: DistillParameters) -> Trained:
    async with prepared("distill", parameters, "prompt", "prompt_completion", "chat") as ready:
        key, rows = ready.prompts("data")
        recipe = Explore(
            rows,
            Rollouts(ready.renderer, unrewarded, parameters.group_size, parameters.answer_tokens),
            await _teacher(parameters.teacher, ready),
            batch_size=parameters.training.batch_size,
            seed=parameters.model.seed,
            shown=ready.shown,
            kl="reverse_kl",
            coefficient=1.0,
            rewards=False,
            loss=parameters.loss,
            held_out_rows=ready.prompts("held_out")[1],
        )
        return await train(ready.setting(key), recipe)


async def _teacher(wanted: TeacherParameters, ready: Prepared) -> tinker.SamplingClient:
    """The teacher; UserError when its tokens are not the student's."""
    if wanted.base_model and wanted.weights:
        raise UserError("teacher: give base_model or weights, not both: weights know their base model")
    service = ready.server.service
    teacher: tinker.SamplingClient
    if wanted.weights:
        teacher = await service.create_sampling_client(model_path=wanted.weights)
    elif wanted.base_model:
        teacher = await service.create_sampling_client(base_model=await ready.server.base_model(wanted.base_model))
    else:
        return ready.base
    if Renderer(teacher.get_tokenizer(), "text").vocabulary != ready.renderer.vocabulary:
        raise UserError(f"teacher {wanted.weights or wanted.base_model!r}: its tokenizer is not the student's")
    return teacher
