"""Rewards of answers: from a user's function, or from an environment that leads a conversation.

Both are given as an import path, `package.module:name`, and run with the rights of the flow's process.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat

import httpx

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.tasks.pipelines.row_errors import shorten, show
from tinkerflow.tasks.pipelines.rows import Json, Message, Row
from tinkerflow.tasks.pipelines.user_code import call_in_loop, call_in_thread, import_named

MAY_IMPORT = "PIPELINES_MAY_IMPORT"  # import paths, separated by spaces
REWARDS = "tinkerflow.tasks.pipelines.rewards"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
# A row's fields: `prompt` as messages; if the row has an answer, its text as `completion` and all its messages as
# `continuation`; `tools`, if any; and all other fields unchanged.
Facts = Mapping[str, Any]
Reward = Callable[[Facts, str], float | Awaitable[float]]


@dataclass(frozen=True)
class Reply:
    """The environment's reply to an answer: a reward, and the next messages. Without messages, the conversation ends.

    parts: the parts of the reward by name, for people who look at rollouts. Training ignores them.
    """

    reward: float
    messages: Sequence[Message] = ()
    parts: Mapping[str, float] = field(default_factory=dict)


class EnvironmentUnavailableError(ServerError):
    """Raised by an environment whose infrastructure failed: its sandbox died, or its server cannot be reached.

    The failure does not depend on the model. The conversation is begun again, and is left out if all attempts fail.
    """


# Errors that do not depend on the model. asyncio.timeout also raises the first.
UNAVAILABLE = (TimeoutError, EnvironmentUnavailableError, ConnectionError, httpx.TransportError)


def is_unavailable(error: BaseException | None, kinds: tuple[type[BaseException], ...] = UNAVAILABLE) -> bool:
    """Whether an error, or an error that caused it, is one of `kinds`. Clients of servers raise their own errors."""
    if error is None or isinstance(error, kinds):
        return error is not None
    return is_unavailable(error.__cause__ or (None if error.__suppress_context__ else error.__context__), kinds)


class Environment(Protocol):
    """One conversation with the model. Each conversation gets a new object, made from a row's `Facts`.

    `Facts` is a mapping: `prompt` is a list of messages, even if the row contains a text. If the row has an answer,
    `completion` is its text and `continuation` its messages. `tools` are the row's tools. All other fields are the
    row's, unchanged.

    Two methods are optional. `async def stopped(self) -> Reply` returns the last reward of a conversation that the
    environment did not end, because it has max_turns answers or no space for another answer.
    `async def close(self)` is awaited when the conversation is over, however it ended.
    """

    async def begin(self) -> Sequence[Message]:
        """The first messages to the model."""

    async def answered(self, text: str) -> Reply:
        """The reply to the model's answer `text`. The rewards of a conversation are added up."""


EnvironmentMaker = Callable[[Facts], Environment]


@dataclass(frozen=True)
class Asked:
    """A conversation of one question and one answer, which a function rewards.

    An `async def` function is called in the event loop, any other function in a thread.
    """

    facts: Facts
    reward: Reward

    @property
    def plain(self) -> bool:
        """Whether the function is neither an `async def` nor an object with an `async def __call__`."""
        return not any(map(inspect.iscoroutinefunction, (self.reward, type(self.reward).__call__)))

    async def begin(self) -> Sequence[Message]:
        """The row's prompt."""
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
    """The facts of a row, for environments and rewards. They are a copy, so code that changes them changes no row."""
    answer = {"completion": row.chosen[0]["content"], "continuation": list(row.chosen)} if row.chosen else {}
    tools = {"tools": list(row.tools)} if row.tools else {}
    return deepcopy({**row.extra, **answer, **tools, "prompt": list(row.prompt)})


def load(field: str, path: str) -> Callable[..., Any]:
    """Import `package.module:name`. Our own rewards are never refused.

    UserError: raised by `import_named` or `refuse_code`, or the object is not callable.
    """
    if path.partition(":")[0] != REWARDS:
        refuse_code(field, path)
    loaded = import_named(field, path)
    if not callable(loaded):
        raise UserError(f"{field} {path!r}: must be a function or a class")
    return loaded


def check_methods(environment: object, name: str) -> None:
    """Raise UserError unless the methods of an environment, or of a class of environments, are `async def`.

    name: the environment's name, for the error.
    """
    for method in ("begin", "answered", "stopped", "close"):
        found = getattr(environment, method, None)
        if found is None and method in ("begin", "answered"):
            raise UserError(f"{name} has no method `async def {method}`")
        if inspect.isroutine(found) and not inspect.iscoroutinefunction(inspect.unwrap(found)):
            raise UserError(f"`{method}` of {name} must be `async def`")


def refuse_code(field: str, path: str) -> None:
    """Raise UserError if MAY_IMPORT is set (by `tinkerflow serve`) and does not contain `path`.

    field: the parameter, for the error. path: an import path, or PREFIX:NAME for an environment of a library that
    executes code or calls a server.
    """
    allowed = os.environ.get(MAY_IMPORT)
    if allowed is not None and path not in allowed.split():
        raise UserError(
            f"{field} {path!r}: `tinkerflow serve` imports only the rewards and environments that its file names; add "
            "the path to `allowed_code` in that file"
        )


def called_tools(text: str) -> tuple[str, list[Json]]:
    """Split an answer into its text and its tool calls, with `name` and `arguments`.

    Calls have the form of Hermes and Qwen: <tool_call>{"name": …, "arguments": …}</tool_call>. Other calls stay in the
    text, such as a call without a name, or with half of a surrogate pair, which no tokenizer accepts.
    """
    calls = []
    for found in [*_CALL.finditer(text)]:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            call = json.loads(found[1])
            json.dumps(call, ensure_ascii=False).encode()
            if isinstance(call["name"], str):
                calls.append({"name": call["name"], "arguments": call["arguments"]})
                text = text.replace(found[0], "")
    return text, calls


def checked_messages(value: object) -> list[Message]:
    """The messages of an environment. UserError: this is not a list, or a message lacks its `role` or `content`."""
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        messages = [*value]
        if all(isinstance(one, Mapping) and isinstance(one.get("role"), str) and "content" in one for one in messages):
            return messages
    rule = "must be a list of messages, each with `role` and `content`"
    raise UserError(f"its messages are {shorten(show(value))}: {rule}")


def checked_reward(value: object, what: str = "reward") -> float:
    """The reward as a number. what: the value's name for the error. UserError: the reward is not a finite number."""
    if isinstance(value, SupportsFloat):  # includes numbers of NumPy and PyTorch
        with suppress(TypeError, ValueError, OverflowError):
            if math.isfinite(number := float(value)):
                return number
    hint = "; does the function return a value?" if value is None else ""
    raise UserError(f"its {what} is {value!r}: must be a finite number{hint}")
