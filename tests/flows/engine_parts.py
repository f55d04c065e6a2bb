"""A real journal and store, a unigram model instead of the worker group, and a client that writes wire bytes."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests import waiting

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.core.errors import GroupFailedError, SuspectError
from tinkerflow.backend.core.ids import model_id, sampler_id
from tinkerflow.backend.journal import (
    Journal,
    Kind,
    NewModel,
    NewRequest,
    NewSampler,
    NewSession,
    Result,
    ResultSubscriptions,
)
from tinkerflow.backend.pool import GroupLost
from tinkerflow.backend.spec.commands import Command, GroupConfig, GroupInfo, Reply
from tinkerflow.backend.store import Store
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.flows.prefect.connection import PrefectConnection
from tinkerflow.flows.prefect.mirror import Mirror
from tinkerflow.flows.prefect.pacing import Pacing
from tinkerflow.flows.runner import ModelRunner
from tinkerflow.flows.snapshots import SnapshotPolicy
from tinkerflow.tasks.execution.operation import AnswerWriter, ExecutionContext
from tinkerflow.tasks.execution.sampling_snapshots import Snapshots
from tinkerflow.tasks.execution.sequencer import Saves

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from numpy_executor import VOCAB, Unigram  # noqa: E402

CONFIG = GroupConfig("none", "float32", 1, 1, 64, 64, 4, 4, "")
CARD = ModelCard("folder/unigram", "/nowhere", "unigram", "Unigram", VOCAB, 64, (2,), VOCAB, tied=False)
INFO = GroupInfo(
    ("cpu:0",),
    1,
    64,
    1,
    64,
    CARD.max_context,
    CARD.context_rule,
    1,
    programs="fedcba9876543210",
    places=("rank 0 on this machine",),
)


@dataclass
class NumpyPool:
    """Executes commands in order, like a worker group. Tests make it wait or fail."""

    executor: Unigram = field(default_factory=lambda: Unigram(CONFIG, print, 1, 0))
    generation: int = 1
    reaches_store: bool = False
    draining: bool = False
    resting: bool = False
    taken_out: str = ""
    info: GroupInfo = INFO
    log: list[Command] = field(default_factory=list)
    hold: asyncio.Event | None = None
    failing: Exception | None = None
    line: asyncio.Lock = field(default_factory=asyncio.Lock)
    lost: asyncio.Queue[GroupLost] = field(default_factory=asyncio.Queue)

    down: asyncio.Event | None = None  # not None: no group serves until the event is set
    executing: bool = False
    deaths: int = 0
    poison: Callable[[Command], bool] = lambda command: False

    async def submit(
        self, command: Command, deadline: float | None = None, *, owner: str = "", generation: int | None = None
    ) -> Reply:
        if self.down is not None and generation is None:
            await self.down.wait()
        generation = generation or self.generation
        self.check(generation)
        self.log.append(command)
        async with self.line:  # in the order of arrival
            self.executing, deaths = True, self.deaths
            try:
                if self.hold is not None:
                    await self.hold.wait()
                if self.poison(command):
                    self.die()
                    raise SuspectError("the group crashed", crashed=True)
                if self.deaths != deaths:
                    raise SuspectError("the group was killed", crashed=False)
                self.check(generation)
                if self.failing is not None:
                    raise self.failing
                return self.executor.execute(command)
            finally:
                self.executing = False

    def check(self, generation: int) -> None:
        if self.down is not None or generation != self.generation:
            raise GroupFailedError(f"worker group {generation} no longer serves")

    @property
    def ready(self) -> bool:
        return self.down is None

    @property
    def idle(self) -> bool:
        return self.ready and not self.executing

    async def serving(self) -> int:
        if self.down is not None:
            await self.down.wait()
        return self.generation

    def die(self, *, down: bool = False) -> None:
        """End the group and lose its state. The next group serves immediately, unless `down`."""
        self.lost.put_nowait(GroupLost(self.generation, "rank 0 died of signal 9"))
        self.executor = Unigram(CONFIG, print, 1, 0)
        self.generation += 1
        self.deaths += 1
        if down:
            self.down = asyncio.Event()

    def take_out(self, generation: int, why: str) -> None:
        self.check(generation)
        self.taken_out = why
        self.die(down=True)

    def come_back(self) -> None:
        assert self.down is not None
        self.down.set()
        self.down = None

    async def notices(self) -> AsyncIterator[str]:
        await asyncio.Event().wait()
        yield ""

    async def losses(self) -> AsyncIterator[GroupLost]:
        while True:
            yield await self.lost.get()

    @property
    def names(self) -> list[str]:
        return [type(command).__name__ for command in self.log]


@dataclass
class Client:
    """Submits requests for a client of one session, as the API does."""

    journal: Journal
    subscriptions: ResultSubscriptions
    session: str
    base_model: str = CARD.name
    seqs: dict[str, int] = field(default_factory=dict)
    owner: str = "local"

    async def ring(self, topic: str, runner: ModelRunner) -> None:
        """Wake the runner at each notification of the journal, as the dispatcher does, until cancelled."""
        async with self.journal.notifier.subscribe(topic) as topics:
            runner.wake()  # for requests from before the subscription
            async for _ in topics:
                runner.wake()

    async def create(self, number: int = 0, *, history: bool = False) -> str:
        model, request = self.submit_create(number, history=history)
        result = await self.result(request)
        assert result.error is None, result.error
        return model

    def submit_create(self, number: int = 0, rank: int = 1, **said: Any) -> tuple[str, str]:
        model, made = model_id(self.session, number), {"made": "here"}
        new = NewModel(model, self.session, self.owner, self.base_model, rank=rank, seed=7, user_metadata=made)
        new = replace(new, **said)
        self.seqs[model] = 0
        return model, self.journal.models.create(new, self.request(Kind.CREATE_MODEL, {}, model=model))

    def load_model(self, number: int, path: str, *, optimizer: bool) -> tuple[str, str]:
        model = model_id(self.session, number)
        new = NewModel(model, self.session, self.owner, self.base_model, rank=1, seed=7)
        self.seqs[model] = 0
        body = {"path": path, "optimizer": optimizer}
        return model, self.journal.models.create(new, self.request(Kind.LOAD_MODEL, body, model=model))

    def submit(self, model: str, kind: Kind, body: dict[str, object] | bytes | None = None, *, skip: int = 0) -> str:
        self.seqs[model] += skip
        return self.journal.requests.submit(self.request(kind, {} if body is None else body, model=model))

    def forward_backward(
        self, model: str, *targets: Sequence[int], weight: float = 1.0, forward_only: bool = False
    ) -> str:
        kind = Kind.FORWARD if forward_only else Kind.FORWARD_BACKWARD
        message = pb.ForwardBackwardRequest(
            model_id=model, seq_id=self.seqs[model], loss_fn="cross_entropy", forward_only=forward_only
        )
        for some in targets:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.asarray(some, np.int32).tobytes()
            tensor = datum.loss_fn_inputs["target_tokens"]
            tensor.dense, tensor.dtype = np.asarray(some, np.int64).tobytes(), pb.DTYPE_INT64
            tensor.shape.append(len(some))
            weights = datum.loss_fn_inputs["weights"]
            weights.dense, weights.dtype = np.full(len(some), weight, np.float32).tobytes(), pb.DTYPE_FLOAT32
            weights.shape.append(len(some))
        return self.submit(model, kind, message.SerializeToString())

    def optim_step(self, model: str, learning_rate: float = 0.5) -> str:
        return self.submit(model, Kind.OPTIM_STEP, {"adam_params": {"learning_rate": learning_rate}})

    def sampler(self, number: int, path: str | None = None) -> str:
        new = NewSampler(sampler_id(self.session, number), self.session, self.owner, self.base_model, model_path=path)
        return self.journal.samplers.open(new)

    def sample(self, sampler: str, of: Mapping[str, object] | None = None, **params: object) -> str:
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            **(of or {}),
            "sampling_params": {"seed": 1, "max_tokens": 6, **params},
        }
        seq = self.seqs.setdefault(sampler, 0)
        self.seqs[sampler] += 1
        new = NewRequest(
            Kind.SAMPLE,
            self.owner,
            orjson.dumps(body),
            f"{sampler}{seq}",
            sampler_id=sampler,
            seq_id=seq,
            interactive=body.get("priority") == "interactive",
        )
        return self.journal.requests.submit(new)

    def request(self, kind: Kind, body: dict[str, object] | bytes, *, model: str) -> NewRequest:
        seq = self.seqs[model]
        self.seqs[model] += 1
        payload = body if isinstance(body, bytes) else orjson.dumps(body)
        return NewRequest(kind, self.owner, payload, f"{kind}{seq}", model_id=model, seq_id=seq)

    async def result(self, request: str, seconds: float = 120.0) -> Result:
        with self.subscriptions.request(request) as answer:
            result = self.journal.results.get(request, self.owner)
            if result is None:
                assert await answer.wait(seconds), f"{request} was not answered in {seconds} s"
                result = self.journal.results.get(request, self.owner)
        assert result is not None
        return result

    async def results(self, *requests: str) -> list[Result]:
        return [await self.result(request) for request in requests]


@pytest.fixture
def url(tmp_path: Path, journal_template: Path) -> str:
    shutil.copy(journal_template, tmp_path / "journal.db")
    return f"sqlite:///{tmp_path / 'journal.db'}"


@pytest.fixture
async def journal(url: str) -> AsyncIterator[Journal]:
    journal = Journal.open(url)
    yield journal
    journal.close()


@pytest.fixture
def pool() -> NumpyPool:
    return NumpyPool()


@pytest.fixture
async def context(journal: Journal, pool: NumpyPool, tmp_path: Path) -> AsyncIterator[ExecutionContext]:
    answers = AnswerWriter(journal.results.finish)
    store = Store.open(f"file://{tmp_path / 'store'}")
    saves = Saves()
    context = ExecutionContext(journal, pool, store, CARD, SystemClock(), answers, saves, Snapshots(saves))
    yield context
    await answers.close()
    context.close()


ConnectClient = Callable[..., Awaitable[Client]]


@pytest.fixture
async def connect() -> AsyncIterator[ConnectClient]:
    """`await connect(journal)`: a client with a session of its own."""
    opened: list[ResultSubscriptions] = []

    async def connect(journal: Journal, base_model: str = CARD.name, owner: str = "local") -> Client:
        subscriptions = journal.result_subscriptions()
        await subscriptions.__aenter__()
        opened.append(subscriptions)
        return Client(
            journal, subscriptions, journal.sessions.create(NewSession(owner, "0.38.0")), base_model, owner=owner
        )

    yield connect
    for subscriptions in opened:
        await subscriptions.__aexit__(None, None, None)


@pytest.fixture
async def client(connect: ConnectClient, journal: Journal) -> Client:
    return await connect(journal)


@pytest.fixture
def mirror() -> Mirror:
    """A mirror that is not connected to Prefect."""
    return Mirror(PrefectConnection(""), Pacing(10.0, SystemClock()))


@pytest.fixture
def make_runner(context: ExecutionContext, mirror: Mirror) -> Callable[..., ModelRunner]:
    """make_runner(model, snapshots=SnapshotPolicy(…)): the runner of a model, without observers."""

    def make(model: str, steps_made: int = 0, snapshots: SnapshotPolicy | None = None) -> ModelRunner:
        shown = mirror.observe_training_run(model, CARD.name)
        return ModelRunner(context, shown, snapshots or SnapshotPolicy(50, 60.0), model, steps_made)

    return make


@pytest.fixture
def running() -> Callable[[Awaitable[object]], object]:
    """`async with running(coroutine) as task`: run it during the block, and cancel it at the end if it still runs."""

    @asynccontextmanager
    async def running(work: Awaitable[object]) -> AsyncIterator[asyncio.Task[object]]:
        task = asyncio.ensure_future(work)
        try:
            yield task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    return running


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """`await until(condition)`, see `tests/waiting.py`."""
    return waiting.until
