"""The findings of `tinkerflow doctor`, and its advice."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.health_server import health_server

from tinkerflow.backend.core.errors import ServerError, StoreError, UserError
from tinkerflow.backend.core.prefect_access import make_credential, record_server
from tinkerflow.backend.journal import migrate
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.commands import CompileStatus
from tinkerflow.backend.store import blobs
from tinkerflow.backend.supervise.processes import free_port
from tinkerflow.deployments import doctor
from tinkerflow.deployments.data_dir import owned
from tinkerflow.deployments.options import plain_console
from tinkerflow.deployments.parts import open_journal
from tinkerflow.deployments.status import show_status


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a healthy server."""
    with health_server() as port:
        yield port


@pytest.fixture(autouse=True)
def no_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def test_one_failed_check_makes_the_report_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(_: Settings) -> str:
        raise UserError("the dog of sess-1:train:0 is not in [gpu]")

    monkeypatch.setattr(doctor, "CHECKS", {"cat": lambda _: "purrs", "dog": bad})
    said = io.StringIO()
    assert not doctor.examine(Settings(data_dir=tmp_path), plain_console(file=said, width=100))
    assert re.search(r"ok +\S* *cat +\S* *purrs", said.getvalue())
    assert re.search(r"bad +\S* *dog +\S* *the dog of sess-1:train:0 is not in \[gpu\]", said.getvalue())
    monkeypatch.setattr(doctor, "CHECKS", {"cat": lambda _: "purrs"})
    assert doctor.examine(Settings(data_dir=tmp_path), plain_console(file=said))


def test_doctor_shows_waiting_parts_and_groups(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    with open_journal(settings) as journal:
        assert doctor.check_processes(settings).startswith("none is running")
        journal.leases.acquire("an engine")
        journal.base_models.register([("m", "{}")])
        journal.base_models.note_progress("m", "worker group 1 ended (rank 0 was killed)")
        said = doctor.check_processes(settings)
        assert re.fullmatch(
            r"engine: last heartbeat \d+ s ago; m waits: worker group 1 ended \(rank 0 was killed\)", said
        )
        journal.leases.release()
        journal.base_models.note_progress("m", None)
        assert doctor.check_processes(settings).startswith("none is running")
        assert doctor.check_recovery(settings) == "no snapshots of models"
        assert doctor.check_journal(settings).endswith("journal.db: 0 training run(s), 0 key(s)")


OF_THE_JOURNAL = (doctor.check_journal, doctor.check_processes, doctor.check_recovery, doctor.check_compiled)


def test_doctor_does_not_create_a_missing_data_dir(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "none")
    assert doctor.check_store(settings) == f"file://{tmp_path}/none/store: `tinkerflow up` creates it"
    assert not settings.data_dir.exists()


@pytest.mark.parametrize("check", OF_THE_JOURNAL)
def test_doctor_does_not_create_a_missing_database(tmp_path: Path, check: Callable[[Settings], str]) -> None:
    folder = tmp_path / "none"
    for settings in (Settings(data_dir=folder), Settings(data_dir=folder, database_url=f"sqlite:///{folder}/x.db")):
        said = check(settings)
        assert check is doctor.check_compiled or said.endswith("there is no database yet; `tinkerflow up` creates it")
    assert not folder.exists()


@pytest.mark.parametrize("check", OF_THE_JOURNAL)
def test_database_of_an_earlier_version_is_left_unchanged(tmp_path: Path, check: Callable[[Settings], str]) -> None:
    settings = Settings(data_dir=tmp_path)
    migrate(settings.journal_url, "v0001")
    for _ in range(2):  # the first check has not upgraded it
        with pytest.raises(ServerError, match="the database is of an earlier version: `tinkerflow up` upgrades it"):
            check(settings)


def test_database_without_tables_is_healthy(tmp_path: Path) -> None:
    (tmp_path / "journal.db").touch()
    assert doctor.check_journal(Settings(data_dir=tmp_path)).endswith("no database yet; `tinkerflow up` creates it")


def test_doctor_shows_the_compile_status(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert doctor.check_compiled(settings).startswith("0 file(s)")
    with open_journal(settings) as journal:
        journal.base_models.register([("m", "{}"), ("new", "{}")])
        journal.base_models.note_compile_status("m", CompileStatus(planned=9, ready=4, failed=1, needed=2, late=0))
    said = "m: 4 of 9 warm (1 failed), 2 compiled for a request before, 0 after the warm-up; 0 file(s)"
    assert doctor.check_compiled(settings).startswith(said)


def test_the_store_is_probed_as_checkpoints_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(data_dir=tmp_path)
    assert doctor.check_store(settings) == f"file://{tmp_path}/store: writable"
    assert not list((tmp_path / "store").rglob(".doctor*"))
    with pytest.raises(UserError, match="ftp"):  # fsspec could write there, but no checkpoint can be saved there
        doctor.check_store(Settings(data_dir=tmp_path, store="ftp://somewhere/x"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match="file"):
        doctor.check_store(Settings(data_dir=tmp_path, store=f"file://{tmp_path}/file"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "runs").write_text("no checkpoint can be written below")
    with pytest.raises(OSError, match="runs"):
        doctor.check_store(Settings(data_dir=tmp_path, store=f"file://{tmp_path}/other"))

    monkeypatch.setattr(blobs.LocalBlobs, "read", lambda *_: b"something else")
    with pytest.raises(StoreError, match="differ from the bytes written"):
        doctor.check_store(settings)


def test_devices_are_found_without_opening_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(kind: str, signs: str, plugin: str) -> None:
        monkeypatch.setattr("tinkerflow.backend.pool.host.devices.accelerator", lambda: kind)
        monkeypatch.setattr(doctor, "accelerator", lambda: kind)
        monkeypatch.setattr(doctor, "seen", lambda: signs)
        monkeypatch.setattr(doctor, "find_spec", lambda name: name == plugin or None)

    def check(platform: str = "auto") -> str:
        return doctor.check_devices(Settings(data_dir=tmp_path, platform=platform), str(smi))

    smi = tmp_path / "smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB'\necho 'NVIDIA H100, 81559 MiB'\n")
    smi.chmod(0o755)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(doctor, "version", lambda name: "1.2.3")
    found("cpu", "", "")
    assert check() == "jax 1.2.3, CPUs"
    with pytest.raises(UserError, match="platform is 'tpu', but this host has only CPUs"):
        check("tpu")
    found("cuda", "an NVIDIA device (/dev/nvidia0)", "")
    assert check("cpu") == "jax 1.2.3, CPUs; an NVIDIA device (/dev/nvidia0) is not used"
    with pytest.raises(UserError, match=r"this host has an NVIDIA device .*, which JAX cannot use: .*extra `gpu`"):
        check()
    found("cuda", "an NVIDIA device (/dev/nvidia0)", "jax_cuda13_plugin")
    assert check() == "jax 1.2.3, jax-cuda13-plugin 1.2.3, NVIDIA H100, 81559 MiB; NVIDIA H100, 81559 MiB"
    smi.write_text("#!/bin/sh\necho 'cannot communicate with the NVIDIA driver' >&2\nexit 9\n")
    with pytest.raises(UserError, match="communicate with the NVIDIA driver"):
        check("cuda")
    found("tpu", "4 TPU chip(s)", "libtpu")
    assert check() == "jax 1.2.3, libtpu 1.2.3, 4 TPU chip(s)"


def test_doctor_shows_whether_the_api_runs(tmp_path: Path, port: int) -> None:
    settings = Settings(data_dir=tmp_path, port=port)
    with pytest.raises(UserError, match=r"serves a different data dir than .*: choose another --port"):
        doctor.check_api(settings)
    shown = io.StringIO()
    assert not show_status(settings, plain_console(file=shown, width=200))
    assert "serves a different data dir than" in shown.getvalue()
    with open_journal(settings) as journal:
        journal.leases.beat()
    assert doctor.check_api(settings).endswith("/api/v1/healthz: ok")
    assert show_status(settings, plain_console(file=shown, width=200))
    idle = Settings(data_dir=tmp_path, port=free_port())
    assert doctor.check_api(idle).endswith("not running; `tinkerflow up` starts it")


def test_prefect_embedded_external_or_off(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_prefect(Settings(data_dir=tmp_path, prefect="off")) == "off: nothing is tracked"
    idle = Settings(data_dir=tmp_path, prefect_port=port)  # another program listens on this port
    assert doctor.check_prefect(idle) == "not running; `tinkerflow up` starts it"
    with owned(tmp_path, "http://127.0.0.1:8000"):
        assert doctor.check_prefect(idle) == "starts with the engine"
    make_credential(tmp_path)
    record_server(tmp_path, port, os.getpid())
    assert f"{port}/api/health" in doctor.check_prefect(idle)
    with pytest.raises(UserError, match="set PREFECT_API_URL"):
        doctor.check_prefect(Settings(data_dir=tmp_path, prefect="external", prefect_port=port))
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/elsewhere/api/")
    for settings in (Settings(data_dir=tmp_path, prefect="external"), idle):  # `up` uses the external one, too
        assert "/elsewhere/api/health" in doctor.check_prefect(settings)
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    with pytest.raises(UserError, match=r"no answer .*; start that server, or change PREFECT_API_URL"):
        doctor.check_prefect(Settings(data_dir=tmp_path, prefect="external", prefect_port=port))


def test_uncreatable_data_dir_is_unhealthy(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "file" / "data")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"/file cannot be written: choose another --data-dir"):
        doctor.check_data_dir(settings)
