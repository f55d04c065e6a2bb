"""Addresses and secrets of worker groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.joining import make_secret, parse_address, read_secret


def test_addresses_are_hosts_with_ports() -> None:
    assert parse_address("node-1.example:7000") == ("node-1.example", 7000)
    assert parse_address("10.0.0.1:0") == ("10.0.0.1", 0)
    assert parse_address("[::1]:8500") == ("::1", 8500)
    assert parse_address("[2001:db8::a:1]:7000") == ("2001:db8::a:1", 7000)


NO_PORT = ["", "7000", ":7000", "host", "host:", "host:x", "host:70000", "host:²", "[::1]", "[::1]7000", "[::1]:"]
NO_HOST = [
    "::1:7000",
    "[]:7000",
    "[host]:7000",
    "[::g]:7000",
    "[10.0.0.1]:7000",
    "[fe80::1%eth0]:7000",
    "[::1:7000",
    "a..b:7000",
    "x" * 70 + ":7000",
    "é..b:7000",
    "a\0b:7000",
]


@pytest.mark.parametrize("text", NO_PORT + NO_HOST)
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        parse_address(text)


def test_secret_is_created_once_and_only_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new" / "group.secret"
    secret = make_secret(path)
    assert len(secret) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_secret(path) == read_secret(path) == secret
    assert make_secret(tmp_path / "other") != secret


def test_invalid_secret_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent'\): copy the file from the driver's host"):
        read_secret(tmp_path / "absent")
    (tmp_path / "short").write_text(" 0123456789\n")
    with pytest.raises(UserError, match="short has 10 bytes: must have at least 16"):
        read_secret(tmp_path / "short")
