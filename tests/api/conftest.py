"""A real server on a real journal, and a small engine: a bigram model trained with plain NumPy."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import tokenizers
from tests.manual_clock import ManualClock

from tinkerflow.api.app import create_app
from tinkerflow.api.serve import ApiServer
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.errors import TinkerflowError
from tinkerflow.backend.core.ids import sampler_id
from tinkerflow.backend.core.threads import TurnThreads
from tinkerflow.backend.journal import (
    CheckpointKind,
    CheckpointSaved,
    Journal,
    Kind,
    ModelEnded,
    ModelLive,
    ModelState,
    NewSampler,
    Outcome,
    Pending,
    SamplerOpened,
    StepMade,
    StepMeasured,
    migrate,
)
from tinkerflow.backend.journal.notify import RECHECK_SECONDS
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.commands import (
    AdapterState,
    ForwardResult,
    LoraSpec,
    OptimResult,
    SampledSequence,
    SampleResult,
)
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.store import CheckpointMeta, CheckpointPath, Store
from tinkerflow.backend.wire import (
    LoadModel,
    LoadWeights,
    OptimStepBody,
    SampleBody,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    decode_forward,
    encode_forward,
    encode_loaded,
    encode_model_created,
    encode_optim_step,
    encode_sample,
    encode_sampler_opened,
    encode_saved,
    encode_unloaded,
    read_forward,
    sample_request,
)

VOCAB, CONTEXT, EOS = 16, 64, 1
BASE = "tiny/bigram"
KEY = "tml-test"
LORA = "base_model.model.lm_head.lora_A.weight"


# ------------------------------------------------------------------ the engine
def log_softmax(table: Any) -> Any:
    return table - np.log(np.exp(table).sum(-1, keepdims=True))


@dataclass
class Engine:
    """Answers the journal's requests in order. A model is a table of logits [V, V]; its gradients are exact."""

    journal: Journal
    store: Store
    tables: dict[str, Any] = field(default_factory=dict)  # by model id, and saved tables by path or sampler id
    grads: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    executed: list[tuple[Kind, int | None]] = field(default_factory=list)
    next_outcome: Callable[[Pending], Outcome] | None = None  # answers the next request instead
    processor: ImageProcessor | None = None  # for images; placeholders get logits from the table like other tokens
    stopped: bool = False
    _paused: bool = False
    _working: Any = field(default_factory=threading.RLock)

    @property
    def paused(self) -> bool:
        """Whether the engine takes no requests. Setting it waits for work in progress."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        with self._working:
            self._paused = paused

    def run(self) -> None:
        while not self.stopped:
            with self._working:
                busy = not self._paused and self._work()
            if not busy:
                time.sleep(0.002)

    def _work(self) -> bool:
        ready = [
            request for model in self.journal.queue.pending_models() for request in self.journal.requests.ready(model)
        ]
        for request in [*ready, *self.journal.requests.pending_samples(100)]:
            self.executed.append((request.kind, request.seq_id))
            self.journal.results.finish([self._answer(request)])
        return bool(ready)

    def _answer(self, request: Pending) -> Outcome:
        if self.next_outcome is not None:
            answer, self.next_outcome = self.next_outcome, None
            return answer(request)
        try:
            return getattr(self, f"_{request.kind.value}")(request)
        except TinkerflowError as e:
            return request.failed(e)

    def _table(self, name: str) -> Any:
        found = self.tables.get(name)  # other writers' checkpoints are only in the store
        return self.store.load(name)[0].weights[LORA].astype(np.float64) if found is None else found

    def _create_model(self, request: Pending) -> Outcome:
        model = str(request.model_id)
        self.tables[model], self.grads[model], self.steps[model] = np.zeros((VOCAB, VOCAB)), 0.0, 0
        return request.done(encode_model_created(model), "json", ModelLive(model))

    def _load_model(self, request: Pending) -> Outcome:
        asked, model = LoadModel.decode(request.payload), str(request.model_id)
        self.journal.checkpoints.get(asked.path, request.owner, access=asked.access)
        self.tables[model], self.grads[model], self.steps[model] = self._table(asked.path).copy(), 0.0, 0
        return request.done(encode_loaded(model, asked.path), "json", ModelLive(model))

    def _load_weights(self, request: Pending) -> Outcome:
        asked, model = LoadWeights.decode(request.payload), str(request.model_id)
        self.journal.checkpoints.get(asked.path, request.owner, access=asked.access)
        self.tables[model], self.grads[model], self.steps[model] = self._table(asked.path).copy(), 0.0, 0
        return request.done(encode_loaded(model, asked.path), "json", StepMade(model, 0))

    def _forward_backward(self, request: Pending) -> Outcome:
        read = read_forward(request.payload)
        command = decode_forward(read, vocab_size=VOCAB, max_context=CONTEXT, processor=self.processor)
        model, logprobs, loss = str(request.model_id), [], 0.0
        for e in command.examples:
            rows = log_softmax(self.tables[model])[e.tokens_T]
            of_targets = np.take_along_axis(rows, e.targets_TK, 1)
            logprobs.append((of_targets[:, 0] if e.flat else of_targets).astype(np.float32))
            loss -= float((of_targets * e.weights_TK).sum())
            if command.backward:
                grad = np.exp(rows) * e.weights_TK.sum(1, keepdims=True)
                np.subtract.at(grad, (np.arange(len(grad))[:, None], e.targets_TK), e.weights_TK)
                whole = np.zeros((VOCAB, VOCAB))
                np.add.at(whole, e.tokens_T, grad)
                self.grads[model] = self.grads[model] + whole
        return request.done(encode_forward(ForwardResult(tuple(logprobs), loss)), "proto")

    _forward = _forward_backward

    def _optim_step(self, request: Pending) -> Outcome:
        params, model = OptimStepBody.decode(request.payload).params, str(request.model_id)
        norm = float(np.linalg.norm(self.grads[model]))
        self.tables[model] = self.tables[model] - params.learning_rate * self.grads[model]
        self.grads[model], self.steps[model] = 0.0, self.steps[model] + 1
        step = self.steps[model]
        measured = StepMeasured(model, int(request.seq_id or 0), step, norm, params.learning_rate)
        return request.done(encode_optim_step(OptimResult(norm, step)), "json", StepMade(model, step), measured)

    def _saved(self, request: Pending, kind: CheckpointKind, asked: Any) -> CheckpointSaved:
        run = str(request.model_id)
        state = AdapterState(LoraSpec(8), self.steps[run], {LORA: self.tables[run].astype(np.float32)})
        path = str(CheckpointPath(run, kind, asked.name))
        ttl = asked.ttl_seconds
        expires_at = None if ttl is None else datetime.now(UTC) + timedelta(seconds=ttl)
        metadata = getattr(asked, "user_metadata", {})
        meta = CheckpointMeta(BASE, request.owner, metadata, expires_at, request.id)
        over = getattr(asked, "overwrite", False) or self.journal.checkpoints.before_save(path, run).is_gone
        if kind is CheckpointKind.EXTERNAL_WEIGHTS:
            saved = self.store.export(run, asked.name, state, meta, recipients=asked.recipients, overwrite=over)
        else:
            saved = self.store.save(run, kind, asked.name, state, meta, overwrite=over)
        self.tables[path] = self.tables[run].copy()
        return CheckpointSaved.of(saved)

    def _save_weights_external(self, request: Pending) -> Outcome:
        saved = self._saved(request, CheckpointKind.EXTERNAL_WEIGHTS, SaveExternal.decode(request.payload))
        answer = encode_saved(saved.path, kind="save_weights_external", size_bytes=saved.size_bytes)
        return request.done(answer, "json", saved)

    def _save_weights(self, request: Pending) -> Outcome:
        asked = SaveWeights.decode(request.payload)
        saved = self._saved(request, CheckpointKind.WEIGHTS, asked)
        return request.done(encode_saved(saved.path), "json", saved)

    def _save_for_sampler(self, request: Pending) -> Outcome:
        asked = SaveForSampler.decode(request.payload)
        if asked.name is not None:
            saved = self._saved(request, CheckpointKind.SAMPLER_WEIGHTS, asked)
            return request.done(encode_saved(saved.path, kind="save_weights_for_sampler"), "json", saved)
        new_id = sampler_id(request.session_id, int(asked.sampling_session_seq_id or 0))
        self.tables[new_id] = self.tables[str(request.model_id)].copy()
        opened = SamplerOpened(NewSampler(new_id, request.session_id, request.owner, BASE, snapshot_id=new_id))
        return request.done(encode_sampler_opened(new_id), "json", opened)

    def _sample(self, request: Pending) -> Outcome:
        assert request.sampler is not None
        source = request.sampler.snapshot_id or request.sampler.model_path
        table = log_softmax(self._table(source) if source else np.zeros((VOCAB, VOCAB)))
        long = self.journal.requests.payload(request.id) if request.left else None
        body = SampleBody.decode(long or request.payload)
        asked = sample_request(
            body,
            request_id=request.id,
            owner=request.owner,
            vocab_size=VOCAB,
            max_context=CONTEXT,
            eos=[EOS],
        )
        sequences = []
        for i in range(asked.num_samples):
            rng, last, tokens = np.random.default_rng([asked.seed, i]), int(asked.prompt_T[-1]), []
            while len(tokens) < asked.max_tokens and not (tokens and tokens[-1] in asked.stop_tokens):
                tokens.append(int(rng.choice(VOCAB, p=np.exp(table[tokens[-1] if tokens else last]))))
            path = np.array([last, *tokens])
            stopped = tokens[-1] in asked.stop_tokens
            sequences.append(
                SampledSequence(
                    np.array(tokens, np.int32),
                    table[path[:-1], path[1:]].astype(np.float32),
                    "stop" if stopped else "length",
                )
            )
        prompt = np.concatenate([[np.nan], table[asked.prompt_T[:-1], asked.prompt_T[1:]]]).astype(np.float32)
        result = SampleResult(request.id, tuple(sequences), prompt if asked.prompt_logprobs else None)
        return request.done(encode_sample(result, body.target_prompt_logprobs), "proto")

    def _unload(self, request: Pending) -> Outcome:
        model = str(request.model_id)
        ended = ModelEnded(model, ModelState.UNLOADED, request.payload.decode())
        return request.done(encode_unloaded(model), "json", ended)


# ------------------------------------------------------------------ the server
@dataclass(frozen=True)
class Running:
    """A running server and its parts."""

    url: str
    journal: Journal
    store: Store
    app: Any
    settings: Settings
    http: httpx.Client
    clock: ManualClock  # used only by the app

    def post(self, path: str, json: Any = None, key: str = KEY, **more: Any) -> httpx.Response:
        """POST to /api/v1/`path`."""
        return self.http.post(f"{self.url}/api/v1/{path}", json=json, headers={"X-API-Key": key}, **more)

    def get(self, path: str, key: str = KEY, **more: Any) -> httpx.Response:
        """GET /api/v1/`path`."""
        return self.http.get(f"{self.url}/api/v1/{path}", headers={"X-API-Key": key}, **more)

    def session(self, key: str = KEY) -> str:
        """Create a session, and return its id."""
        return str(self.post("create_session", {"sdk_version": "0", "tags": []}, key).json()["session_id"])

    def model(self, key: str = KEY, **metadata: str) -> str:
        """Create a model, and return its id without waiting for the model."""
        body = {"session_id": self.session(key), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
        body |= {"user_metadata": metadata}
        return str(self.post("create_model", body, key).json()["model_id"])

    def result(self, request_id: str, key: str = KEY) -> httpx.Response:
        """Poll for at most a minute, and return the last answer: the result or an error."""
        deadline = time.monotonic() + 60
        while True:
            answer = self.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True}, key)
            if b"try_again" not in answer.content or time.monotonic() > deadline:
                return answer


def card_json() -> str:
    return ModelCard(
        name=BASE,
        path="/models/bigram",
        tokenizer_id="/models/bigram",
        architecture="Qwen3ForCausalLM",
        vocab_size=VOCAB,
        max_context=CONTEXT,
        eos_token_ids=(EOS,),
        parameters=VOCAB * VOCAB,
        tied=False,
    ).to_json()


@pytest.fixture
def settings_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """Makes settings whose data dir is a fresh folder."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)

    def make(**more: Any) -> Settings:
        return Settings(**{"data_dir": tmp_path, "poll_hold": 2.0, **more})

    return make


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database with one base model. Tests copy it, because a migration takes a second."""
    file = tmp_path_factory.mktemp("migrated") / "journal.db"
    migrate(f"sqlite:///{file}")
    journal = Journal.open(f"sqlite:///{file}")
    journal.base_models.register([(BASE, card_json())])
    journal.close()
    return file


@pytest.fixture
def journal(settings_for: Callable[..., Settings], migrated: Path) -> Iterator[Journal]:
    """A journal that contains only one base model."""
    url = settings_for().journal_url
    shutil.copy(migrated, url.removeprefix("sqlite:///"))
    journal = Journal.open(url)
    yield journal
    journal.close()


@pytest.fixture
def start(journal: Journal, settings_for: Callable[..., Settings]) -> Iterator[Callable[..., Running]]:
    """Starts servers with given settings, and stops them after the test."""
    stops: list[Callable[[], None]] = []

    def begin(**more: Any) -> Running:
        # Holds the port from now on. asyncio sends small answers at once only if the socket names its protocol.
        listening = socket.socket(proto=socket.IPPROTO_TCP)
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        bound = more.pop("host", "127.0.0.1")
        recheck_seconds = more.pop("recheck_seconds", RECHECK_SECONDS)
        settings = settings_for(host=bound, port=port, **more)
        # The clock stands still at the present time, because the SDK compares times in tokens with its own clock.
        store, clock = Store.open(settings.store_url), ManualClock(datetime.now(UTC))
        started: dict[str, Any] = {}
        ready = threading.Event()

        async def main() -> None:
            asyncio.get_running_loop().set_default_executor(TurnThreads(8, "journal"))
            async with journal.result_subscriptions(recheck_seconds=recheck_seconds) as subscriptions:
                started["app"] = app = create_app(settings, journal, subscriptions, store, clock=clock)
                started["server"] = server = ApiServer(app, settings, ready.set)
                await server.serve([listening])

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()

        def stop() -> None:
            started["server"].should_exit = True
            thread.join(10)

        stops.append(stop)
        while not ready.wait(0.01):
            assert thread.is_alive(), "the server did not start"
        return Running(f"http://127.0.0.1:{port}", journal, store, started["app"], settings, http, clock)

    with httpx.Client(verify=False, timeout=20, limits=httpx.Limits(max_connections=None)) as http:
        yield begin
    for stop in stops:
        stop()


def lettered_card(folder: Path) -> ModelCard:
    """The base model with a tokenizer in `folder`: token 1 ends a text, and the others are the letters from `a` on."""
    letters = {"a": 0, "</s>": EOS, **{chr(ord("a") + n - 1): n for n in range(2, VOCAB)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return replace(ModelCard.from_json(card_json()), path=str(folder))


@pytest.fixture
def lettered(journal: Journal, tmp_path: Path) -> ModelCard:
    """The base model, registered with a tokenizer."""
    card = lettered_card(tmp_path / "bigram")
    journal.base_models.register([(BASE, card.to_json())])
    return card


@pytest.fixture
def server(start: Callable[..., Running]) -> Running:
    """A server on loopback without API keys, which serves only its owner."""
    return start()


@pytest.fixture
def engine(journal: Journal, settings_for: Callable[..., Settings]) -> Iterator[Engine]:
    """A running engine."""
    engine = Engine(journal, Store.open(settings_for().store_url))
    thread = threading.Thread(target=engine.run)
    thread.start()
    yield engine
    engine.stopped = True
    thread.join(10)


@pytest.fixture
def client(server: Running, engine: Engine) -> Iterator[tinker.ServiceClient]:
    """The real SDK, connected to the server."""
    service = tinker.ServiceClient(base_url=server.url)
    yield service
    service.close("success").result()
