"""Names of hosts in requests and URLs."""

from __future__ import annotations

import ipaddress
import re

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?")


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(authority: str) -> str:
    """The host of `host`, `host:port` or `[v6]:port`, in lower case and without a trailing dot; empty if invalid."""
    match = _AUTHORITY.fullmatch(authority)
    return "" if match is None else match[1].strip("[]").rstrip(".").lower()


def url_of(host: str, port: int) -> str:
    """The URL of an HTTP server, with an IPv6 address in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
