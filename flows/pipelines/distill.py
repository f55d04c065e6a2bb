"""The pipeline `distill`: on-policy distillation of a teacher's log probabilities into the student."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from prefect import flow

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines.fine_tuning import TrainingResult, cancellable, train
from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.flows.pipelines.rl import RlRecipe
from tinkerflow.tasks.pipelines.connection import connect
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
    async with prepare(parameters) as run, _teacher(parameters.teacher, run) as teacher:
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
            teacher,
            kl="reverse_kl",
            coefficient=1.0,
            rewards=False,
            loss=parameters.loss,
            loss_config=parameters.loss_config,
            trust_region=parameters.trust_region,
            held_out_rows=run.prompts("held_out")[1],
            versions=WeightVersions(parameters.max_staleness),
            recorded=True,
        )
        return await train(run, key, recipe)


@asynccontextmanager
async def _teacher(wanted: TeacherParameters, run: PreparedRun) -> AsyncIterator[tinker.SamplingClient]:
    """A client of the teacher; UserError when its tokens are not the student's."""
    if wanted.base_model and wanted.weights:
        raise UserError("teacher: give base_model or weights, not both: weights name their base model")
    if wanted == TeacherParameters():
        yield run.base
        return
    async with connect(wanted.connection) if wanted.connection else nullcontext(run.server) as server:
        teacher: tinker.SamplingClient
        if wanted.weights:
            teacher = await server.service.create_sampling_client(model_path=wanted.weights)
        else:
            model = await server.base_model(wanted.base_model)
            teacher = await server.service.create_sampling_client(base_model=model.name)
        if Renderer(teacher.get_tokenizer(), "text").vocabulary != run.renderer.vocabulary:
            name = wanted.weights or wanted.base_model or wanted.connection
            raise UserError(f"teacher {name!r}: its tokenizer is not the student's")
        yield teacher


PIPELINE = Pipeline(distill, DistillParameters, example_teacher=True)
