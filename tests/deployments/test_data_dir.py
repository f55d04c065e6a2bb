"""A data dir is private, is served by one process, and can be backed up, restored and inspected."""

from __future__ import annotations

import gzip
import io
import multiprocessing
import os
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copytree
from threading import Thread
from typing import Any

import orjson
import pytest
from tests.manual_clock import ManualClock
from typer.testing import CliRunner

from tinkerflow.backend.core.errors import NotFoundError, ServerError, UserError
from tinkerflow.backend.core.ids import model_id, sampler_id
from tinkerflow.backend.journal import Kind, NewModel, NewRequest, NewSampler, NewSession
from tinkerflow.backend.service import LOCK, read_owner, service_url
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.backup import _restoring, restore_backup, unused_places, write_backup
from tinkerflow.deployments.commands import command_line
from tinkerflow.deployments.commands.key import _id_of
from tinkerflow.deployments.data_dir import RESTORING, open_to_others, owned
from tinkerflow.deployments.doctor import check_data_dir, check_processes
from tinkerflow.deployments.options import plain_console
from tinkerflow.deployments.parts import open_journal
from tinkerflow.deployments.status import show_status
from tinkerflow.deployments.up import Stack


def test_files_of_an_earlier_release_are_made_private(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("x")
    elsewhere.chmod(0o644)
    (data_dir / "logs").mkdir(parents=True, mode=0o755)
    for file in ("journal.db", "logs/engine.log"):
        (data_dir / file).write_text("")
        (data_dir / file).chmod(0o644)
    (data_dir / "logs/link").symlink_to(elsewhere)
    data_dir.chmod(0o755)
    with pytest.raises(
        UserError, match=r"4 files and folders, .*, can be read by other users: run `tinkerflow up`, which"
    ):
        check_data_dir(Settings(data_dir=data_dir))
    with owned(data_dir, "http://here"):
        assert open_to_others(data_dir) == []
        assert {p.stat().st_mode & 0o777 for p in data_dir.rglob("*") if p.is_file() and not p.is_symlink()} == {0o600}
    assert elsewhere.stat().st_mode & 0o777 == 0o644
    assert "private" in check_data_dir(Settings(data_dir=data_dir))


def test_other_files_of_the_folder_keep_their_modes(tmp_path: Path) -> None:
    """A mistyped --data-dir may be a home, or /tmp."""
    (tmp_path / "store").mkdir()
    for file in ("store/a", "notes.txt"):
        (tmp_path / file).write_text("")
    for path, mode in ((tmp_path, 0o1777), (tmp_path / "store", 0o755), (tmp_path / "notes.txt", 0o644)):
        path.chmod(mode)
    for _ in range(2):
        with owned(tmp_path, "http://here"):
            pass
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path, *tmp_path.rglob("*"))}
    expected = {tmp_path.name: 0o1777, "store": 0o700, "a": 0o600, "notes.txt": 0o644, "up.lock": 0o600}
    assert modes == expected and "private" in check_data_dir(Settings(data_dir=tmp_path))


def _own(data_dir: str, owns: object, ends: object) -> None:
    with owned(Path(data_dir), "http://127.0.0.1:1"):
        owns.set()  # type: ignore[attr-defined]
        ends.wait(60)  # type: ignore[attr-defined]


def test_a_second_process_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    assert read_owner(tmp_path) is None
    context = multiprocessing.get_context("spawn")
    owns, ends = context.Event(), context.Event()
    first = context.Process(target=_own, args=(str(tmp_path), owns, ends))
    first.start()
    assert owns.wait(120)
    message = rf"is already served by process {first.pid} at http://127\.0\.0\.1:1; stop it, or choose another"
    with pytest.raises(UserError, match=message), owned(tmp_path, "x"):
        pass
    (tmp_path / LOCK).write_text("")  # as before the first process has written its name
    with pytest.raises(UserError, match="is already served by another process; stop it"), owned(tmp_path, "x"):
        pass
    first.kill()
    first.join()
    settings = Settings(data_dir=tmp_path)
    with owned(tmp_path, "x"):
        assert read_owner(tmp_path) is not None
        assert service_url(settings) == "x"
    assert read_owner(tmp_path) is None
    assert service_url(settings) == "x", "of the last one, and not port 8000"
    assert service_url(Settings(data_dir=tmp_path, port=81)) == "http://127.0.0.1:81"


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def serving_health() -> Iterator[str]:
    """The URL of a server that answers like a healthy API, for the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_killed_service_is_unhealthy_and_a_stopped_one_is_healthy(tmp_path: Path) -> None:
    def shown() -> str:
        said = io.StringIO()
        assert not show_status(settings, plain_console(file=said, width=200))
        return said.getvalue()

    def beat() -> None:  # before each check, because a heartbeat is soon too old on a busy machine
        with open_journal(settings) as journal:
            journal.leases.beat()

    settings = Settings(data_dir=tmp_path)
    context = multiprocessing.get_context("spawn")
    owns, ends = context.Event(), context.Event()
    first = context.Process(target=_own, args=(str(tmp_path), owns, ends))
    first.start()
    assert owns.wait(120)
    beat()
    assert check_processes(settings).startswith("api: last heartbeat")
    first.kill()
    first.join()
    killed = f"process {first.pid} at http://127.0.0.1:1 was killed; `tinkerflow up` starts it again"
    with pytest.raises(UserError, match=f"^{killed}$"):
        check_processes(settings)
    assert killed in shown() and "http://127.0.0.1:1: does not answer" in shown()
    with serving_health() as url:  # as when the parts are started separately, without `up`
        parts = Settings(data_dir=tmp_path, port=int(url.rpartition(":")[2]))
        beat()
        assert check_processes(parts).startswith("api: last heartbeat")
        said = io.StringIO()
        assert show_status(parts, plain_console(file=said, width=200))
        assert f"{url}: answers" in said.getvalue() and "was killed" not in said.getvalue()
    with owned(tmp_path, "http://127.0.0.1:2"):
        pass
    assert "at http://127.0.0.1:2 stopped 20" in shown() and "http://127.0.0.1:2: does not answer" in shown()
    hour = ManualClock(datetime.now(UTC) + timedelta(hours=1))
    assert check_processes(settings, hour).startswith("none is running")
    with open_journal(settings) as journal:
        journal.leases.acquire("an engine of parts, that is killed")
    with pytest.raises(UserError, match=r"engine: last heartbeat \d+ s ago: must be at most 15 s; start the part"):
        check_processes(settings, hour)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_unwritable_folder_is_a_one_line_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"), owned(tmp_path / "data", "x"):
        pass


def test_full_disk_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkerflow.deployments.data_dir.NEEDED_BYTES", 2**62)
    message = r"its disk has \d+ MiB left, needs at least .* choose another --data-dir"
    with pytest.raises(UserError, match=message), owned(tmp_path, "x"):
        pass


def filled(data_dir: Path) -> Settings:
    """Fill a data dir with a key, a checkpoint's file and a champion, and return its settings."""
    settings = Settings(data_dir=data_dir)
    with open_journal(settings) as journal:
        journal.keys.create("mine", "search")
    scores = {"loss": 1.0, "exact_match": 0.5, "rows": 2, "samples": []}
    for number, weights in ((1, "tinker://a/sampler_weights/x"), (2, "tinker://b/sampler_weights/x")):
        entry = {"number": number, "weights": weights, "state": "s", "run": "r", "data": "d", "scores": scores,
                 "promoted_at": "2026-01-31T02:00:00Z"}  # fmt: skip
        file = data_dir / "pipelines" / "champions" / "best" / f"{number:08d}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(orjson.dumps(entry))
    (data_dir / "store" / "run").mkdir(parents=True)
    (data_dir / "store" / "run" / "tensors").write_bytes(b"\1" * 100)
    (data_dir / "group.secret").write_text("s3cret")
    (data_dir / "prefect").mkdir()
    sqlite3.connect(data_dir / "prefect" / "prefect.db").close()
    return settings


@pytest.mark.parametrize("name", ["data", "a#b %20"])  # the second name has another meaning in a URL
def test_backup_is_made_during_writes_and_restored_into_a_new_folder(tmp_path: Path, name: str) -> None:
    settings = filled(tmp_path / name)
    with closing(sqlite3.connect(settings.data_dir / "journal.db")) as writer:
        writer.execute("BEGIN IMMEDIATE")
        shown = list(write_backup(settings, tmp_path / "b.tar"))
    assert shown[-1].startswith(f"backup: {tmp_path / 'b.tar'}, ")
    assert (tmp_path / "b.tar").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="already exists; give a new name"):
        list(write_backup(settings, tmp_path / "b.tar"))
    with pytest.raises(UserError, match="is not empty"):
        list(restore_backup(tmp_path / "b.tar", settings.data_dir))
    lines = list(restore_backup(tmp_path / "b.tar", tmp_path / "new"))
    assert (
        lines[1]
        == f"next: tinkerflow checkpoint verify --data-dir {tmp_path}/new && tinkerflow up --data-dir {tmp_path}/new"
    )
    with open_journal(Settings(data_dir=tmp_path / "new")) as journal:
        assert [key.name for key in journal.keys.all()] == ["mine"]
    assert (tmp_path / "new/store/run/tensors").read_bytes() == b"\1" * 100
    assert (tmp_path / "new/group.secret").read_text() == "s3cret"
    assert open_to_others(tmp_path / "new") == []


def test_backup_takes_recovery_snapshots_first_and_leaves_out_what_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = filled(tmp_path / "data")
    for folder in ("a/weights/kept", "a/weights/gone", "b/recovery/seq-1"):
        (settings.data_dir / "store" / folder).mkdir(parents=True)
        (settings.data_dir / "store" / folder / "tensors").write_bytes(b"1")
    scandir = os.scandir

    def delete_before_it_is_read(path: Any) -> Any:
        if Path(path).name == "gone":
            Path(path, "tensors").unlink()
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", delete_before_it_is_read)
    assert "store: 3 file(s)" in list(write_backup(settings, tmp_path / "b.tar"))
    with tarfile.open(tmp_path / "b.tar") as tar:
        stored = [member.name for member in tar if member.isfile() and member.name.startswith("store/")]
    assert stored == ["store/b/recovery/seq-1/tensors", "store/a/weights/kept/tensors", "store/run/tensors"]


def test_restored_service_uses_the_embedded_model_of_its_data_dir(tmp_path: Path) -> None:
    settings = filled(tmp_path / "old")
    embedded, other = f"{tmp_path}/old/models/tinkerflow/tiny-qwen3", "Qwen/Qwen3-0.6B"
    with open_journal(settings) as journal:
        session = journal.sessions.create(NewSession("search", "0.38.0"))
        for n, base in enumerate((embedded, other)):
            run = model_id(session, n)
            creation = NewRequest(Kind.CREATE_MODEL, "search", b"{}", "", model_id=run, seq_id=0)
            journal.models.create(NewModel(run, session, "search", base, 8), creation)
    list(write_backup(settings, tmp_path / "b.tar"))
    list(restore_backup(tmp_path / "b.tar", tmp_path / "new"))
    with open_journal(Settings(data_dir=tmp_path / "new")) as journal:
        found = [journal.models.get(model_id(session, n), None).base_model for n in (0, 1)]
    assert found == [f"{tmp_path}/new/models/tinkerflow/tiny-qwen3", other]


def test_moved_service_uses_the_embedded_model_of_its_data_dir(tmp_path: Path) -> None:
    embedded = "models/tinkerflow/tiny-qwen3"
    (tmp_path / "other" / embedded).mkdir(parents=True)
    bases = [f"{tmp_path}/{name}" for name in (f"old/{embedded}", f"other/{embedded}")]
    with open_journal(Settings(data_dir=tmp_path / "old")) as journal:
        session = journal.sessions.create(NewSession("search", "0.38.0"))
        samplers = [NewSampler(sampler_id(session, n), session, "search", base) for n, base in enumerate(bases)]
        for sampler in samplers:
            journal.samplers.open(sampler)
    (tmp_path / "old").rename(tmp_path / "new")
    settings = Settings(data_dir=tmp_path / "new", port=0, prefect="off", start_deadline=0.01)
    with pytest.raises(ServerError, match="not ready"):
        Stack(settings, report=print).__enter__()
    with open_journal(settings) as journal:
        found = [journal.samplers.get(sampler.id, None).base_model for sampler in samplers]
    assert found == [f"{tmp_path}/new/{embedded}", bases[1]]


def test_foreign_or_malicious_backup_file_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("x"))
    with pytest.raises(UserError, match=r"^backup /dev/zero: must be a regular file$"):
        list(restore_backup(Path("/dev/zero"), tmp_path / "new"))
    with pytest.raises(UserError, match="was not written by `tinkerflow backup`"):
        list(restore_backup(tmp_path / "other.tar", tmp_path / "new"))
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        manifest = tarfile.TarInfo("tinkerflow-backup.json")
        content = b'{"made_at": "x", "version": "0"}'
        manifest.size = len(content)
        tar.addfile(manifest, io.BytesIO(content))
        tar.addfile(tarfile.TarInfo("../../evil"))
    with pytest.raises(UserError, match="cannot be restored"):
        list(restore_backup(tmp_path / "evil.tar", tmp_path / "new"))


def test_backup_of_a_store_behind_a_link_is_restored(tmp_path: Path) -> None:
    settings = filled(tmp_path / "data")
    for link in (settings.data_dir / "store" / "run", settings.data_dir / "store"):
        link.rename(tmp_path / f"disk-{link.name}")
        link.symlink_to(tmp_path / f"disk-{link.name}")
    list(write_backup(settings, tmp_path / "b.tar"))
    list(restore_backup(tmp_path / "b.tar", tmp_path / "new"))
    assert (tmp_path / "new/store/run/tensors").read_bytes() == b"\1" * 100
    assert not (tmp_path / "new/store").is_symlink()


def test_a_backup_is_restored_onto_a_new_disk(tmp_path: Path) -> None:
    list(write_backup(filled(tmp_path / "data"), tmp_path / "b.tar"))
    (tmp_path / "cut.tar").write_bytes((tmp_path / "b.tar").read_bytes()[:-5000])
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be restored"):
        list(restore_backup(tmp_path / "cut.tar", tmp_path / "disk"))
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["lost+found"]
    list(restore_backup(tmp_path / "b.tar", tmp_path / "disk"))
    assert (tmp_path / "disk/store/run/tensors").read_bytes() == b"\1" * 100


def test_a_backup_of_a_store_on_its_own_disk_leaves_out_what_only_root_can_read(tmp_path: Path) -> None:
    settings = filled(tmp_path / "data")
    for place in ("lost+found", "run/lost+found"):
        (settings.data_dir / "store" / place).mkdir()
    list(write_backup(settings, tmp_path / "b.tar"))
    with tarfile.open(tmp_path / "b.tar") as tar:
        stored = [name for name in tar.getnames() if name.startswith("store")]
    assert stored == ["store/.", "store/run", "store/run/lost+found", "store/run/tensors"]


def test_restored_parts_that_the_settings_do_not_use_are_named(tmp_path: Path) -> None:
    filled(tmp_path)
    assert list(unused_places(Settings(data_dir=tmp_path, store=str(tmp_path / "store")))) == []
    other = Settings(data_dir=tmp_path, store=str(tmp_path / "x"), database_url="postgresql://me:secret@db/x")
    store, database = unused_places(other)
    assert store.startswith(f"warning: TINKERFLOW_STORE names another place, so {tmp_path}/store is not used")
    assert "TINKERFLOW_DATABASE_URL" in database and f"{tmp_path}/journal.db" in database and "secret" not in database


def written(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


def test_cut_or_damaged_backup_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    list(write_backup(filled(tmp_path / "data"), tmp_path / "b.tar"))
    whole = (tmp_path / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "b.tar") as tar:
        middle = tar.getmember("store/run/tensors").offset
    packed = gzip.compress(whole)
    list(restore_backup(written(tmp_path / "b.tar.gz", packed), tmp_path / "packed"))
    broken = bytearray(whole)
    broken[middle + 10] ^= 1
    for content in (whole[:middle], whole[: middle + 600], bytes(broken), packed[: len(packed) // 2]):
        with pytest.raises(UserError, match="cannot be restored"):
            list(restore_backup(written(tmp_path / "cut.tar", content), tmp_path / "new"))
        assert list((tmp_path / "new").iterdir()) == []


def test_a_data_dir_is_restored_by_one_command_and_not_served_before_its_end(tmp_path: Path) -> None:
    list(write_backup(filled(tmp_path / "data"), tmp_path / "b.tar"))
    new = tmp_path / "new"
    with _restoring(new):
        with pytest.raises(UserError, match="another command restores a backup into it"):
            list(restore_backup(tmp_path / "b.tar", new))
        with pytest.raises(UserError, match="only a part of a backup is restored"), owned(new, "http://here"):
            pass
        (new / "store").mkdir()
        (new / "store" / "left").write_bytes(b"half")
        copytree(new, tmp_path / "killed")  # as `kill -9` leaves it
    list(restore_backup(tmp_path / "b.tar", tmp_path / "killed"))
    assert [path.name for path in (tmp_path / "killed/store").iterdir()] == ["run"]
    assert not (tmp_path / "killed" / RESTORING).exists()
    with owned(tmp_path / "killed", "http://here"), pytest.raises(UserError, match="is not empty"):
        list(restore_backup(tmp_path / "b.tar", tmp_path / "killed"))


def test_a_backup_inside_of_a_copied_folder_or_written_twice_at_once_is_refused(tmp_path: Path) -> None:
    settings = filled(tmp_path / "data")
    (tmp_path / "link").symlink_to(settings.data_dir / "store" / "run")
    for place, name in ((tmp_path / "link", "store"), (settings.data_dir / "pipelines", "pipelines")):
        with pytest.raises(UserError, match=rf"is in the folder .*/{name} \({name}\), which every backup copies"):
            list(write_backup(settings, place / "b.tar"))
    first = write_backup(settings, tmp_path / "b.tar")
    next(first)
    with pytest.raises(UserError, match=r"b.tar: cannot be written in its folder \(another command is writing it\)"):
        list(write_backup(settings, tmp_path / "b.tar"))
    list(first)
    list(restore_backup(tmp_path / "b.tar", tmp_path / "new"))
    assert (tmp_path / "new/store/run/tensors").read_bytes() == b"\1" * 100


def test_failed_backup_leaves_no_file(tmp_path: Path) -> None:
    settings = filled(tmp_path / "data")
    (settings.data_dir / "prefect" / "prefect.db").write_bytes(b"no database" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        list(write_backup(settings, tmp_path / "b.tar"))
    assert not list(tmp_path.glob("b.tar*"))


def test_backup_names_parts_stored_elsewhere(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    settings = Settings(data_dir=tmp_path, database_url="postgresql://db/x", store="gs://bucket/store")
    shown = "\n".join(write_backup(settings, tmp_path / "b.tar"))
    assert "the journal is in PostgreSQL" in shown and "store is at gs://bucket/store" in shown


def test_champions_are_listed_and_rolled_back(tmp_path: Path) -> None:
    filled(tmp_path)

    def run(*words: str) -> str:
        done = CliRunner().invoke(command_line("champion"), ["champion", *words, "--data-dir", str(tmp_path)])
        assert done.exception is None, done.exception
        return done.stdout

    assert "tinker://b/sampler_weights/x" in run("list") and "tinker://a" not in run("list")
    assert run("rollback", "best") == "champion/best is number 3 now: tinker://a/sampler_weights/x\n"
    assert run("show", "best").count("tinker://a/sampler_weights/x") == 2
    for words, message in ((["rollback", "best", "--to", "9"], "has no number 9"), (["show", "bets"], "mean 'best'")):
        done = CliRunner().invoke(command_line("champion"), ["champion", *words, "--data-dir", str(tmp_path)])
        assert isinstance(done.exception, NotFoundError) and message in str(done.exception)


def test_keys_are_revoked_by_id_or_by_an_unambiguous_name(tmp_path: Path) -> None:
    with open_journal(Settings(data_dir=tmp_path)) as journal:
        one, two = journal.keys.create("laptop", "a")[0], journal.keys.create("laptop", "b")[0]
        keys = journal.keys.all()
        assert _id_of(one.id, keys) == one.id
        with pytest.raises(UserError, match=f"2 keys have this name; give one of their ids: {one.id}, {two.id}"):
            _id_of("laptop", keys)
        journal.keys.revoke(one.id)
        assert _id_of("laptop", journal.keys.all()) == two.id
        with pytest.raises(NotFoundError, match=r"'lapto': no usable key has this id or name .did you mean 'laptop'"):
            _id_of("lapto", journal.keys.all())


def test_the_state_of_a_service_is_shown(tmp_path: Path) -> None:
    settings, shown = filled(tmp_path), io.StringIO()
    assert not show_status(settings, plain_console(file=shown, width=200))
    for text in ("no `tinkerflow up` with this data dir", "does not answer", "1 usable", "training runs"):
        assert text in shown.getvalue()
