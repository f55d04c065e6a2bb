"""The pipeline `distill`: on-policy distillation of a teacher's log probabilities into the student."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import flow

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines.fine_tuning import TrainingResult, cancellable, train
from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.flows.pipelines.rl import RlRecipe
from tinkerflow.tasks.pipelines.environments import unrewarded
from tinkerflow.tasks.pipelines.parameters import DistillParameters, TeacherParameters
from tinkerflow.tasks.pipelines.preparation import PreparedRun, prepare
from tinkerflow.tasks.pipelines.render import Renderer
from tinkerflow.tasks.pipelines.rollouts import Rollouts
from tinkerflow.tasks.pipelines.versions import WeightVersions

if TYPE_CHECKING:
    import tinker


@flow(name="distill", flow_run_name="distill {parameters.name}")
@cancellable
async def distill(parameters: DistillParameters) -> TrainingResult:
    """Train like `rl`; instead of rewards, each token counts by how much likelier the teacher finds it."""
    async with prepare(parameters) as run:
        key, rows = run.prompts("data")
        recipe = RlRecipe(
            run,
            rows,
            Rollouts(
                run.renderer,
                unrewarded,
                parameters.group_size,
                parameters.answer_tokens,
                max_context=run.model.max_context,
                max_bad_fraction=parameters.data.max_bad_fraction,
            ),
            await _teacher(parameters.teacher, run),
            kl="reverse_kl",
            coefficient=1.0,
            rewards=False,
            loss=parameters.loss,
            loss_config=parameters.loss_config,
            held_out_rows=run.prompts("held_out")[1],
            versions=WeightVersions(parameters.max_staleness),
            recorded=True,
        )
        return await train(run, key, recipe)


async def _teacher(wanted: TeacherParameters, run: PreparedRun) -> tinker.SamplingClient:
    """A client of the teacher; UserError when its tokens are not the student's."""
    if wanted.base_model and wanted.weights:
        raise UserError("teacher: give base_model or weights, not both: weights name their base model")
    service = run.server.service
    teacher: tinker.SamplingClient
    if wanted.weights:
        teacher = await service.create_sampling_client(model_path=wanted.weights)
    elif wanted.base_model:
        teacher = await service.create_sampling_client(base_model=(await run.server.base_model(wanted.base_model)).name)
    else:
        return run.base
    if Renderer(teacher.get_tokenizer(), "text").vocabulary != run.renderer.vocabulary:
        raise UserError(f"teacher {wanted.weights or wanted.base_model!r}: its tokenizer is not the student's")
    return teacher


PIPELINE = Pipeline(distill, DistillParameters, example_teacher=True)
