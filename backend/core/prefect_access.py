"""Access to the Prefect server that `tinkerflow up` starts: its credential, its address, and sign-in links.

Two files in `<data_dir>/prefect`, which only their owner can read:

- `credential` is the server's auth string, `tinkerflow:<random>`. It is created once. Clients send it with each
request.
- `server.json` exists while the server runs, and names its port and process. Clients send the credential only to this
  server, so a program that listens on Prefect's usual port does not get it.

A sign-in link contains a ticket, which the server exchanges for the credential (flows/prefect/guard.py). The ticket is
an HMAC of its expiry with the credential as key. It is in the link's fragment, which browsers do not send to servers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from tinkerflow.backend.core.hosts import is_loopback
from tinkerflow.backend.core.process_identity import identity, is_alive

SIGN_IN_PATH = "/tinkerflow/sign-in"
LINK_SECONDS = 3600
_CLOUD = re.compile(r"https://api((?:\.\w+)*\.prefect\.\w+)/api/accounts/([^/]+)/workspaces/([^/]+)")
TRAINING_FLOW = "training_run"  # the flow of training runs; the engine registers its deployment


@dataclass(frozen=True)
class PrefectAccess:
    """How clients and people reach a Prefect server.

    api_url: as PREFECT_API_URL. credential: its auth string, empty if it has none. pages_url: the URL of its pages for
    people, perhaps behind a proxy. is_embedded: whether it is the server of a data dir, which serves the sign-in page.
    """

    api_url: str
    credential: str
    pages_url: str
    is_embedded: bool = True

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make Prefect's clients use this server, and name its pages in links."""
        credential = {"PREFECT_API_AUTH_STRING": self.credential} if self.credential else {}
        return {"PREFECT_API_URL": self.api_url, "PREFECT_UI_URL": self.pages_url, **credential}

    @property
    def headers(self) -> dict[str, str]:
        """The headers that an HTTP client of this server sends."""
        token = base64.b64encode(self.credential.encode()).decode()
        return {"Authorization": f"Basic {token}"} if self.credential else {}

    def link(self, path: str, now: float) -> str:
        """A link to the page at `path`; the embedded server's signs the browser in, for LINK_SECONDS from `now`."""
        if not self.is_embedded:
            return f"{self.pages_url}{path}"
        expires = int(now) + LINK_SECONDS
        to = f"?to={quote(path, safe='/')}" if path != "/" else ""
        return f"{self.pages_url}{SIGN_IN_PATH}{to}#{expires}.{_signature(self.credential, expires)}"


def page_command(page: str, data_dir: Path) -> str:
    """The command that prints a link to a page of the data dir's Prefect server. The link signs the browser in."""
    return f"tinkerflow prefect --page {page} --data-dir {shlex.quote(str(data_dir))}"


def is_valid_ticket(credential: str, ticket: str, now: float) -> bool:
    """Whether the ticket of a sign-in link was made with this credential and has not expired."""
    expires, _, signature = ticket.partition(".")
    if not (expires.isascii() and expires.isdigit() and len(expires) < 20 and signature.isascii()):
        return False
    return hmac.compare_digest(signature, _signature(credential, int(expires))) and now < int(expires)


def make_credential(data_dir: Path) -> str:
    """The credential of the Prefect server of this data dir. The first call creates it."""
    file = data_dir / "prefect" / "credential"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):  # `link`, not `rename`: if two processes write, the first credential stays
        _write(file, f"tinkerflow:{secrets.token_urlsafe(32)}", os.link)
    return file.read_text().strip()


def record_server(data_dir: Path, port: int, pid: int, public_url: str = "") -> None:
    """Record that process `pid` serves on 127.0.0.1:`port`, behind a proxy at `public_url` if there is one."""
    server = {"port": port, "process": identity(pid), "public_url": public_url}
    _write(data_dir / "prefect" / "server.json", json.dumps(server), os.replace)


def forget_server(data_dir: Path, pid: int) -> None:
    """Remove the record of process `pid`, which no longer serves. The record of a later server stays."""
    file = data_dir / "prefect" / "server.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads(json.loads(file.read_text())["process"])["pid"] == pid:
            file.unlink()


def record_port(data_dir: Path, wanted: int, port: int) -> None:
    """Record for the next start that the data dir's server got `port` instead of `wanted`."""
    _write(data_dir / "prefect" / "port.json", json.dumps({"wanted": wanted, "port": port}), os.replace)


def last_port(data_dir: Path, wanted: int) -> int:
    """The port of the last start if that start had the same `wanted`, else `wanted`."""
    try:
        noted = json.loads((data_dir / "prefect" / "port.json").read_text())
        return int(noted["port"]) if noted["wanted"] == wanted else wanted
    except (OSError, ValueError, KeyError, TypeError):
        return wanted


def find_server(data_dir: Path) -> PrefectAccess | None:
    """The server of this data dir, if it runs on this machine."""
    folder = data_dir / "prefect"
    try:
        server = json.loads((folder / "server.json").read_text())
        credential = (folder / "credential").read_text().strip()
        if not is_alive(server["process"]):
            return None
        url = f"http://127.0.0.1:{int(server['port'])}"
        return PrefectAccess(f"{url}/api", credential, server["public_url"].rstrip("/") or url)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def server_for_clients(data_dir: Path, environment: Mapping[str, str]) -> PrefectAccess | None:
    """The server at PREFECT_API_URL, or else the server of this data dir; None if there is neither.

    environment: this process's variables. Other servers never get this data dir's credential.
    """
    server, named = find_server(data_dir), environment.get("PREFECT_API_URL", "")
    if not named or (server is not None and _is_same(server.api_url, named)):
        return server
    pages = urlsplit((environment.get("PREFECT_UI_URL") or _pages_of(named)).rstrip("/"))
    pages = pages._replace(netloc=pages.netloc.rpartition("@")[2])  # a password in the URL is only for clients
    return PrefectAccess(named, environment.get("PREFECT_API_AUTH_STRING", ""), pages.geturl(), is_embedded=False)


def _pages_of(api_url: str) -> str:
    """The address of the pages of a server's API, as Prefect's client derives it. Prefect Cloud has another host."""
    url = api_url.rstrip("/")
    if (cloud := _CLOUD.fullmatch(url)) is not None:
        return "https://app{}/account/{}/workspace/{}".format(*cloud.groups())
    return url.removesuffix("/api")


def _is_same(local: str, other: str) -> bool:
    """Whether `other` is a URL of the same server as `local`, on this machine, under any name of the host."""
    try:
        mine, named = urlsplit(local), urlsplit(other)
        same = (mine.port, mine.path) == (named.port, named.path.rstrip("/"))
        return same and is_loopback(named.hostname or "")
    except ValueError:
        return False


def _signature(credential: str, expires: int) -> str:
    return hmac.new(credential.encode(), f"sign-in\n{expires}".encode(), hashlib.sha256).hexdigest()


def _write(file: Path, text: str, place: Callable[[Path, Path], object]) -> None:
    """Write a private file atomically. place: `os.link` or `os.replace`, which moves it to its name."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
            output.write(text + "\n")
        place(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
