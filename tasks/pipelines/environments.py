"""How answers are rewarded: by a function of the user, or by an environment that leads a conversation.

Both are given by import path, `package.module:name`, and run with the rights of the flow's process.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.tasks.pipelines.rows import Json, Message, Row
from tinkerflow.tasks.pipelines.user_code import call_in_loop, call_in_thread, import_named

MAY_IMPORT = "PIPELINES_MAY_IMPORT"  # import paths, divided by spaces
REWARDS = "tinkerflow.tasks.pipelines.rewards"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
# A row's fields: `prompt` as messages; if the row has an answer, its text as `completion` and all its messages as
# `continuation`; `tools`, if any; and all others as they are.
Facts = Mapping[str, Any]
Reward = Callable[[Facts, str], float | Awaitable[float]]


@dataclass(frozen=True)
class Reply:
    """The environment's reply to an answer: a reward, and the next messages; no messages end the conversation.

    parts: of the reward, by name, for people who look at rollouts. They change nothing.
    """

    reward: float
    messages: Sequence[Message] = ()
    parts: Mapping[str, float] = field(default_factory=dict)


class EnvironmentUnavailableError(ServerError):
    """Raised by an environment whose infrastructure failed: its sandbox died, or its server cannot be reached.

    The conversation says nothing about the model. It is begun again, and is left out if that fails, too.
    """


# Errors that say nothing about the model; the first is of asyncio.timeout, too.
UNAVAILABLE = (TimeoutError, EnvironmentUnavailableError, ConnectionError, httpx.TransportError)


class Environment(Protocol):
    """One conversation with the model; a new object, made from a row's `Facts`, for each conversation.

    `Facts` is a mapping: `prompt` is a list of messages, also where the row has a text. If the row has an answer,
    `completion` is its text and `continuation` its messages. `tools` are those of the row. All other fields are as in
    the row.

    If it has a method `async def stopped(self) -> Reply`, this gives the last reward of a conversation that the
    environment did not end: it has max_turns answers, or no space for another one.
    If it has a method `async def close(self)`, this is awaited when the conversation is over, however it ended.
    """

    async def begin(self) -> Sequence[Message]:
        """The first messages to the model."""
        ...

    async def answered(self, text: str) -> Reply:
        """The reply to the model's answer `text`. The rewards of a conversation are added up."""
        ...


EnvironmentMaker = Callable[[Facts], Environment]


@dataclass(frozen=True)
class Asked:
    """A conversation of one question and one answer, which a function rewards.

    An `async def` is called in the event loop, any other function in a thread.
    """

    facts: Facts
    reward: Reward

    @property
    def plain(self) -> bool:
        """Whether the function is not an `async def`, nor an object that is called like one."""
        return not any(map(inspect.iscoroutinefunction, (self.reward, type(self.reward).__call__)))

    async def begin(self) -> Sequence[Message]:
        """Ask the row's prompt."""
        return tuple(self.facts["prompt"])

    async def answered(self, text: str) -> Reply:
        """Reward the answer and end the conversation."""
        call = call_in_thread if self.plain else call_in_loop
        reward = await call(self.reward, self.facts, text)
        return Reply(await reward if inspect.isawaitable(reward) else reward)


def unrewarded(facts: Facts) -> Environment:
    """A conversation of one question and one answer, with the reward 0."""

    async def nothing(_facts: Facts, _text: str) -> float:
        return 0.0

    return Asked(facts, nothing)


def facts_of(row: Row) -> Facts:
    """The facts of a row, for environments and rewards."""
    answer = {"completion": row.chosen[0]["content"], "continuation": list(row.chosen)} if row.chosen else {}
    tools = {"tools": list(row.tools)} if row.tools else {}
    return {**row.extra, **answer, **tools, "prompt": list(row.prompt)}


def load(field: str, path: str) -> Callable[..., Any]:
    """Import `package.module:name`. UserError, as `import_named` and `refuse_code`, or when it is not callable.

    Our own rewards are never refused.
    """
    if path.partition(":")[0] != REWARDS:
        refuse_code(field, path)
    loaded = import_named(field, path)
    if not callable(loaded):
        raise UserError(f"{field} {path!r}: must be a function or a class")
    return loaded


def check_methods(environment: object, name: str) -> None:
    """Raise UserError unless the methods of an environment, or of a class of environments, are `async def`.

    name: of the environment, for the error.
    """
    for method in ("begin", "answered", "stopped", "close"):
        found = getattr(environment, method, None)
        if found is None and method in ("begin", "answered"):
            raise UserError(f"{name} has no method `async def {method}`")
        if inspect.isroutine(found) and not inspect.iscoroutinefunction(inspect.unwrap(found)):
            raise UserError(f"`{method}` of {name} must be `async def`")


def refuse_code(field: str, path: str) -> None:
    """Raise UserError, which names `field`, where MAY_IMPORT is set (by `tinkerflow serve`) and does not have `path`.

    path: an import path, or PREFIX:NAME for an environment of a library that executes code or calls a server.
    """
    allowed = os.environ.get(MAY_IMPORT)
    if allowed is not None and path not in allowed.split():
        raise UserError(
            f"{field} {path!r}: `tinkerflow serve` imports only the rewards and environments that its file names; add "
            "the path to `allowed_code` in that file"
        )


def called_tools(text: str) -> tuple[str, list[Json]]:
    """An answer without its calls of tools, and the calls, with `name` and `arguments`.

    Their form is that of Hermes and Qwen: <tool_call>{"name": …, "arguments": …}</tool_call>. Others stay in the text.
    """
    calls = []
    for found in [*_CALL.finditer(text)]:
        with suppress(ValueError, KeyError, TypeError):
            call = json.loads(found[1])
            calls.append({"name": call["name"], "arguments": call["arguments"]})
            text = text.replace(found[0], "")
    return text, calls


def checked_reward(value: object, what: str = "reward") -> float:
    """The reward as a number; UserError when it is not a finite number. what: the value, as the error names it."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    hint = "; does the function return its value?" if value is None else ""
    raise UserError(f"its {what} is {value!r}: must be a finite number{hint}")
