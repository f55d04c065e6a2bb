"""The server that pipelines use if no Prefect block names one."""

from __future__ import annotations

import os
from collections.abc import Collection

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.backend.service import api_answers, refuse_other_service, service_url
from tinkerflow.backend.settings import Settings

API_KEY = "tml-local"  # a key that a server on loopback without keys accepts


def server_from_environment(settings: Settings, server: str = "") -> tuple[str, str]:
    """URL and key from TINKER_BASE_URL and TINKER_API_KEY, or from the service of the data dir.

    server: a URL that replaces TINKER_BASE_URL. UserError: no service of the data dir is running, and the API at the
    settings' host and port belongs to another service; or the key cannot be sent.
    """
    url = server or os.environ.get("TINKER_BASE_URL") or _own_service(settings)
    return url, sendable_key(os.environ.get("TINKER_API_KEY", ""), "TINKER_API_KEY") or API_KEY


def sendable_key(key: str, source: str) -> str:
    """`key` without the white space around it. UserError: no header can contain it, so the SDK would retry forever.

    source: the name of the key's variable or block, for the error, which does not show the key.
    """
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{source}: must be one line of ASCII characters")
    return key


def _own_service(settings: Settings) -> str:
    url = service_url(settings)
    if api_answers(url):
        fix = f"name the service's own with --data-dir or TINKERFLOW_DATA_DIR, or set TINKER_BASE_URL={url}"
        refuse_other_service(settings, url, fix)
    return url


def offered_name(wanted: str, offered: Collection[str]) -> str:
    """The name under which a server offers `wanted`, a name or an alias. UserError: the server does not offer it."""
    from tinkerflow.backend.catalog.model_card import alias_of

    name = next((name for name in offered if alias_of(name) == wanted), wanted)
    if name not in offered:
        names = f"{', '.join(offered)}{did_you_mean(wanted, offered)}"
        raise UserError(f"model.base_model {wanted!r}: the server offers {names}")
    return name
