"""What answers are rewarded by: a function of the user's, or an environment that leads a conversation.

Both are named by import path, `package.module:name`, and run with the rights of the flow's process.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tinkerflow.backend.errors import UserError
from tinkerflow.tasks.pipelines.rows import Message, Row

Facts = Mapping[str, Any]  # of a row: its own fields, `prompt` as messages, `completion` as a text when it has one
Reward = Callable[[Facts, str], float | Awaitable[float]]


@dataclass(frozen=True)
class Reply:
    """What an answer brings: a reward, and the messages that follow it; none of them ends the conversation."""

    reward: float
    messages: Sequence[Message] = ()


class Environment(Protocol):
    """One conversation with the model. It is made of a row's facts, once for each conversation."""

    async def begin(self) -> Sequence[Message]:
        """What the model is asked first."""
        ...

    async def answered(self, text: str) -> Reply:
        """How it goes on after the model's answer. The rewards of a conversation are added up."""
        ...


EnvironmentMaker = Callable[[Facts], Environment]


@dataclass(frozen=True)
class Asked:
    """One question, one answer, a reward by a function."""

    facts: Facts
    reward: Reward

    async def begin(self) -> Sequence[Message]:
        """The row's prompt."""
        return tuple(self.facts["prompt"])

    async def answered(self, text: str) -> Reply:
        """The end."""
        found = self.reward(self.facts, text)
        return Reply(await found if inspect.isawaitable(found) else found)


def unrewarded(facts: Facts) -> Environment:
    """One question, one answer, and nothing for it."""
    return Asked(facts, lambda _facts, _text: 0.0)


def facts_of(row: Row) -> Facts:
    """A row as environments and rewards see it."""
    completion = {"completion": row.chosen[0]["content"]} if row.chosen else {}
    return {**row.extra, **completion, "prompt": list(row.prompt)}


def load(field: str, path: str) -> Callable[..., Any]:
    """What `package.module:name` names; UserError, which names `field`, when it cannot be had or not be called."""
    module, _, name = path.partition(":")
    try:
        found: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{field} {path!r}: cannot be imported ({error})") from error
    if not callable(found):
        raise UserError(f"{field} {path!r}: must be a function or a class")
    return found


def environment_maker(reward: str, environment: str) -> EnvironmentMaker:
    """Conversations by the environment of one import path, or of a single turn by the reward function of the other."""
    if environment:
        return load("environment", environment)
    function = load("reward", reward)
    return lambda facts: Asked(facts, function)


def checked_reward(value: object) -> float:
    """A reward as a number; UserError when it is none."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise UserError(f"reward {value!r}: must be a finite number")
