"""A unigram language model in NumPy that executes the pool's commands. Its whole adapter is a bias over the vocabulary.

Tests use it in their own process (NumpyPool in engine_parts.py) and, for the engine, in real worker processes.
A DropAdapter of the adapter "crash" ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.spec.commands import (
    AdapterState,
    Command,
    CreateAdapter,
    Done,
    DropAdapter,
    DropSnapshot,
    ExportAdapter,
    Forward,
    ForwardResult,
    GroupConfig,
    ImportAdapter,
    LoadSnapshot,
    LoraSpec,
    MoveSnapshot,
    NewTokens,
    NextMicroBatch,
    OptimResult,
    OptimStep,
    Ping,
    PublishSnapshot,
    ReadCompileStatus,
    Reply,
    SampledSequence,
    SampleProgress,
    SampleRequest,
    SampleResult,
    SampleStep,
    SnapshotHeld,
)

VOCAB = 32
CHUNK = 4
BIAS = "base_model.model.lm_head.lora_B.weight"
MOMENT, GRAD = f"{BIAS}.mu", f"{BIAS}.grad"


class Unigram:
    uses_jax = False

    def __init__(self, config: GroupConfig, progress: Callable[[str], None], processes: int, rank: int) -> None:
        self.devices = ("numpy:0",)
        self.parameters = VOCAB
        self.microbatch_tokens = 1024
        self.attention_tokens = 1024
        self.few_shapes = False
        self.branch_tokens = 0
        self.fsdp = 1
        self.context, self.context_rule = config.max_context, "the model's context"
        self.memory: dict[str, int] = {"weights": 1000, "kv_cache": 500}
        self.programs = "NumPy"
        self.clear()

    def clear(self) -> None:
        self.adapters: dict[str, AdapterState] = {}
        self.snapshots: dict[str, np.ndarray] = {}
        self.batch: dict[str, Decoding] = {}

    def execute(self, command: Command) -> Reply:
        match command:
            case CreateAdapter():
                self.adapters[command.adapter_id] = fresh(command.spec)
            case DropAdapter():
                if command.adapter_id == "crash":
                    os._exit(3)
                self.adapters.pop(command.adapter_id, None)
            case Forward():
                return self.forward(command)
            case OptimStep():
                state = self.adapter(command.adapter_id)
                grad = state.moments[GRAD]
                weights = {BIAS: state.weights[BIAS] - np.float32(command.params.learning_rate) * grad}
                moments = {MOMENT: state.moments[MOMENT] + grad, GRAD: np.zeros_like(grad)}
                after = state.copy_with(step=state.step + 1, weights=weights, moments=moments)
                self.adapters[command.adapter_id] = after
                return OptimResult(float(np.linalg.norm(grad)), after.step)
            case ExportAdapter():
                state = self.adapter(command.adapter_id)
                kept = {name: array for name, array in state.moments.items() if name == MOMENT or array.any()}
                return state.copy_with(moments=kept if command.optimizer else {})
            case ImportAdapter():
                moments = {**fresh(command.state.spec).moments, **command.state.moments}
                self.adapters[command.adapter_id] = command.state.copy_with(moments=moments)
            case PublishSnapshot():
                state = self.adapter(command.adapter_id)
                self.snapshots[command.snapshot_id] = state.weights[BIAS]
                return SnapshotHeld(state.weights[BIAS].nbytes, on_host=state.spec.full)
            case LoadSnapshot(snapshot_id, state):
                held = self.snapshots.setdefault(snapshot_id, state.weights[BIAS])
                return SnapshotHeld(held.nbytes, on_host=state.spec.full)
            case MoveSnapshot():
                moved = self.snapshots[command.to_id] = self.snapshots.pop(command.snapshot_id)
                for decoding in self.batch.values():
                    if decoding.request.snapshot_id == command.to_id:
                        decoding.bias = moved
            case DropSnapshot():
                self.snapshots.pop(command.snapshot_id, None)
            case SampleStep():
                return self.sample(command)
            case Ping() | ReadCompileStatus() | NextMicroBatch():
                pass
            case _:
                assert_never(command)
        return Done()

    def adapter(self, adapter_id: str) -> AdapterState:
        if adapter_id not in self.adapters:
            raise NotFoundError(f"adapter {adapter_id!r} is not in this worker group")
        return self.adapters[adapter_id]

    def forward(self, command: Forward) -> ForwardResult:
        state = self.adapter(command.adapter_id)
        logprobs_V = log_softmax(state.weights[BIAS][:, 0])
        grad = np.zeros(VOCAB, np.float32)
        found, loss = [], 0.0
        for example in command.examples:
            targets_T, weights_T = example.targets_TK[:, 0], example.weights_TK[:, 0]
            found.append(logprobs_V[targets_T])
            loss -= float(np.sum(found[-1] * weights_T))
            np.add.at(grad, targets_T, -weights_T)
            grad += np.exp(logprobs_V) * np.sum(weights_T)
        if command.backward:
            total = state.moments[GRAD] + grad[:, None]
            self.adapters[command.adapter_id] = state.copy_with(moments={**state.moments, GRAD: total})
        return ForwardResult(tuple(found), loss)

    def sample(self, command: SampleStep) -> SampleProgress:
        for request_id in command.cancel:
            self.batch.pop(request_id, None)
        finished, streamed = [], []
        for request in command.admit:
            bias = np.zeros((VOCAB, 1)) if request.snapshot_id is None else self.snapshots.get(request.snapshot_id)
            if bias is None:
                finished.append(SampleResult(request.request_id, error=f"{request.snapshot_id!r} is not loaded"))
            else:
                self.batch[request.request_id] = Decoding(request, bias)
        for request_id, decoding in tuple(self.batch.items()):
            start = len(decoding.tokens)
            decoding.go_on()
            streamed += decoding.since(start)
            if len(decoding.tokens) == decoding.request.max_tokens:
                del self.batch[request_id]
                finished.append(decoding.result())
        return SampleProgress(tuple(finished), len(self.batch), 0, tuple(streamed))


@dataclass
class Decoding:
    """A request in the batch. Each token is the most likely one under the snapshot's bias at that time."""

    request: SampleRequest
    bias: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def go_on(self) -> None:
        token = int(np.argmax(self.bias))
        count = min(CHUNK, self.request.max_tokens - len(self.tokens))
        self.tokens += [token] * count
        self.logprobs += [float(log_softmax(self.bias[:, 0])[token])] * count

    def since(self, start: int) -> list[NewTokens]:
        if not self.request.stream:
            return []
        tokens, logprobs = np.asarray(self.tokens[start:], np.int32), np.asarray(self.logprobs[start:], np.float32)
        ended = "length" if len(self.tokens) == self.request.max_tokens else None
        name, samples = self.request.request_id, self.request.num_samples
        return [NewTokens(name, index, start, tokens, logprobs, None, ended) for index in range(samples)]

    def result(self) -> SampleResult:
        one = SampledSequence(np.asarray(self.tokens, np.int32), np.asarray(self.logprobs, np.float32), "length")
        return SampleResult(self.request.request_id, (one,) * self.request.num_samples)


def fresh(spec: LoraSpec) -> AdapterState:
    zeros = np.zeros((VOCAB, 1), np.float32)
    return AdapterState(spec, 0, {BIAS: zeros}, {MOMENT: zeros.copy(), GRAD: zeros.copy()})


def log_softmax(values_V: np.ndarray) -> np.ndarray:
    shifted = values_V - values_V.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float32)
