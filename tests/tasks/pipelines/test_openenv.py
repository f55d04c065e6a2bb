"""Conversations with servers of the real openenv library."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from tests.tasks.pipelines.conftest import parse
from tests.tasks.pipelines.test_rollouts import Echo, Saying

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines import DataSource, Renderer
from tinkerflow.tasks.pipelines.adapters import environment_maker
from tinkerflow.tasks.pipelines.environments import MAY_IMPORT, EnvironmentUnavailableError
from tinkerflow.tasks.pipelines.rollouts import Episode, Lost, Rollouts
from tinkerflow.tasks.pipelines.sources import read_rows

with warnings.catch_warnings(action="ignore"):
    pytest.importorskip("openenv", reason="no openenv", exc_type=ImportError)
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

ROW = parse({"prompt": "Repeat.", "reset": {"seed": 7}})


class Text(Action):  # type: ignore[misc]
    message: str


class Move(Action):  # type: ignore[misc]
    x: int
    y: int


class Seen(Observation):  # type: ignore[misc]
    text: str | None = None
    x: int | None = None


class EchoEnvironment(Environment):  # type: ignore[misc]
    """Repeats each message, and is done after "1" or after three steps. The reward is the message's length."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **rest: Any) -> Any:
        self.steps = 0
        return Seen(text=f"seed {seed}")

    def step(self, action: Any, timeout_s: float | None = None, **rest: Any) -> Any:
        self.steps += 1
        if isinstance(action, Move):
            return Seen(text="moved", x=action.x, reward=action.x + action.y, done=action.x == 0)
        if action.message == "break":
            raise RuntimeError("a mistake of the environment")
        return Seen(text=action.message, reward=len(action.message), done=action.message == "1" or self.steps == 3)

    @property
    def state(self) -> Any:
        return State(step_count=self.steps)


class Served:
    """A server in a thread."""

    def __init__(self, action: type[Any], most: int) -> None:
        app = create_fastapi_app(EchoEnvironment, action, Seen, max_concurrent_envs=most)
        self.server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            self.thread.join(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self.server.force_exit = self.server.should_exit = True
        self.thread.join()


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts servers, and stops them after the test."""
    started = list[Served]()

    def serve(action: type[Any] = Text, most: int = 8) -> Served:
        started.append(Served(action, most))
        return started[-1]

    yield serve
    for each in started:
        each.stop()


async def talk(renderer: Renderer, tokenizer: Any, url: str, *texts: str, lost: list[Lost] | None = None) -> Episode:
    """A conversation in which the model answers with `texts`."""
    sampler, make = Saying(tokenizer, *texts), environment_maker("", f"openenv:{url}")
    rollouts = Rollouts(renderer, make, 1, 64, 9, environment_retries=0)
    ((episode,),) = await rollouts.groups(sampler, [ROW], [1], lost)  # type: ignore[arg-type]
    assert not sampler.texts and len(episode.trajectories()) == 1
    return episode


async def test_an_answer_is_a_step(renderer: Renderer, tokenizer: Any, serve: Any) -> None:
    episode = await talk(renderer, tokenizer, serve().url, "Hello", "1")
    assert [(message["role"], message["content"]) for message in episode.messages] == [
        ("user", "Repeat.\n\nseed 7"),
        ("assistant", "Hello"),
        ("user", "Hello"),
        ("assistant", "1"),
    ]
    assert (episode.reward, episode.ended) == (6.0, True)


async def test_each_conversation_of_a_group_has_a_session(renderer: Renderer, tokenizer: Any, serve: Any) -> None:
    make = environment_maker("", f"openenv:{serve().url}/")
    (group,) = await Rollouts(renderer, make, 3, 4, 9).groups(Echo(tokenizer), [ROW], [1])
    assert [(len(episode.turns), episode.reward) for episode in group] == [(3, 3.0), (1, 1.0), (3, 3.0)]


async def test_action_with_several_fields_is_json(renderer: Renderer, tokenizer: Any, serve: Any) -> None:
    episode = await talk(renderer, tokenizer, serve(Move).url, '{"x": 2, "y": 1}', "left", "[1]", '{"x": "a"}',
                         "[" * 2000, '{"x": 0, "y": 5}')  # fmt: skip
    assert episode.reward == 8.0
    moved, left, listed, wrong, deep = (message["content"] for message in episode.messages[2::2])
    assert deep.startswith("The action must be a JSON object: ")  # some versions of Python read it to its end
    assert moved == '{"text": "moved", "x": 2}' and listed.endswith("it is not an object")
    assert left.startswith("The action must be a JSON object: ") and "x" in wrong and "y" in wrong


async def test_environment_error_fails_its_row(renderer: Renderer, tokenizer: Any, serve: Any) -> None:
    with pytest.raises(UserError, match="a mistake of the environment"):
        await talk(renderer, tokenizer, serve().url, "break")


async def test_unavailable_or_full_server_counts_as_lost(renderer: Renderer, tokenizer: Any, serve: Any) -> None:
    lost, served = list[Lost](), serve(most=1)
    make = environment_maker("", f"openenv:{served.url}")
    first = make({"prompt": ROW.prompt})
    await first.begin()
    with pytest.raises(EnvironmentUnavailableError):
        await talk(renderer, tokenizer, served.url, lost=lost)
    assert "capacity" in lost[-1].reason.lower()
    served.stop()
    with pytest.raises(EnvironmentUnavailableError, match="the session was lost"):
        await first.answered("Hello")
    await first.close()  # type: ignore[attr-defined]
    with pytest.raises(EnvironmentUnavailableError):
        await talk(renderer, tokenizer, served.url, lost=lost)
    assert served.url in lost[-1].reason


def test_invalid_uses_of_openenv_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"environment 'openenv:echo': must be openenv:http://HOST:PORT"):
        environment_maker("", "openenv:echo")
    with pytest.raises(UserError, match=r"data\.url 'openenv://a': .* has no rows"):
        list(read_rows(DataSource(url="openenv://a")))
    monkeypatch.setenv(MAY_IMPORT, "openenv:http://a:1")
    environment_maker("", "openenv:http://a:1")
    with pytest.raises(UserError, match=r"environment 'openenv:http://b:1': .* add the path to `allowed_code`"):
        environment_maker("", "openenv:http://b:1")
