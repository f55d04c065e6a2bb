"""Environments of an OpenEnv server (https://github.com/meta-pytorch/OpenEnv), with a session for each conversation.

    data: {url: prompts.jsonl}      # rows like {"prompt": "Play Wordle.", "reset": {"seed": 1}}
    environment: openenv:http://127.0.0.1:8000

A conversation resets the environment with the row's `reset`, shows the observation after the row's prompt, and takes a
step with each answer until the environment is done. If an action has one text field, the answer is its value.
Otherwise the answer must be the action as a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.environments import (
    EnvironmentMaker,
    EnvironmentUnavailableError,
    Facts,
    Reply,
    refuse_code,
)
from tinkerflow.tasks.pipelines.rows import Json, Message

_REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")  # codes for actions that are invalid in the environment
_FULL = ("CAPACITY_REACHED", "SESSION_ERROR", "FACTORY_ERROR")  # codes for sessions that the server cannot begin


def read_rows(url: str, split: str) -> Iterator[Json]:
    """Raise UserError: a server contains no prompts."""
    raise UserError(f"data.url {url!r}: an OpenEnv server has no rows; write a file of prompts, with `reset` for each")


def environment_maker(name: str) -> EnvironmentMaker:
    """Conversations with the server at the URL `name`. UserError: `name` is not an HTTP URL."""
    refuse_code("environment", f"openenv:{name}")
    if urlsplit(name).scheme not in ("http", "https"):
        raise UserError(f"environment 'openenv:{name}': must be openenv:http://HOST:PORT or openenv:https://…")
    return lambda facts: _Played(name.rstrip("/"), facts)


class _Played:
    """A conversation in a session of the server, over a WebSocket."""

    def __init__(self, url: str, facts: Facts) -> None:
        self._url, self._facts = url, facts
        self._open = AsyncExitStack()
        self._text_field = ""  # an action's only field; "" if answers are JSON objects

    async def begin(self) -> Sequence[Message]:
        try:
            client = await self._open.enter_async_context(aiohttp.ClientSession(raise_for_status=True))
            async with client.get(f"{self._url}/schema") as response:
                self._text_field = _text_field((await response.json())["action"])
            self._socket = await self._open.enter_async_context(client.ws_connect(f"{self._url}/ws"))
        except aiohttp.ClientError as error:
            raise EnvironmentUnavailableError(f"{self._url}: {error}") from error
        first = _text((await self._request("reset", self._facts.get("reset", {})))["observation"])
        *before, last = self._facts["prompt"]
        if last["role"] == "user":  # many chat templates refuse two messages of a user
            return [*before, {**last, "content": f"{last['content']}\n\n{first}"}]
        return [*before, last, Message(role="user", content=first)]

    async def answered(self, text: str) -> Reply:
        try:
            action = {self._text_field: text} if self._text_field else json.loads(text)
            if not isinstance(action, dict):
                raise ValueError("it is not an object")
            seen = await self._request("step", action)
        except (ValueError, RecursionError) as error:
            return Reply(0.0, [Message(role="user", content=f"The action must be a JSON object: {error}")])
        reward = float(seen["reward"] or 0.0)
        return Reply(reward, () if seen["done"] else [Message(role="user", content=_text(seen["observation"]))])

    async def close(self) -> None:
        await self._open.aclose()

    async def _request(self, kind: str, data: Json) -> Json:
        """Send a request, and return the data of the answer. ValueError: the action is invalid in the environment."""
        try:
            await self._socket.send_json({"type": kind, "data": data})
            answer = await self._socket.receive_json()
        except (aiohttp.ClientError, TypeError) as error:  # TypeError: the connection was closed
            raise EnvironmentUnavailableError(f"{self._url}: the session was lost: {error}") from error
        found: Json = answer["data"]
        if answer["type"] != "error":
            return found
        why = f"{found.get('message')} {found.get('errors', '')}".strip()
        if found.get("code") in _REFUSED:
            raise ValueError(why)
        if found.get("code") in _FULL:
            raise EnvironmentUnavailableError(f"{self._url}: {why}")
        raise RuntimeError(f"{self._url}: {why}")


def _text_field(action: Json) -> str:
    """The name of the only (required) field of an action if its type is string, otherwise an empty text."""
    fields = {name: field for name, field in action.get("properties", {}).items() if name != "metadata"}
    needed = [name for name in fields if name in action.get("required", ())] or list(fields)
    return needed[0] if len(needed) == 1 and fields[needed[0]].get("type") == "string" else ""


def _text(observation: Json) -> str:
    """An observation for the model: the text of its only field, or else all fields as JSON."""
    shown: dict[str, Any] = {
        name: value for name, value in observation.items() if value is not None and name != "metadata"
    }
    only = [*shown.values()]
    return only[0] if len(only) == 1 and isinstance(only[0], str) else json.dumps(shown, ensure_ascii=False)
