"""`tinkerflow doctor`: check everything that a deployment needs, and print each finding with its remedy.

The checks read the database, and never create or upgrade it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinkerflow.backend.core.clock import Clock, SystemClock
from tinkerflow.backend.core.errors import StoreError, TinkerflowError, UserError
from tinkerflow.backend.core.prefect_access import server_for_clients
from tinkerflow.backend.journal import AWAY
from tinkerflow.backend.journal.leases import PAUSE_SECONDS
from tinkerflow.backend.pool.host.devices import accelerator, expected, seen
from tinkerflow.backend.service import (
    api_answers,
    last_owner,
    opened_journal,
    read_owner,
    refuse_other_service,
    service_url,
)
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.checkpoint import RUNS
from tinkerflow.backend.spec.commands import CompileStatus
from tinkerflow.backend.store.blobs import open_blobs
from tinkerflow.deployments.data_dir import NEEDED_BYTES, exposed
from tinkerflow.deployments.options import database_of, is_in_missing_data_dir, minute
from tinkerflow.deployments.status import ended

_PLUGINS = {"cuda": ("gpu", ("jax-cuda13-plugin", "jax-cuda12-plugin")), "tpu": ("tpu", ("libtpu",))}  # by platform
_NO_DATABASE = "there is no database yet; `tinkerflow up` creates it"


def examine(settings: Settings, console: Console) -> bool:
    """Print a table of checks. Returns whether all of them passed."""
    table = Table("", "check", "found", title="tinkerflow doctor")
    healthy = True
    for name, check in CHECKS.items():
        try:
            mark, found = Text("ok", "green"), check(settings)
        except TinkerflowError as error:
            mark, found, healthy = Text("bad", "red"), error.message, False
        except (*AWAY, OSError, subprocess.SubprocessError, httpx.HTTPError) as error:
            found = f"{type(error).__name__}: {' '.join(str(error).split())}; {FIXES.get(name, 'see its log')}"
            mark, healthy = Text("bad", "red"), False
        table.add_row(mark, name, Text(found))
    console.print(table)
    return healthy


def check_settings(settings: Settings) -> str:
    """The settings that people ask about first."""
    weights = f"{settings.dtype}, base weights {settings.base_weights}"
    return f"data dir {settings.data_dir}, {settings.processes} process(es), {weights}"


def check_data_dir(settings: Settings) -> str:
    """The data dir's modes and free space. UserError: others may read it, or its disk is full or read-only."""
    folder = settings.data_dir
    if not folder.exists():
        above = next(path for path in folder.parents if path.exists())
        if not os.access(above, os.W_OK | os.X_OK):
            raise UserError(f"{folder}: {above} cannot be written: choose another --data-dir")
        return f"{folder}: `tinkerflow up` creates it"
    if readable := exposed(folder):
        count = f"{len(readable)} files and folders, such as {readable[0]}"
        raise UserError(f"{count}, can be read by other users: run `tinkerflow up`, which makes them private")
    if (free := shutil.disk_usage(folder).free) < NEEDED_BYTES:
        raise UserError(f"{folder}: its disk has {free / 2**20:.0f} MiB left: free some, or choose another --data-dir")
    return f"{folder}: private, {free / 2**30:.1f} GiB free"


def check_devices(settings: Settings, nvidia: str = "nvidia-smi") -> str:
    """JAX's version and this host's devices, found without JAX: opening a device would take it from the workers.

    nvidia: the program that lists NVIDIA's devices. UserError: devices are missing, or software that JAX needs to use
    them.
    """
    expects, jax = expected(settings.platform, os.environ), f"jax {version('jax')}"
    if expects == "cpu":
        return f"{jax}, CPUs" + (f"; {unused} is not used" if (unused := seen()) else "")
    if accelerator() != expects:
        raise UserError(f"{jax}; platform is {expects!r}, but this host has {seen() or 'only CPUs'}")
    extra, plugins = _PLUGINS[expects]
    plugin = next((f"{name} {version(name)}" for name in plugins if find_spec(name.replace("-", "_"))), None)
    if plugin is None:
        raise UserError(f"{jax}; this host has {seen()}, which JAX cannot use: install the extra `{extra}`")
    if expects == "tpu":
        return f"{jax}, {plugin}, {seen()}"
    asked = [nvidia, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise UserError(f"{jax}, {plugin}; {nvidia} fails: {(done.stdout + done.stderr).strip()}")
    return f"{jax}, {plugin}, {'; '.join(done.stdout.splitlines())}"


def check_journal(settings: Settings) -> str:
    """The journal's database, and its counts of runs and keys. ServerError: its schema is not this version's."""
    with opened_journal(settings) as journal:
        if journal is None:
            return f"{database_of(settings)}: {_NO_DATABASE}"
        runs = journal.models.runs(None, limit=1, offset=0).total
        return f"{database_of(settings)}: {runs} training run(s), {len(journal.keys.all())} key(s)"


def check_processes(settings: Settings, clock: Clock | None = None) -> str:
    """Last heartbeat of each part, the reasons why groups wait, and the requests that a lost group was executing.

    UserError: the service was killed, or a part of it is silent.
    """
    with opened_journal(settings) as journal:
        if journal is None:
            return _NO_DATABASE
        found = journal.recovery.health()
    now = (clock or SystemClock()).now()
    owner, last = read_owner(settings.data_dir), last_owner(settings.data_dir)
    if owner is None and last is not None and last.stopped == "" and not api_answers(service_url(settings)):
        raise UserError(ended(last))  # if the API answers, its parts were started separately
    ages = {part: max(0.0, (now - at).total_seconds()) for part, at in sorted(found.beats.items())}
    if owner is None and ages.get("engine") is None and ages.get("api", 0.0) > PAUSE_SECONDS:
        ages = {}  # the service was stopped, which only the engine's lease shows
    lines = [f"{part}: last heartbeat {age:.0f} s ago" for part, age in ages.items()]
    if any(age > PAUSE_SECONDS for age in ages.values()):
        raise UserError(
            f"{'; '.join(lines)}: must be at most {PAUSE_SECONDS:.0f} s; start the part again, or see its log"
        )
    lines += [f"{model} waits: {reason}" for model, reason in sorted(found.waits.items())]
    if found.suspects:
        lines.append(f"{found.suspects} pending request(s) were being executed when a worker group ended")
    return "; ".join(lines) or "none is running; `tinkerflow up` starts them"


def check_recovery(settings: Settings) -> str:
    """For each model that can be restored: its last snapshot, and how many requests came after it."""
    with opened_journal(settings) as journal:
        if journal is None:
            return _NO_DATABASE
        newest = {view.model_id: view for view in reversed(journal.recovery.snapshots())}
        lines = [
            f"{model_id}: snapshot at request {view.seq_id} (step {view.step}, {view.size_bytes / 2**20:.1f} MiB, "
            f"{minute(view.created_at)}), {journal.recovery.count_executed(model_id, view.seq_id)} to replay"
            for model_id, view in sorted(newest.items())
        ]
    return "; ".join(lines) or "no snapshots of models"


def check_store(settings: Settings) -> str:
    """Write, read and remove objects, also in the folder of checkpoints, through the code that saves checkpoints.

    A store in a data dir that does not exist is not made. StoreError: other bytes come back. UserError and OSError:
    the store cannot be opened or written.
    """
    if is_in_missing_data_dir(settings, settings.store_url):
        return f"{settings.store_url}: `tinkerflow up` creates it"
    blobs, name, content = open_blobs(settings.store_url), f".doctor-{uuid.uuid4().hex}", b"tinkerflow"
    for probe in (name, f"{RUNS}/{name}"):
        blobs.create(probe, content)
        try:
            if blobs.read(probe) != content:
                raise StoreError(
                    f"{settings.store_url}: the bytes read differ from the bytes written; is it shared with a cache?"
                )
        finally:
            blobs.remove(probe)
    return f"{settings.store_url}: writable"


def check_base_models(settings: Settings) -> str:
    """Name, architecture, size and context of each base model."""
    from tinkerflow.backend.catalog.model_card import ModelCard
    from tinkerflow.backend.core.ids import EMBEDDED

    cards = [ModelCard.load(name) for name in settings.base_models if name != EMBEDDED]
    lines = [
        f"{c.name} ({c.architecture}, {c.parameters / 1e6:.1f} M parameters, context {c.max_context})" for c in cards
    ]
    return "; ".join(lines) or "the embedded tiny model, created at start"


def check_compiled(settings: Settings) -> str:
    """The progress of each base model's compilation, and the size of the compilation cache."""
    with opened_journal(settings) as journal:
        models = [] if journal is None else journal.base_models.all()
    lines = [f"{m.name}: {_compile_status(m.compile_status)}" for m in models if m.compile_status]
    files = [path for path in settings.compile_cache.rglob("*-cache") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 2**20
    return "; ".join([*lines, f"{len(files)} file(s), {size:.1f} MiB in {settings.compile_cache}"])


def _compile_status(status: CompileStatus) -> str:
    failed = f" ({status.failed} failed)" if status.failed else ""
    text = f"{status.ready} of {status.planned} warm{failed}" if status.planned else "no warm-up"
    return f"{text}, {status.needed} compiled for a request before, {status.late} after the warm-up"


def check_api(settings: Settings) -> str:
    """Whether the API answers at its address. UserError: another program, or another data dir's API, answers."""
    service = service_url(settings)
    url = f"{service}/api/v1/healthz"
    try:
        answer = httpx.get(url, timeout=3).raise_for_status().json()["status"]
    except httpx.ConnectError:
        return f"{url}: not running; `tinkerflow up` starts it"
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{url}: another program answers ({error}): choose another --port") from error
    refuse_other_service(settings, service)
    return f"{url}: {answer}"


def check_prefect(settings: Settings) -> str:
    """Whether the Prefect server that tracks runs answers: the one at PREFECT_API_URL, or the embedded one.

    UserError: an external server is not configured or does not answer.
    """
    if settings.prefect == "off":
        return "off: nothing is tracked"
    external = os.environ.get("PREFECT_API_URL")
    if settings.prefect == "external" and not external:
        raise UserError("TINKERFLOW_PREFECT is external: set PREFECT_API_URL to the URL of that server's API")
    server = server_for_clients(settings.data_dir, os.environ)
    if server is None:
        if read_owner(settings.data_dir) is not None:
            return "starts with the engine"
        return "not running; `tinkerflow up` starts it"
    url = f"{server.api_url.removesuffix('/')}/health"
    try:
        return f"{url}: {httpx.get(url, timeout=3).raise_for_status().text}"
    except httpx.ConnectError as error:
        raise UserError(f"{url}: no answer ({error}); start that server, or change PREFECT_API_URL") from error


FIXES = {  # fixes for errors of libraries, which suggest no fix
    "journal": "check TINKERFLOW_DATABASE_URL, and that the database runs",
    "processes": "check TINKERFLOW_DATABASE_URL, and that the database runs",
    "recovery": "check TINKERFLOW_DATABASE_URL, and that the database runs",
    "devices": "run nvidia-smi by hand, and install the driver that it asks for",
    "store": "check TINKERFLOW_STORE, its credentials, its free space, and that this user may write there",
    "base models": "check TINKERFLOW_BASE_MODELS, and fetch them with `tinkerflow models fetch`",
    "prefect": "start `tinkerflow up` again; its log is logs/prefect.log in the data dir",
}
CHECKS: Mapping[str, Callable[[Settings], str]] = {
    "settings": check_settings,
    "data dir": check_data_dir,
    "devices": check_devices,
    "journal": check_journal,
    "processes": check_processes,
    "recovery": check_recovery,
    "store": check_store,
    "base models": check_base_models,
    "compiled programs": check_compiled,
    "api": check_api,
    "prefect": check_prefect,
}
