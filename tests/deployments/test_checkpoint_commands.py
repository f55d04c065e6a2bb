"""`tinkerflow checkpoint`: access tokens, maintenance of the store, import, merge and export."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import load_file, save
from tests.catalog import test_merging as merging
from tests.catalog.test_peft_import import CONFIG as TINY
from tests.catalog.test_peft_import import tensors
from typer.testing import CliRunner

from tinkerflow.backend.compute.models.families import parse_config
from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.core.errors import NotFoundError, StoreError, UserError
from tinkerflow.backend.core.ids import EMBEDDED, IMPORTED
from tinkerflow.backend.journal import (
    CheckpointKind,
    CheckpointSaved,
    Kind,
    Limits,
    ModelLive,
    ModelState,
    NewModel,
    NewRequest,
    NewSession,
    NewUpload,
    access_hash,
)
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.commands import AdapterState, LoraSpec
from tinkerflow.backend.store import RECOVERY, CheckpointMeta, Store
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG
from tinkerflow.deployments.commands import every_command
from tinkerflow.deployments.parts import open_journal
from tinkerflow.flows.sweeps import delete_uploads

RUN = "copy-1:train:0"
PATH = f"tinker://{RUN}/weights/a"


def test_access_token_is_shown_once_and_works_until_revoked(tmp_path: Path) -> None:
    settings, where = Settings(data_dir=tmp_path), ["--data-dir", str(tmp_path)]
    runner = CliRunner()
    missing = runner.invoke(every_command(), ["checkpoint", "share", PATH, *where])
    assert isinstance(missing.exception, NotFoundError)
    with open_journal(settings) as journal:
        saved = CheckpointSaved(PATH, RUN, CheckpointKind.WEIGHTS, "a", "team", "tiny", 8, True, True, True, 1, 10)
        journal.imports.record_copy("copy-1", saved, "tinker://elsewhere/weights/a")
    share_id, token = (
        runner.invoke(every_command(), ["checkpoint", "share", PATH, "--ttl", "3600", *where])
        .stdout.strip()
        .split(": ")
    )
    with open_journal(settings) as journal:
        assert journal.checkpoints.get(PATH, "stranger", access=access_hash(token)).path == PATH
        (row,) = journal.shares.all(PATH)
        assert row.expires_at is not None and 3500 < (row.expires_at - SystemClock().now()).total_seconds() <= 3600
    listed = runner.invoke(every_command(), ["checkpoint", "shares", *where], env={"COLUMNS": "200"}).stdout
    assert re.search(rf"{share_id}.*{re.escape(PATH)}", listed) and token not in listed
    assert (
        runner.invoke(every_command(), ["checkpoint", "unshare", share_id, *where]).stdout
        == f"revoked the token for {PATH}\n"
    )
    with open_journal(settings) as journal:
        assert journal.shares.all()[0].revoked_at is not None


@pytest.mark.parametrize("ttl", ["0", "nan", "inf", "1.5", "999999999"])
def test_invalid_time_to_live_is_refused(ttl: str) -> None:
    refused = CliRunner().invoke(every_command(), ["checkpoint", "share", PATH, "--ttl", ttl])
    assert refused.exit_code == 2 and "Invalid value for '--ttl'" in refused.output


# ------------------------------------------------------------------ maintenance of the store
@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store of a data dir without a database, with two checkpoints of a run and a recovery snapshot."""
    made = Store.open(Settings(data_dir=tmp_path).store_url)
    weights = {f"base_model.model.lm_head.lora_{m}.weight": np.ones((4, 4), np.float32) for m in "AB"}
    state = AdapterState(LoraSpec(4), 2, weights, {})
    meta = CheckpointMeta("tiny", "team", {"note": "n"}, run_metadata={"renderer": "qwen3"})
    for kind, name in (("weights", "a"), ("sampler_weights", "b"), (RECOVERY, "seq-1")):
        made.save(RUN, kind, name, state, meta)
    return made


def test_checkpoints_that_the_first_key_took_over_are_listed_with_its_project(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    state, meta = AdapterState(LoraSpec(4), 2, {}, {}), CheckpointMeta("tiny", "local")
    saved = Store.open(settings.store_url).save(RUN, "weights", "a", state, meta)

    def owner() -> str:
        listed = CliRunner().invoke(every_command(), ["checkpoint", "list", "--data-dir", str(tmp_path)])
        return str(listed.stdout.partition(PATH)[2].replace("│", " ").split()[0])

    assert owner() == "local"
    with open_journal(settings) as journal:
        journal.imports.restore(CheckpointSaved.of(saved), False, {}, None)
        journal.keys.create("me", "search")
    assert owner() == "search"


def checkpoint(tmp_path: Path, *args: str) -> Result:
    return CliRunner().invoke(every_command(), ["checkpoint", *args, "--data-dir", str(tmp_path)])


def test_list_reads_only_the_store(tmp_path: Path, store: Store) -> None:
    store.amend(PATH, store.checkpoints()[0].attempt, public=True, expires_at=datetime(2030, 1, 2, tzinfo=UTC))
    listed = checkpoint(tmp_path, "list").stdout
    assert re.search(rf"{PATH} .*team .*tiny .*2 .*UTC .*2030-01-02 00:00 UTC .*yes", listed)
    assert f"tinker://{RUN}/sampler_weights/b" in listed and "recovery" not in listed
    assert PATH not in checkpoint(tmp_path, "list", "--run", "other").stdout
    elsewhere = checkpoint(tmp_path, "list", "--store", f"file://{tmp_path}/elsewhere").stdout
    assert PATH not in elsewhere
    assert not (tmp_path / "journal.db").exists()


def test_verify_names_damaged_files(tmp_path: Path, store: Store) -> None:
    done = checkpoint(tmp_path, "verify")
    assert (done.exit_code, done.stdout) == (0, "3 whole, 0 damaged\n")
    (file,) = (tmp_path / "store").glob("runs/*/recovery/*/*/adapter_model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    done = checkpoint(tmp_path, "verify")
    assert done.exit_code == 1
    assert re.fullmatch(
        rf"checkpoint tinker://{RUN}/recovery/seq-1: adapter_model.safetensors has \d+ bytes; \d+ were saved\n"
        "2 whole, 1 damaged\n",
        done.stdout,
    )
    assert checkpoint(tmp_path, "verify", PATH).exit_code == 0
    missing = checkpoint(tmp_path, "verify", f"tinker://{RUN}/weights/never")
    assert missing.exit_code == 1 and "weights/never: it is not in the store" in missing.stdout


def test_gc_lists_orphans_and_removes_them_with_yes(tmp_path: Path, store: Store) -> None:
    dead = tmp_path / "store" / "runs" / RUN / "weights" / "a" / "attempt-dead"
    dead.mkdir()
    (dead / "adapter_config.json").write_bytes(b"half")
    assert "attempt-dead" not in checkpoint(tmp_path, "gc", "--yes").stdout
    os.utime(dead / "adapter_config.json", (0, 0))
    done = checkpoint(tmp_path, "gc")
    assert f"{PATH}: attempt attempt-dead, last written 1970-01-01 00:00 UTC" in done.stdout
    assert "nothing was removed" in done.stdout and dead.exists()
    assert "removed 1 attempt(s), 0 recovery snapshot(s) and 0 draft(s)" in checkpoint(tmp_path, "gc", "--yes").stdout
    assert not dead.exists()
    assert checkpoint(tmp_path, "verify").stdout == "3 whole, 0 damaged\n"


def of_old(commit: Path) -> None:
    for written in commit.parent.iterdir():
        os.utime(written, (0, 0))


def test_gc_removes_recovery_snapshots_of_models_that_are_not_live(tmp_path: Path, store: Store) -> None:
    path = f"tinker://{RUN}/recovery/seq-1"
    (commit,) = (tmp_path / "store").glob("runs/*/recovery/*/commit.json")
    of_old(commit)
    assert path not in checkpoint(tmp_path, "gc").stdout, "no journal says that its model is not live"
    with open_journal(Settings(data_dir=tmp_path)) as journal:
        session = journal.sessions.create(NewSession("team", "0.38.0"))
        creation = NewRequest(Kind.CREATE_MODEL, "team", b"{}", "create", model_id=RUN, seq_id=0)
        journal.models.create(NewModel(RUN, session, "team", "tiny", rank=4), creation)
        (pending,) = journal.requests.ready(RUN)
        journal.results.finish([pending.done(b"{}", "json", ModelLive(RUN))])
        assert "0 recovery snapshot(s)" in checkpoint(tmp_path, "gc", "--yes").stdout
        journal.models.end(RUN, ModelState.FAILED, "over")
        found = checkpoint(tmp_path, "gc").stdout
        assert f"{path}: recovery snapshot of model {RUN}, which is failed, written 1970" in found
        os.utime(commit)
        assert path not in checkpoint(tmp_path, "gc").stdout, "too young"
        of_old(commit)
    assert "1 recovery snapshot(s)" in checkpoint(tmp_path, "gc", "--yes").stdout
    assert checkpoint(tmp_path, "verify").stdout == "2 whole, 0 damaged\n"


def test_gc_keeps_the_snapshots_of_a_store_that_another_database_uses(tmp_path: Path, store: Store) -> None:
    """As with `--store` and the default data dir, or with an empty database before its backup is restored."""
    path = f"tinker://{RUN}/recovery/seq-1"
    (commit,) = (tmp_path / "store").glob("runs/*/recovery/*/commit.json")
    of_old(commit)
    with open_journal(Settings(data_dir=tmp_path / "other")) as journal:
        journal.recovery.note_store("file:///its/own/store", "its mark")
        assert "0 recovery snapshot(s)" in checkpoint(tmp_path / "other", "gc", "--store", store.url, "--yes").stdout
        assert store.exists(path)
        journal.recovery.note_store("file:///old/place/of/the/store", store.mark())
        of_old(commit)
        done = checkpoint(tmp_path / "other", "gc", "--store", store.url, "--yes").stdout
    assert f"{path}: recovery snapshot of unknown model {RUN}" in done and not store.exists(path)


def test_rebuild_index_restores_the_rows(tmp_path: Path, store: Store) -> None:
    done = checkpoint(tmp_path, "rebuild-index")
    *restored, counts = done.stdout.splitlines()
    assert set(restored) == {PATH, f"tinker://{RUN}/sampler_weights/b"}
    assert counts == "restored 2, known 0, damaged 0"
    assert checkpoint(tmp_path, "rebuild-index").stdout == "restored 0, known 2, damaged 0\n"
    with open_journal(Settings(data_dir=tmp_path)) as journal:
        (run,) = journal.models.runs("team", limit=9, offset=0).rows
        assert (run.model.id, run.model.user_metadata) == (RUN, {"renderer": "qwen3"})
        assert run.last_checkpoint is not None and run.last_checkpoint.path == PATH
        assert {row.path for row in journal.checkpoints.page("team").rows} == {
            saved.path for saved in store.checkpoints()
        }


def test_rebuild_index_gives_checkpoints_without_a_key_to_a_project(tmp_path: Path, store: Store) -> None:
    saved = store.save(
        "copy-2:train:0", "weights", "a", AdapterState(LoraSpec(4), 2, {}, {}), CheckpointMeta("tiny", "local")
    )
    assert "restored 3" in checkpoint(tmp_path, "rebuild-index", "--project", "research").stdout
    with open_journal(Settings(data_dir=tmp_path)) as journal:
        assert [row.path for row in journal.checkpoints.page("research").rows] == [saved.path]
        assert journal.models.runs("research", limit=9, offset=0).total == 1
        assert len(journal.checkpoints.page("team").rows) == 2


def test_rebuilt_checkpoint_of_an_upload_outlives_the_upload(tmp_path: Path, store: Store) -> None:
    """The API was killed between the commit and the rows, and the client did not repeat the request."""
    state, meta = AdapterState(LoraSpec(4), 2, {}, {}), CheckpointMeta("tiny", "team")
    saved = store.save("upload-1:train:0", "weights", IMPORTED, state, meta)
    with open_journal(Settings(data_dir=tmp_path)) as journal:
        spec = {"base_model": "tiny", "rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": True}
        expired = {"max_bytes": 9, "expires_at": SystemClock().now() - timedelta(hours=2)}
        upload = NewUpload(id="upload-1", owner="team", key_id="k", project_id=None, **spec, **expired)
        journal.uploads.start(upload, Limits())
        assert saved.path in checkpoint(tmp_path, "rebuild-index").stdout
        delete_uploads(journal, store)
        assert journal.checkpoints.get(saved.path, "team").path == saved.path
        assert journal.uploads.over() == []
    assert store.exists(saved.path)


def test_rebuild_index_names_damaged_checkpoints_and_restores_the_others(tmp_path: Path, store: Store) -> None:
    (tmp_path / "store" / "runs" / RUN / "sampler_weights" / "b" / "commit.json").write_bytes(b"{")
    done = checkpoint(tmp_path, "rebuild-index")
    assert isinstance(done.exception, StoreError) and "sampler_weights/b: commit.json is damaged" in str(done.exception)
    assert done.stdout.splitlines() == [PATH, "restored 1, known 0, damaged 1"]


# ------------------------------------------------------------------ import
def test_a_peft_folder_becomes_a_checkpoint(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    folder.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    config = parse_config(TINY, name="tiny")
    weights = tensors(config, LoraSpec(4))
    (folder / ADAPTER).write_bytes(save(weights))
    (folder / ADAPTER_CONFIG).write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    runner, data = CliRunner(), ["--data-dir", str(tmp_path / "data")]
    arguments = ["checkpoint", "import", str(folder), "--base-model", str(model), "--project", "team", *data]
    with pytest.raises(UserError, match=r"the rank of 'model\.layers\.0\.self_attn\.q_proj' is 8: must be 4"):
        runner.invoke(every_command(), arguments, catch_exceptions=False)
    (folder / ADAPTER_CONFIG).write_text(json.dumps({"r": 4, "lora_alpha": 16}))
    path = runner.invoke(every_command(), arguments, catch_exceptions=False).stdout.strip()
    settings = Settings(data_dir=tmp_path / "data")
    state, saved = Store.open(settings.store_url).load(path)
    assert (state.spec, state.moments, saved.meta.base_model) == (LoraSpec(4), {}, str(model))
    for name, array in weights.items():
        np.testing.assert_array_equal(state.weights[name], array / 2 if "lora_B" in name else array)
    with open_journal(settings) as journal:
        assert journal.checkpoints.get(path, "team").kind is CheckpointKind.WEIGHTS
        with pytest.raises(NotFoundError):
            journal.checkpoints.get(path, "other")
        assert journal.audit.entries("team")[-1].event == "checkpoint_imported"


@pytest.mark.parametrize("base_model", [".", EMBEDDED])
def test_a_folder_without_an_adapter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base_model: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    arguments = ["checkpoint", "import", str(tmp_path), "--base-model", base_model, "--data-dir", str(tmp_path)]
    with pytest.raises(UserError, match=r"adapter_config\.json cannot be read"):
        CliRunner().invoke(every_command(), arguments, catch_exceptions=False)


def test_a_checkpoint_is_merged_into_its_base_model(tmp_path: Path) -> None:
    cfg, base = merging.of_base()
    folder, weights = merging.written(tmp_path / "model", base), tensors(cfg)
    opened = Store.open(Settings(data_dir=tmp_path).store_url)
    state, meta = AdapterState(LoraSpec(4), 1, weights), CheckpointMeta(base_model=str(folder), owner="team")
    path = opened.save(RUN, "weights", "a", state, meta).path
    arguments = ["checkpoint", "merge", path, "--to", str(tmp_path / "out"), "--data-dir", str(tmp_path)]
    done = CliRunner().invoke(every_command(), arguments, catch_exceptions=False)
    assert done.stdout == "written: model.safetensors\n"
    name = "model.layers.0.mlp.up_proj.weight"
    merged = load_file(tmp_path / "out" / "model.safetensors")[name]
    np.testing.assert_array_equal(merged, base[name] + merging.update(weights, name))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "An adapter of rank 4 of `model`, after 1 steps with adamw." in card and f"checkpoint `{path}`" in card
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- tinkerflow\n---\n")
    shown = CliRunner().invoke(every_command(), ["checkpoint", "card", path, "--data-dir", str(tmp_path)])
    assert 'AutoModelForCausalLM.from_pretrained("FOLDER")' in card and f'create(model="{path}"' in card
    hint = f"The base model is a folder of the service: `tinkerflow checkpoint merge {path} --to FOLDER` writes"
    assert "library_name: peft" in shown.stdout and hint in shown.stdout
    missing = CliRunner().invoke(every_command(), ["checkpoint", "card", f"{path}b", "--data-dir", str(tmp_path)])
    assert isinstance(missing.exception, NotFoundError)


def test_a_merge_that_fails_at_its_card_leaves_nothing(tmp_path: Path) -> None:
    cfg, base = merging.of_base()
    meta = CheckpointMeta(base_model=str(merging.written(tmp_path / "model", base)), owner="team")
    opened = Store.open(Settings(data_dir=tmp_path).store_url)
    path = opened.save(RUN, "weights", "a", AdapterState(LoraSpec(4), 1, tensors(cfg)), meta).path
    arguments = ["checkpoint", "merge", path, "--to", str(tmp_path / "out" / "whole"), "--data-dir", str(tmp_path)]
    (tmp_path / "journal.db").write_bytes(b"no database" * 100)
    assert "not a database" in str(CliRunner().invoke(every_command(), arguments).exception)
    (tmp_path / "journal.db").unlink()
    assert not list(tmp_path.glob("out/*"))
    CliRunner().invoke(every_command(), arguments, catch_exceptions=False)
    assert f"checkpoint `{path}`" in (tmp_path / "out" / "whole" / "README.md").read_text()


def test_the_embedded_model_of_a_restored_data_dir_is_found(tmp_path: Path) -> None:
    cfg, base = merging.of_base()
    embedded = Path("models", "tinkerflow", "tiny-qwen3")
    (tmp_path / "new" / embedded).parent.mkdir(parents=True)
    merging.written(tmp_path / "new" / embedded, base)
    opened = Store.open(Settings(data_dir=tmp_path / "new").store_url)
    meta = CheckpointMeta(base_model=str(tmp_path / "old" / embedded), owner="team")
    path = opened.save(RUN, "weights", "a", AdapterState(LoraSpec(4), 1, tensors(cfg)), meta).path
    for command in (["card"], ["export", "--to", str(tmp_path / "out")], ["merge", "--to", str(tmp_path / "whole")]):
        arguments = ["checkpoint", *command, path, "--data-dir", str(tmp_path / "new")]
        CliRunner().invoke(every_command(), arguments, catch_exceptions=False)
    assert (tmp_path / "out" / ADAPTER).is_file() and (tmp_path / "whole" / "model.safetensors").is_file()


@pytest.mark.parametrize("kind", ["weights", "external_weights"])
def test_an_exported_checkpoint_is_an_adapter_of_peft_with_its_card(tmp_path: Path, kind: str) -> None:
    cfg, base = merging.of_base()
    folder, weights = merging.written(tmp_path / "model", base), tensors(cfg)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    opened = Store.open(Settings(data_dir=tmp_path).store_url)
    state = AdapterState(LoraSpec(4), 1, weights, {f"m.{name}": array for name, array in weights.items()})
    meta = CheckpointMeta(base_model=str(folder), owner="team")
    save = opened.export if kind == "external_weights" else partial(opened.save, kind=kind)
    path = save(run_id=RUN, name="a", state=state, meta=meta).path
    arguments = ["checkpoint", "export", path, "--to", str(tmp_path / "out/deep"), "--data-dir", str(tmp_path)]
    (stored,) = (tmp_path / "store").rglob(ADAPTER)
    good = stored.read_bytes()
    stored.write_bytes(bytes(len(good)))
    assert "SHA-256" in str(CliRunner().invoke(every_command(), arguments).exception)
    assert not list((tmp_path / "out").iterdir())  # nothing is left, so the same command can be repeated
    stored.write_bytes(good)
    done = CliRunner().invoke(every_command(), arguments, catch_exceptions=False)
    written, hint = done.stdout.splitlines()
    assert written == "written: README.md, adapter_config.json, adapter_model.safetensors"
    assert f"tinkerflow checkpoint merge {path} --to FOLDER" in hint
    exported = load_file(tmp_path / "out/deep/adapter_model.safetensors")
    assert {name: array.tolist() for name, array in exported.items()} == {n: a.tolist() for n, a in weights.items()}
    assert json.loads((tmp_path / "out/deep" / ADAPTER_CONFIG).read_text())["r"] == 4
    card = (tmp_path / "out/deep/README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\nlicense: mit\ntags:\n- tinkerflow\n---\n")
    assert f"checkpoint `{path}`" in card and card.endswith("Base model: mit (its README.md).\n")
    again = CliRunner().invoke(every_command(), arguments)
    assert isinstance(again.exception, UserError) and "name a new folder" in str(again.exception)
    for command in ("export", "merge") if kind == "weights" else ("export",):
        impossible = ["checkpoint", command, path, "--to", str(stored / "x"), "--data-dir", str(tmp_path)]
        error = CliRunner().invoke(every_command(), impossible).exception
        assert isinstance(error, UserError)
        assert error.message == f"--to '{stored / 'x'}': cannot be written (Not a directory)"
    arguments[2] = f"{path}b"
    assert isinstance(CliRunner().invoke(every_command(), arguments).exception, NotFoundError)
