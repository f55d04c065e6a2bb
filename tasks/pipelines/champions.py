"""Champions: which weights are the best so far under a name. A new one is a new entry, so the history stays."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel, Field

from tinkerflow.backend.errors import ConflictError
from tinkerflow.tasks.pipelines.scoring import Scores
from tinkerflow.tasks.pipelines.work import checked_name, create_json, open_work, read_json


class Champion(BaseModel):
    """The best weights under a name. number: how many there were, this one included."""

    number: int
    weights: str
    state: str
    run: str
    data: str
    scores: Scores
    promoted_at: datetime = Field(default_factory=lambda: datetime.now(UTC))


def champion(work_url: str, name: str) -> Champion | None:
    """The champion of `name`, None when nothing was promoted yet."""
    work = open_work(work_url)
    numbers = sorted(work.children(_folder(name)))
    found = read_json(work, f"{_folder(name)}/{numbers[-1]}") if numbers else None
    return None if found is None else Champion.model_validate(found)


@task(name="promote", task_run_name="promote to {name}", cache_policy=NO_CACHE)
def promote(work_url: str, name: str, new: Champion) -> None:
    """Make `new` the champion of `name`, after the one with the number before its own.

    ConflictError when another run has promoted its own meanwhile: what was compared is not the champion any more. The
    same weights again are no conflict.
    """
    key = f"{_folder(name)}/{new.number:08d}.json"
    try:
        create_json(open_work(work_url), key, new.model_dump(mode="json"))
    except FileExistsError:
        there = Champion.model_validate(read_json(open_work(work_url), key))
        if there.weights != new.weights:
            raise ConflictError(f"champion {name!r}: run {there.run} was promoted meanwhile; compare again") from None


def _folder(name: str) -> str:
    return f"champions/{checked_name('champion', name)}"
