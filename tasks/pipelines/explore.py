"""The recipe of learning from one's own samples: by rewards, by another model's log probabilities, or by both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from tinkerflow.tasks.pipelines.advantages import Floats, group_centred, nearness
from tinkerflow.tasks.pipelines.rollouts import Episode, Rollouts, Turn
from tinkerflow.tasks.pipelines.rows import Row
from tinkerflow.tasks.pipelines.sampling import Shown
from tinkerflow.tasks.pipelines.schedule import batch_of
from tinkerflow.tasks.pipelines.trainer import Trainer, Values, grad_norm

if TYPE_CHECKING:
    import tinker

_HELD_OUT = 2**32 - 1  # stands where the steps of training have their number, in the seed of samples


@dataclass(frozen=True)
class Explore:
    """A step samples with the weights of that moment and learns from it at once; see `trainer.Recipe`.

    other: a model that each sampled token is measured by; kl: the name of that measure, the mean of own less other log
    probability. coefficient: what it counts for, 0: nothing. rewards: whether there are any; by_deviation: see
    `group_centred`. All is divided by the number of tokens sampled, so that a step's size does not follow their number.
    """

    rows: Sequence[Row]
    rollouts: Rollouts
    other: tinker.SamplingClient
    batch_size: int
    seed: int
    shown: Shown
    kl: str
    coefficient: float
    rewards: bool = True
    by_deviation: bool = False
    loss: Literal["importance_sampling", "ppo"] = "importance_sampling"
    held_out_rows: Sequence[Row] = ()
    ahead: ClassVar[int] = 0

    async def prepare(self, trainer: Trainer) -> None:
        """There is nothing to know before the first step."""

    async def submit(self, client: tinker.TrainingClient, step: int, params: tinker.AdamParams) -> Values:
        """Sample on the rows of the step's number, and learn."""
        picked = batch_of(step, size=self.batch_size, rows=len(self.rows), seed=self.seed)
        groups, turns, gaps = await self._sample(client, [self.rows[i] for i in picked], step)
        earned = [
            advantage
            for group in groups
            for advantage in group_centred([one.reward for one in group], by_deviation=self.by_deviation)
        ]
        tokens = sum(len(turn.answer) for turn in turns)
        near = iter(nearness(gaps, self.coefficient))
        data = [
            turn.datum((advantage + next(near)) / tokens)
            for advantage, episode in zip(earned, (one for group in groups for one in group), strict=True)
            for turn in episode.turns
        ]
        forward, update = client.forward_backward(data, self.loss), client.optim_step(params)
        loss = (await forward).metrics["loss:sum"]
        varied = float(np.mean([len({one.reward for one in group}) > 1 for group in groups]))
        return {
            **self._measured(groups, turns, gaps),
            **({"varied_groups": varied} if self.rewards else {}),
            "answer_tokens": tokens / len(turns),
            "loss": loss,
            "grad_norm": await grad_norm(update),
        }

    async def held_out(self, client: tinker.TrainingClient) -> Values:
        """Reward and divergence on the held-out rows, of samples that have the same seeds each time."""
        if not self.held_out_rows:
            return {}
        found = self._measured(*await self._sample(client, self.held_out_rows, _HELD_OUT))
        return {f"held_out_{name}": value for name, value in found.items() if name in ("reward", self.kl)}

    async def _sample(
        self, client: tinker.TrainingClient, rows: Sequence[Row], step: int
    ) -> tuple[list[list[Episode]], list[Turn], list[Floats]]:
        """Groups; all their turns in order; and of each turn own less other log probabilities [N]."""
        sampler = await client.save_weights_and_get_sampling_client()
        groups = await self.rollouts.groups(sampler, rows, [self.seed, step])
        turns = [turn for group in groups for episode in group for turn in episode.turns]
        others = await asyncio.gather(*(turn.logprobs_by(self.other) for turn in turns))
        return groups, turns, [turn.logprobs - other for turn, other in zip(turns, others, strict=True)]

    def _measured(self, groups: list[list[Episode]], turns: list[Turn], gaps: list[Floats]) -> dict[str, float]:
        rewards = [episode.reward for group in groups for episode in group]
        return {
            **({"reward": float(np.mean(rewards))} if self.rewards else {}),
            self.kl: float(np.concatenate(gaps).mean()),
            "entropy": float(-np.concatenate([turn.logprobs for turn in turns]).mean()),
        }
