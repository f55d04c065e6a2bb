"""Conversations of the trained model with environments, in groups that begin from the same row."""

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
    """One sampled answer: its prompt's tokens, its own tokens [N], and the log probabilities [N] of their sampling."""

    prompt: Sequence[int]
    answer: Sequence[int]
    logprobs: npt.NDArray[np.float64]

    async def logprobs_by(self, sampler: tinker.SamplingClient) -> npt.NDArray[np.float64]:
        """The log probabilities [N] of the answer's tokens under another model."""
        import tinker

        tokens = tinker.ModelInput.from_ints([*self.prompt, *self.answer])
        logprobs = await sampler.compute_logprobs(tokens, prompt_logprobs_last_n=len(self.answer))
        return np.array(logprobs[-len(self.answer) :], np.float64)

    def datum(self, advantages_N: npt.NDArray[np.float64]) -> tinker.Datum:
        """The input of `importance_sampling` and `ppo`; only the answer's tokens are learnt."""
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
    """One conversation: the messages so far, the model's answers, and the sum of the rewards."""

    environment: Environment
    messages: list[Message]
    turns: list[SampledTurn] = field(default_factory=list)
    reward: float = 0.0
    ended: bool = False


@dataclass(frozen=True)
class Rollouts:
    """How conversations go: `group_size` for each row, with at most `max_turns` answers of at most `max_tokens` tokens.

    Tokens are sampled at temperature 1 from the model's whole distribution, as the losses assume.
    """

    renderer: Renderer
    make: EnvironmentMaker
    group_size: int
    max_tokens: int
    max_turns: int = 1

    async def groups(
        self, sampler: tinker.SamplingClient, rows: Sequence[Row], seed: Sequence[int]
    ) -> list[list[Episode]]:
        """A group of conversations for each row, all concurrent. Equal seeds give equal samples of the same model."""
        return list(await asyncio.gather(*(self._group(sampler, row, [*seed, i]) for i, row in enumerate(rows))))

    async def _group(self, sampler: tinker.SamplingClient, row: Row, seed: Sequence[int]) -> list[Episode]:
        environments = [self.make(facts_of(row)) for _ in range(self.group_size)]
        episodes = [Episode(environment, list(await environment.begin())) for environment in environments]
        for turn in range(self.max_turns):
            going = [episode for episode in episodes if not episode.ended]
            answers = await self._answers(sampler, going, [*seed, turn])
            await asyncio.gather(*(self._take(episode, answer) for episode, answer in zip(going, answers, strict=True)))
        return episodes

    async def _answers(
        self, sampler: tinker.SamplingClient, going: Sequence[Episode], seed: Sequence[int]
    ) -> list[SampledTurn]:
        """One answer for each conversation; equal prompts share one request."""
        import tinker

        prompts = [tuple(self.renderer.prompt(episode.messages)) for episode in going]
        waiting = {}
        for number, prompt in enumerate(dict.fromkeys(prompts)):
            params = tinker.SamplingParams(
                max_tokens=self.max_tokens,
                temperature=1.0,
                stop=self.renderer.stop,
                seed=int(np.random.SeedSequence([*seed, number]).generate_state(1)[0]),
            )
            waiting[prompt] = sampler.sample(tinker.ModelInput.from_ints(list(prompt)), prompts.count(prompt), params)
        sequences = {prompt: iter((await future).sequences) for prompt, future in waiting.items()}
        return [
            SampledTurn(prompt, sampled.tokens, np.array(sampled.logprobs, np.float64))
            for prompt, sampled in ((prompt, next(sequences[prompt])) for prompt in prompts)
        ]

    async def _take(self, episode: Episode, turn: SampledTurn) -> None:
        text = self.renderer.text(turn.answer)
        reply = await episode.environment.answered(text)
        episode.turns.append(turn)
        episode.reward += checked_reward(reply.reward)
        episode.messages += [Message(role="assistant", content=text), *reply.messages]
        episode.ended = not reply.messages
