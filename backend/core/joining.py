"""The address of a group's driver, and the secret that authenticates the driver and its hosts to each other."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from pathlib import Path

from tinkerflow.backend.core.disk import PRIVATE_FILE, make_folder
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.hosts import can_be_looked_up

_LEAST_BYTES = 16
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+)):([0-9]{1,5})")


def parse_address(text: str) -> tuple[str, int]:
    """The host and the port of "host:port" or "[v6]:port". The brackets of an IPv6 address are removed.

    ValueError: anything else.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65535 or not (_is_ipv6(match[1]) if match[1] else can_be_looked_up(match[2])):
        rule = "with a name, an IPv4 address or an IPv6 address in brackets, and a port of 0 to 65535"
        raise ValueError(f"{text!r} must be HOST:PORT, {rule}")
    return match[1] or match[2], int(match[3])


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


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
