"""Environments of the verifiers library, as rows and in conversations with one turn, several turns, and tools."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tests.logged import logged_by
from tests.tasks.pipelines.test_rollouts import Saying

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines import DataSource, Renderer, Row, rollouts
from tinkerflow.tasks.pipelines.adapters import environment_maker
from tinkerflow.tasks.pipelines.data import read_source
from tinkerflow.tasks.pipelines.environments import MAY_IMPORT, EnvironmentUnavailableError
from tinkerflow.tasks.pipelines.parameters import RlParameters
from tinkerflow.tasks.pipelines.rollouts import Episode, Lost, Rollouts
from tinkerflow.tasks.pipelines.sources import RawRow, read_rows

pytest.importorskip("verifiers", reason="no verifiers", exc_type=ImportError)

MODULE = '''
import verifiers as vf
from datasets import Dataset

CLEANED = []

def rows(questions):
    return Dataset.from_list([{"question": question, "answer": answer} for question, answer in questions.items()])

def right(completion, answer):
    return float(completion[-1].content == answer)

def short(completion):
    return -float(len(completion[-1].content))

class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["left"] = 3

    async def env_response(self, messages, state):
        state["left"] -= 1
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = [vf.types.UserMessage(content="Right.")]
            return []
        return [vf.types.UserMessage(content=f"Wrong, {state['left']} left.")]

    @vf.cleanup
    async def note(self, state):
        CLEANED.append(state["stop_condition"])

def tries(state):
    return 1.0 / len(state["trajectory"])

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b

def dead(completion):
    raise ConnectionError("the judge is away")

def wrong(completion):
    raise KeyError("a mistake of the reward")

def alike(completions):
    return [0.0] * len(completions)

class Rewriting(Guess):
    async def get_prompt_messages(self, state):
        return state["prompt"] if not state["trajectory"] else [vf.types.UserMessage(content="New")] * 3

class Lost(Guess):
    async def env_response(self, messages, state):
        raise vf.SandboxError("killed")

def load_environment(kind="single", reward="right", size=2):
    if kind == "gym":
        return vf.ReasoningGymEnv("gcd", num_train_examples=size, num_eval_examples=1)
    questions = {"Say 1": "1", "Say 2": "2"}
    data = {"dataset": rows(dict(list(questions.items())[:size])), "eval_dataset": rows({"Say 3": "3"})}
    rubric = vf.Rubric(funcs=[globals()[reward], short], weights=[1.0, 0.1])
    if kind == "single":
        return vf.SingleTurnEnv(**data, system_prompt="Be brief.", rubric=rubric)
    if kind == "tools":
        return vf.ToolEnv(**data, tools=[add], max_turns=3, rubric=rubric)
    rubric = vf.Rubric(funcs=[right, tries])
    return {"guess": Guess, "rewriting": Rewriting, "lost": Lost}[kind](**data, max_turns=5, rubric=rubric)
'''


@pytest.fixture(autouse=True, scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module `guessing_games`, which verifiers finds as guessing-games."""
    folder = tmp_path_factory.mktemp("environments")
    (folder / "guessing_games.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        yield


def rows_of(query: str = "", **changes: Any) -> list[Row]:
    source = {"url": f"verifiers://guessing-games?{query}", **changes}
    parameters = RlParameters.model_validate({"data": source, "environment": "verifiers:guessing-games"})
    return [row for _, row in read_source(parameters.data, parameters.use()).good]


async def talk(
    renderer: Renderer, tokenizer: Any, query: str, *texts: str, max_turns: int = 9, lost: list[Lost] | None = None
) -> tuple[Episode, Sequence[str]]:
    """The conversation about the first row with these answers, and its prompts."""
    sampler = Saying(tokenizer, *texts)
    make = environment_maker("", "verifiers:guessing-games")
    rollouts = Rollouts(renderer, make, 1, 64, max_turns, environment_retries=0)
    ((episode,),) = await rollouts.groups(sampler, rows_of(query)[:1], [1], lost)  # type: ignore[arg-type]
    assert not sampler.texts
    return episode, sampler.asked


def test_rows_are_the_dataset_with_the_system_prompt() -> None:
    first, second = rows_of()
    assert first.prompt == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 1"})
    assert (first.extra["verifiers"]["example"]["answer"], first.tools) == ("1", ())
    assert [row.prompt[1]["content"] for row in (second, *rows_of(split="eval"))] == ["Say 2", "Say 3"]
    assert len(rows_of("size=1")) == 1
    with pytest.raises(UserError, match=r"data\.split 'test': must be train or eval"):
        rows_of(split="test")


async def test_a_rubric_rewards_an_answer(renderer: Renderer, tokenizer: Any) -> None:
    episode, asked = await talk(renderer, tokenizer, "", "1")
    assert episode.reward == pytest.approx(0.9)
    assert episode.parts == {"right": 1.0, "short": -1.0, "num_turns": 1.0}
    assert len(episode.turns) == 1 and asked == [tokenizer.decode(renderer.prompt(rows_of()[0].prompt))]
    episode, _ = await talk(renderer, tokenizer, "", "234")
    assert episode.reward == pytest.approx(-0.3)


async def test_verifiers_environment_checks_answers(renderer: Renderer, tokenizer: Any) -> None:
    gym = pytest.importorskip("reasoning_gym", reason="no reasoning-gym", exc_type=ImportError)
    right = gym.create_dataset("gcd", size=3, seed=0)[0]["answer"]
    episode, _ = await talk(renderer, tokenizer, "kind=gym", f"<answer>{right}</answer>")
    assert (episode.reward, episode.parts["check_answer_reward_func"]) == (1.0, 1.0)
    episode, _ = await talk(renderer, tokenizer, "kind=gym", "<answer>none</answer>")
    assert episode.reward < 0.1


async def test_an_environment_leads_several_turns(renderer: Renderer, tokenizer: Any) -> None:
    episode, asked = await talk(renderer, tokenizer, "kind=guess", "5", "4", "1")
    assert (episode.reward, episode.parts["num_turns"]) == (0.0 + 1 / 3, 3.0)  # the last message is "Right."
    assert [message["content"] for message in episode.messages[1:]] == [
        *("5", "Wrong, 2 left.", "4", "Wrong, 1 left.", "1")
    ]
    assert [len(one.turns) for one in episode.trajectories()] == [3], "all turns are one sequence"
    assert asked[2].startswith(asked[1]) and sys.modules["guessing_games"].CLEANED[-1:] == ["has_final_env_response"]


async def test_truncated_conversation_has_the_reward_of_its_turns(renderer: Renderer, tokenizer: Any) -> None:
    episode, _ = await talk(renderer, tokenizer, "kind=guess", "5", "4", max_turns=2)
    assert (episode.reward, episode.ended) == (0.5, False)
    assert sys.modules["guessing_games"].CLEANED[-1] == "prompt_too_long"


async def test_tools_are_called(renderer: Renderer, tokenizer: Any) -> None:
    (row, _) = rows_of("kind=tools")
    assert row.tools[0]["function"]["name"] == "add" and "a" in row.tools[0]["function"]["parameters"]["properties"]
    call = json.dumps({"name": "add", "arguments": {"a": 2, "b": -1}})
    said = f"<tool_call>\n{call}\n</tool_call>"
    episode, asked = await talk(renderer, tokenizer, "kind=tools", f"So: {said}", "1")
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.messages[2] == {"role": "tool", "content": "1", "tool_call_id": "call_0"}
    assert (episode.parts["total_tool_calls"], episode.parts["add_calls"], episode.parts["right"]) == (1.0, 1.0, 1.0)
    assert "add" in asked[0] and [len(one.turns) for one in episode.trajectories()] == [2]
    episode, _ = await talk(renderer, tokenizer, "kind=tools", "<tool_call>\n{add}\n</tool_call>")
    assert episode.parts["total_tool_calls"] == 0.0 and episode.ended


@pytest.mark.parametrize("query", ["reward=dead", "kind=lost"])
async def test_lost_infrastructure_counts_as_lost_conversation(renderer: Renderer, tokenizer: Any, query: str) -> None:
    lost = list[Lost]()
    with pytest.raises(EnvironmentUnavailableError):
        await talk(renderer, tokenizer, query, "5", lost=lost)
    assert len(lost) == 1 and ("away" in lost[0].reason or "killed" in lost[0].reason)


async def test_failed_reward_is_zero_as_verifiers_defines(renderer: Renderer, tokenizer: Any) -> None:
    episode, _ = await talk(renderer, tokenizer, "reward=wrong", "1")
    assert episode.parts["wrong"] == 0.0


async def test_changed_messages_are_refused(
    renderer: Renderer, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match="changes messages before the last answer"):
        await talk(renderer, tokenizer, "kind=rewriting", "5")
    (error,) = [record.exc_info[1] for record in logged_by(caplog, rollouts) if record.exc_info]
    assert repr(error) == "KeyError('stop_condition')", "the cleanup of this conversation fails, because it has no end"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("verifiers://no-such-games", "Could not import 'no-such-games'"),
        ("verifiers://guessing-games?king=single", "unexpected keyword argument 'king'"),
        ("verifiers://guessing-games?reward=alike", "rewards groups of answers"),
    ],
)
def test_invalid_url_is_named_in_the_error(url: str, text: str) -> None:
    with pytest.raises(UserError) as error:
        list(read_rows(DataSource(url=url)))
    assert repr(url) in error.value.message and text in error.value.message


def test_verifiers_environment_needs_its_own_rows() -> None:
    make = environment_maker("", "verifiers:other")
    for row in (Row(({"role": "user", "content": "?"},)), rows_of()[0]):
        with pytest.raises(UserError, match=r"data\.url must be verifiers://other\?…"):
            make({**row.extra, "prompt": row.prompt})


def test_served_files_name_the_imported_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAY_IMPORT, "a:B verifiers:guessing-games")
    assert [item for item in read_rows(DataSource(url="verifiers://guessing-games?size=1")) if isinstance(item, RawRow)]
    with pytest.raises(UserError, match=r"data\.url 'verifiers:other': .* add the path to `allowed_code`"):
        list(read_rows(DataSource(url="verifiers://other")))
    with pytest.raises(UserError, match=r"environment 'verifiers:other': .* add the path to `allowed_code`"):
        environment_maker("", "verifiers:other")


def test_environment_keeps_the_signal_handlers_of_the_flow() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    rows_of("size=2&kind=single")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
