"""`tinkerflow doctor`: look at everything a deployment needs, and say what is wrong in one line each."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable

import httpx
from rich.console import Console
from rich.table import Table

from tinkerflow.backend.clock import SystemClock
from tinkerflow.backend.commands import CompileStatus
from tinkerflow.backend.errors import TinkerflowError
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.parts import open_journal


def examine(settings: Settings, console: Console) -> bool:
    """Print a table of checks; return whether all of them passed."""
    checks: tuple[tuple[str, Callable[[Settings], str]], ...] = (
        ("settings", _settings),
        ("devices", _devices),
        ("journal", _journal),
        ("processes", _processes),
        ("recovery", _recovery),
        ("store", _store),
        ("base models", _base_models),
        ("compiled programs", _compiled),
        ("api", _api),
        ("prefect", _prefect),
    )
    table = Table("", "check", "found", title="tinkerflow doctor")
    healthy = True
    for name, check in checks:
        try:
            mark, found = "[green]ok[/]", check(settings)
        except (TinkerflowError, OSError, subprocess.SubprocessError, httpx.HTTPError) as error:
            mark, found, healthy = "[red]bad[/]", f"{type(error).__name__}: {error}", False
        table.add_row(mark, name, found)
    console.print(table)
    return healthy


def _settings(settings: Settings) -> str:
    weights = f"{settings.dtype}, base weights {settings.base_weights}"
    return f"data dir {settings.data_dir}, {settings.processes} process(es), {weights}"


def _devices(settings: Settings) -> str:
    # JAX is loaded in a process of its own: a device opened here would be taken from the workers.
    code = "import jax; print(jax.__version__, ', '.join(str(d) for d in jax.devices()))"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


def _journal(settings: Settings) -> str:
    with open_journal(settings) as journal:
        runs = journal.training_runs(None, limit=1, offset=0).total
        return f"{settings.journal_url.split('@')[-1]}: {runs} training run(s), {len(journal.keys())} key(s)"


def _processes(settings: Settings) -> str:
    """When the parts last said that they work, what is waited for, and whether requests are suspects."""
    with open_journal(settings) as journal:
        found = journal.recovery.condition()
    now = SystemClock().now()
    said = [f"{name} beat {max(0.0, (now - at).total_seconds()):.0f} s ago" for name, at in sorted(found.beats.items())]
    said += [f"{name} waits: {text}" for name, text in sorted(found.waits.items())]
    if found.suspects:
        said.append(f"{found.suspects} pending request(s) were being executed when a worker group ended")
    return "; ".join(said) or "none runs"


def _recovery(settings: Settings) -> str:
    """Of each model that can be restored: its last snapshot, and how many requests come after it."""
    with open_journal(settings) as journal:
        newest = {view.model_id: view for view in reversed(journal.recovery.snapshots())}
        found = [
            f"{model_id}: snapshot at request {view.seq_id} (step {view.step}, {view.size_bytes / 2**20:.1f} MiB, "
            f"{view.created_at:%Y-%m-%d %H:%M} UTC), {journal.recovery.count_executed(model_id, view.seq_id)} to replay"
            for model_id, view in sorted(newest.items())
        ]
    return "; ".join(found) or "no snapshots of models"


def _store(settings: Settings) -> str:
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(settings.store_url)
    probe = f"{root}/.doctor-{uuid.uuid4().hex}"
    filesystem.makedirs(root, exist_ok=True)
    filesystem.pipe_file(probe, b"tinkerflow")
    try:
        if filesystem.cat_file(probe) != b"tinkerflow":
            raise OSError(f"{settings.store_url}: read back other bytes than were written")
    finally:
        filesystem.rm_file(probe)
    return f"{settings.store_url}: writeable"


def _base_models(settings: Settings) -> str:
    from tinkerflow.backend.model_card import ModelCard

    cards = [ModelCard.load(name) for name in settings.base_models]
    named = [
        f"{c.name} ({c.architecture}, {c.parameters / 1e6:.1f} M parameters, context {c.max_context})" for c in cards
    ]
    return "; ".join(named) or "the embedded tiny one, made at start"


def _compiled(settings: Settings) -> str:
    """Which programs are warm in the worker groups, and what is kept for the next ones."""
    warm = []
    if settings.has_journal:
        with open_journal(settings) as journal:
            warm = [f"{model.name}: {_warmth(model.warmth)}" for model in journal.base_models() if model.warmth]
    return "; ".join([*warm, _cached(settings)])


def _warmth(warmth: CompileStatus) -> str:
    failed = f" ({warmth.failed} failed)" if warmth.failed else ""
    text = f"{warmth.ready} of {warmth.planned} warm{failed}" if warmth.planned else "no warm-up"
    return f"{text}, {warmth.needed} compiled for a request before, {warmth.late} after the warm-up"


def _cached(settings: Settings) -> str:
    entries = [p for p in settings.compile_cache.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in entries) / 2**20
    return f"{len(entries)} file(s), {size:.1f} MiB in {settings.compile_cache}"


def _api(settings: Settings) -> str:
    url = f"http://{settings.host}:{settings.port}/api/v1/healthz"
    try:
        return f"{url}: {httpx.get(url, timeout=3).raise_for_status().json()['status']}"
    except httpx.ConnectError:
        return f"{url}: not running"


def _prefect(settings: Settings) -> str:
    if settings.prefect == "off":
        return "off: nothing is tracked"
    url = f"http://127.0.0.1:{settings.prefect_port}/api/health"
    try:
        return f"{url}: {httpx.get(url, timeout=3).raise_for_status().text}"
    except httpx.ConnectError:
        return f"{url}: not running ({'started by `tinkerflow up`' if settings.prefect == 'embedded' else 'external'})"
