"""Saved checkpoints as Prefect assets, with the base model, the checkpoint and the data that they come from.

Prefect's `materialize` emits such events for a task that Prefect runs. Operations are only mirrored, so their events
are made here, in the same form and with the same public classes.
"""

from __future__ import annotations

import re
from uuid import NAMESPACE_URL, uuid5

from prefect.assets import Asset, AssetProperties
from prefect.context import AssetContext
from prefect.events import Event, RelatedResource, Resource

from tinkerflow.backend.core.ids import hub_name
from tinkerflow.backend.journal import CheckpointSaved, ModelView

_MOST_KEY = 512  # characters of an asset's key


def asset_events(run: ModelView, saved: CheckpointSaved, console: str) -> list[Event]:
    """The events of a checkpoint that a run saved: a reference to each upstream asset, and the materialization.

    console: the URL of our console. A repeated materialization has the same id, so Prefect keeps only one.
    """
    page = f"{console}/checkpoints/{saved.path.removeprefix('tinker://')}" if console else None
    properties = AssetProperties(name=saved.name, url=page, owners=[run.owner])
    upstream = _upstream(run)
    references = [
        Event(event="prefect.asset.referenced", resource=Resource(AssetContext.asset_as_resource(one)))
        for one in upstream
    ]
    related = [*map(AssetContext.asset_as_related, upstream), AssetContext.related_materialized_by("tinkerflow")]
    materialized = Event(
        id=uuid5(NAMESPACE_URL, f"{saved.path} {saved.attempt}"),
        event="prefect.asset.materialization.succeeded",
        resource=Resource(AssetContext.asset_as_resource(Asset(key=_key(saved.path), properties=properties))),
        related=[RelatedResource(one) for one in related],
        payload={"kind": saved.kind, "step": saved.step, "bytes": saved.size_bytes, **saved.user_metadata},
    )
    return [*references, materialized]


def _upstream(run: ModelView) -> list[Asset]:
    """The base model, the checkpoint that the run began from, and the data if the run names or keeps them."""
    hub = hub_name(run.base_model)
    base = f"file://{run.base_model}" if hub is None else f"https://huggingface.co/{hub[0]}"
    found = [Asset(key=_key(base), properties=AssetProperties(name=run.base_model))]
    if run.origin is not None:
        found.append(Asset(key=_key(run.origin)))
    digest = run.user_metadata.get("data")
    if run.history or digest:
        properties = AssetProperties(name=f"data of {run.id}", description=digest)
        found.append(Asset(key=_key(f"tinker://{run.id}/data"), properties=properties))
    return found


def _key(text: str) -> str:
    """The text as an asset's key: without characters that keys may not contain, and cut to _MOST_KEY."""
    return re.sub(r"[^A-Za-z0-9._~:/@+=,-]", "-", text)[:_MOST_KEY]
