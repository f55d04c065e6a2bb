"""The address of a group's driver, and the secret that authenticates the driver and its hosts to each other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from tinkerflow.backend.core.disk import PRIVATE_FILE, make_folder
from tinkerflow.backend.core.errors import UserError

_LEAST_BYTES = 16


def parse_address(text: str) -> tuple[str, int]:
    """The host (a name or an IPv4 address) and the port of "host:port". ValueError: anything else."""
    host, _, port = text.rpartition(":")
    if not host or ":" in host or not (port.isascii() and port.isdigit() and len(port) < 6) or int(port) > 65535:
        raise ValueError(f"{text!r} must be HOST:PORT, with a name or an IPv4 address and a port of 0 to 65535")
    return host, int(port)


def read_secret(path: Path) -> bytes:
    """The group's secret: the file's content without surrounding whitespace. UserError: unreadable or too short."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"the group's secret cannot be read ({error}): copy the file from the driver's host") from error
    if len(secret) < _LEAST_BYTES:
        raise UserError(f"{path} has {len(secret)} bytes: must have at least {_LEAST_BYTES}, as a group's secret")
    return secret


def make_secret(path: Path) -> bytes:
    """The group's secret. A missing file is created, readable by its owner only."""
    make_folder(path.parent)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    except FileExistsError:
        return read_secret(path)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return read_secret(path)
