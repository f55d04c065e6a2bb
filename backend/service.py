"""The service of a data dir: the process that serves it, the address of its API, and its journal as it is."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    """The process that serves a data dir, and its API, once that is known.

    stopped: when it stopped; "" if it serves or was killed; None in files of earlier releases.
    """

    pid: int
    since: str
    api_url: str = ""
    stopped: str | None = None


def read_owner(data_dir: Path) -> Owner | None:
    """The process that serves a data dir; None when none does."""
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
    """The process that serves a data dir, or else the last one that did; None when none did."""
    try:
        return Owner(**json.loads((data_dir / LOCK).read_text()))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def opened_journal(settings: Settings) -> Iterator[Journal | None]:
    """The journal as it is; None: there is no database, or it has no tables. ServerError: of another version."""
    from tinkerflow.backend.journal import Journal, NoTablesError  # SQLAlchemy takes a second to load

    journal = None
    if settings.has_journal:
        with suppress(NoTablesError):
            journal = Journal.open(settings.journal_url)
    try:
        yield journal
    finally:
        if journal is not None:
            journal.close()


def service_url(settings: Settings) -> str:
    """URL of the data dir's API, as its `tinkerflow up` has it, or else of a host or port that is set.

    Without either, the URL of its last `tinkerflow up`.
    """
    given = {"host", "port"} & settings.model_fields_set
    owner = (read_owner if given else last_owner)(settings.data_dir)
    return owner.api_url if owner and owner.api_url else url_of(settings.host, settings.port)


def api_answers(url: str) -> bool:
    """Whether an API answers at a URL."""
    try:
        return httpx.get(f"{url}/api/v1/healthz", timeout=3).is_success
    except httpx.HTTPError:
        return False


def refuse_other_service(settings: Settings, url: str, fix: str = "choose another --port, or its --data-dir") -> None:
    """Raise UserError, with the fix, when the API that answers at `url` (`service_url`) serves another data dir.

    A service of this data dir has an owner. If it runs as parts, perhaps on other hosts, its API beats in the journal.
    """
    if read_owner(settings.data_dir) is not None:
        return
    with opened_journal(settings) as journal:
        if journal is None or not journal.leases.has_api():
            raise UserError(f"{url}: serves another data dir than '{settings.data_dir}': {fix}")
