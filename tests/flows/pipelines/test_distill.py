"""The teacher of `distill`: a model of the run's server or of another one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines import distill as distill_module
from tinkerflow.tasks.pipelines.parameters import TeacherParameters


class Service:
    """Opens samplers, named after what was asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def create_sampling_client(self, **asked: str) -> Any:
        return SimpleNamespace(name=f"{self.name} {asked}", get_tokenizer=lambda: self.name)


class Server:
    def __init__(self, name: str) -> None:
        self.service = Service(name)

    async def base_model(self, wanted: str) -> Any:
        return SimpleNamespace(name=wanted or "first")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The connections that were closed. `Renderer` has the tokenizer's name, up to its last letter, as vocabulary."""
    ended: list[str] = []

    @asynccontextmanager
    async def connect(block: str) -> AsyncIterator[Any]:
        yield Server(block)
        ended.append(block)

    monkeypatch.setattr(distill_module, "connect", connect)
    monkeypatch.setattr(distill_module, "Renderer", lambda tokenizer, form: SimpleNamespace(vocabulary=tokenizer[:-1]))
    return ended


RUN: Any = SimpleNamespace(base="its base", server=Server("own1"), renderer=SimpleNamespace(vocabulary="own"))


@pytest.mark.parametrize(
    ("given", "teacher", "connections"),
    [
        ({}, "its base", []),
        ({"base_model": "large"}, "own1 {'base_model': 'large'}", []),
        ({"connection": "own2"}, "own2 {'base_model': 'first'}", ["own2"]),
        ({"connection": "own2", "weights": "tinker://a/b"}, "own2 {'model_path': 'tinker://a/b'}", ["own2"]),
    ],
)
async def test_a_teacher_is_a_model_of_a_server(
    given: dict[str, str], teacher: str, connections: list[str], closed: list[str]
) -> None:
    async with distill_module._teacher(TeacherParameters(**given), RUN) as found:
        assert getattr(found, "name", found) == teacher and not closed
    assert closed == connections


async def test_a_teacher_with_other_tokens_is_refused(closed: list[str]) -> None:
    with pytest.raises(UserError, match="teacher 'other1': its tokenizer is not the student's"):
        async with distill_module._teacher(TeacherParameters(connection="other1"), RUN):
            pass
