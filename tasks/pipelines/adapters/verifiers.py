"""Environments of verifiers (https://github.com/PrimeIntellect-ai/verifiers), rewarded by their own rubrics.

    data: {url: "verifiers://gsm8k?num_train_examples=500"}
    environment: verifiers:gsm8k

NAME is a module with a function `load_environment`, and the URL contains its arguments. The rows are the environment's
dataset, or with `split: eval` its evaluation dataset. A conversation is a rollout of verifiers: whenever the rollout
requests a completion, it gets our model's answer. The reward comes at the end, with the rubric's metrics as its parts.

Tool calls are parsed by `called_tools`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, wraps
from threading import Lock
from types import SimpleNamespace
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall
from verifiers.utils.message_utils import normalize_messages

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.adapters import url_settings
from tinkerflow.tasks.pipelines.environments import (
    UNAVAILABLE,
    EnvironmentMaker,
    EnvironmentUnavailableError,
    Facts,
    Reply,
    called_tools,
    is_unavailable,
    refuse_code,
)
from tinkerflow.tasks.pipelines.rows import Json, Message

_SCHEME = "verifiers://"
_ENTRY = "verifiers"  # the field of a row that contains its example
_UNAVAILABLE = (*UNAVAILABLE, vf.InfraError)
_loading = Lock()
_unavailable: ContextVar[list[Exception]] = ContextVar("_unavailable")  # errors of one conversation's reward functions


def read_rows(url: str, split: str) -> Iterator[Json]:
    """The prompts and tools of the environment's dataset. UserError: the environment cannot be loaded."""
    if split not in ("", "train", "eval"):
        raise UserError(f"data.split {split!r}: must be train or eval for {url}")
    environment = _environment(url)
    dataset = environment.get_eval_dataset() if split == "eval" else environment.get_dataset()
    for example in dataset:
        info = example.get("info")
        info = json.loads(info) if isinstance(info, str) else info or {}
        tools = [_tool(tool) for tool in info.get("tool_defs") or environment.tool_defs or ()]
        yield {
            "prompt": [*map(_message, normalize_messages(example["prompt"]))],
            **({"tools": tools} if tools else {}),
            _ENTRY: {"url": url, "example": example},
        }


def environment_maker(name: str) -> EnvironmentMaker:
    """Conversations with the environment `name`. UserError: a row does not come from its data source."""
    refuse_code("environment", f"verifiers:{name}")

    def make(facts: Facts) -> _Rollout:
        entry = facts.get(_ENTRY, {"url": ""})
        if entry["url"].partition("?")[0] != _SCHEME + name:
            raise UserError(f"environment 'verifiers:{name}': data.url must be {_SCHEME}{name}?…")
        return _Rollout(entry["url"], entry["example"])

    return make


class _Model(Client):  # type: ignore[misc]
    """The model of one rollout. Its requests wait until the conversation answers them."""

    def __init__(self) -> None:
        super().__init__(None)
        self.requests: asyncio.Queue[tuple[list[Message], asyncio.Future[str]]] = asyncio.Queue()
        self._calls = 0

    async def get_native_response(
        self, prompt: list[Message], model: str, sampling_args: Json, tools: Any = None, **kwargs: Any
    ) -> Response:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.requests.put_nowait((prompt, answer))
        text, calls = await answer, []
        if tools:
            text, found = called_tools(text)
            for number, call in enumerate(found, self._calls):
                arguments = json.dumps(call["arguments"])
                calls.append(ToolCall(id=f"call_{number}", name=call["name"], arguments=arguments))
            self._calls += len(calls)
        message = ResponseMessage(
            content=text.strip() if calls else text,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return Response(id="", created=0, model=model, message=message)

    async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[list[Message], Json]:
        return [*map(_message, messages)], {}

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def from_native_response(self, response: Response) -> Response:
        return response

    async def raise_from_native_response(self, response: Response) -> None:
        """Do nothing: the response is ours."""

    def setup_client(self, config: Any) -> None:
        """Do nothing: there is no connection."""

    async def close(self) -> None:
        """Do nothing: there is no connection."""


class _Rollout:
    """A conversation that a rollout of verifiers leads in a separate task."""

    def __init__(self, url: str, example: Json) -> None:
        self._url, self._example, self._model = url, example, _Model()
        self._rollout: asyncio.Task[Reply] | None = None
        self._shown: list[Message] = []  # all messages of the last request
        self._answer: asyncio.Future[str] | None = None

    async def begin(self) -> Sequence[Message]:
        environment = await asyncio.to_thread(_environment, self._url)
        self._rollout = asyncio.create_task(_scored(environment, self._example, self._model))
        if await self._next() is not None:
            raise UserError(f"{self._url}: the environment ends before it asks the model")
        return self._shown

    async def answered(self, text: str) -> Reply:
        assert self._answer is not None, "the conversation has begun"
        self._answer.set_result(text)
        known = self._shown
        if (reply := await self._next()) is not None:
            return reply
        if self._shown[: len(known)] != known or len(self._shown) < len(known) + 2:
            raise UserError(
                f"{self._url}: the environment changes messages before the last answer: must not, for training"
            )
        return Reply(0.0, self._shown[len(known) + 1 :])

    async def stopped(self) -> Reply:
        """End the rollout as if the prompt were too long. Returns the reward of the conversation so far."""
        assert self._answer is not None and self._rollout is not None, "the conversation has begun"
        self._answer.set_exception(vf.OverlongPromptError("the conversation has max_turns answers, or is too long"))
        return await self._rollout

    async def close(self) -> None:
        """Cancel the rollout if it still runs, and wait until it has cleaned up. Raises the error of this cleanup."""
        if self._rollout is not None and self._rollout.cancel():
            await asyncio.wait({self._rollout})
            if not self._rollout.cancelled():
                self._rollout.result()

    async def _next(self) -> Reply | None:
        """Wait for the next request to the model, or for the rollout's end. Returns the reward at the end, or None."""
        assert self._rollout is not None, "the conversation has begun"
        request = asyncio.create_task(self._model.requests.get())
        try:
            await asyncio.wait({request, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                return await self._rollout
            self._shown, self._answer = request.result()
        finally:
            request.cancel()
        return None


async def _scored(environment: Any, example: Json, model: _Model) -> Reply:
    """Execute a rollout and score it. EnvironmentUnavailableError: infrastructure of the environment failed."""
    _unavailable.set(failures := [])
    try:
        state = await environment.rollout(example, model, "policy", {})
        if is_unavailable(state.get("error"), _UNAVAILABLE):
            raise EnvironmentUnavailableError(str(state["error"])) from state["error"]
        await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
    except Exception as error:
        if not is_unavailable(error, _UNAVAILABLE):
            raise
        failures.append(error)
    if failures:
        raise EnvironmentUnavailableError(f"{type(failures[0]).__name__}: {failures[0]}") from failures[0]
    return Reply(state["reward"], (), {name: float(value) for name, value in state["metrics"].items()})


def _environment(url: str) -> Any:
    """The environment of a URL, loaded once for all its conversations."""
    name, _, _ = url.removeprefix(_SCHEME).partition("?")
    refuse_code("data.url", f"verifiers:{name}")
    with _loading:
        return _loaded(url)


@lru_cache(8)
def _loaded(url: str) -> Any:
    name, _, query = url.removeprefix(_SCHEME).partition("?")
    # Environments set handlers of SIGINT and SIGTERM. The flow has its own, and only the main thread can set them.
    module: Any = sys.modules[vf.Environment.__module__]
    signals, module.signal = module.signal, SimpleNamespace(signal=lambda *_: None, SIGINT=None, SIGTERM=None)
    try:
        environment = vf.load_environment(name, **url_settings(query))
    except (Exception, SystemExit) as error:  # the environment's own code
        raise UserError(f"data.url {url!r}: the environment cannot be loaded: {error}") from error
    finally:
        module.signal = signals
    if environment.requires_group_rollouts:
        raise UserError(f"data.url {url!r}: its rubric rewards groups of answers, which is not supported")
    for rubric in _rubrics(environment):
        rubric.funcs = [*map(_watched, rubric.funcs)]
    return environment


def _rubrics(part: Any) -> Iterator[Any]:
    """All rubrics within an environment or a rubric."""
    for below in [*getattr(part, "envs", ()), *getattr(part, "rubrics", ()), getattr(part, "rubric", None)]:
        if below is not None:
            yield from _rubrics(below)
    if isinstance(part, vf.Rubric):
        yield part


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward function so that `_scored` gets infrastructure failures, which a rubric turns into rewards of 0."""

    @wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return await vf.utils.async_utils.maybe_await(function, *args, **kwargs)
        except Exception as error:
            if is_unavailable(error, _UNAVAILABLE):
                _unavailable.get().append(error)
            raise

    return call


def _message(message: Any) -> Message:
    """Convert a message of verifiers to ours. UserError: it has parts other than text."""
    content = message.content or ""
    if not isinstance(content, str):
        parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
        if any(part["type"] != "text" for part in parts):
            raise UserError(f"a message of the environment has the parts {[part['type'] for part in parts]}: only text")
        content = "".join(part["text"] for part in parts)
    shown = Message(role=message.role, content=content)
    if reasoning := getattr(message, "reasoning_content", None):
        shown["reasoning_content"] = reasoning
    if calls := getattr(message, "tool_calls", None):
        shown["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in calls
        ]
    if message.role == "tool":
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _tool(tool: Any) -> Json:
    """Convert a tool of verifiers to OpenAI's form."""
    defined = tool if isinstance(tool, Mapping) else tool.model_dump()
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: defined[name] for name in names if defined.get(name) is not None}}
