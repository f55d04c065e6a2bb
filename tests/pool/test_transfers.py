"""States move between worker processes and the store. The driver's sockets carry only names."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.pool.conftest import StartPool, make_config

from tinkerflow.backend.core.errors import GroupFailedError, NotFoundError, StoreAwayError, StoreError
from tinkerflow.backend.pool import Pool, transfers
from tinkerflow.backend.pool import pool as pool_module
from tinkerflow.backend.spec.checkpoint import RECOVERY
from tinkerflow.backend.spec.commands import (
    AdapterKept,
    ExportAdapter,
    FetchState,
    ImportAdapter,
    Ping,
    WriteState,
)
from tinkerflow.backend.store import CheckpointMeta, Saved, Store, parts

META = CheckpointMeta(base_model="tiny", owner="me")
ADAPTERS = 16


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(f"file://{tmp_path / 'store'}")


@pytest.fixture
def keepers(start_pool: StartPool, store: Store) -> Callable[..., Awaitable[Pool]]:
    async def start(processes: int, mark: str | None = None) -> Pool:
        config = replace(
            make_config(fsdp=processes), store_url=store.url, store_mark=store.mark() if mark is None else mark
        )
        return await start_pool("Keeper", processes=processes, config=config)

    return start


async def save(pool: Pool, store: Store, adapter: str) -> Saved:
    folder = store.new_folder("run", RECOVERY, f"seq-{adapter}")
    kept = await pool.submit(ExportAdapter(adapter, optimizer=True, keep=folder))
    assert isinstance(kept, AdapterKept)
    return store.commit_parts(folder, kept, META, await pool.transfer(WriteState(adapter, folder)))


def bytes_sent(pool: Pool) -> int:
    group = pool._generations.serving
    members = () if group is None else group._members
    return sum(member.link.sent for member in members if member.link is not None)


async def restore(pool: Pool, store: Store, adapter: str) -> None:
    state, _ = store.stored(f"tinker://run/recovery/seq-{adapter}")
    await pool.transfer(FetchState(adapter, state))
    await pool.submit(ImportAdapter(adapter, state))


@pytest.mark.parametrize("processes", [2, 8])
async def test_restart_sends_names_instead_of_state(
    keepers: Callable[..., Awaitable[Pool]], store: Store, processes: int
) -> None:
    pool = await keepers(processes)
    assert pool.reaches_store
    names = [f"adapter-{number}" for number in range(ADAPTERS)]
    sizes = [(await save(pool, store, name)).size_bytes for name in names]
    os.kill(pool.pids[0], signal.SIGKILL)
    with pytest.raises(GroupFailedError):
        while True:
            await pool.submit(Ping(), generation=1)
    await pool.serving()
    before = bytes_sent(pool)
    for name in names:
        await restore(pool, store, name)
    for_each = (bytes_sent(pool) - before) / processes / ADAPTERS
    assert min(sizes) > 128 * 1024 * processes // 2
    assert for_each < 8 * 1024  # mostly digests of the files; a part of a state has 64 or 128 KiB


async def test_failed_process_fails_the_transfer_but_not_the_group(
    keepers: Callable[..., Awaitable[Pool]], store: Store, tmp_path: Path
) -> None:
    pool = await keepers(2)
    with pytest.raises(StoreError, match="rank 1 has lost it"):
        await save(pool, store, "fail")
    assert not store.exists("tinker://run/recovery/seq-fail")
    saved = await save(pool, store, "a")
    state, _ = store.stored(saved.path)
    (tmp_path / "store" / state.folder / "part-00001.safetensors").write_bytes(b"cut")
    with pytest.raises(StoreError, match=r"part-00001\.safetensors does not have the SHA-256"):
        await pool.transfer(FetchState("a", state))
    store.delete(saved.path)
    with pytest.raises(NotFoundError, match="no longer exists"):
        await pool.transfer(FetchState("a", state))
    with pytest.raises(GroupFailedError, match="no longer serves"):
        await pool.transfer(FetchState("a", state), generation=7)
    assert pool.generation == 1
    await pool.submit(Ping())


async def test_process_with_a_different_store_gets_states(keepers: Callable[..., Awaitable[Pool]]) -> None:
    assert not (await keepers(2, mark="store-of-another-host")).reaches_store


async def test_states_go_through_the_driver_for_a_while_after_a_failed_store(
    keepers: Callable[..., Awaitable[Pool]], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "DETOUR_SECONDS", 1.0)
    pool = await keepers(2)
    (tmp_path / "store" / "runs").touch()  # a file instead of a folder makes the store fail
    with pytest.raises(StoreAwayError, match="cannot write"):
        await save(pool, store, "a")
    reached = [pool.reaches_store]
    (tmp_path / "store" / "runs").unlink()
    await asyncio.sleep(1.0)
    reached.append(pool.reaches_store)
    assert reached == [False, True]
    await save(pool, store, "a")


def test_unresponsive_store_prevents_no_start(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, mark = threading.Event(), store.mark()
    holder = SimpleNamespace(take_kept=print, needed_tensors=print, keep_fetched=print)
    config = replace(make_config(), store_url=store.url, store_mark=mark)
    assert transfers.Transfers(holder, config, 0).reach_store
    monkeypatch.setattr(parts, "is_store", lambda blobs, mark: hangs.wait(60))
    assert not transfers.Transfers(holder, config, 0, patience=0.1).reach_store
    hangs.set()
