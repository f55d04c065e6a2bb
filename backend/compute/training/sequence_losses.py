"""Losses of whole sequences: a formula of `backend/spec/losses`, or a loss that the client traced.

They are computed from the log probabilities of a forward pass: formulas on the host in float64, traced losses by
`custom_loss`. A second pass then trains with weighted cross entropy, whose weights are minus the slopes. By the chain
rule, its gradient equals the gradient of the loss. Each example is computed by itself, so packing cannot change its
loss.
Letters: T tokens, K targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinkerflow.backend.compute.training.custom_loss import Outcome, custom_loss
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import Example, Float32, Forward
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.backend.spec.supports import restricted_inputs


@dataclass(frozen=True)
class SequenceLoss:
    """The loss of a command.

    loss_sum: the sum over its examples. surrogates: examples for which cross_entropy has the gradient of the loss.
    metrics: a traced loss's metrics over all examples: sums, or means if the name ends with `:mean`.
    """

    loss_sum: float
    surrogates: tuple[Example, ...]
    metrics: Mapping[str, float]


class SequenceLosses:
    """The losses of the examples of a command, computed some at a time."""

    def __init__(self, command: Forward, logprobs: Sequence[Float32]) -> None:
        """Start without losses. logprobs: each example's, [T] or [T, K]; under its supports, if it has any."""
        self._command, self._logprobs = command, logprobs
        self._outcomes: dict[int, Outcome] = {}

    def compute(self, examples: Iterable[int]) -> None:
        """Compute the losses of the examples with these numbers.

        UserError names an example that lacks an input, or whose loss or slope is not finite.
        """
        for i in examples:
            self._outcomes[i] = loss, slope_TK, _ = self._outcome(i)
            if not np.isfinite(loss) or not np.isfinite(slope_TK.astype(np.float32)).all():
                raise UserError(
                    f"data[{i}]: {self._command.loss} gives the loss {loss:g} or a slope that is not finite; nothing "
                    "was trained"
                )

    def _outcome(self, index: int) -> Outcome:
        command, example = self._command, self._command.examples[index]
        logprobs_TK = self._logprobs[index].reshape(example.targets_TK.shape)
        if command.custom is not None:
            return custom_loss(command.custom, example, logprobs_TK)
        spec, given = LOSSES[command.loss], restricted_inputs(example.inputs, example.supports)
        inputs = {"weights": example.weights_TK, **given}
        if missing := sorted(spec.read - inputs.keys()):
            raise UserError(f"data[{index}].loss_fn_inputs lacks {missing[0]!r}: {spec.name} needs it")
        assert spec.per_sequence is not None
        with np.errstate(over="ignore", invalid="ignore"):
            loss, slope_TK = spec.per_sequence(
                logprobs_TK.astype(np.float64), inputs, {**spec.defaults, **command.config}
            )
        return loss, slope_TK, {}

    def result(self) -> SequenceLoss:
        """The loss of the command, after all examples are computed."""
        examples, outcomes = self._command.examples, [self._outcomes[i] for i in range(len(self._command.examples))]
        sums: dict[str, float] = {}
        for _, _, metrics in outcomes:
            for key, value in metrics.items():
                sums[key] = sums.get(key, 0.0) + value
        return SequenceLoss(
            loss_sum=float(sum(loss for loss, _, _ in outcomes)),
            surrogates=tuple(
                replace(example, weights_TK=(-slope_TK).astype(np.float32), inputs={})
                for example, (_, slope_TK, _) in zip(examples, outcomes, strict=True)
            ),
            metrics={key: total / len(examples) if key.endswith(":mean") else total for key, total in sums.items()},
        )
