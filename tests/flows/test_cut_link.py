"""Four processes on four hosts (network namespaces): cut links and lost packets cost time but change no bit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.netns import NetHost, Network, NoNetnsError, network

from tinkerflow.backend.core.joining import make_secret
from tinkerflow.backend.journal import Journal, Kind
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store import Store
from tinkerflow.deployments.tiny_model import make_tiny
from tinkerflow.flows.engine import run_engine

HERE = Path(__file__).parent
SILENCE = 10.0  # heartbeat_timeout
NOTICED = SILENCE * 7 / 6  # the limit in the README; the tests wait longer, because machines may be busy


@pytest.fixture
def four() -> Iterator[Network]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(network(4))
        except NoNetnsError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made


@pytest.fixture
def settings(four: Network, tmp_path: Path) -> Settings:
    return Settings(
        data_dir=tmp_path,
        base_models=(str(make_tiny(tmp_path / "tiny")),),
        prefect="off",
        processes=4,
        group=f"{four.address}:0",
        heartbeat_timeout=SILENCE,
    )


@contextmanager
def joined(host: NetHost, group: str, settings: Settings) -> Iterator[Path]:
    """Run `tinkerflow worker` on a host during the block. Yields the path of its log."""
    command = (sys.executable, "-m", "tinkerflow", "worker", "--group", group)
    options = ("--secret-file", str(settings.group_secret_path), "--data-dir", str(settings.data_dir / host.name))
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parents[1])))}
    said = settings.data_dir / f"{host.name}.log"
    with said.open("w") as log:
        process = subprocess.Popen(host.command(*command, *options), stdout=log, stderr=log, env=env)
    try:
        yield said
    finally:
        process.terminate()
        try:
            assert process.wait(60) == 0, said.read_text()
        finally:
            process.kill()
            process.wait()


@pytest.fixture
async def engine(four: Network, settings: Settings, running: Any, until: Any) -> AsyncIterator[Callable[[], int]]:
    """Run an engine with a worker on each host. Yields a function that counts the groups it has started."""
    make_secret(settings.group_secret_path)
    said: list[str] = []
    ready = asyncio.Event()
    work = run_engine(settings, on_ready=ready.set, on_progress=said.append, executor="joint_executor:Joint")
    with ExitStack() as stack:
        async with running(work) as task:
            await until(lambda: bool(said) or task.done())
            group = said[0].rpartition(" ")[2]  # hosts join at …: tinkerflow worker --group 198.18.0.1:34567
            for host in four.hosts:
                stack.enter_context(joined(host, group, settings))
            await until(lambda: ready.is_set() or task.done())
            yield lambda: sum(line.startswith("starting worker group") for line in said)


def work(client: Any, model: str) -> list[str]:
    """Submit steps whose results depend on all earlier steps, and a save of the model."""
    requests = []
    for step in range(6):
        requests += [client.forward_backward(model, [token, 3, token]) for token in (step % 7, 11 + step % 5)]
        requests.append(client.optim_step(model, 0.1 + step / 10))
    return [*requests, client.submit(model, Kind.SAVE_WEIGHTS, {"path": "end"})]


def same(settings: Settings, results: Any, expected: Any) -> None:
    """Check that all results and every number of the final checkpoints are equal."""
    assert [result.result for result in results[:-1]] == [result.result for result in expected[:-1]]
    store = Store.open(settings.store_url)
    one, other = (store.load(orjson.loads(every[-1].result)["path"])[0] for every in (expected, results))
    for name, array in (one.weights | one.moments).items():
        assert array.any() or "grad" in name
        assert array.tobytes() == (other.weights | other.moments)[name].tobytes()


async def test_cut_link_only_pauses_and_lost_packets_only_slow_work(
    four: Network,
    engine: Callable[[], int],
    settings: Settings,
    connect: Any,
    until: Any,
    record_property: Callable[[str, object], None],
) -> None:
    journal, (base_model,) = Journal.open(settings.journal_url), settings.base_models
    client = await connect(journal, base_model)
    undisturbed, disturbed, throttled = [await client.create(seq_id) for seq_id in range(3)]
    expected = await client.results(*work(client, undisturbed))
    assert [result.error for result in expected] == [None] * len(expected)

    lost = four.hosts[2]
    lost.cut()
    began = time.monotonic()
    requests = work(client, disturbed)
    async with asyncio.timeout(NOTICED + 60):
        await until(lambda: "waiting for hosts: 3 of 4" in (journal.queue.waits_for(requests[0]) or ""))
    record_property("noticed_s", round(time.monotonic() - began, 1))
    there = settings.data_dir / f"{lost.name}.log"
    async with asyncio.timeout(NOTICED + 60):
        await until(
            lambda: "its processes here have ended" in there.read_text()
        )  # no message can arrive over the cut link
    assert journal.results.get(requests[0], "local") is None
    lost.heal()
    results = await client.results(*requests)
    assert engine() == 2
    same(settings, results, expected)

    try:
        lost.narrow()
    except NoNetnsError as error:
        pytest.skip(f"the cut link passed, but no packets can be dropped here: {error}")
    same(settings, await client.results(*work(client, throttled)), expected)
    assert lost.dropped() > 0
    record_property("dropped", lost.dropped())
    assert engine() == 2  # no host was declared lost
    journal.close()
