"""Back up a data dir to one tar file while the service runs, and restore it.

The database is copied first, so the store then contains every checkpoint that the copy lists, except those that expire
or are deleted while the store is copied. Files of the store and of the work folder never change once they are written.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import shlex
import shutil
import sqlite3
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tinkerflow import __version__
from tinkerflow.backend.core.disk import folder_of_url, lock_new, make_folder, open_private
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.ids import EMBEDDED_FOLDER
from tinkerflow.backend.settings import Settings, variable_of
from tinkerflow.backend.spec.checkpoint import RECOVERY
from tinkerflow.deployments.data_dir import OF_DISK, RESTORING, refuse_restoring
from tinkerflow.deployments.options import existing

MANIFEST = "tinkerflow-backup.json"
JOURNAL, PREFECT = "journal.db", "prefect/prefect.db"
_FOLDERS = {"store": "store_url", "pipelines": "pipelines_url"}  # name in the file -> setting with the folder's URL
_DRAFT = ".partial"
_DAMAGED = (tarfile.TarError, OSError, ValueError, EOFError, zlib.error, lzma.LZMAError)  # also if people compress it


def write_backup(settings: Settings, file: Path) -> Iterator[str]:
    """Write a backup of the data dir to a new file. Yields lines for people. Links are replaced by their targets.

    UserError: the file exists, is in a folder that is copied, or cannot be written, or there is no data dir with a
    database.
    """
    if file.exists():
        raise UserError(f"backup {file}: already exists; give a new name")
    existing(settings, settings.data_dir.as_uri())
    refuse_restoring(settings.data_dir)
    for name, setting in _FOLDERS.items():
        url = getattr(settings, setting)
        if url.startswith("file://") and (folder := folder_of_url(url).resolve()) in file.resolve().parents:
            raise UserError(f"backup {file}: is in the folder {folder} ({name}), which every backup copies; move it")
    if not settings.has_journal:
        raise UserError(f"data dir {settings.data_dir}: has no database {settings.journal_file}: check --data-dir")
    draft = file.with_name(file.name + _DRAFT)
    with ExitStack() as stack:
        try:
            out = stack.enter_context(open_private(draft, "ab"))
            lock_new(out.fileno(), draft)
        except OSError as error:
            raise UserError(f"backup {file}: cannot be written in its folder ({error.strerror})") from error
        try:
            out.truncate(0)  # the draft of a backup that was killed
            with tarfile.open(fileobj=out, mode="w", dereference=True) as tar:
                yield from _add_all(tar, settings)
            draft.rename(file)
        except BaseException:
            draft.unlink()  # the backup may have filled the disk
            raise
    yield f"backup: {file}, {file.stat().st_size / 2**20:.1f} MiB"


def _add_all(tar: tarfile.TarFile, settings: Settings) -> Iterator[str]:
    now = datetime.now(UTC).isoformat()
    manifest = {"version": __version__, "made_at": now, "data_dir": str(settings.data_dir)}
    _add_bytes(tar, MANIFEST, json.dumps(manifest).encode())
    if (journal := settings.journal_file) is not None:
        yield from _add_database(tar, JOURNAL, journal)
    else:
        yield "not copied: the journal is in PostgreSQL; copy it with pg_dump before this backup"
    for name, setting in _FOLDERS.items():
        url = getattr(settings, setting)
        if url.startswith("file://"):
            yield _add_folder(tar, name, folder_of_url(url))
        else:
            yield f"not copied: {name} is at {url}"
    yield from _add_database(tar, PREFECT, settings.data_dir / PREFECT)
    for secret in sorted(settings.data_dir.glob("*.secret")):
        _add_bytes(tar, secret.name, secret.read_bytes())


def restore_backup(file: Path, data_dir: Path) -> Iterator[str]:
    """Unpack a backup into a data dir. Yields lines for people.

    UserError: the file is not a backup, the data dir is not empty, or another command restores into it.
    """
    if file.exists() and not file.is_file():  # a pipe may never end, and cannot be read twice
        raise UserError(f"backup {file}: must be a regular file")
    with _restoring(data_dir):
        try:
            manifest = _unpack(file, data_dir)
        except _DAMAGED as error:
            reason = str(error).partition("\n")[0].rstrip(":")  # tarfile lists the reason of each format
            raise UserError(f"backup {file}: cannot be restored ({reason})") from error
        (data_dir / MANIFEST).unlink()
        name_embedded_model(data_dir)
    folder = shlex.quote(str(data_dir))
    yield f"restored the backup of {manifest['made_at'][:16]} UTC (tinkerflow {manifest['version']}) into {data_dir}"
    yield f"next: tinkerflow checkpoint verify --data-dir {folder} && tinkerflow up --data-dir {folder}"


@contextmanager
def _restoring(data_dir: Path) -> Iterator[None]:
    """Mark an empty data dir as being restored during the block. If the block fails, empty the data dir again.

    The mark of a restore that was killed is still there. Its files are removed first. UserError: the data dir is not
    empty, or another command restores into it.
    """
    mark = data_dir / RESTORING
    if _content(data_dir) and not mark.exists():
        raise _not_empty(data_dir)
    make_folder(data_dir)
    was_killed = mark.exists()
    with ExitStack() as stack:
        try:
            held = stack.enter_context(open_private(mark, "r+" if was_killed else "x"))
            lock_new(held.fileno(), mark)
        except (FileExistsError, FileNotFoundError) as error:
            raise UserError(f"data dir {data_dir}: another command restores a backup into it") from error
        if was_killed:
            _clear(data_dir, but=mark)
        elif len(_content(data_dir)) > 1:  # another command has just restored a backup
            mark.unlink()
            raise _not_empty(data_dir)
        try:
            yield
        except BaseException:
            _clear(data_dir, but=mark)
            mark.unlink()
            raise
        mark.unlink()


def _not_empty(data_dir: Path) -> UserError:
    return UserError(f"data dir {data_dir}: is not empty; give a new --data-dir, or move the old one away")


def unused_places(settings: Settings) -> Iterator[str]:
    """A warning for each part of a restored data dir that a service with these settings would look for elsewhere."""
    used = {name: folder_of_url(getattr(settings, url)) for name, url in _FOLDERS.items()}
    for setting, name, place in (
        ("store", "store", used["store"]),
        ("pipelines", "pipelines", used["pipelines"]),
        ("database_url", JOURNAL, settings.journal_file),
    ):
        restored = settings.data_dir / name
        if restored.exists() and place != restored:
            yield f"warning: {variable_of(setting)} names another place, so {restored} is not used: unset it first"


def _unpack(file: Path, data_dir: Path) -> dict[str, Any]:
    """Unpack a backup. Returns its manifest. UserError: the file is no backup. One of _DAMAGED: it is damaged."""
    with tarfile.open(file) as tar:
        first = tar.next()
        content = None if first is None or first.name != MANIFEST else tar.extractfile(first)
        if content is None:
            raise UserError(f"backup {file}: was not written by `tinkerflow backup`")
        manifest: dict[str, Any] = json.loads(content.read())
        make_folder((data_dir / PREFECT).parent)  # the archive has only a file for this
        tar.extractall(data_dir, filter=_private)
        # tarfile also stops without an error at a damaged header, or if the file was cut between two members.
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"the file is cut or damaged after byte {tar.offset}")
    return manifest


def _content(folder: Path) -> list[Path]:
    """The entries of a folder, if it exists, without that of a new disk."""
    return [path for path in folder.iterdir() if path.name != OF_DISK] if folder.is_dir() else []


def _clear(folder: Path, *, but: Path) -> None:
    """Remove the content of a folder except one entry."""
    for path in _content(folder):
        if path == but:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


# Samples with their tokens. The journal also has the samplers that drew them. If no sampler has an old name, this table
# is not read, because `up` would have to read most of the journal's bytes.
_LARGE = "stability_info"


def name_embedded_model(data_dir: Path, *, moved: bool = False) -> None:
    """Rename the embedded model in the journal's rows to its folder in this data dir (`EMBEDDED_FOLDER`).

    moved: rename only folders that no longer exist, as after the data dir was moved.
    """
    if not (journal := data_dir / JOURNAL).exists():
        return
    folder = "/".join(EMBEDDED_FOLDER)
    ours = str(data_dir.absolute() / folder)
    with closing(sqlite3.connect(journal)) as database, database:
        tables = database.execute(
            "SELECT m.name FROM sqlite_master m JOIN pragma_table_info(m.name) c"
            " WHERE m.type = 'table' AND c.name = 'base_model'"
        ).fetchall()
        renamed = False
        for (table,) in sorted(tables, key=lambda row: row[0] == _LARGE):
            if table == _LARGE and not renamed:
                continue
            found = database.execute(
                f'SELECT DISTINCT base_model FROM "{table}" WHERE base_model LIKE ?', (f"%/{folder}",)
            ).fetchall()
            for (name,) in found:
                if name != ours and not (moved and Path(name).is_dir()):
                    database.execute(f'UPDATE "{table}" SET base_model = ? WHERE base_model = ?', (ours, name))
                    renamed = True


def _private(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """Refuse paths outside the folder, and restrict unpacked files to their owner."""
    checked = tarfile.data_filter(member, path)
    return checked.replace(mode=0o700 if checked.isdir() else 0o600, deep=False)


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o600
    tar.addfile(member, io.BytesIO(data))


def _add_database(tar: tarfile.TarFile, name: str, file: Path) -> Iterator[str]:
    """Add a consistent copy of an SQLite database, even while other processes write to it."""
    if not file.exists():
        return
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".backup-") as copy:
        source = closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True))
        with source as opened, closing(sqlite3.connect(copy.name)) as target:
            opened.backup(target)
        tar.add(copy.name, name)
    yield f"{name}: {file.stat().st_size / 2**20:.1f} MiB"


def _add_folder(tar: tarfile.TarFile, name: str, folder: Path) -> str:
    count = 0
    # The service soon deletes recovery snapshots that newer ones have replaced, but the copied database names them.
    for path in sorted(_inside(folder), key=lambda path: (RECOVERY not in path.relative_to(folder).parts, path)):
        try:
            tar.add(path, f"{name}/{path.relative_to(folder)}", recursive=False)
        except FileNotFoundError:  # the file expired meanwhile
            continue
        count += path.is_file()
    return f"{name}: {count} file(s)"


def _inside(folder: Path) -> Iterator[Path]:
    """The folder and everything in it, without folders that are deleted meanwhile. OSError: a file cannot be read.

    The entry of a disk that is mounted at the folder is left out, because only root can read it.
    """

    def check(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    yield folder
    for base, folders, files in os.walk(folder, onerror=check, followlinks=True):
        if Path(base) == folder and OF_DISK in folders:
            folders.remove(OF_DISK)
        yield from (Path(base, name) for name in (*folders, *files))
