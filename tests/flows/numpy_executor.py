"""A unigram language model in NumPy behind the pool's commands: its whole adapter is a bias over the vocabulary.

Used in the test's own process (NumpyPool in conftest.py) and, for the engine, in real worker processes.
adapter_id "crash" in a DropAdapter ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from backend.commands import (
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
    OptimResult,
    OptimStep,
    Ping,
    PublishSnapshot,
    Reply,
    SampledSequence,
    SampleProgress,
    SampleRequest,
    SampleResult,
    SampleStep,
)
from backend.errors import NotFoundError

VOCAB = 32
CHUNK = 4
BIAS, GRAD = "base_model.model.lm_head.lora_B.weight", "base_model.model.lm_head.lora_B.weight.grad"


class Unigram:
    """Executes commands one after the other."""

    uses_jax = False

    def __init__(self, config: GroupConfig, progress: Callable[[str], None], processes: int, rank: int) -> None:
        self.devices = ("numpy:0",)
        self.parameters = VOCAB
        self.adapters: dict[str, AdapterState] = {}
        self.snapshots: dict[str, np.ndarray] = {}
        self.batch: dict[str, tuple[SampleRequest, int]] = {}

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
                moments = {GRAD: np.zeros_like(grad)}
                after = replace(state, step=state.step + 1, weights=weights, moments=moments)
                self.adapters[command.adapter_id] = after
                return OptimResult(float(np.linalg.norm(grad)), after.step)
            case ExportAdapter():
                state = self.adapter(command.adapter_id)
                return state if command.optimizer else replace(state, moments={})
            case ImportAdapter():
                moments = command.state.moments or fresh(command.state.spec).moments
                self.adapters[command.adapter_id] = replace(command.state, moments=moments)
            case PublishSnapshot():
                self.snapshots[command.snapshot_id] = self.adapter(command.adapter_id).weights[BIAS]
            case LoadSnapshot():
                self.snapshots[command.snapshot_id] = command.state.weights[BIAS]
            case DropSnapshot():
                self.snapshots.pop(command.snapshot_id, None)
            case SampleStep():
                return self.sample(command)
            case Ping():
                return Done()
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
            self.adapters[command.adapter_id] = replace(state, moments={GRAD: total})
        return ForwardResult(tuple(found), loss)

    def sample(self, command: SampleStep) -> SampleProgress:
        for request_id in command.cancel:
            self.batch.pop(request_id, None)
        finished = []
        for request in command.admit:
            if request.snapshot_id is not None and request.snapshot_id not in self.snapshots:
                finished.append(SampleResult(request.request_id, error=f"snapshot {request.snapshot_id!r} is not here"))
            else:
                self.batch[request.request_id] = (request, 0)
        for request_id, (request, made) in tuple(self.batch.items()):
            made = min(request.max_tokens, made + CHUNK)
            self.batch[request_id] = (request, made)
            if made == request.max_tokens:
                del self.batch[request_id]
                finished.append(
                    SampleResult(request_id, tuple(self.continuation(request) for _ in range(request.num_samples)))
                )
        return SampleProgress(tuple(finished), active=len(self.batch), waiting=0)

    def continuation(self, request: SampleRequest) -> SampledSequence:
        bias_V = (
            np.zeros(VOCAB, np.float32) if request.snapshot_id is None else self.snapshots[request.snapshot_id][:, 0]
        )
        token = int(np.argmax(bias_V))
        tokens_T = np.full(request.max_tokens, token, np.int32)
        return SampledSequence(tokens_T, np.full(request.max_tokens, log_softmax(bias_V)[token], np.float32), "length")


def fresh(spec: LoraSpec) -> AdapterState:
    zeros = np.zeros((VOCAB, 1), np.float32)
    return AdapterState(spec, 0, {BIAS: zeros}, {GRAD: zeros.copy()})


def log_softmax(values_V: np.ndarray) -> np.ndarray:
    shifted = values_V - values_V.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float32)
