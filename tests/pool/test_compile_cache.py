"""The compilation cache at the start of a group. Tests with real groups are in test_jax_group.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zstandard

from tinkerflow.backend.pool.compile_cache import (
    copy_entries_of_rank_0,
    delete_cut_entries,
    folder_of,
    has_common_keys,
)


def entry(folder: Path, name: str, content: bytes = b"an executable" * 100) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"jit_{name}-cache"
    path.write_bytes(zstandard.ZstdCompressor().compress(content))
    return path


def names(folder: Path) -> set[str]:
    return {path.name.removeprefix("jit_").removesuffix("-cache") for path in folder.glob("*-cache")}


@pytest.mark.parametrize("kept", [0, 3, 9, -1])
def test_truncated_entry_is_deleted(tmp_path: Path, kept: int) -> None:
    cut = entry(tmp_path, "cut")
    cut.write_bytes(cut.read_bytes()[:kept])
    entry(tmp_path, "whole")
    (tmp_path / "jit_other-cache").write_bytes(b"compressed in another way")
    delete_cut_entries(tmp_path)
    assert names(tmp_path) == {"whole", "other"}


def test_only_new_entries_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or read_bytes(path))
    old = entry(tmp_path, "old")
    delete_cut_entries(tmp_path)
    stamp = (tmp_path / "checked").stat().st_mtime_ns
    os.utime(old, ns=(stamp - 10**9, stamp - 10**9))
    entry(tmp_path, "new")
    delete_cut_entries(tmp_path)
    assert read == ["jit_old-cache", "jit_new-cache"]


def test_killed_check_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may end between any two deletions, and another group may delete an entry first."""
    for name in "abc":
        cut = entry(tmp_path, name)
        cut.write_bytes(cut.read_bytes()[:9])
    unlink = Path.unlink

    def killed_at_b(path: Path, missing_ok: bool = False) -> None:
        if path.name == "jit_b-cache":
            raise KeyboardInterrupt
        unlink(path, missing_ok)
        raise FileNotFoundError

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "unlink", killed_at_b)
        delete_cut_entries(tmp_path)
    assert names(tmp_path) == {"b", "c"}
    delete_cut_entries(tmp_path)
    assert names(tmp_path) == set()
    assert [path.name for path in tmp_path.iterdir()] == ["checked"]


def copied(*folders: Path) -> tuple[list[set[str]], set[str]]:
    """Copy the entries of rank 0. Returns the entries of each rank afterwards, and the entries that were sent."""
    texts = [" ".join(path.name for path in folder.glob("*-cache")) for folder in folders]
    sent: dict[str, bytes] = {}
    for rank, folder in enumerate(folders):
        copy_entries_of_rank_0(folder, rank, lambda text: texts, sent.__setitem__, sent.__getitem__)
    return [names(folder) for folder in folders], set(sent)


def test_every_rank_gets_the_entries_of_rank_0(tmp_path: Path) -> None:
    first, second, new = (tmp_path / name for name in ("first", "second", "new"))
    new.mkdir()
    for name in "abc":
        entry(first, name, name.encode() * 99)
    for name in "bcd":
        entry(second, name, name.encode() * 99)
    assert copied(first, second) == ([set("abc")] * 2, {"jit_a-cache"})
    assert copied(first, second, new) == ([set("abc")] * 3, {f"jit_{name}-cache" for name in "abc"})
    assert len({(folder / "jit_a-cache").read_bytes() for folder in (first, second, new)}) == 1
    assert copied(first, second, new) == ([set("abc")] * 3, set())


@pytest.mark.parametrize(("others", "common"), [(["jit_probe-1-cache"], True), (["jit_probe-2-cache"], False)])
def test_ranks_with_the_same_keys_are_found_by_a_probe(tmp_path: Path, others: list[str], common: bool) -> None:
    entry(tmp_path, "probe-0")  # of an earlier version
    entry(tmp_path, "step-1")
    found = has_common_keys(tmp_path, lambda: entry(tmp_path, "probe-1") and None, lambda text: [text, *others])
    assert found is common
    assert names(tmp_path) == {"probe-1", "step-1"}


def test_groups_with_several_processes_have_separate_folders(tmp_path: Path) -> None:
    def folder(name: str, config: str, processes: int, rank: int) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(config)
        return folder_of(str(tmp_path), str(tmp_path / name), processes, rank)

    assert folder("a", "1", 1, 0) == tmp_path
    found = [folder("a", "1", 2, 0), folder("a", "1", 2, 1), folder("a", "1", 4, 0), folder("a", "2", 2, 0)]
    assert len({*found, folder("b", "1", 2, 0)}) == 5
    assert found[0] == folder("a", "1", 2, 0)
