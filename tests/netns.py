"""Hosts on one machine: network namespaces with their own names and addresses, joined by a bridge.

The bridge has the first address of the network, in the namespace of the tests.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_ENV = os.environ | {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}  # the folder of tc on Debian


class NoNetnsError(Exception):
    """This machine does not let us make namespaces. The message gives the reason."""


@dataclass(frozen=True)
class NetHost:
    """A namespace. cable: the tests' end of its only link."""

    name: str
    address: str
    cable: str

    def command(self, *words: str) -> tuple[str, ...]:
        """`words` as a command that runs on this host. Its process becomes the command's own process."""
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name)
        return ("ip", "netns", "exec", self.name, *named, *words)

    def cut(self) -> None:
        """Cut the host's link without notice to either end."""
        _ip("link", "set", self.cable, "down")

    def heal(self) -> None:
        """Restore the link."""
        _ip("link", "set", self.cable, "up")

    def narrow(self) -> None:
        """Limit traffic to the host to 256 kbit/s, and drop packets beyond it. NoNetnsError: the kernel cannot."""
        limits = ("rate", "256kbit", "burst", "1600", "limit", "1600")
        _run(("tc", "qdisc", "add", "dev", self.cable, "root", "tbf", *limits))

    def dropped(self) -> int:
        """The number of packets to the host that were dropped since `narrow`."""
        told = _run(("tc", "-s", "qdisc", "show", "dev", self.cable))
        return sum(map(int, re.findall(r"dropped (\d+)", told)))


@dataclass(frozen=True)
class Network:
    """Hosts that reach each other, and the tests at `address`."""

    address: str
    hosts: tuple[NetHost, ...]


@contextmanager
def network(count: int) -> Iterator[Network]:
    """Make a network of `count` hosts for the block, and remove it afterwards. NoNetnsError: no network can be made."""
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        raise NoNetnsError(f"no {missing[0]} command" if missing else "not root")
    # 198.18.0.0/15 is reserved for network benchmarks (RFC 2544), so no real network uses it.
    net, tag = f"198.{random.choice((18, 19))}.{random.randrange(256)}", f"tf{os.getpid():x}"
    bridge = f"{tag}b"
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_quietly, "link", "del", bridge)
        _ip("addr", "add", f"{net}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        hosts = []
        for i in range(count):
            host = NetHost(f"{tag}h{i}", f"{net}.{10 + i}", f"{tag}v{i}")
            hosts.append(host)
            etc = Path("/etc/netns", host.name)  # `ip netns exec` mounts these files over those of /etc
            etc.mkdir(parents=True)
            stack.callback(shutil.rmtree, etc, ignore_errors=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{host.address} {host.name}\n")
            _ip("netns", "add", host.name)
            stack.callback(_quietly, "netns", "del", host.name)
            _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            stack.callback(_quietly, "link", "del", host.cable)
            _ip("link", "set", host.cable, "master", bridge, "up")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _check(hosts[0], hosts[-1])
        yield Network(f"{net}.1", tuple(hosts))


def _check(one: NetHost, other: NetHost) -> None:
    """Connect two hosts, because a firewall of this machine may block traffic over a bridge. NoNetnsError: it does."""
    listen = "import socket, sys; s = socket.create_server(('', 1)); print(flush=True); s.accept()"
    connect = f"import socket; socket.create_connection(({one.address!r}, 1), 10)"
    with subprocess.Popen(one.command(sys.executable, "-c", listen), stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            _run(other.command(sys.executable, "-c", connect))
        finally:
            server.kill()


def _ip(*words: str) -> None:
    _run(("ip", *words))


def _quietly(*words: str) -> None:
    with suppress(NoNetnsError):  # the link was removed with its peer
        _ip(*words)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_ENV)
    except FileNotFoundError as error:
        raise NoNetnsError(f"no {command[0]} command") from error
    if done.returncode:
        raise NoNetnsError(f"{' '.join(command[:8])}: {done.stderr.strip()[-300:]}")
    return done.stdout
