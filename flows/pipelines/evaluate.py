"""The pipeline `evaluate`: scores of weights, compared with other weights or a champion, on rows with answers."""

from __future__ import annotations

from collections.abc import Mapping

from prefect import flow
from pydantic import BaseModel

from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.tasks.pipelines.artifacts import RunArtifacts, log_line
from tinkerflow.tasks.pipelines.champions import champion
from tinkerflow.tasks.pipelines.connection import connect
from tinkerflow.tasks.pipelines.data import load_examples, load_rows
from tinkerflow.tasks.pipelines.parameters import EvaluateParameters, NightlyParameters, SweepParameters
from tinkerflow.tasks.pipelines.preparation import check_data
from tinkerflow.tasks.pipelines.render import Renderer
from tinkerflow.tasks.pipelines.scoring import Scores, score

BASE = "base model"


class EvaluationResult(BaseModel):
    """Scores by name: `weights`, and the compared `against`, `champion` or `base model`."""

    scores: dict[str, Scores]


@flow(name="evaluate", flow_run_name="evaluate {parameters.name}")
async def evaluate(parameters: EvaluateParameters) -> EvaluationResult:
    """Score the weights and those to compare with, and show a table."""
    best = champion(parameters.work_url, parameters.champion) if parameters.champion else None
    paths = {"weights": parameters.weights, "against": parameters.against, "champion": best.weights if best else ""}
    given = {name: path for name, path in paths.items() if path}
    scores = await score_all(parameters, given | {BASE: ""})
    await show_scores(RunArtifacts(f"evaluate-{parameters.name}"), scores)
    return EvaluationResult(scores=scores)


def on_held_out(parameters: NightlyParameters | SweepParameters) -> EvaluateParameters:
    """The evaluation of a fine-tune's weights on its held-out rows."""
    return EvaluateParameters(
        connection=parameters.connection,
        work=parameters.work,
        base_model=parameters.model.base_model,
        data=parameters.held_out,
        format=parameters.model.format,
        max_tokens=parameters.samples.max_tokens,
    )


async def score_all(parameters: EvaluateParameters, candidates: Mapping[str, str]) -> dict[str, Scores]:
    """Score several weights on the same rows; candidate's name -> scores.

    candidates: name -> sampler weights, as `EvaluateParameters.weights` names them; empty: the base model. The weights
    that `parameters` name are not used.
    Raises DataCheckError when too many rows are wrong, UserError when the rows have no answers.
    """
    work_url = parameters.work_url
    async with connect(parameters.connection) as server:
        model = await server.base_model(parameters.base_model)
        sampler = await server.service.create_sampling_client(base_model=model.name)
        renderer = Renderer(sampler.get_tokenizer(), parameters.format, parameters.data.special_tokens)
        report = check_data(parameters.data, work_url, renderer, parameters.use().within(model.max_context))
        rows, examples = load_rows(work_url, report), load_examples(work_url, report)
        scores = {}
        paths = {name: await server.sampler_weights(one) if one else "" for name, one in candidates.items()}
        for name, path in paths.items():
            weights = await server.service.create_sampling_client(model_path=path) if path else sampler
            longest = {"max_tokens": parameters.max_tokens, "max_context": model.max_context}
            scored = await score(name, weights, renderer, rows, examples, **longest, shown=8)
            scores[name] = scored.model_copy(update={"weights": path})
            log_line(f"{name}: loss {scored.loss:.4g}, exact match {scored.exact_match:.4g}, {scored.rows} rows")
    return scores


async def show_scores(artifacts: RunArtifacts, scores: Mapping[str, Scores]) -> None:
    """Make a table of the scores, and a table of the first answers of each candidate with the expected answers."""
    rows = [
        {"of": name, "weights": s.weights, "loss": s.loss, "exact match": s.exact_match, "rows": s.rows}
        for name, s in scores.items()
    ]
    await artifacts.table("evaluation", rows, "scores")
    first = next(iter(scores.values()))
    answers = [
        {"prompt": sample.prompt, "wanted": sample.wanted} | {name: s.samples[i].answer for name, s in scores.items()}
        for i, sample in enumerate(first.samples)
    ]
    await artifacts.table("answers", answers, "greedy answers")


PIPELINE = Pipeline(evaluate, EvaluateParameters)
