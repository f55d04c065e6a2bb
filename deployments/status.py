"""`tinkerflow status`: the service of a data dir, and its work."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinkerflow.backend.core.errors import ServerError, TinkerflowError, UserError
from tinkerflow.backend.journal import AWAY, Journal
from tinkerflow.backend.service import (
    Owner,
    api_answers,
    last_owner,
    opened_journal,
    read_owner,
    refuse_other_service,
    service_url,
)
from tinkerflow.backend.settings import Settings


def show_status(settings: Settings, console: Console) -> bool:
    """Print the state of the service. Returns whether its own API answers."""
    owner, last, url = read_owner(settings.data_dir), last_owner(settings.data_dir), service_url(settings)
    problem = _problem(settings, url)
    table = Table(show_header=False, box=None)

    def show(name: str, value: str, style: str = "") -> None:
        table.add_row(name, Text(value, style))

    show("data dir", f"{settings.data_dir}, {shutil.disk_usage(_existing(settings)).free / 2**30:.1f} GiB free")
    if owner:
        served_by = f"process {owner.pid} since {owner.since}"
    else:
        served_by = "no `tinkerflow up` with this data dir" + (f"; {ended(last)}" if last and problem else "")
    show("served by", served_by)
    show("API", problem or f"{url}: answers", "red" if problem else "green")
    try:
        with opened_journal(settings) as journal:
            if journal is None:
                show("journal", "there is none yet; `tinkerflow up` creates it")
            else:
                _show_work(journal, show)
    except (TinkerflowError, *AWAY) as error:
        show("journal", f"cannot be read: {error}", "red")
    console.print(table)
    return not problem


def _show_work(journal: Journal, show: Callable[[str, str], None]) -> None:
    from tinkerflow.backend.catalog.model_card import public_name  # takes half a second to load

    health = journal.recovery.health()
    for model in journal.base_models.all():
        wait = health.waits.get(model.name)
        show("base model", public_name(model.name) + (f": waits: {wait}" if wait else ""))
    runs = journal.models.runs(None, limit=1, offset=0)
    show("training runs", f"{runs.total}, the newest {runs.rows[0].model.id}" if runs.rows else "none")
    waiting = len(journal.queue.pending_models()), sum(journal.queue.waiting_samples().values())
    show("waiting", "requests of {} model(s), {} sample request(s)".format(*waiting))
    keys = [key for key in journal.keys.all() if key.revoked_at is None]
    show("keys", f"{len(keys)} usable" if keys or journal.keys.has_any() else "none: loopback accepts every tml- key")


def ended(last: Owner) -> str:
    """How the last `tinkerflow up` of a data dir ended."""
    how = f"stopped {last.stopped}" if last.stopped else "was killed" if last.stopped == "" else "has ended"
    return f"process {last.pid} at {last.api_url} {how}; `tinkerflow up` starts it again"


def _problem(settings: Settings, url: str) -> str:
    """Why the service's API cannot be used; "" if it answers."""
    if not api_answers(url):
        return f"{url}: does not answer"
    try:
        with suppress(ServerError, *AWAY):  # the line about the journal shows these errors
            refuse_other_service(settings, url)
    except UserError as error:
        return error.message
    return ""


def _existing(settings: Settings) -> str:
    folder = settings.data_dir
    while not folder.exists():
        folder = folder.parent
    return str(folder)
