"""The pipeline `rl` on environments of other libraries, with the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.tasks.pipelines.test_harbor import write_task
from tests.tasks.pipelines.test_sandbox import needs_namespaces

from tinkerflow.flows.pipelines.rl import rl
from tinkerflow.flows.pipelines.sft import SftParameters, sft
from tinkerflow.tasks.pipelines.parameters import RlParameters

pytest_plugins = ["tinkerflow.deployments.testing"]


GUESSING = """
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state):
        return [vf.types.UserMessage(content="Again.")]

    @vf.stop
    async def even(self, state):
        return bool(state["trajectory"]) and len(state["trajectory"][-1]["completion"][-1].content) % 2 == 0

def quick(state):
    return 1.0 / len(state["trajectory"])

def load_environment():
    rows = Dataset.from_list([{"question": f"Say {number}", "answer": ""} for number in range(8)])
    return Guess(dataset=rows, rubric=vf.Rubric(funcs=[quick]), max_turns=3)
"""


def given(folder: Path, steps: int, learning_rate: float, **changes: Any) -> dict[str, Any]:
    """Parameters of a pipeline that runs in one segment."""
    training = {"steps": steps, "segment_steps": steps, "batch_size": 4, "learning_rate": learning_rate}
    fixed = {"name": "mine", "resume": "mine", "work": f"file://{folder}", "samples": {"rows": 0}}
    return fixed | {"model": {"rank": 8}, "training": training | {"schedule": "constant"}} | changes


@pytest.mark.thorough
async def test_the_model_learns_a_task_of_reasoning_gym(tiny_service, plain_calls, tmp_path):
    """The task is the greatest common divisor of two numbers. Supervised steps first teach the form of an answer."""
    pytest.importorskip("reasoning_gym", reason="no reasoning-gym", exc_type=ImportError)
    url = "reasoning-gym://gcd?max_value=12&size={}&seed={}"
    source = {"url": url.format(64, 2), "ignore": ["reasoning_gym"]}
    begun = await sft(SftParameters.model_validate(given(tmp_path / "sft", 40, 0.01, data=source)))
    values = given(tmp_path / "rl", 16, 0.003, data={"url": url.format(64, 0)}, held_out={"url": url.format(16, 1)})
    values |= {"environment": "reasoning-gym:gcd", "group_size": 16, "answer_tokens": 4}
    values["model"] |= {"start_from": begun.state}
    trained = await rl(RlParameters.model_validate(values))
    assert trained.last["reward"] > trained.first["reward"] + 0.1
    assert trained.held_out["held_out_reward"] > trained.first["reward"] + 0.1


async def trained(folder: Path, url: str, environment: str, **changes: Any) -> Any:
    """Train two steps on an environment, and return the result."""
    rules = {"group_size": 4, "answer_tokens": 4, "max_turns": 3, "environment": environment} | changes
    found = await rl(RlParameters.model_validate(given(folder, 2, 0.01, data={"url": url}, **rules)))
    assert found.steps == 2 and "left_out_episodes" not in found.first
    assert abs(found.first["kl_to_base"]) < 1e-4, "the first step's tokens are those of the base model"
    return found


async def test_a_conversation_with_verifiers_is_trained(tiny_service, plain_calls, tmp_path, monkeypatch):
    """The reward is 1 for one answer and less for more."""
    pytest.importorskip("verifiers", reason="no verifiers", exc_type=ImportError)
    (tmp_path / "guess_a_number.py").write_text(GUESSING)
    monkeypatch.syspath_prepend(tmp_path)
    found = await trained(tmp_path, "verifiers://guess-a-number", "verifiers:guess-a-number")
    assert 1 / 3 < found.first["reward"] <= 1.0


async def test_a_conversation_with_an_echo_server_is_trained(tiny_service, plain_calls, tmp_path):
    """The reward is the length of each answer."""
    pytest.importorskip("openenv", reason="no openenv", exc_type=ImportError)
    from tests.tasks.pipelines.test_openenv import Served, Text

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "Say {n}.", "reset": {{"seed": {n}}}}}\n' for n in range(4)))
    server = Served(Text, 64)
    try:
        found = await trained(tmp_path, str(rows), f"openenv:{server.url}")
    finally:
        server.stop()
    assert found.first["reward"] > 0


@needs_namespaces
async def test_a_task_of_harbor_is_trained(tiny_service, plain_calls, tmp_path):
    """The task's tests write the reward. They run after the model's first answer without a command."""
    tests = "if [ -e lines.txt ]; then echo 1; else echo 0.5; fi > /logs/verifier/reward.txt"
    write_task(tmp_path / "tasks", tests__test_sh=tests)
    found = await trained(tmp_path, f"harbor://{tmp_path / 'tasks'}", f"harbor:{tmp_path / 'tasks'}")
    assert found.first["reward"] == 0.5
