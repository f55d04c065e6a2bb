"""`tinkerflow status`: the service of a data dir, and its work."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinkerflow.backend.core.errors import TinkerflowError
from tinkerflow.backend.journal import AWAY, Journal
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.data_dir import read_owner
from tinkerflow.deployments.doctor import opened_journal


def show_status(settings: Settings, console: Console) -> bool:
    """Print the state of the service; return whether its API answers."""
    owner = read_owner(settings.data_dir)
    url = owner.api_url if owner and owner.api_url else f"http://{settings.host}:{settings.port}"
    answers = _answers(url)
    table = Table(show_header=False, box=None)

    def show(name: str, value: str, style: str = "") -> None:
        table.add_row(name, Text(value, style))

    show("data dir", f"{settings.data_dir}, {shutil.disk_usage(_existing(settings)).free / 2**30:.1f} GiB free")
    show("served by", f"process {owner.pid} since {owner.since}" if owner else "no `tinkerflow up` of this data dir")
    show("API", f"{url}: {'answers' if answers else 'does not answer'}", "green" if answers else "red")
    try:
        with opened_journal(settings) as journal:
            if journal is None:
                show("journal", "there is none yet; `tinkerflow up` makes it")
            else:
                _show_work(journal, show)
    except (TinkerflowError, *AWAY) as error:
        show("journal", f"cannot be read: {error}", "red")
    console.print(table)
    return answers


def _show_work(journal: Journal, show: Callable[[str, str], None]) -> None:
    health = journal.recovery.health()
    for model in journal.base_models.all():
        wait = health.waits.get(model.name)
        show("base model", model.name + (f": waits: {wait}" if wait else ""))
    runs = journal.models.runs(None, limit=1, offset=0)
    show("training runs", f"{runs.total}, the newest {runs.rows[0].model.id}" if runs.rows else "none")
    waiting = len(journal.queue.pending_models()), sum(journal.queue.waiting_samples().values())
    show("waiting", "requests of {} model(s), {} sample request(s)".format(*waiting))
    keys = [key for key in journal.keys.all() if key.revoked_at is None]
    show("keys", f"{len(keys)} usable" if keys or journal.keys.has_any() else "none: loopback accepts every tml- key")


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/healthz", timeout=3).is_success
    except httpx.HTTPError:
        return False


def _existing(settings: Settings) -> str:
    folder = settings.data_dir
    while not folder.exists():
        folder = folder.parent
    return str(folder)
