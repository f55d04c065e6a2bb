"""`/training_runs`: the table of runs, one run with its curves, and runs side by side (`/compare`)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Query
from fastapi.responses import Response

from tinkerflow.api.call import PageOffset
from tinkerflow.api.console.curves import AXES, SMOOTHINGS, AsChartView, ChartView, RunCurves, charts, steps_by_place
from tinkerflow.api.console.pages.events import events_of
from tinkerflow.api.console.prefect_links import PrefectLink, prefect_link, prefect_pages
from tinkerflow.api.console.render import NONE, number
from tinkerflow.api.console.samples import shown, tokenizer_of
from tinkerflow.api.console.upcoming import upcoming
from tinkerflow.api.console.visit import Visit, Visiting, page_router
from tinkerflow.api.endpoints.targets import champions_of
from tinkerflow.backend.catalog.model_card import public_name
from tinkerflow.backend.core.errors import StoreError, UserError
from tinkerflow.backend.core.plot import LINES
from tinkerflow.backend.journal import Curve, ModelView, RunQuery
from tinkerflow.backend.journal.tables import TAKES_WORK
from tinkerflow.backend.spec.outliers import COLUMNS, BlamedRow, cells, remedy
from tinkerflow.backend.spec.run_metadata import DEFAULTS, FLOW_RUN

PAGE = 50
_OF_A_RUN = 100  # most checkpoints shown for a run
_LONG = 1024  # characters of a text in a URL
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
Runs = Annotated[list[str], Query(max_length=LINES)]
Picked = Annotated[list[str], Query(max_length=PAGE)]
Text = Annotated[str, Query(max_length=_LONG)]
ComparedRun = tuple[ModelView, str, Curve]  # a run, its name (or its id), and its curve
router = page_router()


@router.get("/training_runs")
async def runs_page(
    visit: Visiting,
    q: Text = "",
    columns: Text = "",
    sort: Text = "created",
    up: bool = False,
    group: Text = "",
    archived: bool = False,
    offset: PageOffset = 0,
) -> Response:
    """The table of training runs.

    q: the search. columns: additional columns, separated by commas. sort, group: names of columns. up: sort ascending.
    """
    further = tuple(dict.fromkeys(name for name in (part.strip() for part in columns.split(",")) if name))
    query = RunQuery(q, archived, None, further, sort, not up, group)

    def read() -> dict[str, object]:
        table = visit.journal.run_table
        page = table.page(visit.owner, query, limit=PAGE, offset=offset)
        keys = {key for row in page.rows for key in row.model.user_metadata}
        known = sorted(keys | set(table.names_of_columns([row.model.id for row in page.rows])))
        return {"runs": page, "known": known, "size": page.step(PAGE)}

    # Links omit default values, which keeps them short.
    now = {"q": q, "columns": ",".join(further), "group": group, "archived": "yes" if archived else ""}
    ordered = {"sort": "" if sort == "created" else sort, "up": "yes" if up else ""}

    def link(**changed: str) -> str:
        given = {name: value for name, value in (now | ordered | changed).items() if value}
        return f"/training_runs?{urlencode(given)}" if given else "/training_runs"

    def by(column: str) -> str:
        """The link that sorts by a column, or reverses the order if the table is already sorted by it."""
        turned = column == query.sort and query.descending
        return link(sort="" if column == "created" else column, up="yes" if turned else "")

    values = await asyncio.to_thread(read)
    return visit.page("runs.html", query=query, link=link, by=by, offset=offset, most=LINES, **values)


@router.post("/training_runs/archive")
async def archive_runs(visit: Visiting, archived: bool = True) -> Response:
    """Archive the picked runs (fields `run`), or restore them."""
    await asyncio.to_thread(visit.journal.run_table.archive, _picked(visit), visit.call.owner, archived=archived)
    return visit.go("/training_runs" if archived else "/training_runs?archived=yes")


@router.get("/training_runs/delete")
async def confirm_deletion_page(visit: Visiting, run: Picked) -> Response:
    """The contents that would be lost with the picked runs, and the button that deletes the runs."""
    call, journal = visit.call, visit.journal

    def read() -> dict[str, object]:
        lost = journal.run_deletions.contents(dict.fromkeys(run), call.owner)
        champions = champions_of(call, *(path for one in lost for path in one.paths))
        return {"lost": lost, "names": [journal.models.label(one.id) for one in lost], "champions": champions}

    return visit.page("delete_runs.html", **await asyncio.to_thread(read))


@router.post("/training_runs/delete")
async def delete_runs(visit: Visiting) -> Response:
    """Delete the picked runs (fields `run`)."""
    call = visit.call
    await asyncio.to_thread(visit.journal.run_deletions.delete, _picked(visit), call.owner, call.key_id)
    return visit.go("/training_runs?archived=yes")


def _picked(visit: Visit) -> list[str]:
    """The runs that were picked in a page of the table. UserError: a page has fewer runs."""
    runs = visit.fields.every("run")
    if len(runs) > PAGE:
        raise UserError(f"run is given {len(runs)} times: must be at most {PAGE}")
    return runs


@router.get("/training_runs/{run_id}")
async def run_page(run_id: str, visit: Visiting, view: AsChartView) -> Response:
    ((run, name, _),), values = await _curves(visit, [run_id], view)
    checkpoints = await asyncio.to_thread(visit.journal.checkpoints.page, visit.owner, run_id=run_id, limit=_OF_A_RUN)
    events = await asyncio.to_thread(events_of, visit, run)
    return visit.page(
        "run.html",
        run=run,
        name=name,
        checkpoints=checkpoints,
        samples=await shown(visit, run_id=run_id),
        examined=await _examined(visit, run),
        columns=COLUMNS,
        branch=_branch,
        prefect_links=await asyncio.to_thread(_prefect_links, visit, run),
        **await asyncio.to_thread(_lineage, visit, run),
        **events,
        **values,
    )


def _prefect_links(visit: Visit, run: ModelView) -> list[tuple[str, PrefectLink]]:
    """The labeled links to a run's flow runs: the pipeline that trains it, and the engine's mirror."""
    of_pipeline = _UUID.fullmatch(run.user_metadata.get(FLOW_RUN, ""))
    flow_runs = {"flow run of the pipeline": of_pipeline and of_pipeline[0], "flow run": run.flow_run}
    known = [(text, flow_run) for text, flow_run in flow_runs.items() if flow_run]
    pages = prefect_pages(visit.call.services.settings) if known else None
    links = ((text, prefect_link(visit, pages, flow_run)) for text, flow_run in known)
    return [(text, link) for text, link in links if link is not None]


def _lineage(visit: Visit, run: ModelView) -> dict[str, object]:
    """A run's ancestors and descendants, the runs that it repeats or forks, if any, and its other metadata.

    `defaults` holds the pipeline's parameters that are at their default values.
    """
    ancestries, metadata = visit.journal.ancestries, {name: value for name, value in run.user_metadata.items() if value}
    if "planned_steps" in metadata:
        metadata.pop("step", "")  # the step at which the pipeline opened the run, not the current one
    # Forks made by earlier releases have no origin, so their metadata is shown instead.
    repeats, forked, _ = (metadata.pop(key, "") for key in ("rerun_of", "fork_of", FLOW_RUN))
    before, after = ancestries.before(run.id, visit.owner), ancestries.after(run.id, visit.owner)
    names = metadata.pop(DEFAULTS, "").split()
    defaults = {name: metadata.pop(name) for name in list(metadata) if name in names}
    shown = {"metadata": metadata, "defaults": defaults}
    return {"before": before, "after": after, "repeats": repeats, "forked": forked, **shown}


def _branch(path: str) -> str:
    """Where a run branched off another one, from the path that it started from: `@3` is the state after step 3."""
    return path.removeprefix("tinker://").partition("/")[2].replace("weights/@", "@")


async def _examined(visit: Visit, run: ModelView) -> list[tuple[int, str, list[tuple[str, ...]]]]:
    """The examined steps of a run: the step, the command that leaves out its worst row, and the cells of its rows.

    Tokens of the data are shown only to the project that owns the run.
    """
    if not run.history:
        return []
    try:
        steps = await asyncio.to_thread(visit.call.services.store.histories.blames, run.id)
    except StoreError:  # the rest of the page can still be shown
        return []
    own = steps and run.owner == visit.identity.owner
    tokenizer = await tokenizer_of(visit, run.base_model) if own else None
    name = None if tokenizer is None else tokenizer.token_text

    def texts(row: BlamedRow) -> tuple[str, ...]:
        return cells(row if own else replace(row, worst=()), name)

    return [(step, remedy(run.id, step, rows[0]), [texts(row) for row in rows]) for step, rows in steps.items()]


@router.get("/compare")
async def compare_page(visit: Visiting, view: AsChartView, run: Runs = []) -> Response:  # noqa: B006  a query's default
    """Runs side by side: their curves in the same charts, the first steps that differ, and their settings."""
    runs = list(dict.fromkeys(run))
    compared, values = await _curves(visit, runs, view)  # also checks that the visitor may see the runs
    partings = [await asyncio.to_thread(visit.journal.curves.parting, other, runs[0]) for other in runs[1:]]
    settings = _settings(compared)
    return visit.page("compare.html", most=LINES, settings=settings, partings=[None, *partings], **values)


@router.get("/curves")
async def curves_part(visit: Visiting, view: AsChartView, run: Runs, seen: str = "") -> Response:
    """The curves of runs, as a fragment that updates the page; 204 if nothing changed since `seen`."""
    if seen and seen == await asyncio.to_thread(_state, visit, run):
        return Response(status_code=204)
    _, values = await _curves(visit, run, view)
    return visit.page("curves.html", **values)


async def _curves(visit: Visit, runs: Sequence[str], view: ChartView) -> tuple[list[ComparedRun], dict[str, object]]:
    """The runs, and the values for curves.html and the pages that include it."""

    def read() -> tuple[list[ComparedRun], dict[str, object]]:
        journal = visit.journal
        state = _state(visit, runs)  # read first, so that later changes count as new
        models = [journal.models.get(run, visit.owner) for run in runs]
        given = [journal.models.label(run) or run for run in runs]
        names = [name if given.count(name) == 1 else f"{name} ({run})" for run, name in zip(runs, given, strict=True)]
        found = [
            RunCurves(
                "value" if len(runs) == 1 else name,
                model.created_at,
                journal.curves.of_run(model.id, visit.owner, steps=view.steps),
                journal.run_metrics.of_run(model.id, visit.owner, steps=view.steps),
            )
            for model, name in zip(models, names, strict=True)
        ]
        compared = [(model, name, run.curve) for model, name, run in zip(models, names, found, strict=True)]
        return compared, {
            "view": view,
            "axes": AXES,
            "smoothings": SMOOTHINGS,
            "models": models,
            "names": names,
            "compared": compared,
            "rewards": [run.reward for run in found],
            "state": state,
            "going": any(model.state in TAKES_WORK for model in models),
            "measured": any(run.curve.points or run.metrics for run in found),
            "charts": charts(found, view),
            "upcoming": _upcoming(visit, models[0], found[0].curve) if len(models) == 1 else "",
            "places": steps_by_place(found, view),
        }

    if len(runs) > LINES:
        raise UserError(f"run is given {len(runs)} times: must be at most {LINES}")
    return await asyncio.to_thread(read)


def _upcoming(visit: Visit, run: ModelView, curve: Curve) -> str:
    services = visit.call.services
    if run.state not in TAKES_WORK:
        return ""
    return upcoming(visit.journal, run, curve, services.clock.now(), services.settings.snapshot_steps)


def _settings(compared: Sequence[ComparedRun]) -> Mapping[str, Sequence[str]]:
    """The settings of runs: for each setting's name, one text per run."""
    models, curves = [model for model, _, _ in compared], [curve for _, _, curve in compared]
    trained = ("attention", "MLP", "unembedding")
    rows: dict[str, list[str]] = {
        "Base model": [public_name(model.base_model) for model in models],
        "Rank": [number(model.rank) if model.rank else "all parameters" for model in models],
        "Trained": [
            ", ".join(
                name
                for name, trains in zip(trained, (model.train_attn, model.train_mlp, model.train_unembed), strict=True)
                if trains
            )
            for model in models
        ],
        "Optimizer": [model.optimizer for model in models],
        "Seed": [NONE if model.seed is None else str(model.seed) for model in models],
        "Learning rate, first": [number(curve.points[0].learning_rate) if curve.points else NONE for curve in curves],
    }
    keys = sorted({key for model in models for key in model.user_metadata} - {DEFAULTS, FLOW_RUN})
    return rows | {key: [model.user_metadata.get(key, NONE) for model in models] for key in keys}


def _state(visit: Visit, runs: Sequence[str]) -> str:
    """A string that changes whenever there is something new to show."""
    journal = visit.journal
    models = (journal.models.get(run, visit.owner) for run in runs)
    return ",".join(
        f"{model.state}{model.paused or ''}{journal.curves.last_seq(model.id, None)}"
        f"-{journal.run_metrics.number(model.id)}"
        for model in models
    )
