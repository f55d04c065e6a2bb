"""Names and addresses of hosts in requests, URLs and sockets."""

from __future__ import annotations

import ipaddress
import re
import socket

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


def can_be_looked_up(host: str) -> bool:
    """Whether sockets accept a host's name or address. For others, they raise errors that are no OSError."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return "\0" not in host


def family_of(host: str) -> socket.AddressFamily:
    """The family of a socket that listens at `host`: IPv6 for an IPv6 address, IPv4 for an IPv4 address or a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def with_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(host: str, port: int) -> str:
    """The URL of an HTTP server."""
    return f"http://{with_port(host, port)}"
