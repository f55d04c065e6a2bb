"""The pipeline `nightly`: check the data, train, evaluate, and promote the result only if it is better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from prefect import flow
from pydantic import BaseModel

from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.flows.pipelines.evaluate import (
    BASE,
    answers_by_prompt,
    on_held_out,
    refuse_unscorable,
    score_all,
    show_scores,
)
from tinkerflow.flows.pipelines.fine_tuning import cancellable
from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.flows.pipelines.sft import fine_tune
from tinkerflow.tasks.pipelines.approval import approval
from tinkerflow.tasks.pipelines.artifacts import RunArtifacts, cell, log_line
from tinkerflow.tasks.pipelines.champions import Champion, champion, check_readable, promote
from tinkerflow.tasks.pipelines.data import DataCheckError
from tinkerflow.tasks.pipelines.parameters import NightlyParameters
from tinkerflow.tasks.pipelines.preparation import run_name
from tinkerflow.tasks.pipelines.scoring import Scores


class NightlyResult(BaseModel):
    """The outcome, the new sampler weights, and the scores of all candidates by name."""

    outcome: Literal["promoted", "kept"]
    weights: str
    scores: dict[str, Scores]


@flow(name="nightly", flow_run_name="nightly {parameters.name}")
@cancellable
async def nightly(parameters: NightlyParameters) -> NightlyResult:
    """Train, and promote the result if it beats the champion, or the base model if there is no champion.

    Data that fails its check fails the run before training. The champion stays, and the artifact `report` contains the
    reason. A champion that the key cannot read also fails the run before training, and so does a reward that cannot be
    imported. If a process of this run promoted the champion and was then killed, the result is that champion, and no
    one is asked again.
    """
    refuse_unscorable(parameters)
    work_url = parameters.work_url
    artifacts = RunArtifacts(f"nightly-{parameters.name}")
    promoted, before = None, champion(work_url, parameters.champion)
    if before is not None and before.run == run_name(parameters):
        promoted, before = before, champion(work_url, parameters.champion, before.number - 1)
    if before is not None:
        await check_readable(parameters.champion, before, parameters.connection, parameters.model.base_model)
    try:
        trained = await fine_tune(parameters)
    except DataCheckError as error:
        await artifacts.data({"data": error.report})
        page = _page(parameters.champion, f"data check failed: {error}", before, before)
        await artifacts.text("report", page, "report")
        raise
    weights = promoted.weights if promoted else trained.weights
    candidates = {"new": weights} | ({"champion": before.weights} if before else {}) | {BASE: ""}
    scores = await score_all(on_held_out(parameters), candidates)
    await show_scores(artifacts, scores)
    new, old = scores["new"], scores.get("champion", scores[BASE])
    metric = parameters.metric
    compared = f"{metric} {new.value(metric):.4g} against {old.value(metric):.4g}"
    better, answered = promoted is not None or new.beats(old, metric, parameters.margin), ""
    if better and promoted is None and parameters.approval_hours:
        question = f"Promote to champion `{parameters.champion}`: {cell(compared)}?"
        better, answered = await _approved(question, scores, parameters.approval_hours)
    if better:
        promoted = promoted or Champion(
            number=before.number + 1 if before else 1,
            weights=weights,
            state=trained.state,
            run=trained.run,
            data=trained.data,
            scores=new,
            promoted_at=SystemClock().now(),
        )
        promote(work_url, parameters.champion, promoted)  # repeated after a kill, which may have lost the event
    verdict = f"{'promoted' if better else 'kept the champion'}: {compared}, margin {parameters.margin:g}{answered}"
    log_line(verdict)
    page = _page(parameters.champion, verdict, before, promoted or before)
    await artifacts.text("report", page, "report")
    return NightlyResult(outcome="promoted" if better else "kept", weights=weights, scores=scores)


async def _approved(question: str, scores: Mapping[str, Scores], hours: float) -> tuple[bool, str]:
    """Whether a person approves, and the report's line about it. The form shows all candidates' first answers."""
    rows = [" | ".join(cell(answers[name]) for name in ("prompt", *scores)) for answers in answers_by_prompt(scores)]
    table = [" | ".join(("prompt", *scores)), "|".join(["---"] * (len(scores) + 1)), *rows]
    answer = await approval("\n".join([question, "", *(f"| {row} |" for row in table)]), hours)
    if answer is None:
        return False, f"; no one approved it within {hours:g} hours"
    said = "approved" if answer.approve else "refused"
    return answer.approve, f"; {said} by a person{': ' if answer.reason else ''}{answer.reason}"


def _page(name: str, verdict: str, before: Champion | None, after: Champion | None) -> str:
    """A report on the champion `name`, as Markdown."""
    lines = [
        f"# Champion `{name}`: {cell(verdict)}",
        "",
        "| | number | weights | run | data |",
        "|---|---|---|---|---|",
    ]
    for when, held in (("before", before), ("now", after)):
        facts = f"{held.number} | `{held.weights}` | `{held.run}` | `{held.data}`" if held else "none | | |"
        lines.append(f"| {when} | {facts} |")
    return "\n".join(lines)


PIPELINE = Pipeline(nightly, NightlyParameters, deployment="every-night", cron="0 2 * * *")
