"""The pipeline `rl`: reinforcement learning on groups of answers to the same prompt, as in GRPO."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
from prefect import flow

from tinkerflow.backend.catalog.rollouts import StepRollouts
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.flows.pipelines.fine_tuning import TrainingResult, cancellable, train
from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.tasks.pipelines.adapters import environment_maker
from tinkerflow.tasks.pipelines.advantages import ESTIMATORS, Floats, kl_advantages, overlong_penalty
from tinkerflow.tasks.pipelines.artifacts import begin_phase, log_line
from tinkerflow.tasks.pipelines.control import before_stop
from tinkerflow.tasks.pipelines.curriculum import Curriculum
from tinkerflow.tasks.pipelines.parameters import PolicyLoss, RlParameters
from tinkerflow.tasks.pipelines.preparation import PreparedRun, prepare
from tinkerflow.tasks.pipelines.rollout_record import dropped_of, group_of, record_rollouts
from tinkerflow.tasks.pipelines.rollouts import HELD_OUT, Episode, Lost, Rollouts, Trajectory, is_varied
from tinkerflow.tasks.pipelines.rows import Row
from tinkerflow.tasks.pipelines.trainer import Trainer, Values, grad_norm
from tinkerflow.tasks.pipelines.versions import WeightVersions

if TYPE_CHECKING:
    import tinker

_FLAT_STEPS = 5  # steps with advantages of 0, after which the run warns
_ROUNDING = 1e-9  # advantages are rounded to this unit
_RESAMPLED = 2**31  # plus the attempt's number, replaces the row's number in seeds of other rows


@dataclass(frozen=True)
class Sampled:
    """Conversations of one step.

    trajectories: of each episode, in the order of groups and their episodes. gaps: for each compared trajectory [N],
    see `kl_advantages`. first: the groups before some were replaced. lost: conversations that are in no group.
    """

    groups: Sequence[Sequence[Episode]]
    trajectories: Sequence[Sequence[Trajectory]]
    gaps: Sequence[Floats]
    first: Sequence[Sequence[Episode]]
    lost: Sequence[Lost]

    @property
    def episodes(self) -> list[Episode]:
        """All episodes, in the order of groups."""
        return [episode for group in self.groups for episode in group]


@dataclass
class RlRecipe:
    """Learn from the model's own samples: by rewards, by another model's log probabilities, or both.

    A step samples, and learns from its samples; see `trainer.Recipe`. It samples from the current weights, or from
    older ones if sampling runs ahead (`versions`). The loss is divided by the number of sampled tokens, so the size of
    a step does not depend on this number.

    rows: the prompts. rollouts: conducts conversations. other: the model that every sampled token is compared with;
    None: the weights that drew the token. other_prompt: the tokens of a group's prompt for `other`; None: the same.
    kl: the name of the metric that compares the two models, the mean of the model's own minus the other's log
    probability. coefficient: the weight of this comparison in the advantages; 0: one conversation of each group is
    compared, for the metric only. rewards: whether answers have rewards. advantage: a name in `ESTIMATORS`.
    overlong_tokens: see `overlong_penalty`. resample: how many times groups with equal rewards are replaced by groups
    of other rows. curriculum: the rows that a step may pick; None: all. loss, loss_config, trust_region: the policy's
    loss. held_out_rows: prompts that are measured after each segment. versions: the weights that steps sample from.
    recorded: whether rollouts are written to the work folder, for people.
    """

    run: PreparedRun
    rows: Sequence[Row]
    rollouts: Rollouts
    other: tinker.SamplingClient | None
    kl: str
    coefficient: float
    other_prompt: Callable[[Episode], Sequence[int]] | None = None
    rewards: bool = True
    advantage: str = "group_mean"
    overlong_tokens: int = 0
    resample: int = 0
    curriculum: Curriculum | None = None
    loss: PolicyLoss = "importance_sampling"
    loss_config: Mapping[str, float] = field(default_factory=dict)
    trust_region: float = 0.0
    held_out_rows: Sequence[Row] = ()
    versions: WeightVersions = field(default_factory=lambda: WeightVersions(0))
    recorded: bool = False
    flat_steps: int = field(default=0, init=False)

    @property
    def ahead(self) -> int:
        """How many steps may sample before the preceding step is trained."""
        return self.versions.lag

    @cached_property
    def held_out_rollouts(self) -> Rollouts:
        """Conducts the conversations of held-out rows. Their failures count apart from those of training rows."""
        source = self.run.parameters.held_out
        assert source is not None, "there are held-out rows"
        most = source.max_bad_fraction
        return replace(self.rollouts, failures={}, max_bad_fraction=most, parameter=source.parameter)

    async def prepare(self, trainer: Trainer) -> None:
        """Do nothing: the first step needs no measurement."""

    def begin(self, step: int) -> None:
        """Never sample from weights before `step`."""
        self.versions.begin(step)

    async def submit(self, client: tinker.TrainingClient, step: int, params: tinker.AdamParams) -> Values:
        """Sample answers to the prompts of step `step`, and learn from them."""
        pool = self.rows if self.curriculum is None else self.curriculum.pool(step)
        picked = [pool[i] for i in self.run.batch(step, len(pool))]
        others = pool if self.resample else ()
        sampler = await self.versions.sampler_for(client, step)
        sampled = await before_stop(lambda: self._sample(sampler, self.rollouts, picked, step, others))
        self.rollouts.refuse_failures(len(self.rows))
        staleness = step - self.versions.version_for(step)
        penalties = [np.array([self._penalty(episode) for episode in group]) for group in sampled.groups]
        rewards = [
            np.array([episode.reward for episode in group], np.float64) - penalty_G
            for group, penalty_G in zip(sampled.groups, penalties, strict=True)
        ]
        of_groups = ESTIMATORS[self.advantage](rewards)
        advantages = np.concatenate(of_groups)
        tokens = sum(len(trajectory.logprobs) for few in sampled.trajectories for trajectory in few)
        # A loss that is not proportional to the advantages is divided by its weights.
        scale, weight = (1, 1 / tokens) if "advantages" not in LOSSES[self.loss].masks else (tokens, None)
        near = iter(kl_advantages(sampled.gaps, self.coefficient)) if self.coefficient else repeat(np.zeros(1))
        data = [
            trajectory.datum((advantage + next(near)) / scale, weight, self.trust_region)
            for advantage, trajectories in zip(advantages, sampled.trajectories, strict=True)
            for trajectory in trajectories
        ]
        config = dict(self.loss_config) or None
        await self.versions.ready_to_train(client, step)
        forward, update = client.forward_backward(data, self.loss, config), client.optim_step(params)
        self.versions.trained(client, step)
        recording = asyncio.to_thread(self._record, client, step, staleness, sampled, of_groups)
        loss = (await asyncio.gather(forward, recording))[0].metrics["loss:sum"]
        turns = sum(len(episode.turns) for episode in sampled.episodes)
        if self.rewards and not self.coefficient:
            self._warn_of_equal_rewards(advantages)
        return {
            **self._measure(sampled),
            **(
                {"varied_groups": float(np.mean([is_varied(group) for group in sampled.first]))} if self.rewards else {}
            ),
            **({"overlong_penalty": float(np.concatenate(penalties).mean())} if self.overlong_tokens else {}),
            **({"broken_turns": len(data) - len(sampled.episodes)} if turns > len(sampled.episodes) else {}),
            **({"staleness": staleness} if self.ahead else {}),
            **({"curriculum_rows": len(pool)} if self.curriculum else {}),
            **self._count_lost(sampled, len(picked)),
            "answer_tokens": tokens / turns,
            "loss": loss,
            "grad_norm": await grad_norm(update),
        }

    async def held_out(self, client: tinker.TrainingClient) -> Values:
        """Measure reward and divergence on the held-out prompts, with the same seeds each time."""
        if not self.held_out_rows:
            return {}
        sampler = await client.save_weights_and_get_sampling_client()
        measured = self._measure(await self._sample(sampler, self.held_out_rollouts, self.held_out_rows, HELD_OUT))
        self.held_out_rollouts.refuse_failures(len(self.held_out_rows))
        return {f"held_out_{name}": value for name, value in measured.items() if name in ("reward", self.kl)}

    def _record(
        self, client: tinker.TrainingClient, step: int, staleness: int, sampled: Sampled, advantages: Sequence[Floats]
    ) -> None:
        """Write the rollouts of a step for people."""
        if not self.recorded:
            return
        replaced = [group for group in sampled.first if not any(group is kept for kept in sampled.groups)]
        rollouts = StepRollouts(
            step=step + 1,
            staleness=staleness,
            groups=[
                group_of(group, advantages_G, rewarded=self.rewards)
                for group, advantages_G in zip(sampled.groups, advantages, strict=True)
            ],
            dropped=dropped_of(sampled.lost, replaced),
        )
        record_rollouts(self.run.work_url, str(client.model_id), rollouts)

    def _warn_of_equal_rewards(self, advantages: Floats) -> None:
        """Warn when _FLAT_STEPS steps in a row had nothing to learn."""
        self.flat_steps = 0 if np.any(np.abs(advantages) > _ROUNDING) else self.flat_steps + 1
        if self.flat_steps == _FLAT_STEPS:
            log_line(
                f"{_FLAT_STEPS} steps learned nothing, because all advantages are 0: answers to a prompt have equal "
                "rewards; change the reward, or use prompts that the model sometimes answers well",
                logging.WARNING,
            )

    def _count_lost(self, sampled: Sampled, rows: int) -> dict[str, float]:
        """How many conversations were repeated or left out. Counts of 0 are omitted."""
        kept = [episode for group in sampled.first for episode in group]
        counts = {
            "repeated_episodes": sum(episode.attempt > 0 for episode in kept),
            "left_out_episodes": rows * self.rollouts.group_size - len(kept),
        }
        return {name: count for name, count in counts.items() if count}

    def _penalty(self, episode: Episode) -> float:
        most = self.rollouts.max_tokens
        return sum(overlong_penalty(len(turn.answer), most, self.overlong_tokens) for turn in episode.turns)

    async def _sample(
        self,
        sampler: tinker.SamplingClient,
        rollouts: Rollouts,
        rows: Sequence[Row],
        step: int,
        others: Sequence[Row] = (),
    ) -> Sampled:
        """Hold conversations from `rows`. others: rows to replace those whose groups have equal rewards; empty: none.

        If all groups have equal rewards, the first ones are kept.
        """
        seed = [self.run.parameters.model.seed, step]
        lost: list[Lost] = []
        first = await rollouts.groups(sampler, rows, seed, lost)
        varied = [*filter(is_varied, first)]
        for attempt in range(self.resample if others else 0):
            if (missing := len(rows) - len(varied)) <= 0:
                break
            again = [*seed, _RESAMPLED + attempt]
            picked = np.random.default_rng(again).choice(len(others), missing)
            groups = await rollouts.groups(sampler, [others[i] for i in picked], again, lost, needed=False)
            varied += filter(is_varied, groups)
        groups = varied if others and varied else first
        episodes = [episode for group in groups for episode in group]
        trajectories = [episode.trajectories() for episode in episodes]
        other = self.other or sampler
        compared = [
            (trajectory, seen)
            for group in groups
            for seen in [None if self.other_prompt is None else self.other_prompt(group[0])]
            for episode in (group if self.coefficient else group[:1])  # one episode is enough for the metric
            for trajectory in episode.trajectories()
        ]
        by_other = await asyncio.gather(*(trajectory.logprobs_by(other, seen) for trajectory, seen in compared))
        gaps = [trajectory.logprobs - other for (trajectory, _), other in zip(compared, by_other, strict=True)]
        return Sampled(groups, trajectories, gaps, first, lost)

    def _measure(self, sampled: Sampled) -> dict[str, float]:
        rewards = [episode.reward for group in sampled.first for episode in group]
        logprobs = [trajectory.logprobs for few in sampled.trajectories for trajectory in few]
        return {
            **({"reward": float(np.mean(rewards))} if self.rewards else {}),
            self.kl: float(np.concatenate(sampled.gaps).mean()),
            "entropy": float(-np.concatenate(logprobs).mean()),
        }


@flow(name="rl", flow_run_name="rl {parameters.name}")
@cancellable
async def rl(parameters: RlParameters) -> TrainingResult:
    """Train like `sft`, on prompts and a reward or an environment for the answers."""
    make = environment_maker(parameters.reward, parameters.environment)
    async with prepare(parameters) as run:
        key, rows = run.prompts("data")
        training, easy_first = parameters.training, parameters.curriculum
        curriculum = Curriculum(rows, easy_first, training.steps, training.batch_size) if easy_first else None
        recipe = RlRecipe(
            run,
            rows,
            Rollouts.judged(
                parameters,
                make,
                run.renderer,
                max_tokens=parameters.answer_tokens,
                max_context=run.model.max_context,
                max_bad_fraction=parameters.data.max_bad_fraction,
            ),
            run.base,
            kl="kl_to_base",
            coefficient=parameters.kl_coefficient,
            advantage=parameters.advantage,
            overlong_tokens=parameters.overlong_tokens,
            resample=parameters.resample,
            curriculum=curriculum,
            loss=parameters.loss,
            loss_config=parameters.loss_config,
            trust_region=parameters.trust_region,
            held_out_rows=run.prompts("held_out")[1],
            versions=WeightVersions(parameters.max_staleness),
            recorded=True,
        )
        answers = training.batch_size * parameters.group_size
        begin_phase(f"each step samples {answers} answers")
        return await train(run, key, recipe)


PIPELINE = Pipeline(rl, RlParameters)
