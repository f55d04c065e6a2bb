"""The pipeline `distill`: on-policy distillation of a teacher's log probabilities into the student."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import flow
from pydantic import Field

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines.fine_tuning import TrainingResult, cancellable, train
from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.flows.pipelines.rl import RlRecipe, SamplingParameters
from tinkerflow.tasks.pipelines.data import DataSource
from tinkerflow.tasks.pipelines.environments import unrewarded
from tinkerflow.tasks.pipelines.parameters import PATH, Parameters
from tinkerflow.tasks.pipelines.preparation import PreparedRun, prepare
from tinkerflow.tasks.pipelines.render import Renderer
from tinkerflow.tasks.pipelines.rollouts import Rollouts

if TYPE_CHECKING:
    import tinker


class TeacherParameters(Parameters):
    """The teacher: a model that the server offers, or weights that were trained on one."""

    base_model: str = Field("", description="A model that the server offers; empty = the student's.")
    weights: str = Field("", pattern=PATH, description="Sampler weights; empty = the base model itself.")


class DistillParameters(SamplingParameters):
    """On-policy distillation: the student learns from the log probabilities that a teacher gives its answers."""

    data: DataSource = Field(description="Prompts, or rows of which only the prompts are used.")
    held_out: DataSource | None = Field(None, description="Prompts on which the divergence is measured, too.")
    teacher: TeacherParameters = Field(default_factory=TeacherParameters, description="The model to learn from.")


@flow(name="distill", flow_run_name="distill {parameters.name}")
@cancellable
async def distill(parameters: DistillParameters) -> TrainingResult:
    """Train like `rl`; instead of rewards, each token counts by how much likelier the teacher finds it."""
    async with prepare("distill", parameters, "prompt", "prompt_completion", "chat") as run:
        key, rows = run.prompts("data")
        recipe = RlRecipe(
            run,
            rows,
            Rollouts(run.renderer, unrewarded, parameters.group_size, parameters.answer_tokens),
            await _teacher(parameters.teacher, run),
            kl="reverse_kl",
            coefficient=1.0,
            rewards=False,
            loss=parameters.loss,
            held_out_rows=run.prompts("held_out")[1],
        )
        return await train(run, key, recipe)


async def _teacher(wanted: TeacherParameters, run: PreparedRun) -> tinker.SamplingClient:
    """A client of the teacher; UserError when its tokens are not the student's."""
    if wanted.base_model and wanted.weights:
        raise UserError("teacher: give base_model or weights, not both: weights know their base model")
    service = run.server.service
    teacher: tinker.SamplingClient
    if wanted.weights:
        teacher = await service.create_sampling_client(model_path=wanted.weights)
    elif wanted.base_model:
        teacher = await service.create_sampling_client(base_model=await run.server.base_model(wanted.base_model))
    else:
        return run.base
    if Renderer(teacher.get_tokenizer(), "text").vocabulary != run.renderer.vocabulary:
        raise UserError(f"teacher {wanted.weights or wanted.base_model!r}: its tokenizer is not the student's")
    return teacher


PIPELINE = Pipeline(distill, DistillParameters, example_teacher=True)
