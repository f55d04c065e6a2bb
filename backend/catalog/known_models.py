"""The sizes of popular models, which are included in this package, so that a plan for them needs no network."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

_FILE = Path(__file__).with_name("known_models.yaml")


@cache
def known_models() -> dict[str, tuple[dict[str, Any], int]]:
    """Hub id -> the fields of config.json that determine the computation, and the published number of parameters."""
    found: dict[str, tuple[dict[str, Any], int]] = {}
    for family in yaml.safe_load(_FILE.read_text(encoding="utf-8")).values():
        for model in family["models"]:
            config = {name: value for name, value in model.items() if name not in ("names", "parameters")}
            found |= dict.fromkeys(model["names"], (family["config"] | config, model["parameters"]))
    return found
