"""The pipeline `distill`: on-policy distillation of a teacher's log probabilities into the student."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefect import flow

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines.fine_tuning import TrainingResult, cancellable, train
from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.flows.pipelines.rl import RlRecipe
from tinkerflow.tasks.pipelines.connection import connect
from tinkerflow.tasks.pipelines.environments import Asked, Facts, facts_of, unrewarded
from tinkerflow.tasks.pipelines.parameters import DistillParameters, TeacherParameters
from tinkerflow.tasks.pipelines.preparation import PreparedRun, prepare
from tinkerflow.tasks.pipelines.render import Renderer
from tinkerflow.tasks.pipelines.rollouts import Episode, Rollouts
from tinkerflow.tasks.pipelines.rows import Message, Row
from tinkerflow.tasks.pipelines.versions import WeightVersions

if TYPE_CHECKING:
    import tinker


@flow(name="distill", flow_run_name="distill {parameters.name}")
@cancellable
async def distill(parameters: DistillParameters) -> TrainingResult:
    """Train like `rl`, but instead of rewards, weight each token by how much likelier the teacher finds it."""
    async with prepare(parameters) as run, _teacher(parameters.teacher, run) as teacher:
        key, rows = run.prompts("data")
        held_out, hint = run.prompts("held_out")[1], parameters.teacher.prompt
        hinted = HintedPrompt(hint, run.renderer, run.model.max_context - parameters.answer_tokens)
        hinted.check([*rows, *held_out])
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
            other_prompt=hinted if hint else None,
            rewards=False,
            loss=parameters.loss,
            loss_config=parameters.loss_config,
            trust_region=parameters.trust_region,
            held_out_rows=held_out,
            versions=WeightVersions(parameters.max_staleness),
            recorded=True,
        )
        return await train(run, key, recipe)


@dataclass(frozen=True)
class HintedPrompt:
    """The prompt of a teacher that knows more than the student: the row's messages, the last one from a template."""

    template: str
    renderer: Renderer
    most: int  # in tokens

    def __call__(self, episode: Episode) -> list[int]:
        """The tokens of the teacher's prompt for a conversation."""
        assert isinstance(episode.environment, Asked), "distill's conversations are questions with an answer"
        return self._tokens(episode.environment.facts)

    def check(self, rows: Sequence[Row]) -> None:
        """Raise UserError for a row that lacks a field of the template, or whose prompt is too long for the teacher."""
        for row in rows if self.template else ():
            try:
                tokens = len(self._tokens(facts_of(row)))
            except (KeyError, UserError) as error:
                problem = error.message if isinstance(error, UserError) else f"the row has no field {error}"
            else:
                if tokens <= self.most:
                    continue
                problem = f"{tokens} tokens, must be at most {self.most}, so that the answer also fits into the context"
            raise UserError(f"teacher.prompt: row {row.prompt[-1]['content']!r}: {problem}")

    def _tokens(self, facts: Facts) -> list[int]:
        *before, last = facts["prompt"]
        told: Message = last.copy()
        told["content"] = self.template.format_map({**facts, "prompt": last["content"]})
        return self.renderer.prompt([*before, told], facts.get("tools", ()))


@asynccontextmanager
async def _teacher(wanted: TeacherParameters, run: PreparedRun) -> AsyncIterator[tinker.SamplingClient | None]:
    """A client of the teacher; None for the student itself. UserError: its tokenizer is not the student's."""
    if wanted.student:
        yield None
        return
    if wanted.base_model and wanted.weights:
        raise UserError("teacher: give base_model or weights, not both: weights name their base model")
    if wanted == TeacherParameters(prompt=wanted.prompt):
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
            raise UserError(f"teacher {name!r}: its tokenizer differs from the student's")
        yield teacher


PIPELINE = Pipeline(distill, DistillParameters, example_teacher=True)
