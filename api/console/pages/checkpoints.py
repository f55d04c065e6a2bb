"""`/checkpoints`: the saved checkpoints, and one checkpoint with its lineage and the forms that change it."""

from __future__ import annotations

import asyncio
import re

from fastapi.responses import Response

from tinkerflow.api.call import PageOffset
from tinkerflow.api.checkpoints import archive_redirect
from tinkerflow.api.console.visit import Visit, Visiting, page_router
from tinkerflow.api.endpoints.targets import champions_of
from tinkerflow.backend.catalog.card import TrainedData, trained_data
from tinkerflow.backend.core.errors import NotFoundError, StoreError, UserError
from tinkerflow.backend.journal import CheckpointKind, CheckpointView, ModelView
from tinkerflow.backend.store import CheckpointPath

PAGE = 50
_MOST_STEPS = 1000  # requests of a run; longer histories are not read for a page
_ONE = "/checkpoints/{run_id}/{kind}/{name}"
_TTL = re.compile(r"(\d+(?:\.\d+)?)\s*([hd])")
_UNITS = {"h": 3600.0, "d": 86400.0}
router = page_router()


@router.get("/checkpoints")
async def checkpoints_page(visit: Visiting, offset: PageOffset = 0) -> Response:
    """Checkpoints, newest first."""
    page = await asyncio.to_thread(visit.journal.checkpoints.page, visit.owner, limit=PAGE, offset=offset)
    return visit.page("checkpoints.html", page=page, offset=offset, size=page.step(PAGE))


@router.get(_ONE)
async def checkpoint_page(run_id: str, kind: CheckpointKind, name: str, visit: Visiting) -> Response:
    """A checkpoint of the visitor's project, or a published checkpoint."""

    def read() -> dict[str, object]:
        saved = _get(visit, run_id, kind, name)
        metadata = dict(saved.user_metadata)
        lineage = {part: metadata.pop(part, "") for part in ("data", "pipeline", "run", "code", "parent")}
        run = _run(visit, saved)
        trained = None if run is None or not run.history else _trained(visit, saved)
        if trained is not None and trained.loaded:
            lineage["parent"] = trained.loaded
        return {
            "trained": trained,
            "saved": saved,
            "own": _is_own(visit, saved),
            "run": run,
            "metadata": metadata,
            "lineage": lineage,
            "champions": champions_of(visit.call, saved.path),
            "answers": visit.journal.samples.answers_of(saved.path, visit.owner),
        }

    return visit.page("checkpoint.html", **await asyncio.to_thread(read))


@router.get(f"{_ONE}/download")
async def download(run_id: str, kind: CheckpointKind, name: str, visit: Visiting) -> Response:
    """Redirect to a tar archive of the adapter's files, through a link that is valid for an hour."""
    return await archive_redirect(visit.call, CheckpointPath(run_id, kind, name))


@router.get(f"{_ONE}/delete")
async def confirm_page(run_id: str, kind: CheckpointKind, name: str, visit: Visiting) -> Response:
    """The consequences of deleting the checkpoint, and the button that deletes it."""
    saved = await asyncio.to_thread(_own, visit, run_id, kind, name)
    return visit.page(
        "delete.html", saved=saved, champions=await asyncio.to_thread(champions_of, visit.call, saved.path)
    )


@router.post(f"{_ONE}/delete")
async def delete(run_id: str, kind: CheckpointKind, name: str, visit: Visiting) -> Response:
    path, call = CheckpointPath(run_id, kind, name), visit.call
    await asyncio.to_thread(visit.journal.checkpoints.delete, str(path), call.owner, call.key_id)
    return visit.go("/checkpoints")


@router.post(f"{_ONE}/publish")
async def publish_from_page(run_id: str, kind: CheckpointKind, name: str, visit: Visiting) -> Response:
    """Let all keys read the checkpoint, or again only its own project (field `public`: yes or no)."""
    public = visit.fields.get("public", "")
    if public not in ("yes", "no"):
        raise UserError(f"public is {public!r}: must be yes or no")
    path, call = CheckpointPath(run_id, kind, name), visit.call
    await asyncio.to_thread(visit.journal.checkpoints.publish, str(path), call.owner, public == "yes", call.key_id)
    return visit.go(f"/checkpoints/{run_id}/{kind}/{name}")


@router.post(f"{_ONE}/ttl")
async def set_ttl_from_page(run_id: str, kind: CheckpointKind, name: str, visit: Visiting) -> Response:
    """Let the checkpoint expire after the time in the field `ttl`, such as `12 h` or `30 d`. Empty means never."""
    given, seconds = visit.fields.get("ttl", "").strip(), None
    if given:
        found = _TTL.fullmatch(given)
        seconds = 0.0 if found is None else float(found[1]) * _UNITS[found[2]]
        if not 0 < seconds <= 10 * 365 * _UNITS["d"]:
            raise UserError(
                f"ttl is {given!r}: must be hours or days, such as 12 h or 30 d, at most ten years, or empty for never"
            )
    path, call = CheckpointPath(run_id, kind, name), visit.call
    await asyncio.to_thread(visit.journal.checkpoints.set_ttl, str(path), call.owner, seconds, call.key_id)
    return visit.go(f"/checkpoints/{run_id}/{kind}/{name}")


def _get(visit: Visit, run_id: str, kind: CheckpointKind, name: str) -> CheckpointView:
    return visit.journal.checkpoints.get(str(CheckpointPath(run_id, kind, name)), visit.owner)


def _own(visit: Visit, run_id: str, kind: CheckpointKind, name: str) -> CheckpointView:
    saved = _get(visit, run_id, kind, name)
    if not _is_own(visit, saved):
        raise NotFoundError(f"checkpoint {saved.path!r} does not exist in your project")
    return saved


def _is_own(visit: Visit, saved: CheckpointView) -> bool:
    return visit.call.owner == saved.owner  # as in the API, an admin's key cannot change other projects


def _trained(visit: Visit, saved: CheckpointView) -> TrainedData | None:
    """The data that trained a checkpoint, from its run's history; None if the history is too long or unreadable."""
    journal, store = visit.journal, visit.call.services.store
    try:
        if len(journal.histories.steps(saved.run_id)) > _MOST_STEPS:
            return None
        committed = store.find(saved.path)
        return None if committed is None else trained_data(journal, store, committed)
    except StoreError:
        return None


def _run(visit: Visit, saved: CheckpointView) -> ModelView | None:
    """The run that saved the checkpoint; None if another project owns the run, or the journal does not contain it."""
    try:
        return visit.journal.models.get(saved.run_id, visit.owner)
    except NotFoundError:
        return None
