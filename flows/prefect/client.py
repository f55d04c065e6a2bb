"""Clients of the Prefect API that share loaded certificates.

Each client that Prefect makes reads the file of certificate authorities. That takes 23 ms of CPU, more than the
engine's work for a step, and the engine makes a client every second or two.
"""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path

import httpx
import prefect
from prefect.client.orchestration import PrefectClient
from prefect.settings import PREFECT_API_SSL_CERT_FILE, PREFECT_API_TLS_INSECURE_SKIP_VERIFY


def get_client() -> PrefectClient:
    """A client like that of `prefect.get_client`."""
    file = PREFECT_API_SSL_CERT_FILE.value()
    changed = Path(file).stat().st_mtime_ns if file else 0
    verify = _certificates(not PREFECT_API_TLS_INSECURE_SKIP_VERIFY, file, changed)
    return prefect.get_client(httpx_settings={"verify": verify})


@cache
def _certificates(verified: bool, file: str | None, changed: int) -> ssl.SSLContext:
    """The certificates for Prefect's settings. file: of authorities. changed: its time, to notice a new file."""
    if verified and file:
        return ssl.create_default_context(cafile=file)
    return httpx.create_ssl_context(verify=verified)
