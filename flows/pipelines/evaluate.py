"""The pipeline `evaluate`: scores of weights, compared with other weights or a champion.

Rows with answers give loss and exact match. A reward or an environment gives the mean reward of samples, as in `rl`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from prefect import flow
from pydantic import BaseModel

from tinkerflow.backend.catalog.champions import champion_names
from tinkerflow.backend.catalog.rollouts import EvaluationFacts
from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.flows.pipelines.fine_tuning import cancellable
from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.tasks.pipelines.adapters import environment_maker
from tinkerflow.tasks.pipelines.artifacts import RunArtifacts, begin_phase, log_line, training_runs
from tinkerflow.tasks.pipelines.champions import champion, check_readable
from tinkerflow.tasks.pipelines.connection import connect
from tinkerflow.tasks.pipelines.data import FIRST_ROWS, load_examples, load_rows, read_source
from tinkerflow.tasks.pipelines.parameters import ComparedParameters, EvaluateParameters, JudgeParameters
from tinkerflow.tasks.pipelines.preparation import check_data
from tinkerflow.tasks.pipelines.render import Renderer
from tinkerflow.tasks.pipelines.rollout_record import record_evaluation
from tinkerflow.tasks.pipelines.rollouts import Rollouts
from tinkerflow.tasks.pipelines.scoring import Scores, score, score_reward
from tinkerflow.tasks.pipelines.trainer import data_name
from tinkerflow.tasks.pipelines.work import open_work

BASE = "base model"
_SHOWN = 8  # answers


class EvaluationResult(BaseModel):
    """Scores by name: `weights`, and the compared `against`, `champion` or `base model`."""

    scores: dict[str, Scores]


@flow(name="evaluate", flow_run_name="evaluate {parameters.name}")
@cancellable
async def evaluate(parameters: EvaluateParameters) -> EvaluationResult:
    """Score the weights and the weights to compare with, and show a table. UserError: the champion does not exist."""
    best = champion(parameters.work_url, parameters.champion) if parameters.champion else None
    if parameters.champion and best is None:
        near = did_you_mean(parameters.champion, champion_names(open_work(parameters.work_url)))
        rule = f"no weights were promoted under this name in {parameters.work_url}"
        raise UserError(f"champion {parameters.champion!r}: {rule}{near}")
    if best is not None:
        await check_readable(parameters.champion, best, parameters.connection, parameters.base_model)
    paths = {"weights": parameters.weights, "against": parameters.against, "champion": best.weights if best else ""}
    given = {name: path for name, path in paths.items() if path}
    scores = await score_all(parameters, given | {BASE: ""})
    await show_scores(RunArtifacts(f"evaluate-{parameters.name}"), scores)
    return EvaluationResult(scores=scores)


def on_held_out(parameters: ComparedParameters) -> EvaluateParameters:
    """The evaluation of a fine-tune's weights on its held-out rows."""
    return EvaluateParameters(
        connection=parameters.connection,
        work=parameters.work,
        base_model=parameters.model.base_model,
        data=parameters.held_out,
        format=parameters.model.format,
        max_tokens=parameters.samples.max_tokens,
        **{field: getattr(parameters, field) for field in JudgeParameters.model_fields},
    )


def refuse_unscorable(parameters: ComparedParameters) -> None:
    """Raise UserError before training if `score_all` would refuse the reward, the environment or the held-out rows."""
    if parameters.judge:
        environment_maker(parameters.reward, parameters.environment)
    source, use = parameters.held_out, on_held_out(parameters).use()
    read_source(source, use, min(source.limit or FIRST_ROWS, FIRST_ROWS)).refuse_schema(source, use)


async def score_all(parameters: EvaluateParameters, candidates: Mapping[str, str]) -> dict[str, Scores]:
    """Score several weights on the same rows. Returns candidate's name -> scores.

    candidates: name -> sampler weights, as in `EvaluateParameters.weights`; "" = the base model. The weights in
    `parameters` are not used. Rewarded conversations are stored for the pages of their runs. DataCheckError: too many
    rows are wrong. UserError: the rows have no answers and there is no reward, or weights have another tokenizer.
    """
    work_url = parameters.work_url
    make = environment_maker(parameters.reward, parameters.environment) if parameters.judge else None
    begin_phase("connecting to the service")
    async with connect(parameters.connection) as server:
        model = await server.base_model(parameters.base_model)
        paths = {name: await server.sampler_weights(one) if one else "" for name, one in candidates.items()}
        for name, path in paths.items():
            if path:
                await server.refuse_other_tokenizer(name, path, model)
        sampler = await server.service.create_sampling_client(base_model=model.name)
        renderer = Renderer(sampler.get_tokenizer(), parameters.format, parameters.data.special_tokens)
        begin_phase("checking the data")
        report = check_data(parameters.data, work_url, renderer, parameters.use().within(model.max_context))
        rows, examples = load_rows(work_url, report), [] if make else load_examples(work_url, report)
        longest = {"max_tokens": parameters.max_tokens, "max_context": model.max_context}
        scores = {}
        for name, path in paths.items():
            weights = await server.service.create_sampling_client(model_path=path) if path else sampler
            if make is None:
                begin_phase(f"{name}: scoring {len(rows)} rows")
                scored = await score(name, weights, renderer, rows, examples, **longest, shown=_SHOWN)
                line = f"loss {scored.loss:.4g}, exact match {scored.exact_match:.4g}"
            else:
                begin_phase(f"{name}: rewarding {parameters.group_size} answers to each of {len(rows)} prompts")
                rollouts = Rollouts.judged(
                    parameters,
                    make,
                    renderer,
                    **longest,
                    max_bad_fraction=parameters.data.max_bad_fraction,
                    parameter=parameters.data.parameter,
                    places=asyncio.Semaphore(parameters.rows_at_once),
                )
                scored, answers = await score_reward(name, weights, rollouts, rows, parameters.seed, shown=_SHOWN)
                error = "" if scored.reward_error is None else f" ± {scored.reward_error:.2g}"
                line = f"reward {scored.reward:.4g}{error}"
                if path:
                    facts = EvaluationFacts(
                        name=parameters.name,
                        weights=path,
                        judge=parameters.judge,
                        data=data_name(parameters.data.url, report.digest),
                        evaluated_at=SystemClock().now(),
                        **scored.model_dump(include={"reward", "reward_error", "parts", "rows", "answers"}),
                    )
                    page = await asyncio.to_thread(record_evaluation, work_url, answers, facts)
                    line += f"; answers: {server.url}/training_runs/{page}" if page else ""
                    if page and (linked := training_runs.get()) is not None:
                        linked[:] = linked or [page]  # the page of the first weights' run
            scores[name] = scored.model_copy(update={"weights": path})
            log_line(f"{name}: {line}, {scored.rows} rows")
    return scores


async def show_scores(artifacts: RunArtifacts, scores: Mapping[str, Scores]) -> None:
    """Make a table of the scores, and a table of the first answers of each candidate with the expected answers."""
    rows = [{"of": name, "weights": s.weights} | figures(s) | {"rows": s.rows} for name, s in scores.items()]
    await artifacts.table("evaluation", rows, "scores")
    await artifacts.table("answers", answers_by_prompt(scores), "first answers")


def answers_by_prompt(scores: Mapping[str, Scores]) -> list[dict[str, str]]:
    """The first prompts with their expected answer and the answer of each candidate, by its name."""
    found = []
    for first in next(iter(scores.values())).samples:
        same = {name: [one.rated for one in s.samples if one.prompt == first.prompt] for name, s in scores.items()}
        answers = {name: texts[0] if texts else "" for name, texts in same.items()}
        found.append({"prompt": first.prompt, "wanted": first.wanted} | answers)
    return found


def figures(scores: Scores) -> dict[str, float | None]:
    """The measured scores by name."""
    if scores.reward is None:
        return {"loss": scores.loss, "exact match": scores.exact_match}
    return {"reward": scores.reward, "standard error": scores.reward_error, **scores.parts, "answers": scores.answers}


PIPELINE = Pipeline(evaluate, EvaluateParameters)
