"""A Forward command, executed one micro-batch at a time: logprobs, loss, and with `backward` the adapter's gradients.

A loss per token takes one pass over the examples. Any other loss takes a pass for the logprobs, then the loss itself,
then (with `backward`) a pass that trains with the slopes of the loss as weights. The pool computes the number of parts
from `LossSpec.passes`, `spec.packing` (micro-batches of a pass) and `spec.traced_work` (steps of a traced loss), and
sends a command for each part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import row_parts, to_host
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.models.vision_tower import VisionTower
from tinkerflow.backend.compute.platforms import platform
from tinkerflow.backend.compute.training.adapters import Adapter, AdapterStore, PendingGradients
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.compute.training.images import image_features
from tinkerflow.backend.compute.training.logprobs import Scored
from tinkerflow.backend.compute.training.packing import MicroBatch, pack
from tinkerflow.backend.compute.training.sequence_losses import SequenceLosses
from tinkerflow.backend.compute.training.token_losses import choose
from tinkerflow.backend.compute.training.train import Steps, to_devices
from tinkerflow.backend.core.errors import OUT_OF_MEMORY, AllocationError, ServerError
from tinkerflow.backend.spec.commands import DeferredReply, Done, Float32, Forward, ForwardResult, LoraSpec, Reply
from tinkerflow.backend.spec.drift import AGREEMENT, FIRST_AGREEMENT
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.backend.spec.traced_work import examples_of_step, loss_steps

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=Reply)
ReadResult = Callable[[], ForwardResult]  # waits for the devices


class ReadReply(Protocol):
    """Waits for the devices, and raises DevicesError if they fail."""

    def __call__(self, later: Callable[[], R], /) -> R:
        """Return the reply of `later`."""


@dataclass(frozen=True)
class Training:
    """The parts of the executor that passes use.

    steps(spec): the jitted functions for adapters of this shape. budget: the limits of a micro-batch. branch_tokens:
    see `pack`. tree_programs: see `needs_tree_program`. announce(what, adapter, batch): called before each micro-batch.
    tower: None in models that take text only.
    """

    params: Params
    steps: Callable[[LoraSpec], Steps]
    mesh: Mesh
    adapters: AdapterStore
    budget: Budget
    branch_tokens: int
    tree_programs: bool
    announce: Callable[[str, Adapter, MicroBatch], None]
    read: ReadReply
    tower: VisionTower | None = None


class ForwardRun:
    """A Forward command in progress. Call `step` until `done`."""

    def __init__(self, training: Training, command: Forward) -> None:
        """Prepare the command, which has at least one example. Nothing is computed yet."""
        self.done = False
        self._training, self._command = training, command
        self._replies = self._token_loss() if LOSSES[command.loss].per_token is not None else self._sequence_loss()

    def step(self) -> DeferredReply:
        """Start the next part. The reply is Done, or the ForwardResult for the last part.

        NotFoundError: the adapter does not exist. ServerError: computing failed; with `backward` the adapter's
        gradients are cleared. UserError: the loss is not finite. AllocationError, also when the reply is read: the
        devices had no memory left, and the adapter is unchanged. The run cannot continue after an error.
        """
        return partial(_or_no_memory, self._command, _or_no_memory(self._command, lambda: next(self._replies)))

    def _token_loss(self) -> Iterator[DeferredReply]:
        current = _Pass(self._training, self._command)
        while not self.done:
            scored = current.step()
            self.done = current.done
            yield current.finish() if self.done else partial(_wait_for, scored)

    def _sequence_loss(self) -> Iterator[DeferredReply]:
        """The logprobs by micro-batch, the losses by step, then with `backward` the gradients by micro-batch."""
        command, steps = self._command, loss_steps(self._command)
        plain = command.copy_with(loss=LOSSES[command.loss].of_pass.name, config={}, custom=None, loss_seconds=())
        current = _Pass(self._training, plain.copy_with(backward=False))
        while not current.done:
            waiting = partial(_wait_for, current.step())
            if steps or command.backward or not current.done:
                yield waiting
        forward = self._training.read(current.finish())
        losses = SequenceLosses(command, current.of_supports(forward.logprobs))
        for step in range(steps):
            losses.compute(examples_of_step(command, step))
            if step + 1 < steps or command.backward:
                yield Done
        if not steps:
            losses.compute(range(len(command.examples)))
        judged = losses.result()
        result = forward.copy_with(loss_sum=judged.loss_sum, metrics={**forward.metrics, **judged.metrics})
        if not command.backward:
            self.done = True
            yield lambda: result
            return
        current = _Pass(self._training, plain.copy_with(examples=judged.surrogates))
        while not self.done:
            scored = current.step()
            self.done = current.done
            yield partial(_after, current.finish(), result) if self.done else partial(_wait_for, scored)


class _Pass:
    """One pass of a loss per token over the examples of a command."""

    def __init__(self, training: Training, command: Forward) -> None:
        self._training, self._command = training, command
        self._adapter = training.adapters.get(command.adapter_id)
        self._steps = training.steps(self._adapter.spec)
        # A failure must not lose gradients. Zeros can be made again; other gradients are copied.
        self._grads = self._adapter.grads
        if command.backward and self._adapter.pending:
            self._grads = self._steps.copy(self._grads)
        self._choice = choose(command.loss, command.config)
        self._batches = pack(
            command.examples,
            microbatch_tokens=training.budget.microbatch_tokens,
            row_multiple=row_parts(training.mesh),
            attention_tokens=platform().attention_tokens,
            loss=LOSSES[command.loss],
            branch_tokens=training.branch_tokens,
            context_parallel=training.budget.context_parallel,
            few_shapes=platform().few_shapes,
        )
        self._scored: list[Scored] = []

    @property
    def done(self) -> bool:
        return len(self._scored) == len(self._batches)

    def step(self) -> Scored:
        training, command, batch = self._training, self._command, self._batches[len(self._scored)]
        try:
            training.announce("forward_backward" if command.backward else "forward", self._adapter, batch)
            images = image_features(training.tower, command.examples, batch) if training.tower else None
            arrays = to_devices(batch, self._choice, training.mesh, images, trees=training.tree_programs)
            if command.backward:
                self._grads, scored = self._steps.backward(training.params, self._adapter.lora, self._grads, arrays)
            else:
                scored = self._steps.forward(training.params, self._adapter.lora, arrays)
        except Exception as error:
            if not command.backward or OUT_OF_MEMORY in str(error):
                raise
            training.adapters.clear_gradients(command.adapter_id)
            raise ServerError(
                f"forward_backward of {len(command.examples)} examples failed ({type(error).__name__}: {error}); "
                f"the gradients that adapter {command.adapter_id!r} had accumulated are cleared"
            ) from error
        self._scored.append(scored)
        return scored

    def finish(self) -> ReadResult:
        """Store the gradients, and return the result, which is still on the devices."""
        gathered = partial(_gather, self._command, self._batches, self._scored)
        if not self._command.backward:
            return gathered
        computing = PendingGradients(self._adapter.grads if self._adapter.pending else None)
        after = replace(self._adapter, grads=self._grads, pending=True, computing=computing)
        self._training.adapters.set(self._command.adapter_id, after)
        return partial(_computed, gathered, computing)

    def of_supports(self, logprobs: Sequence[Float32]) -> Sequence[Float32]:
        """The log probabilities for the loss: under the softmax over a token's support, if the token has a support.

        logprobs: the result of this pass, under the full softmax.
        """
        if all(scored.log_mass_BT is None for scored in self._scored):
            return logprobs
        on_host = to_host([scored.log_mass_BT for scored in self._scored])
        masses = [
            np.zeros((*scored.logprobs_BTK.shape[:-1], 1), np.float32) if mass_BT is None else mass_BT[..., None]
            for scored, mass_BT in zip(self._scored, on_host, strict=True)
        ]
        by_example = _by_example(self._command, self._batches, masses)
        return [found - mass for found, mass in zip(logprobs, by_example, strict=True)]


def _or_no_memory(command: Forward, run: Callable[[], T]) -> T:
    try:
        return run()
    except Exception as error:
        if OUT_OF_MEMORY in str(error):
            raise _no_memory(command, error) from error
        raise


def _no_memory(command: Forward, error: Exception) -> AllocationError:
    """The error of a Forward that the devices had no memory for."""
    log.error("no memory was left on the devices for a Forward", exc_info=error)
    lengths = [len(example.tokens_T) for example in command.examples]
    return AllocationError(
        f"data of {len(lengths)} examples, the longest of {max(lengths)} tokens: the devices had no memory left for "
        "them. The model is unchanged. Shorter examples take less; the same request may work when there are "
        "fewer models"
    )


def _wait_for(scored: Scored) -> Done:
    jax.block_until_ready(scored)
    return Done()


def _after(trained: ReadResult, result: ForwardResult) -> ForwardResult:
    trained()
    return result


def _computed(scored: ReadResult, computing: PendingGradients) -> ForwardResult:
    """Read the result. The same programs computed the gradients, so the earlier gradients can be dropped."""
    result = scored()
    computing.before = None
    return result


def _gather(command: Forward, batches: list[MicroBatch], on_devices: list[Scored]) -> ForwardResult:
    results = to_host(on_devices)
    logprobs = _by_example(command, batches, [scored.logprobs_BTK for scored in results])
    loss = float(sum(np.float64(scored.loss) for scored in results))
    return ForwardResult(tuple(logprobs), loss, _agreement(command, batches, results))


def _by_example(command: Forward, batches: list[MicroBatch], found: list[Any]) -> list[Float32]:
    """The numbers of each example, [T] or [T, K]. found: the numbers of each micro-batch, [B, T, K]."""
    numbers: list[Float32] = [np.empty(0, np.float32)] * len(command.examples)
    for batch, found_BTK in zip(batches, found, strict=True):
        whole_BTK = batch.in_rows(found_BTK)
        for place in batch.places:
            example = command.examples[place.example]
            rows = whole_BTK[place.row, place.columns]
            numbers[place.example] = np.array(rows[:, 0] if example.flat else rows[:, : example.targets_TK.shape[1]])
    return numbers


def _agreement(command: Forward, batches: list[MicroBatch], results: list[Scored]) -> dict[str, float]:
    """How often the given experts equal the router's choice, in all layers and in the first layer with experts.

    Empty if no experts are given.
    """
    given, equal = np.zeros(2, np.int64), np.zeros(2, np.int64)
    for batch, scored in zip(batches, results, strict=True):
        for place in batch.places:
            routes_Tn = command.examples[place.example].routes_Tn
            if routes_Tn is not None and scored.equal_BT2 is not None:
                is_given_Tn = routes_Tn >= 0
                given += [is_given_Tn.sum(), is_given_Tn.any(axis=-1).sum()]
                equal += batch.in_rows(scored.equal_BT2)[place.row, place.columns].sum(axis=0)
    return dict(zip((AGREEMENT, FIRST_AGREEMENT), map(float, equal / given), strict=True)) if given.all() else {}
