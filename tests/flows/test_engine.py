"""The whole engine: a real journal, real worker processes (with the unigram model), real signals and restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from prefect.events import Event

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.process_identity import is_alive
from tinkerflow.backend.journal import Journal, Kind, ModelState, migrate
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store import Store
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.deployments.tiny_model import make_tiny
from tinkerflow.flows import engine as engine_module
from tinkerflow.flows import sweeps
from tinkerflow.flows.engine import run_engine
from tinkerflow.flows.prefect.connection import PrefectConnection
from tinkerflow.flows.prefect.flow_run import FlowRunRecord

HERE = Path(__file__).parent
Engine = Callable[..., Any]


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def engine(tmp_path: Path, base_model: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """`async with engine(**settings) as journal`: a ready engine, which is cancelled at the end of the block."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))

    @asynccontextmanager
    async def engine(**settings: Any) -> AsyncIterator[Journal]:
        ready = asyncio.Event()
        chosen = Settings(data_dir=tmp_path, base_models=(base_model,), **{"prefect": "off"} | settings)
        work = run_engine(chosen, on_ready=ready.set, on_progress=print, executor="numpy_executor:Unigram")
        running = asyncio.create_task(work)
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if running.done():
            running.result()
        journal = Journal.open(chosen.journal_url)
        try:
            yield journal
        finally:
            journal.close()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    return engine


def workers() -> list[int]:
    """PIDs of the worker processes that this process started."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread or process that has just ended
            for pid in path.read_text().split():
                if b"tinkerflow.backend.pool.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return found


async def test_training_and_sampling_through_worker_processes(engine: Engine, connect: Any, base_model: str) -> None:
    async with engine() as journal:
        assert [view.name for view in journal.base_models.all()] == [base_model]
        client = await connect(journal, base_model)
        first, second = await asyncio.gather(client.create(0), client.create(1))
        for model, token in ((first, 5), (second, 9)):
            requests = [client.forward_backward(model, [token]), client.optim_step(model)]
            requests.append(client.submit(model, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": token}))
            assert [result.error for result in await client.results(*requests)] == [None] * 3
        samples = await client.results(*(client.sample(f"{client.session}:sample:{token}") for token in (5, 9)))
        said = [pb.SampleResponse.FromString(result.result).sequences[0].tokens for result in samples]
        assert [set(np.frombuffer(tokens, np.int32)) for tokens in said] == [{5}, {9}]
    assert workers() == []


async def test_dead_worker_only_delays_requests(engine: Engine, connect: Any, base_model: str) -> None:
    async with engine() as journal:
        client = await connect(journal, base_model)
        model = await client.create(0)
        (worker,) = workers()
        os.kill(worker, signal.SIGSTOP)
        requests = [client.forward_backward(model, [5]), client.optim_step(model), client.optim_step(model)]
        os.kill(worker, signal.SIGKILL)
        assert [result.error for result in await client.results(*requests)] == [None] * 3
        assert journal.models.get(model, None).state == ModelState.LIVE
        assert journal.models.get(model, None).step == 2
        assert workers() != [worker]


async def test_restarted_engine_continues_the_work_of_the_previous_one(
    engine: Engine, connect: Any, base_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str, dict[str, Any]]] = []

    def emit(_: object, event: Event) -> None:
        of = event.resource["prefect.resource.id"].split(".")[1]
        told.append((event.event, of, event.payload))

    monkeypatch.setattr(PrefectConnection, "emit", emit)
    monkeypatch.setattr(FlowRunRecord, "emit", emit)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")  # no server answers there
    async with engine(prefect="external") as journal:
        client = await connect(journal, base_model)
        model = await client.create(0)
        first = [client.forward_backward(model, [7]), client.optim_step(model)]
        named = client.submit(model, Kind.SAVE_FOR_SAMPLER, {"path": "kept"})
        unnamed = client.submit(model, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": 3})
        assert [result.error for result in await client.results(*first, named, unnamed)] == [None] * 4
        in_memory, in_store = f"{client.session}:sample:3", client.sampler(4, f"tinker://{model}/sampler_weights/kept")
        before = await client.result(client.sample(in_store))

    away = Journal.open(f"sqlite:///{tmp_path / 'journal.db'}")
    client.journal = away
    waiting = [client.sample(in_memory), client.sample(in_store), client.optim_step(model)]
    assert [away.results.get(request, "local") for request in waiting] == [None] * 3  # accepted while no engine runs
    away.close()

    async with engine(prefect="external") as journal:
        again = await connect(journal, base_model)
        results = await again.results(*waiting)
        assert [result.error for result in results] == [None] * 3
        assert results[0].result == results[1].result == before.result
        assert journal.models.get(model, None).step == 2
    started, saved, restarted, restored = told  # a stopped engine does not end its runs
    assert saved[:2] == ("tinkerflow.checkpoint.saved", "model")
    assert saved[2]["path"] == f"tinker://{model}/sampler_weights/kept"
    assert started == ("tinkerflow.engine.started", "engine", {"engine": 1, "base_models": [base_model]})
    assert restarted == ("tinkerflow.engine.restarted", "engine", {"engine": 2, "base_models": [base_model]})
    assert restored[:2] == ("tinkerflow.model.restored", "model")
    assert restored[2]["generation"] == 1


async def test_running_engine_holds_the_lease_with_its_process(engine: Engine, connect: Any) -> None:
    async with engine() as journal:
        holder = journal.leases.acquire("another")
        assert holder is not None and str(os.getpid()) in holder
        assert is_alive(holder)
        assert not is_alive(holder.replace('"birth": "', '"birth": "9'))


async def test_an_engine_that_waits_for_the_lease_can_be_stopped(
    tmp_path: Path, base_model: str, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(data_dir=tmp_path, base_models=(base_model,), prefect="off")
    migrate(settings.journal_url)
    with closing(Journal.open(settings.journal_url)) as journal:
        assert journal.leases.acquire("another") is None
        running = asyncio.create_task(run_engine(settings, on_ready=print, on_progress=print))
        await until(lambda: "another engine (another) uses this journal" in caplog.text)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert journal.leases.acquire("a third") == "another"


async def test_models_of_ended_sessions_are_unloaded_while_the_store_is_slow(
    engine: Engine, connect: Any, base_model: str, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()
    monkeypatch.setattr(sweeps, "write_histories", lambda journal, store: slow.wait(60))
    async with engine(session_timeout=0.5) as journal:
        finished, silent = await connect(journal, base_model), await connect(journal, base_model)
        first, second = await finished.create(0), await silent.create(0)
        journal.sessions.finish(finished.session, "local", "done")
        await until(lambda: journal.models.get(first, None).state == ModelState.UNLOADED)
        await until(lambda: journal.models.get(second, None).state == ModelState.UNLOADED)
        assert journal.sessions.get(silent.session, None).state == "expired"
        slow.set()


async def test_gap_is_skipped_after_its_time(engine: Engine, connect: Any, base_model: str) -> None:
    async with engine(gap_timeout=0.2) as journal:
        client = await connect(journal, base_model)
        model = await client.create(0)
        after = client.submit(model, Kind.OPTIM_STEP, {"adam_params": {"learning_rate": 0.1}}, skip=1)
        assert (await client.result(after)).error is None


async def test_unserved_base_model_fails_the_creation_with_its_name(engine: Engine, connect: Any) -> None:
    async with engine() as journal:
        client = await connect(journal, "another/model")
        model, request = client.submit_create()
        result = await client.result(request)
        assert result.category == "user" and "another/model" in result.error
        assert journal.models.get(model, None).state == ModelState.FAILED


async def test_expired_checkpoints_are_deleted_and_publications_reach_the_store(
    engine: Engine, connect: Any, base_model: str, until: Any, tmp_path: Path
) -> None:
    async with engine(keep_last=1) as journal:
        client = await connect(journal, base_model)
        model = await client.create(0)
        assert (await client.result(client.submit(model, Kind.SAVE_WEIGHTS, {"path": "short"}))).error is None
        (saved,) = journal.checkpoints.page("local", run_id=model).rows
        folder = tmp_path / "store" / "runs" / model / "weights" / "short"
        assert (folder / saved.attempt).is_dir()
        journal.checkpoints.set_ttl(saved.path, "local", 0.01)
        await until(lambda: not folder.exists() or not list(folder.iterdir()))
        await until(lambda: journal.upkeep.unpurged() == [] and journal.upkeep.delete_expired() == [])
        assert journal.checkpoints.page("local").total == 0
        for name in ("old", "new"):
            assert (await client.result(client.submit(model, Kind.SAVE_WEIGHTS, {"path": name}))).error is None
        await until(lambda: [row.name for row in journal.checkpoints.page("local").rows] == ["new"])
        journal.checkpoints.publish(f"tinker://{model}/weights/new", "local")
        await until(lambda: journal.upkeep.unnoted() == [])
        assert [saved.meta.public for saved in Store.open(f"file://{tmp_path}/store").checkpoints()] == [True]


async def test_engine_waits_until_its_store_is_mounted(
    engine: Engine, connect: Any, base_model: str, until: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a restart of the machine, the folder of a disk that is not mounted yet is empty."""
    async with engine(snapshot_steps=1) as journal:
        client = await connect(journal, base_model)
        model = await client.create(0)
        for number in range(3):
            requests = [client.forward_backward(model, [7]), client.optim_step(model)]
            assert [result.error for result in await client.results(*requests)] == [None] * 2
            await until(lambda number=number: len(journal.recovery.snapshots(model)) > min(number, 1))
    store, disk = tmp_path / "store", tmp_path / "disk"
    store.rename(disk)
    store.mkdir()
    said: list[str] = []

    async def mount() -> None:
        while "mount it" not in "".join(said):
            said.append(capsys.readouterr().out)
            await asyncio.sleep(0.05)
        assert list(store.iterdir()) == []
        store.rmdir()
        disk.rename(store)

    mounting = asyncio.create_task(mount())
    async with engine() as journal:
        again = await connect(journal, base_model)
        again.session, again.seqs = client.session, client.seqs
        result = await again.result(again.optim_step(model))
        assert result.error is None and journal.models.get(model, None).step == 4
    await mounting


async def test_links_to_an_ipv6_service_contain_its_address_in_brackets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = AsyncMock(emit=Mock())
    opened = Mock(return_value=mirror)
    monkeypatch.setattr("tinkerflow.flows.prefect.mirror.Mirror", opened)
    settings = Settings(data_dir=tmp_path, host="::1", port=8000)
    await engine_module._open_observer(settings, Mock(leases=Mock(epoch=1)), Mock(), Mock(), [])
    assert opened.call_args.kwargs["api_url"] == "http://[::1]:8000"


async def test_engine_without_base_models_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="base_models is empty"):
        await run_engine(Settings(data_dir=tmp_path, prefect="off"), on_ready=print, on_progress=print)
