"""The engine with workers on other hosts, which are `tinkerflow worker` processes on this machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.joining import make_secret
from tinkerflow.backend.journal import Journal, ModelState
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.tiny_model import make_tiny
from tinkerflow.flows.engine import run_engine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Join = Callable[[str, str], subprocess.Popen[bytes]]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = make_tiny(tmp_path / "tiny")
    return Settings(data_dir=tmp_path, base_models=(str(model),), prefect="off", processes=2, group="127.0.0.1:0")


@pytest.fixture
def join(settings: Settings) -> Iterator[Join]:
    """join(group, name): run `tinkerflow worker` in a folder of that name, and end it cleanly by SIGTERM after the
    test.
    """

    @contextmanager
    def started(group: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "tinkerflow", "worker", "--group", group]
        options = ["--secret-file", str(settings.group_secret_path), "--data-dir", str(settings.data_dir / name)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join((str(HERE), str(ROOT)))}
        process = subprocess.Popen([*command, *options], env=env)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                assert process.wait(60) == 0

    make_secret(settings.group_secret_path)
    with ExitStack() as stack:
        yield lambda group, name: stack.enter_context(started(group, name))


async def test_lost_host_pauses_work_until_another_one_joins(
    settings: Settings, join: Join, connect: Any, running: Any, until: Any
) -> None:
    ready, base_model = asyncio.Event(), settings.base_models[0]
    said: list[str] = []
    engine = run_engine(settings, on_ready=ready.set, on_progress=said.append, executor="numpy_executor:Unigram")
    async with running(engine) as task:
        await until(lambda: bool(said) or task.done())
        group = said[0].rpartition(" ")[2]  # hosts join at …: tinkerflow worker --group 127.0.0.1:34567
        lost = join(group, "a")
        join(group, "b")
        await until(lambda: ready.is_set() or task.done())
        journal = Journal.open(settings.journal_url)
        client = await connect(journal, base_model)
        model = await client.create(0)
        assert (await client.result(client.forward_backward(model, [5]))).error is None
        lost.kill()
        lost.wait()
        await until(lambda: (journal.recovery.health().waits.get(base_model) or "").startswith("waiting for hosts: "))
        request = client.optim_step(model)
        assert "waiting for hosts: 1 of 2 processes (" in (journal.queue.waits_for(request) or "")
        join(group, "c")
        assert (await client.result(request)).error is None
        assert journal.models.get(model, None).state == ModelState.LIVE
        await until(lambda: journal.recovery.health().waits == {})
        assert (settings.data_dir / "c" / "logs").is_dir()
        journal.close()


async def test_an_engine_that_waits_for_hosts_can_be_stopped(settings: Settings, until: Any) -> None:
    said: list[str] = []
    engine = asyncio.create_task(run_engine(settings, on_ready=lambda: None, on_progress=said.append))
    await until(lambda: any(line.startswith("waiting for hosts: 0 of 2 processes") for line in said) or engine.done())
    engine.cancel()
    with pytest.raises(asyncio.CancelledError):
        await engine
    assert said[0].startswith("hosts join at 127.0.0.1:")


async def test_unusable_listen_address_is_named(settings: Settings) -> None:
    chosen = Settings(**(settings.model_dump() | {"group": "192.0.2.1:7000"}))
    with pytest.raises(UserError, match=r"group is '192.0.2.1:7000': cannot listen at this address"):
        await run_engine(chosen, on_ready=lambda: None, on_progress=print)


async def test_host_saves_its_models_on_sigterm(
    settings: Settings, join: Join, connect: Any, running: Any, until: Any
) -> None:
    """A cloud sends SIGTERM before it takes a machine away. By its schedule, the first snapshot would be due in an
    hour.
    """
    ready, base_model = asyncio.Event(), settings.base_models[0]
    said: list[str] = []
    patient = Settings(**(settings.model_dump() | {"snapshot_seconds": 3600.0, "snapshot_steps": 1000}))
    engine = run_engine(patient, on_ready=ready.set, on_progress=said.append, executor="numpy_executor:Unigram")
    async with running(engine) as task:
        await until(lambda: bool(said) or task.done())
        group = said[0].rpartition(" ")[2]
        leaving, spare = join(group, "a"), join(group, "b")
        await until(lambda: ready.is_set() or task.done())
        journal = Journal.open(settings.journal_url)
        client = await connect(journal, base_model)
        model = await client.create(0)
        for _ in range(3):
            assert (await client.result(client.forward_backward(model, [5]))).error is None
            assert (await client.result(client.optim_step(model))).error is None
        assert not journal.recovery.snapshots()
        leaving.terminate()
        await until(lambda: (journal.recovery.health().waits.get(base_model) or "").startswith("waiting for hosts: "))
        (taken,) = journal.recovery.snapshots()
        assert (taken.model_id, taken.step, journal.recovery.count_executed(model, taken.seq_id)) == (model, 3, 0)
        assert await asyncio.to_thread(leaving.wait, 60) == 0
        assert spare.poll() is None
        join(group, "c")
        assert (await client.result(client.forward_backward(model, [5]))).error is None
        journal.close()
