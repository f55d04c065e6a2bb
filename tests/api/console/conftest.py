"""A browser without scripts, and a project with objects of all kinds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from tests.api.conftest import KEY, Running

from tinkerflow.backend.journal.database import driver_url
from tinkerflow.backend.journal.tables import TrainingStep


@dataclass(frozen=True)
class Browser:
    """A browser with its own cookies, which does not follow redirects."""

    server: Running
    http: httpx.Client

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.http.get(self.server.url + path, **more)

    def post(self, path: str, fields: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        return self.http.post(self.server.url + path, data=fields or {}, **more)

    def sign_in(self, key: str, wanted: str = "/") -> httpx.Response:
        return self.post("/sign-in", {"key": key, "next": wanted})

    def mark(self, path: str = "/keys") -> str:
        """The CSRF token of this page's forms."""
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', self.get(path).text)
        assert found is not None
        return found[1]

    def send(self, path: str, fields: dict[str, str] | None = None, page: str = "/keys") -> httpx.Response:
        """Submit a form of `page`, with its CSRF token."""
        return self.post(path, {**(fields or {}), "csrf": self.mark(page)})


@pytest.fixture
def browse() -> Any:
    """browse(server): a new browser."""
    opened = []

    def make(server: Running) -> Browser:
        http = httpx.Client(timeout=60)
        opened.append(http)
        return Browser(server, http)

    yield make
    for http in opened:
        http.close()


@pytest.fixture
def browser(server: Running, browse: Callable[[Running], Browser]) -> Browser:
    """A browser on a server that needs no key."""
    return browse(server)


@dataclass(frozen=True)
class Things:
    """Ids and paths of a user's objects."""

    session: str
    run: str
    weights: str
    sampler_weights: str
    sample: str


@pytest.fixture
def furnish(server: Running, engine: Any) -> Callable[..., Things]:
    """furnish(key): creates a run with three steps, two checkpoints and a sample."""

    def make(key: str = KEY) -> Things:
        run = server.model(key)
        session = run.split(":")[0]
        seq = 0

        def operate(operation: str, **body: Any) -> None:
            nonlocal seq
            seq += 1
            accepted = server.post(operation, {"model_id": run, "seq_id": seq, **body}, key).json()
            assert server.result(accepted["request_id"], key).status_code == 200

        for _ in range(3):
            operate("optim_step", adam_params={"learning_rate": 0.5})
        operate("save_weights", path="state")
        operate("save_weights_for_sampler", path="best")
        opening = {"session_id": session, "sampling_session_seq_id": 0}
        path = f"tinker://{run}/sampler_weights/best"
        sampler = server.post("create_sampling_session", opening | {"model_path": path}, key).json()
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [2, 3]}]}
        body = {"sampling_session_id": sampler["sampling_session_id"], "seq_id": 0, "prompt": prompt}
        sampled = server.post("asample", {**body, "sampling_params": {"max_tokens": 4, "seed": 1}}, key).json()
        assert server.result(sampled["request_id"], key).status_code == 200
        return Things(session, run, f"tinker://{run}/weights/state", path, sampled["request_id"])

    return make


@pytest.fixture
def put_steps(server: Running) -> Callable[..., None]:
    """put_steps(run, count, first): writes rows of steps, as the engine does with its answers."""

    def put(run: str, count: int, first: int = 1) -> None:
        start = datetime(2026, 1, 1, tzinfo=UTC)
        rows = [
            {"model_id": run, "seq_id": 2 * n, "step": n, "at": start + timedelta(seconds=n), "tokens": 64}
            | {"weight": 8.0, "loss": 80.0 / n, "kl": 0.01, "grad_norm": 1 / n, "learning_rate": 1e-4}
            for n in range(first, first + count)
        ]
        engine = sa.create_engine(driver_url(server.settings.journal_url))
        with engine.begin() as connection:
            connection.execute(sa.delete(TrainingStep).where(TrainingStep.model_id == run, TrainingStep.step >= first))
            connection.execute(sa.insert(TrainingStep), rows)
        engine.dispose()

    return put


def of_checkpoint(path: str) -> str:
    """The console's path of a checkpoint, quoted as by the SDK."""
    run, _, rest = path.removeprefix("tinker://").partition("/")
    return f"/checkpoints/{run.replace(':', '%3A')}/{rest.replace('/', '%2F')}"
