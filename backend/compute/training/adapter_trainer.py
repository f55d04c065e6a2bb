"""The training commands of all adapters: a Forward in one or more parts, and the optimizer's step."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from tinkerflow.backend.compute.mesh import put, replicated, to_host
from tinkerflow.backend.compute.training.adapters import Adapter
from tinkerflow.backend.compute.training.forward_backward import ForwardRun, Training
from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.spec.commands import DeferredReply, Forward, ForwardResult, OptimResult, OptimStep, Reply
from tinkerflow.backend.spec.optimizers import optimizer_of


class AdapterTrainer:
    """Trains the adapters of one base model. Each command starts a computation, and its reply waits for the devices."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._in_progress: dict[str, ForwardRun] = {}  # Forwards that are executed in parts, by adapter

    def forward(self, command: Forward) -> Reply | DeferredReply:
        """Compute the command, or with `by_micro_batch` its first part. Errors are those of `ForwardRun.step`."""
        if not command.examples:
            return ForwardResult((), 0.0)
        run = ForwardRun(self._training, command)
        if command.by_micro_batch:
            return self._advance(command.adapter_id, run)
        reply = run.step()
        while not run.done:
            self._training.read(reply)
            reply = run.step()
        return reply

    def next_part(self, adapter_id: str) -> DeferredReply:
        """Compute the next part of the adapter's Forward. ServerError: no Forward is in progress."""
        if adapter_id not in self._in_progress:
            raise ServerError(f"adapter {adapter_id!r} has no forward in progress, because an earlier part failed")
        return self._advance(adapter_id, self._in_progress.pop(adapter_id))

    def optimize(self, command: OptimStep) -> DeferredReply:
        """Update the adapter with its gradients, and clear them.

        UserError: the parameters belong to another optimizer, or (when the reply is read) the gradient norm is not
        finite.
        """
        adapters, mesh = self._training.adapters, self._training.mesh
        adapter = adapters.get(command.adapter_id)
        spec = optimizer_of(command.params)
        if spec.name != adapter.optimizer:
            raise UserError(
                f"optim_step: the parameters are {spec.name}'s, but the model was created with {adapter.optimizer}"
            )
        on_devices = put(spec.vector(command.params), replicated(mesh))
        stepped = self._training.steps(adapter.spec).optimize(adapter.lora, adapter.grads, adapter.state, on_devices)
        before, norm = adapter.step, stepped.norm
        after = Adapter(adapter.spec, stepped.lora, stepped.grads, stepped.state, before, norm)
        adapters.set(command.adapter_id, after)
        return partial(_stepped, norm, before + 1)

    def forget(self, adapter_id: str) -> None:
        """Abandon the adapter's Forward, if one is in progress."""
        self._in_progress.pop(adapter_id, None)

    def clear(self) -> None:
        """Abandon every Forward that is in progress."""
        self._in_progress.clear()

    def _advance(self, adapter_id: str, run: ForwardRun) -> DeferredReply:
        reply = run.step()
        if not run.done:
            self._in_progress[adapter_id] = run
        return reply


def _stepped(on_devices: jax.Array, step: int) -> OptimResult:
    norm = float(to_host(on_devices))
    if not np.isfinite(norm):
        raise UserError(
            f"optim_step: the gradient norm is {norm}: must be finite. The step was not executed, and the "
            "gradients are cleared: check the weights, advantages and logprobs of the last forward_backward"
        )
    return OptimResult(grad_norm=norm, step=step)
