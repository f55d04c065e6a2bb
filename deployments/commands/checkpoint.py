"""`tinkerflow checkpoint`: look after stored checkpoints, and make tokens that let others load or copy one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinkerflow.backend.core.disk import draft_of
from tinkerflow.backend.core.errors import NotFoundError, StoreError, UserError
from tinkerflow.backend.core.ids import IMPORTED, LOCAL_OWNER, new_id
from tinkerflow.backend.spec.limits import MAX_TTL
from tinkerflow.deployments.options import (
    DataDir,
    database_of,
    existing,
    minute,
    print_wide,
    setting,
    settings_with,
    write_output,
    writing,
)

if TYPE_CHECKING:
    from tinkerflow.backend.settings import Settings
    from tinkerflow.backend.spec.checkpoint import Saved
    from tinkerflow.backend.store import Store
    from tinkerflow.backend.store.upkeep import Snapshot

app = typer.Typer(help="Manage stored checkpoints, and let others load or copy one.", no_args_is_help=True)

StoreUrl = Annotated[str | None, setting("store")]
Run = Annotated[str | None, typer.Option("--run", help="only checkpoints of this training run")]


@app.command("list")
def list_checkpoints(run: Run = None, store: StoreUrl = None, data_dir: DataDir = None) -> None:
    """List all checkpoints in the store, including those that are missing in the database.

    The owner is taken from the database: the first key's project takes over checkpoints that were saved without a key.
    """
    from rich.table import Table

    table = Table("checkpoint", "owner", "base model", "step", "MiB", "saved", "expires", "public")
    settings, opened = _opened(data_dir, store)
    owners = _owners(settings)
    for saved in opened.checkpoints(run):
        meta = saved.meta
        table.add_row(
            saved.path,
            owners.get(saved.path, meta.owner),
            meta.base_model,
            str(saved.step),
            f"{saved.size_bytes / 2**20:.1f}",
            minute(saved.created_at),
            minute(meta.expires_at),
            "yes" if meta.public else "",
        )
    print_wide(table, empty=f"no checkpoints{f' of {run}' if run else ''} in the store {settings.store_url}")


def _owners(settings: Settings) -> Mapping[str, str]:
    """The owner of each checkpoint in the database; empty if there is no database."""
    from tinkerflow.deployments.parts import open_journal

    if not settings.has_journal:
        return {}
    with open_journal(settings) as journal:
        return journal.checkpoints.owners()


@app.command()
def verify(
    paths: Annotated[
        list[str] | None, typer.Argument(help="tinker://run/kind/name (default: every checkpoint of the store)")
    ] = None,
    store: StoreUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Read every byte of checkpoints and compare sizes and checksums; exit status 1 when a checkpoint is damaged."""
    settings, opened = _opened(data_dir, store)
    found = whole = 0
    for path in paths or opened.upkeep.paths():
        wrong = opened.upkeep.problems(path)
        if paths and not wrong and not opened.exists(path):
            wrong = [_missing(path, settings).message]
        for problem in wrong:
            print(problem)
        found, whole = found + bool(wrong), whole + (not wrong and opened.exists(path))
    print(f"{whole} whole, {found} damaged")
    if found:
        raise typer.Exit(1)


@app.command()
def gc(
    older_than: Annotated[
        float, typer.Option(min=1, help="hours without a write after which an uncommitted save is considered abandoned")
    ] = 24,
    yes: Annotated[bool, typer.Option("--yes", help="remove the files; without it, they are only listed")] = False,
    store: StoreUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Find files that belong to no checkpoint, and recovery snapshots of models that are not live.

    Interrupted saves and deletions leave such files. The journal records whether a model is live, so run this where the
    journal database of this store is. Without a journal, recovery snapshots are not touched. A database that no engine
    has used with this store counts as the journal of another one, so models that it does not list are not touched.
    """
    from tinkerflow.backend.core.clock import SystemClock, add_seconds

    settings, opened = _opened(data_dir, store)
    before = add_seconds(SystemClock().now(), -3600 * older_than)
    removed = dropped = 0
    for orphan in opened.upkeep.orphans(before):
        print(f"{orphan.path}: attempt {orphan.attempt}, last written {minute(orphan.written_at)}")
        removed += yes and opened.upkeep.remove_orphan(orphan)
    for snapshot, whose in _strays(settings, opened, opened.upkeep.snapshots(before)):
        print(f"{snapshot.path}: recovery snapshot of {whose}, written {minute(snapshot.written_at)}")
        dropped += yes and opened.delete(snapshot.path)
    if not yes:
        print("nothing was removed: give --yes to remove the files")
        return
    drafts = opened.upkeep.clear_drafts(before)
    print(f"removed {removed} attempt(s), {dropped} recovery snapshot(s) and {drafts} draft(s)")


def _opened(data_dir: Path | None, store: str | None) -> tuple[Settings, Store]:
    from tinkerflow.backend.store import Store

    settings = settings_with(data_dir=data_dir, store=store)
    return settings, Store.open(existing(settings, settings.store_url))


def _found(opened: Store, path: str, settings: Settings) -> Saved:
    if (saved := opened.find(path)) is None:
        raise _missing(path, settings)
    return saved


def _missing(path: str, settings: Settings) -> NotFoundError:
    fix = "name its store with --store or --data-dir"
    return NotFoundError(f"checkpoint {path}: it is not in the store {settings.store_url}; {fix}")


def _strays(settings: Settings, opened: Store, found: Sequence[Snapshot]) -> list[tuple[Snapshot, str]]:
    from tinkerflow.deployments.parts import open_journal

    if not found or not settings.has_journal:
        return []
    with open_journal(settings) as journal:
        strays = journal.recovery.strays({snapshot.path: snapshot.run_id for snapshot in found}, opened.find_mark())
    return [(snapshot, strays[snapshot.path]) for snapshot in found if snapshot.path in strays]


@app.command("rebuild-index")
def rebuild_index(
    project: Annotated[str, typer.Option(help="project of checkpoints that were saved without a key")] = LOCAL_OWNER,
    store: StoreUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Add every checkpoint in the store to the database, for example after its loss; existing rows stay.

    The store does not hold keys, tokens for checkpoints, names and labels of sessions, usage or the audit log.
    """
    from tinkerflow.backend.catalog.checkpoint_index import rebuild
    from tinkerflow.backend.store import Store
    from tinkerflow.deployments.parts import open_journal

    settings = settings_with(data_dir=data_dir, store=store)
    opened = Store.open(existing(settings, settings.store_url))
    with open_journal(settings) as journal:
        done = rebuild(journal, opened, project)
    for path in done.restored:
        print(path)
    print(f"restored {len(done.restored)}, known {done.known}, damaged {len(done.damaged)}")
    if done.damaged:
        raise StoreError("; ".join(done.damaged))


@app.command("import")
def import_folder(
    folder: Annotated[
        Path, typer.Argument(help="folder with adapter_config.json and adapter_model.safetensors, as PEFT saves them")
    ],
    base_model: Annotated[str, typer.Option(help="base model's name in the service: a folder, hub id or gs:// URL")],
    project: Annotated[str, typer.Option(help="project that the checkpoint belongs to")] = LOCAL_OWNER,
    name: Annotated[str, typer.Option(help="name of the checkpoint")] = IMPORTED,
    store: StoreUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Make a checkpoint from a PEFT adapter, to train it further or sample from it; print its tinker:// path.

    An adapter is refused, with the reason, if tensors are missing or unknown, or if it uses DoRA, biases,
    modules_to_save, or another feature that changes the computation of an adapter.
    """
    from tinkerflow.backend.catalog.model_source import find_model
    from tinkerflow.backend.catalog.peft_import import import_adapter, save_import
    from tinkerflow.backend.compute.models.families import load_config
    from tinkerflow.backend.journal import CheckpointSaved
    from tinkerflow.backend.store import Store
    from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG
    from tinkerflow.deployments.parts import open_journal, resolve_base_model

    settings = settings_with(data_dir=data_dir, store=store)
    adapter = _file(folder, ADAPTER_CONFIG), _file(folder, ADAPTER)
    base_model = resolve_base_model(settings, base_model)
    model = find_model(base_model)
    state = import_adapter(load_config(model, name=base_model), *adapter, folder=model)
    session_id = new_id("import")
    opened = Store.open(settings.store_url)
    with open_journal(settings) as journal:
        saved = save_import(opened, session_id, state, base_model=base_model, owner=project, name=name)
        print(journal.imports.record_import(session_id, CheckpointSaved.of(saved)))


def _file(folder: Path, file: str) -> bytes:
    try:
        return (folder / file).read_bytes()
    except OSError as error:
        raise UserError(f"{folder}: {file} cannot be read ({error}); PEFT's save_pretrained writes it") from error


@app.command()
def merge(
    path: Annotated[str, typer.Argument(help="tinker://run/kind/name")],
    to: Annotated[Path, typer.Option(help="folder to write; it must not exist")],
    base_model: Annotated[str | None, typer.Option(help="folder, hub id or gs:// URL (default: its own)")] = None,
    store: StoreUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Write the base model with a checkpoint's adapter merged into it: config, tokenizer and safetensors files.

    If all parameters were trained, they replace those of the base model.

    One tensor is in memory at a time. Quantized matrices that the adapter changes are written in bfloat16. README.md
    is the model card, as `tinkerflow checkpoint card` prints it.
    """
    from tinkerflow.backend.catalog.merging import merge as merge_model
    from tinkerflow.backend.catalog.model_source import find_model
    from tinkerflow.deployments.parts import resolve_base_model

    settings, opened = _opened(data_dir, store)
    _found(opened, path, settings)
    state, saved = opened.load(path, optimizer=False)
    folder = find_model(resolve_base_model(settings, base_model)) if base_model else _base(settings, saved)
    with writing("--to", to):
        merge_model(folder, state, to, print, card=_card(opened, saved, folder, settings, merged=True))


@app.command()
def export(
    path: Annotated[str, typer.Argument(help="tinker://run/kind/name")],
    to: Annotated[Path, typer.Option(help="folder to write; it must not exist")],
    store: StoreUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Write a checkpoint as a folder that `peft` and vLLM load, with the model card as README.md.

    The optimizer state is left out. If all parameters were trained, the folder contains model.safetensors instead of an
    adapter. The folder is created last, so it is complete if it exists.
    """
    from tinkerflow.backend.catalog.card import merge_hint
    from tinkerflow.backend.spec.checkpoint import BLOCK
    from tinkerflow.backend.store.commit import OPTIMIZER

    settings, opened = _opened(data_dir, store)
    saved = _found(opened, path, settings)
    if to.exists():
        raise UserError(f"to {to}: already exists; name a new folder")
    base = _base(settings, saved)
    text = _card(opened, saved, base, settings)
    with writing("--to", to), draft_of(to) as draft:
        for name, digest in saved.files.items():
            if name != OPTIMIZER:
                with (draft / name).open("wb") as file:
                    for start in range(0, digest.size, BLOCK):
                        file.write(opened.read_range(saved, name, start, BLOCK))
        (draft / "README.md").write_text(text, encoding="utf-8")
    print(f"written: {', '.join(sorted(file.name for file in to.iterdir()))}")
    if hint := merge_hint(saved, base):
        print(hint)


@app.command()
def card(
    path: Annotated[str, typer.Argument(help="tinker://run/kind/name")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="file to write (default: print it)")] = None,
    store: StoreUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Write the model card of a checkpoint: its training, data, curve and evaluation, and the base model's license.

    Rows, tokens and their digest need the history of the run.
    """
    settings, opened = _opened(data_dir, store)
    saved = _found(opened, path, settings)
    text = _card(opened, saved, _base(settings, saved), settings)
    if output is None:
        print(text, end="")
    else:
        write_output(output, text)


def _base(settings: Settings, saved: Saved) -> Path:
    """The folder of a checkpoint's base model. If the data dir of an embedded model is gone, that of this data dir."""
    from tinkerflow.backend.catalog.model_card import alias_of
    from tinkerflow.backend.catalog.model_source import find_model
    from tinkerflow.deployments.parts import resolve_base_model

    name = saved.meta.base_model
    if (alias := alias_of(name)) and not Path(name).is_dir():
        with redirect_stdout(sys.stderr):  # the output may be a model card
            name = resolve_base_model(settings, alias)
    return find_model(name)


def _card(opened: Store, saved: Saved, base: Path, settings: Settings, *, merged: bool = False) -> str:
    from tinkerflow.backend.catalog.card import card as card_of
    from tinkerflow.deployments.parts import open_journal

    if not settings.has_journal:
        return card_of(None, opened, saved, base, merged=merged)
    with open_journal(settings) as journal:
        return card_of(journal, opened, saved, base, merged=merged)


@app.command()
def share(
    path: Annotated[str, typer.Argument(help="tinker://run/kind/name")],
    ttl: Annotated[
        int | None, typer.Option(min=1, max=MAX_TTL, help="seconds until the token expires (default: never)")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Make a weights_access_token for a checkpoint in its current state. The token is shown only once."""
    from tinkerflow.backend.journal import command_line_actor
    from tinkerflow.deployments.parts import open_existing_journal

    settings = settings_with(data_dir=data_dir)
    with open_existing_journal(settings) as journal, _named_database(settings):
        made, token = journal.shares.create(path, None, ttl, actor=command_line_actor())
        print(f"{made.id}: {token}")


@contextmanager
def _named_database(settings: Settings) -> Iterator[None]:
    """Add the database to errors about a checkpoint that it does not list."""
    try:
        yield
    except NotFoundError as error:
        where = f"in the database {database_of(settings)}; name the right data dir with --data-dir"
        raise NotFoundError(f"{error.message} {where}") from error


@app.command()
def shares(
    path: Annotated[str | None, typer.Argument(help="tinker://run/kind/name (default: of all checkpoints)")] = None,
    data_dir: DataDir = None,
) -> None:
    """List the tokens that were made: their ids and checkpoints, not the tokens themselves."""
    from rich.table import Table

    from tinkerflow.deployments.parts import open_existing_journal

    table = Table("id", "checkpoint", "made", "expires", "revoked")
    with open_existing_journal(settings_with(data_dir=data_dir)) as journal:
        found = journal.shares.all(path)
    for shared in found:
        times = (shared.created_at, shared.expires_at, shared.revoked_at)
        table.add_row(shared.id, shared.path, *map(minute, times))
    print_wide(table, empty="no tokens: `tinkerflow checkpoint share PATH` creates one")


@app.command()
def unshare(
    share_id: Annotated[str, typer.Argument(help="the id that `checkpoint shares` shows")], data_dir: DataDir = None
) -> None:
    """Revoke a token."""
    from tinkerflow.backend.journal import command_line_actor
    from tinkerflow.deployments.parts import open_existing_journal

    with open_existing_journal(settings_with(data_dir=data_dir)) as journal:
        print(f"revoked the token for {journal.shares.revoke(share_id, actor=command_line_actor()).path}")
