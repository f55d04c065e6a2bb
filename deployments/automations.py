"""The automations of automations.yaml in a Prefect server. One of them marks killed runs of pipelines as crashed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from prefect.events.schemas.automations import AutomationCore


def automations() -> list[AutomationCore]:
    from prefect.events.schemas.automations import AutomationCore

    file = resources.files("tinkerflow.deployments") / "automations.yaml"
    return [AutomationCore.model_validate(one) for one in yaml.safe_load(file.read_text("utf-8"))["automations"]]


async def ensure_automations(wanted: Sequence[AutomationCore]) -> list[str]:
    """Create the automations whose names are new to Prefect. Returns the names of the created ones."""
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        missing = [one for one in wanted if not await client.read_automations_by_name(name=one.name)]
        for one in missing:
            await client.create_automation(one)
    return [one.name for one in missing]
