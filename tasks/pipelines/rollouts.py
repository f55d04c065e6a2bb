"""Conversations of the model that is trained with its environments, in groups of the same row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tinkerflow.tasks.pipelines.environments import Environment, EnvironmentMaker, checked_reward, facts_of
from tinkerflow.tasks.pipelines.render import Renderer
from tinkerflow.tasks.pipelines.rows import Message, Row

if TYPE_CHECKING:
    import tinker


@dataclass(frozen=True)
class SampledTurn:
    """One answer: the tokens that asked for it, its own [N], and their log probabilities [N] when they were sampled."""

    prompt: Sequence[int]
    answer: Sequence[int]
    logprobs: npt.NDArray[np.float64]

    async def logprobs_by(self, sampler: tinker.SamplingClient) -> npt.NDArray[np.float64]:
        """What another model gives the answer's tokens [N]."""
        import tinker

        tokens = tinker.ModelInput.from_ints([*self.prompt, *self.answer])
        found = await sampler.compute_logprobs(tokens, prompt_logprobs_last_n=len(self.answer))
        return np.array(found[-len(self.answer) :], np.float64)

    def datum(self, advantages_N: npt.NDArray[np.float64]) -> tinker.Datum:
        """For `importance_sampling` and `ppo`: the prompt is only read."""
        import tinker

        tokens = [*self.prompt, *self.answer]
        read = np.zeros(len(self.prompt) - 1)
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:], np.int64)),
                "logprobs": tinker.TensorData.from_numpy(np.concatenate([read, self.logprobs]).astype(np.float32)),
                "advantages": tinker.TensorData.from_numpy(np.concatenate([read, advantages_N]).astype(np.float32)),
            },
        )


@dataclass
class Episode:
    """One conversation: what the model answered in it, and the rewards together."""

    environment: Environment
    messages: list[Message]
    turns: list[SampledTurn] = field(default_factory=list)
    reward: float = 0.0
    ended: bool = False


@dataclass(frozen=True)
class Rollouts:
    """How conversations go: `group_size` for each row, `max_turns` answers of at most `max_tokens` each.

    Tokens are sampled at temperature 1 from the model's whole distribution, because that is what the losses assume.
    """

    renderer: Renderer
    make: EnvironmentMaker
    group_size: int
    max_tokens: int
    max_turns: int = 1

    async def groups(
        self, sampler: tinker.SamplingClient, rows: Sequence[Row], seed: Sequence[int]
    ) -> list[list[Episode]]:
        """A group for each row, all at once. Equal seeds give the same samples of the same model."""
        return list(await asyncio.gather(*(self._group(sampler, row, [*seed, i]) for i, row in enumerate(rows))))

    async def _group(self, sampler: tinker.SamplingClient, row: Row, seed: Sequence[int]) -> list[Episode]:
        environments = [self.make(facts_of(row)) for _ in range(self.group_size)]
        episodes = [Episode(one, list(await one.begin())) for one in environments]
        for turn in range(self.max_turns):
            going = [one for one in episodes if not one.ended]
            answers = await self._answers(sampler, going, [*seed, turn])
            await asyncio.gather(*(self._take(one, answer) for one, answer in zip(going, answers, strict=True)))
        return episodes

    async def _answers(
        self, sampler: tinker.SamplingClient, going: Sequence[Episode], seed: Sequence[int]
    ) -> list[SampledTurn]:
        """An answer for each; equal prompts are one request."""
        import tinker

        prompts = [tuple(self.renderer.prompt(one.messages)) for one in going]
        waiting = {}
        for number, prompt in enumerate(dict.fromkeys(prompts)):
            params = tinker.SamplingParams(
                max_tokens=self.max_tokens,
                temperature=1.0,
                stop=self.renderer.stop,
                seed=int(np.random.SeedSequence([*seed, number]).generate_state(1)[0]),
            )
            waiting[prompt] = sampler.sample(tinker.ModelInput.from_ints(list(prompt)), prompts.count(prompt), params)
        told = {prompt: iter((await future).sequences) for prompt, future in waiting.items()}
        return [
            SampledTurn(prompt, found.tokens, np.array(found.logprobs, np.float64))
            for prompt, found in ((prompt, next(told[prompt])) for prompt in prompts)
        ]

    async def _take(self, episode: Episode, turn: SampledTurn) -> None:
        text = self.renderer.text(turn.answer)
        reply = await episode.environment.answered(text)
        episode.turns.append(turn)
        episode.reward += checked_reward(reply.reward)
        episode.messages += [Message(role="assistant", content=text), *reply.messages]
        episode.ended = not reply.messages
