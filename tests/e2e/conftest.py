"""The whole service as a user starts it: `tinkerflow up` in its own process, used through the real SDK."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tinker
from prefect.client.base import PrefectHttpxSyncClient
from tests.waiting import wait_for

from tinkerflow.backend.core.prefect_access import PrefectAccess, find_server
from tinkerflow.backend.store import Store
from tinkerflow.deployments.run import wait_for_prefect

sys.path.insert(0, str(Path(__file__).parent))

from browser import Page, open_page
from descent import cmdline, descendants

os.environ["HF_HUB_OFFLINE"] = "1"

PREFECT = "tinkerflow.flows.prefect.server_process"  # part of the embedded server's command line


class Client(tinker.ServiceClient):
    """A client whose exit fails after a minute, whereas the exit of the SDK's own client may hang.

    On exit, SDK 0.38 cancels its poller of samples and waits for it. If the poller has just received an answer, the
    HTTP library may lose the cancellation, and the wait never ends (`SessionFuturesPoller._poll_loop`).
    """

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("success" if kind is None else "errored").result(60)


@dataclass
class Server:
    """A `tinkerflow up` that can be restarted on the same data dir and port after a kill."""

    data_dir: Path
    options: tuple[str, ...]
    prefect_mode: str = "embedded"
    port: int = 0
    api_url: str = ""
    prefect_url: str = ""
    clients: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Start the service and return once it is ready."""
        log = self.data_dir / "up.log"  # not a pipe, because no one reads the later output
        said = log.stat().st_size if log.exists() else 0
        options = ("--port", str(self.port), "--data-dir", str(self.data_dir), *self.options)
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tinkerflow", "up", *options],
                stdout=output,
                stderr=output,
                env={"TINKERFLOW_PREFECT": self.prefect_mode} | os.environ | {"TINKERFLOW_PREFECT_PORT": "0"},
            )
        while (match := re.search(r"^ready: (\S+)  prefect: (\S+)$", log.read_text()[said:], re.M)) is None:
            if self.process.poll() is not None:
                pytest.fail(f"tinkerflow up ended before it was ready:\n{log.read_text()[said:]}")
            time.sleep(0.05)
        self.api_url, self.prefect_url = match[1], match[2]
        self.port = int(self.api_url.rsplit(":", 1)[1])

    def stop(self) -> None:
        """Send SIGTERM; fail unless all of the service's processes end soon."""
        below = descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(180)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        deadline = time.monotonic() + 10
        while left := [f"{pid} {cmdline(pid)}" for pid in below if cmdline(pid)]:
            assert time.monotonic() < deadline, f"processes left running: {left}"
            time.sleep(0.1)

    def client(self) -> tinker.ServiceClient:
        """A new client, closed with `clients` at the latest."""
        return self.clients.enter_context(Client(base_url=self.api_url, api_key="tml-test"))

    def rest(self) -> tinker.RestClient:
        return tinker.RestClient(base_url=self.api_url, api_key="tml-test")

    @property
    def prefect(self) -> PrefectAccess:
        """Access to the service's Prefect server, once it runs."""
        return wait_for_prefect(lambda: find_server(self.data_dir), 300)

    def prefect_page(self, path: str) -> str:
        """A link to a page of Prefect's UI that signs the browser in."""
        return self.prefect.link(path, time.time())

    def ask_prefect(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The Prefect server's answer to a GET, or to a POST of `body`, retried while the server is busy (503)."""
        access = self.prefect
        with PrefectHttpxSyncClient(base_url=access.api_url, headers=access.headers, timeout=60) as http:
            return (http.get(path) if body is None else http.post(path, json=body)).json()

    @property
    def base_model(self) -> str:
        models = self.rest().get_server_capabilities().result().supported_models
        return next(m.model_name for m in models if m.model_name)

    def workers(self) -> list[int]:
        """Pids of the pool's processes: descendants whose command line names the worker's module."""
        return [pid for pid in descendants(self.process.pid) if "tinkerflow.backend.pool.worker" in cmdline(pid)]

    def kill(self, *parts: str) -> None:
        """Kill the parts with these names, or else the worker processes, as soon as they run."""
        for pid in wait_for(lambda: self.parts(*parts) if parts else self.workers()):
            os.kill(pid, signal.SIGKILL)

    def descendants(self) -> list[int]:
        return descendants(self.process.pid)

    def parts(self, *names: str) -> list[int]:
        """Pids of the running parts with these names (`engine`, `api`, `prefect`)."""
        commands = [PREFECT if name == "prefect" else f"-m tinkerflow {name} " for name in names]
        return [pid for pid in descendants(self.process.pid) if any(one in cmdline(pid) for one in commands)]


@contextmanager
def running(data_dir: Path, *options: str, compiled: Path, prefect: str = "embedded") -> Iterator[Server]:
    """Run `tinkerflow up` on free ports until the block ends; fail if any of its processes is left afterwards."""
    if not (data_dir / "jax-cache").exists():
        (data_dir / "jax-cache").symlink_to(compiled)
    server = Server(data_dir, options, prefect)
    server.start()
    try:
        with server.clients:
            yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, compiled_programs: Path, prefect_database: Callable[[Path], None]
) -> Iterator[Server]:
    """One server for the whole session, with the embedded tiny model."""
    prefect_database(data_dir := tmp_path_factory.mktemp("server"))
    with running(data_dir, compiled=compiled_programs) as found:
        yield found


@pytest.fixture(scope="session")
def start_server(compiled_programs: Path) -> Callable[..., object]:
    """For tests that need a server of their own: `with start_server(data_dir, *options) as server`."""
    return partial(running, compiled=compiled_programs)


@pytest.fixture
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    """A client of the shared server, closed afterwards."""
    with server.client() as client:
        yield client


def datum(tokens: list[int], weights: list[float] | None = None) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights or [1.0] * (len(tokens) - 1)},
    )


@pytest.fixture(scope="session")
def make_datum() -> Callable[..., tinker.Datum]:
    """tokens -> a cross_entropy datum that predicts each next token."""
    return datum


@pytest.fixture(scope="session")
def train() -> Callable[..., list[dict[str, float]]]:
    """train(client, steps, kill, after): the metrics of concurrent steps on fixed tokens.

    kill: called once the step `after` is made, or else once all steps are submitted.
    """

    def steps_of(
        client: tinker.TrainingClient,
        steps: range = range(4),
        kill: Callable[[], object] = lambda: None,
        after: int | None = None,
    ) -> list[dict[str, float]]:
        tokens, futures = [1 + i % 200 for i in range(80)], []
        for step in steps:
            futures.append(client.forward_backward([datum(tokens[step:])] * 4, "cross_entropy"))
            futures.append(client.optim_step(tinker.AdamParams(learning_rate=1e-3)))
            if step == after:
                futures[-1].result()
                kill()
        if after is None:
            kill()
        return [future.result().metrics for future in futures]

    return steps_of


@dataclass(frozen=True)
class Pipelines:
    """For pipelines that run in this process, against the shared server and its Prefect server."""

    server: Server
    work: str

    async def artifacts(self, prefix: str) -> dict[str, dict]:
        """The newest artifact of each key that begins with `prefix`, by the rest of the key."""
        body = {"artifacts": {"key": {"like_": f"{prefix}%"}}, "limit": 100}
        found = await asyncio.to_thread(self.server.ask_prefect, "/artifacts/latest/filter", body)
        return {one["key"].removeprefix(prefix): one for one in found}

    def weights(self, path: str) -> dict[str, object]:
        """The tensors of a checkpoint in the server's store."""
        return Store.open(f"file://{self.server.data_dir / 'store'}").load(path)[0].weights


@pytest.fixture
def pipelines(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipelines]:
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    access = server.prefect
    monkeypatch.setenv("TINKER_BASE_URL", server.api_url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    for name, value in access.environment.items():  # for processes that a test starts
        monkeypatch.setenv(name, value)
    with temporary_settings({PREFECT_API_URL: access.api_url, PREFECT_API_AUTH_STRING: access.credential}):
        yield Pipelines(server, f"file://{tmp_path / 'work'}")


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_page(tmp_path_factory.mktemp("chromium")) as page:
        yield page
