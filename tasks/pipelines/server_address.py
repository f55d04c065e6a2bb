"""The server that pipelines use when no Prefect block names one."""

from __future__ import annotations

import os

from tinkerflow.backend.settings import Settings

API_KEY = "tml-local"  # accepted by a server on loopback that has no keys


def server_from_environment(settings: Settings) -> tuple[str, str]:
    """URL and key from TINKER_BASE_URL and TINKER_API_KEY, or of the server on this machine."""
    url = os.environ.get("TINKER_BASE_URL") or f"http://{settings.host}:{settings.port}"
    return url, os.environ.get("TINKER_API_KEY") or API_KEY
