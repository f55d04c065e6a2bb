"""Clients of the Prefect API check certificates according to Prefect's settings, and read the authorities once."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import certifi
import pytest
from prefect.settings import (
    PREFECT_API_SSL_CERT_FILE,
    PREFECT_API_TLS_INSECURE_SKIP_VERIFY,
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    temporary_settings,
)

from tinkerflow.flows.prefect.client import get_client
from tinkerflow.flows.prefect.connection import PrefectConnection


def made(monkeypatch: pytest.MonkeyPatch, settings: dict[Any, Any] | None = None) -> ssl.SSLContext:
    """The SSL context of a client under these settings."""
    seen: list[ssl.SSLContext] = []
    monkeypatch.setattr("prefect.get_client", lambda httpx_settings: seen.append(httpx_settings["verify"]))
    names = {PREFECT_API_URL: "https://prefect.example/api", PREFECT_API_SSL_CERT_FILE: "", **(settings or {})}
    with temporary_settings(names):
        get_client()
    return seen[0]


def test_certificate_authorities_are_reread_when_their_file_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    default = made(monkeypatch)
    assert made(monkeypatch) is default
    assert default.verify_mode is ssl.CERT_REQUIRED and default.check_hostname and default.get_ca_certs()
    file = tmp_path / "authorities.pem"
    first = Path(certifi.where()).read_text().split("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n"
    file.write_text(first)
    own = made(monkeypatch, {PREFECT_API_SSL_CERT_FILE: str(file)})
    assert made(monkeypatch, {PREFECT_API_SSL_CERT_FILE: str(file)}) is own
    assert len(own.get_ca_certs()) == 1 and own.verify_mode is ssl.CERT_REQUIRED
    file.write_text(Path(certifi.where()).read_text())
    assert len(made(monkeypatch, {PREFECT_API_SSL_CERT_FILE: str(file)}).get_ca_certs()) > 1


def test_certificate_checks_follow_the_prefect_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch, {PREFECT_API_TLS_INSECURE_SKIP_VERIFY: True})
    assert found.verify_mode is ssl.CERT_NONE and not found.check_hostname


def test_prefect_client_connects_to_the_configured_url(monkeypatch: pytest.MonkeyPatch) -> None:
    with temporary_settings({PREFECT_API_URL: "https://prefect.example/api"}):
        assert str(get_client().api_url) == "https://prefect.example/api/"


def test_csrf_tokens_are_requested_from_external_servers_only() -> None:
    connection = PrefectConnection("http://prefect.example/api")
    for credential in ("", "tinkerflow:secret"):
        with connection.settings(credential):
            assert PREFECT_CLIENT_CSRF_SUPPORT_ENABLED.value() is not bool(credential)
