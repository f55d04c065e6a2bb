"""The pipeline `rl`: reinforcement learning on groups of answers to the same prompt, as in GRPO."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from prefect import flow

from tinkerflow.flows.pipelines.fine_tuning import TrainingResult, cancellable, train
from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.tasks.pipelines.environments import EnvironmentMaker, environment_maker
from tinkerflow.tasks.pipelines.parameters import RlParameters, SamplingParameters
from tinkerflow.tasks.pipelines.preparation import PreparedRun, prepare
from tinkerflow.tasks.pipelines.rollouts import Episode, Rollouts, Trajectory
from tinkerflow.tasks.pipelines.rows import Row
from tinkerflow.tasks.pipelines.trainer import Trainer, Values, grad_norm

if TYPE_CHECKING:
    import tinker

Floats = npt.NDArray[np.float64]
_HELD_OUT = 2**32 - 1  # in the seeds of held-out samples, instead of the number of a training step


def group_centred(rewards_G: Sequence[float], *, by_deviation: bool = False) -> Floats:
    """Rewards [G] of one group minus their mean.

    by_deviation: divided by their standard deviation, as in GRPO (Shao et al., 2024, section 4.1.2). Without it, as
    Liu et al. (2025, "Dr. GRPO") recommend, groups in which all answers but one are right or wrong do not weigh more.
    """
    centred = np.asarray(rewards_G, np.float64) - np.mean(rewards_G)
    return centred / (centred.std() + 1e-6) if by_deviation else centred


def kl_advantages(gaps: Sequence[Floats], coefficient: float) -> list[Floats]:
    """Advantages of sampled tokens for staying near another model, shaped like `gaps`: coefficient * (mean gap - gap).

    gaps: for each sequence [N], the model's own log probabilities minus those of the other model. Their mean estimates
    the reverse Kullback-Leibler divergence. With that mean as the baseline, they are the per-token reward of on-policy
    distillation (Agarwal et al., 2023, "GKD"; Thinking Machines, 2025, "On-Policy Distillation"), and the penalty of RL
    for leaving the base model.
    """
    mean = np.concatenate(gaps).mean()
    return [coefficient * (mean - gap_N) for gap_N in gaps]


@dataclass(frozen=True)
class Sampled:
    """Conversations of one step. trajectories: of each episode, in the order of groups and their episodes. gaps: for
    each trajectory [N], see `kl_advantages`.
    """

    groups: Sequence[Sequence[Episode]]
    trajectories: Sequence[Sequence[Trajectory]]
    gaps: Sequence[Floats]

    @property
    def episodes(self) -> list[Episode]:
        """All episodes, in the order of groups."""
        return [episode for group in self.groups for episode in group]


@dataclass(frozen=True)
class RlRecipe:
    """Learn from the model's own samples: by rewards, by another model's log probabilities, or both.

    A step samples with the current weights and immediately learns from the samples; see `trainer.Recipe`. The loss is
    divided by the number of sampled tokens, so the size of a step does not depend on their number.

    rows: the prompts. rollouts: how conversations go. other: the model that every sampled token is compared with. kl:
    the name of the metric that compares the two models, the mean of the model's own minus the other's log probability.
    coefficient: the weight of this comparison in the advantages, 0: none. rewards: whether answers have rewards.
    by_deviation: see `group_centred`. loss: the policy's loss. held_out_rows: prompts that are measured after each
    segment.
    """

    run: PreparedRun
    rows: Sequence[Row]
    rollouts: Rollouts
    other: tinker.SamplingClient
    kl: str
    coefficient: float
    rewards: bool = True
    by_deviation: bool = False
    loss: Literal["importance_sampling", "ppo"] = "importance_sampling"
    held_out_rows: Sequence[Row] = ()
    ahead: ClassVar[int] = 0

    async def prepare(self, trainer: Trainer) -> None:
        """Do nothing: the first step needs no measurement."""

    async def submit(self, client: tinker.TrainingClient, step: int, params: tinker.AdamParams) -> Values:
        """Sample answers to the prompts of step `step`, and learn from them."""
        picked = [self.rows[i] for i in self.run.batch(step, len(self.rows))]
        sampled = await self._sample(client, picked, step)
        advantages = [
            advantage
            for group in sampled.groups
            for advantage in group_centred([episode.reward for episode in group], by_deviation=self.by_deviation)
        ]
        tokens = sum(map(len, sampled.gaps))
        near = iter(kl_advantages(sampled.gaps, self.coefficient))
        data = [
            trajectory.datum((advantage + next(near)) / tokens)
            for advantage, trajectories in zip(advantages, sampled.trajectories, strict=True)
            for trajectory in trajectories
        ]
        forward, update = client.forward_backward(data, self.loss), client.optim_step(params)
        loss = (await forward).metrics["loss:sum"]
        varied = float(np.mean([len({episode.reward for episode in group}) > 1 for group in sampled.groups]))
        turns = sum(len(episode.turns) for episode in sampled.episodes)
        return {
            **self._measure(sampled),
            **({"varied_groups": varied} if self.rewards else {}),
            **({"broken_turns": len(data) - len(sampled.episodes)} if turns > len(sampled.episodes) else {}),
            "answer_tokens": tokens / turns,
            "loss": loss,
            "grad_norm": await grad_norm(update),
        }

    async def held_out(self, client: tinker.TrainingClient) -> Values:
        """Measure reward and divergence on the held-out prompts, with the same seeds each time."""
        if not self.held_out_rows:
            return {}
        measured = self._measure(await self._sample(client, self.held_out_rows, _HELD_OUT))
        return {f"held_out_{name}": value for name, value in measured.items() if name in ("reward", self.kl)}

    async def _sample(self, client: tinker.TrainingClient, rows: Sequence[Row], step: int) -> Sampled:
        sampler = await client.save_weights_and_get_sampling_client()
        groups = await self.rollouts.groups(sampler, rows, [self.run.parameters.model.seed, step])
        self.rollouts.refuse_failures(len(self.rows))
        trajectories = [episode.trajectories() for group in groups for episode in group]
        each = [trajectory for few in trajectories for trajectory in few]
        others = await asyncio.gather(*(trajectory.logprobs_by(self.other) for trajectory in each))
        gaps = [trajectory.logprobs - other for trajectory, other in zip(each, others, strict=True)]
        return Sampled(groups, trajectories, gaps)

    def _measure(self, sampled: Sampled) -> dict[str, float]:
        logprobs = [trajectory.logprobs for few in sampled.trajectories for trajectory in few]
        return {
            **({"reward": float(np.mean([episode.reward for episode in sampled.episodes]))} if self.rewards else {}),
            self.kl: float(np.concatenate(sampled.gaps).mean()),
            "entropy": float(-np.concatenate(logprobs).mean()),
        }


def rollouts_of(
    run: PreparedRun, parameters: SamplingParameters, make: EnvironmentMaker, max_turns: int = 1
) -> Rollouts:
    """The conversations of a run with the environments that `make` makes."""
    return Rollouts(
        run.renderer,
        make,
        parameters.group_size,
        parameters.answer_tokens,
        max_turns,
        max_context=run.model.max_context,
        max_bad_fraction=parameters.data.max_bad_fraction,
    )


@flow(name="rl", flow_run_name="rl {parameters.name}")
@cancellable
async def rl(parameters: RlParameters) -> TrainingResult:
    """Train like `sft`, on prompts and a reward or an environment for the answers."""
    make = environment_maker(parameters.reward, parameters.environment)
    async with prepare(parameters) as run:
        key, rows = run.prompts("data")
        recipe = RlRecipe(
            run,
            rows,
            rollouts_of(run, parameters, make, parameters.max_turns),
            run.base,
            kl="kl_to_base",
            coefficient=parameters.kl_coefficient,
            by_deviation=parameters.by_deviation,
            loss=parameters.loss,
            held_out_rows=run.prompts("held_out")[1],
        )
        return await train(run, key, recipe)


PIPELINE = Pipeline(rl, RlParameters)
