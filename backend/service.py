"""The service of a data dir: the process that serves it, the address of its API, and its journal."""

from __future__ import annotations

import fcntl
import json
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.hosts import url_of
from tinkerflow.backend.settings import Settings

if TYPE_CHECKING:
    from tinkerflow.backend.journal import Journal

LOCK = "up.lock"  # the process that serves a data dir holds its lock


@dataclass(frozen=True)
class Owner:
    """The process that serves a data dir, and the URL of its API, once known.

    stopped: when it stopped; "" if it is serving or was killed; None in files of earlier releases.
    """

    pid: int
    since: str
    api_url: str = ""
    stopped: str | None = None


def read_owner(data_dir: Path) -> Owner | None:
    """The process that serves a data dir, or None."""
    try:
        with (data_dir / LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return last_owner(data_dir)
    except OSError:
        pass
    return None


def last_owner(data_dir: Path) -> Owner | None:
    """The process that serves a data dir, or the last process that served it; None if there was none."""
    try:
        return Owner(**json.loads((data_dir / LOCK).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def opened_journal(settings: Settings) -> AbstractContextManager[Journal | None]:
    """Open the journal without migrating it. None without a database or tables. ServerError: wrong schema."""
    from tinkerflow.backend.journal import Journal, NoTablesError  # SQLAlchemy takes a second to load

    if settings.has_journal:
        with suppress(NoTablesError):
            return closing(Journal.open(settings.journal_url))
    return nullcontext()


def service_url(settings: Settings) -> str:
    """The URL of the data dir's API, as recorded by `tinkerflow up`, or else of the configured host or port.

    If neither is configured, the URL of the last `tinkerflow up` is used even if it has stopped.
    """
    given = {"host", "port"} & settings.model_fields_set
    owner = (read_owner if given else last_owner)(settings.data_dir)
    return owner.api_url if owner and owner.api_url else url_of(settings.host, settings.port)


def api_answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/healthz", timeout=3).is_success
    except httpx.HTTPError:
        return False


def refuse_other_service(settings: Settings, url: str, fix: str = "choose another --port, or its --data-dir") -> None:
    """UserError, with the fix: the API that answers at `url` (`service_url`) serves another data dir.

    A service of this data dir has an owner. If it runs as separate parts, perhaps on other hosts, its API writes
    heartbeats to the journal.
    """
    if read_owner(settings.data_dir) is not None:
        return
    with opened_journal(settings) as journal:
        if journal is None or not journal.leases.has_api():
            raise UserError(f"{url}: serves a different data dir than '{settings.data_dir}': {fix}")
