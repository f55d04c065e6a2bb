"""Errors of rewards and environments that do not depend on the model."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
from tests.tasks.pipelines.conftest import parse
from tests.tasks.pipelines.test_rollouts import Echo

from tinkerflow.tasks.pipelines import Renderer
from tinkerflow.tasks.pipelines.environments import Asked, EnvironmentUnavailableError, Facts, Reply, is_unavailable
from tinkerflow.tasks.pipelines.rollouts import Lost, Rollouts


def judged(facts: Facts, text: str) -> float:
    """A reward that asks a server, which is away."""
    with urllib.request.urlopen("http://127.0.0.1:1/judge", timeout=5) as answer:
        return float(answer.read())


async def test_lost_connection_of_another_client_interrupts_the_conversation(
    tokenizer: Any, renderer: Renderer
) -> None:
    lost = list[Lost]()
    rollouts = Rollouts(renderer, lambda facts: Asked(facts, judged), 2, 4, environment_retries=1)
    with pytest.raises(EnvironmentUnavailableError, match=r"the last one: .* Connection refused"):
        await rollouts.groups(Echo(tokenizer), [parse({"prompt": "a"})], [1], lost)
    assert [one.repeated for one in lost] == [True, True, False, False] and not rollouts.failures


def test_only_a_cause_that_is_shown_makes_an_error_unavailable() -> None:
    def raised(*, hidden: bool) -> Exception:
        try:
            try:
                raise ConnectionResetError
            except ConnectionResetError as error:
                raise ValueError("no score") from (None if hidden else error)
        except ValueError as error:
            return error

    assert is_unavailable(raised(hidden=False)) and not is_unavailable(raised(hidden=True))
    assert not is_unavailable(ValueError()) and not is_unavailable(None)


async def test_a_reply_without_messages_ends_the_conversation_even_if_it_is_a_generator(
    tokenizer: Any, renderer: Renderer
) -> None:
    class Once(Asked):
        async def answered(self, text: str) -> Reply:
            messages: Any = (message for message in ())
            return Reply(1.0, messages)

    rollouts = Rollouts(renderer, lambda facts: Once(facts, judged), 2, 4, max_turns=3)
    (group,) = await rollouts.groups(Echo(tokenizer), [parse({"prompt": "a"})], [1])
    assert [(len(episode.turns), episode.reward, episode.ended) for episode in group] == [(1, 1.0, True)] * 2
