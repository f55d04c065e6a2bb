"""Champions: the best weights so far under a name. A new champion is a new entry, so the history is kept."""

from __future__ import annotations

from datetime import datetime

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.events import emit_event
from pydantic import BaseModel

from tinkerflow.backend.catalog.champions import champion_key, newest_champion
from tinkerflow.backend.core.errors import ConflictError, UserError
from tinkerflow.tasks.pipelines.connection import connect
from tinkerflow.tasks.pipelines.scoring import Scores
from tinkerflow.tasks.pipelines.work import create_json, open_work, read_json


class Champion(BaseModel):
    """The best weights under a name. number: counts the champions of this name, from 1."""

    number: int
    weights: str
    state: str
    run: str
    data: str
    scores: Scores
    promoted_at: datetime


def champion(work_url: str, name: str, number: int | None = None) -> Champion | None:
    """The champion of `name`, or the one with this number. Returns None if there is none."""
    work = open_work(work_url)
    found = newest_champion(work, name) if number is None else read_json(work, champion_key(name, number))
    return None if found is None else Champion.model_validate(found)


async def check_readable(name: str, best: Champion, connection: str, base_model: str) -> None:
    """Raise UserError if the connection's key cannot read `best`, or `base_model` has another tokenizer.

    connection: a Prefect block; empty: as `connect` finds it. base_model: as in `ServerClients.base_model`. All
    projects share the names of champions, but checkpoints belong to the projects of their runs.
    """
    async with connect(connection) as server:
        from tinker import NotFoundError

        try:
            model = await server.base_model(base_model)
            await server.refuse_other_tokenizer(f"champion {name!r}", best.weights, model)
        except NotFoundError:
            raise UserError(
                f"champion {name!r} belongs to another project than this key, or {best.weights} was deleted: use its "
                "project's key, or another name for `champion`"
            ) from None


@task(name="promote", task_run_name="promote to {name}", cache_policy=NO_CACHE)
def promote(work_url: str, name: str, new: Champion) -> None:
    """Make `new` the champion of `name`, after the champion with the preceding number.

    ConflictError: another run has promoted other weights since `new` was compared with the champion.
    """
    key = champion_key(name, new.number)
    try:
        create_json(open_work(work_url), key, new.model_dump(mode="json"))
    except FileExistsError:
        present = Champion.model_validate(read_json(open_work(work_url), key))
        if present.weights != new.weights:
            raise ConflictError(f"champion {name!r}: run {present.run} was promoted meanwhile; compare again") from None
    if TaskRunContext.get() is not None:  # an event for automations
        resource = {"prefect.resource.id": f"tinkerflow.champion.{name}", "prefect.resource.name": name}
        payload = {"weights": new.weights, "state": new.state, "run": new.run, "number": new.number}
        emit_event("tinkerflow.champion.promoted", resource, payload=payload)
