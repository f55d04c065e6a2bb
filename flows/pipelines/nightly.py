"""The pipeline `nightly`: check the data, train, evaluate, and promote what was made only if it is better."""

from __future__ import annotations

from typing import Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Cancelled
from pydantic import BaseModel

from tinkerflow.flows.pipelines.evaluate import BASE, score_all, show_scores
from tinkerflow.flows.pipelines.sft import fine_tune
from tinkerflow.flows.pipelines.training import Trained
from tinkerflow.tasks.pipelines.board import Board, cell
from tinkerflow.tasks.pipelines.champions import Champion, champion, promote
from tinkerflow.tasks.pipelines.connection import connect
from tinkerflow.tasks.pipelines.control import StoppedError
from tinkerflow.tasks.pipelines.data import DataCheckError
from tinkerflow.tasks.pipelines.parameters import NightlyParameters
from tinkerflow.tasks.pipelines.scoring import Scores
from tinkerflow.tasks.pipelines.work import default_work_url

PIPELINE = "nightly"


class Night(BaseModel):
    """What a night came to."""

    outcome: Literal["promoted", "kept"]
    weights: str
    scores: dict[str, Scores]


@flow(name=PIPELINE, flow_run_name="nightly {parameters.name}")
async def nightly(parameters: NightlyParameters) -> Night | State[None]:
    """Train, and promote the result when it beats the champion, or the base model when there is none.

    Data that does not pass its check fails the run before anything is trained; the champion stays, and the artifact
    `report` says so.
    """
    work_url = parameters.work or default_work_url()
    board = Board(f"{PIPELINE}-{parameters.name}")
    before = champion(work_url, parameters.champion)
    try:
        trained = await fine_tune(parameters, pipeline=PIPELINE)
    except StoppedError as stopped:
        return Cancelled(message=str(stopped))
    except DataCheckError as error:
        await board.data({"data": error.report})
        await board.text("report", _page(parameters.champion, f"data check failed: {error}", before, before), "report")
        raise
    scores = await _evaluate(parameters, work_url, trained, before)
    await show_scores(board, scores)
    new, old = scores["new"], scores.get("champion", scores[BASE])
    better = new.beats(old, parameters.metric, parameters.margin)
    if better:
        after = Champion(
            number=before.number + 1 if before else 1,
            weights=trained.weights,
            state=trained.state,
            run=trained.run,
            data=trained.data,
            scores=new,
        )
        promote(work_url, parameters.champion, after)
    compared = (
        f"{parameters.metric} {getattr(new, parameters.metric):.4g} against {getattr(old, parameters.metric):.4g}"
    )
    verdict = f"{'promoted' if better else 'kept the champion'}: {compared}, margin {parameters.margin:g}"
    page = _page(parameters.champion, verdict, before, after if better else before)
    await board.text("report", page, "report")
    return Night(outcome="promoted" if better else "kept", weights=trained.weights, scores=scores)


async def _evaluate(
    parameters: NightlyParameters, work_url: str, trained: Trained, before: Champion | None
) -> dict[str, Scores]:
    candidates = {"new": trained.weights} | ({"champion": before.weights} if before else {}) | {BASE: ""}
    async with connect(parameters.connection) as server:
        base = await server.base_model(parameters.model.base_model)
        return await score_all(
            server,
            base,
            candidates,
            parameters.held_out,
            work_url,
            parameters.model.format,
            parameters.samples.max_tokens,
        )


def _page(name: str, verdict: str, before: Champion | None, after: Champion | None) -> str:
    """What happened to the champion, as Markdown."""
    lines = [
        f"# Champion `{name}`: {cell(verdict)}",
        "",
        "| | number | weights | run | data |",
        "|---|---|---|---|---|",
    ]
    for when, one in (("before", before), ("now", after)):
        facts = f"{one.number} | `{one.weights}` | `{one.run}` | `{one.data}`" if one else "none | | |"
        lines.append(f"| {when} | {facts} |")
    return "\n".join(lines)
