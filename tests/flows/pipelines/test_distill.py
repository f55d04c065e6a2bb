"""The teacher of `distill`, a model of the run's server or of another server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines import distill as distill_module
from tinkerflow.tasks.pipelines.environments import facts_of, unrewarded
from tinkerflow.tasks.pipelines.parameters import DistillParameters, TeacherParameters
from tinkerflow.tasks.pipelines.rollouts import Episode
from tinkerflow.tasks.pipelines.rows import Row


class Service:
    """Opens samplers that are named after the arguments."""

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
    """The closed connections. The vocabulary of `Renderer` is the tokenizer's name without its last letter."""
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
        ({"prompt": "{prompt} {answer}"}, "its base", []),
        ({"prompt": "{prompt} {answer}", "student": True}, None, []),
        ({"base_model": "large"}, "own1 {'base_model': 'large'}", []),
        ({"connection": "own2"}, "own2 {'base_model': 'first'}", ["own2"]),
        ({"connection": "own2", "weights": "tinker://a/b"}, "own2 {'model_path': 'tinker://a/b'}", ["own2"]),
    ],
)
async def test_a_teacher_is_a_model_of_a_server(
    given: dict[str, Any], teacher: str | None, connections: list[str], closed: list[str]
) -> None:
    async with distill_module._teacher(TeacherParameters(**given), RUN) as found:
        assert getattr(found, "name", found) == teacher and not closed
    assert closed == connections


async def test_teacher_with_a_different_tokenizer_is_refused(closed: list[str]) -> None:
    with pytest.raises(UserError, match="teacher 'other1': its tokenizer differs from the student's"):
        async with distill_module._teacher(TeacherParameters(connection="other1"), RUN):
            pass


class Shown:
    """Renders messages as their texts, with a token for each letter."""

    def prompt(self, messages: Any, tools: Any = ()) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]


QUESTION = Row(
    ({"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Which colour has grass?"}),
    ({"role": "assistant", "content": "Green"},),
    extra={"why": {"light": 550}},
)
HINT = "{prompt} {{It is {completion}, see {why}.}}"


def test_a_teacher_sees_more_of_the_row_than_the_student() -> None:
    hinted = distill_module.HintedPrompt(HINT, Shown(), 100)  # type: ignore[arg-type]
    hinted.check([QUESTION])
    tokens = hinted(Episode(environment=unrewarded(facts_of(QUESTION))))
    seen = "Be brief. Which colour has grass? {It is Green, see {'light': 550}.}"
    assert "".join(map(chr, tokens)) == seen
    assert QUESTION.prompt[1]["content"] == "Which colour has grass?", "the student's prompt is the same"


@pytest.mark.parametrize(
    ("row", "most", "error"),
    [
        (
            Row(QUESTION.prompt, QUESTION.chosen),
            100,
            "row 'Which colour has grass.': the row has no field 'why'",
        ),
        (QUESTION, 20, "tokens, must be at most 20, so that the answer also fits into the context"),
    ],
)
def test_row_unusable_for_the_teacher_ends_the_run_before_training(row: Row, most: int, error: str) -> None:
    with pytest.raises(UserError, match=error):
        distill_module.HintedPrompt(HINT, Shown(), most).check([row])  # type: ignore[arg-type]
    distill_module.HintedPrompt("", Shown(), most).check([row])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"prompt": "{prompt} {answer.text}"}, "{answer.text} must be the name of a row's field"),
        ({"prompt": "{prompt} {"}, "Single '{'"),
        ({"student": True}, "needs a prompt that gives the teacher more"),
        ({"student": True, "prompt": "{answer}", "weights": "tinker://a/b"}, "leave out connection, base_model"),
    ],
)
def test_invalid_teacher_is_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        TeacherParameters(**given)


def test_rows_may_have_fields_only_for_the_teacher_prompt() -> None:
    plain: dict[str, Any] = {"data": {"url": "rows.jsonl"}}
    assert DistillParameters(**plain).use().extra == {"answer"}
    assert DistillParameters(**plain, teacher={"prompt": HINT}).use().extra is None
