"""The pipeline `evaluate`: scores of weights beside others, or beside a champion, on rows with answers."""

from __future__ import annotations

from collections.abc import Mapping

from prefect import flow
from pydantic import BaseModel, Field

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.tasks.pipelines.artifacts import RunArtifacts
from tinkerflow.tasks.pipelines.champions import champion
from tinkerflow.tasks.pipelines.connection import connect
from tinkerflow.tasks.pipelines.data import DataSource, check_data, load_rows
from tinkerflow.tasks.pipelines.parameters import NAME, PipelineParameters, RunParameters
from tinkerflow.tasks.pipelines.render import Format, Renderer, load_examples, render
from tinkerflow.tasks.pipelines.scoring import Scores, score

BASE = "base model"
_WEIGHTS = r"^(tinker://.+|[^/]+)?$"


class EvaluateParameters(RunParameters):
    """Scores of weights, compared with others, on rows with answers."""

    base_model: str = Field("", description="A model that the server offers; empty = the first one it offers.")
    weights: str = Field(
        "",
        pattern=_WEIGHTS,
        description="Sampler weights to evaluate: a tinker:// path, or the id of a training run for its newest ones; "
        "empty = none.",
    )
    against: str = Field(
        "", pattern=_WEIGHTS, description="Sampler weights to compare with, as `weights`; empty = none."
    )
    champion: str = Field(
        "", pattern=rf"^$|{NAME}", max_length=40, description="A champion to compare with; empty = none."
    )
    data: DataSource = Field(description="Rows with answers: chat or prompt/completion.")
    format: Format = Field("chat", description="chat: by the model's chat template. text: texts one after another.")
    max_tokens: int = Field(48, ge=1, le=4096, description="Longest answer, in tokens.")


class EvaluationResult(BaseModel):
    """Scores by name: `weights`, and those that were compared: `against`, the `champion`, or the `base model`."""

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


def on_held_out(parameters: PipelineParameters) -> EvaluateParameters:
    """The evaluation of what a fine-tune makes, on its held-out rows."""
    assert parameters.held_out is not None
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
        base_model = await server.base_model(parameters.base_model)
        sampler = await server.service.create_sampling_client(base_model=base_model)
        renderer = Renderer(sampler.get_tokenizer(), parameters.format)
        report = check_data(parameters.data, work_url, renderer.special_tokens)
        if report.schema_name not in ("chat", "prompt_completion"):
            raise UserError(f"data: schema {report.schema_name}: an evaluation needs rows with answers")
        rendered = render(report.digest, work_url, renderer, max_tokens=1 << 20)
        rows, examples = load_rows(work_url, report.digest), load_examples(work_url, rendered.key)
        scores = {}
        paths = {name: await server.sampler_weights(one) if one else "" for name, one in candidates.items()}
        for name, path in paths.items():
            weights = await server.service.create_sampling_client(model_path=path) if path else sampler
            scored = await score(name, weights, renderer, rows, examples, max_tokens=parameters.max_tokens, shown=8)
            scores[name] = scored.model_copy(update={"weights": path})
    return scores


async def show_scores(artifacts: RunArtifacts, scores: Mapping[str, Scores]) -> None:
    """Make a table of the scores, and one of the first answers of each candidate beside the expected answers."""
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
