"""The pipeline `evaluate`: weights against others, or against the champion of a name, on rows with answers."""

from __future__ import annotations

from collections.abc import Mapping

from prefect import flow
from pydantic import BaseModel

from tinkerflow.backend.errors import UserError
from tinkerflow.tasks.pipelines.board import Board
from tinkerflow.tasks.pipelines.champions import champion
from tinkerflow.tasks.pipelines.connection import Server, connect
from tinkerflow.tasks.pipelines.data import DataSource, check_data, load_rows
from tinkerflow.tasks.pipelines.parameters import EvaluateParameters
from tinkerflow.tasks.pipelines.render import Format, Renderer, load_examples, render
from tinkerflow.tasks.pipelines.scoring import Scores, score
from tinkerflow.tasks.pipelines.work import default_work_url

BASE = "base model"


class Evaluated(BaseModel):
    """Scores by name: `weights`, and what it was compared with: `against`, the `champion`, or the `base model`."""

    scores: dict[str, Scores]


@flow(name="evaluate", flow_run_name="evaluate {parameters.name}")
async def evaluate(parameters: EvaluateParameters) -> Evaluated:
    """Score the weights and what they are compared with, and show a table."""
    work_url = parameters.work or default_work_url()
    board = Board(f"evaluate-{parameters.name}")
    best = champion(work_url, parameters.champion) if parameters.champion else None
    candidates = {
        "weights": parameters.weights,
        "against": parameters.against,
        "champion": best.weights if best else "",
    }
    given = {name: path for name, path in candidates.items() if path}
    async with connect(parameters.connection) as server:
        base = await server.base_model(parameters.base_model)
        scores = await score_all(
            server, base, given | {BASE: ""}, parameters.data, work_url, parameters.format, parameters.max_tokens
        )
    await show_scores(board, scores)
    return Evaluated(scores=scores)


async def score_all(
    server: Server,
    base_model: str,
    candidates: Mapping[str, str],
    source: DataSource,
    work_url: str,
    format_: Format,
    max_tokens: int,
) -> dict[str, Scores]:
    """Scores of each of `candidates` (name -> path of its weights, empty: the base model) on the same rows."""
    sampler = await server.service.create_sampling_client(base_model=base_model)
    renderer = Renderer(sampler.get_tokenizer(), format_)
    report = check_data(source, work_url, renderer.special_tokens)
    if report.schema_name not in ("chat", "prompt_completion"):
        raise UserError(f"data: schema {report.schema_name}: an evaluation needs rows with answers")
    rendered = render(report.digest, work_url, renderer, max_tokens=1 << 20)
    rows, examples = load_rows(work_url, report.digest), load_examples(work_url, rendered.key)
    scores = {}
    for name, path in candidates.items():
        weights = await server.service.create_sampling_client(model_path=path) if path else sampler
        scores[name] = await score(name, weights, renderer, rows, examples, max_tokens=max_tokens, shown=8)
    return scores


async def show_scores(board: Board, scores: Mapping[str, Scores]) -> None:
    """Scores as a table, and the first answers of each beside what was wanted."""
    rows = [
        {"of": name, "loss": one.loss, "exact match": one.exact_match, "rows": one.rows} for name, one in scores.items()
    ]
    await board.table("evaluation", rows, "scores")
    first = next(iter(scores.values()))
    answers = [
        {"prompt": sample.prompt, "wanted": sample.wanted} | {name: s.samples[i].answer for name, s in scores.items()}
        for i, sample in enumerate(first.samples)
    ]
    await board.table("answers", answers, "greedy answers")
