"""A user's own reward: `rl` trains with it, `evaluate` measures with it, and `nightly` promotes by it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from tinkerflow.backend.catalog.rollouts import numbers_of, read_rollouts
from tinkerflow.backend.store import Store
from tinkerflow.flows.pipelines.evaluate import evaluate
from tinkerflow.flows.pipelines.nightly import nightly
from tinkerflow.flows.pipelines.rl import rl
from tinkerflow.tasks.pipelines.champions import champion
from tinkerflow.tasks.pipelines.parameters import EvaluateParameters, NightlyParameters, RlParameters
from tinkerflow.tasks.pipelines.work import open_work

pytest_plugins = ["tinkerflow.deployments.testing"]

REWARD = """
def shouting(facts, answer):
    return sum(letter.isupper() for letter in answer) / max(1, len(answer)) + facts.get("bonus", 0)
"""


async def test_checkpoint_is_evaluated_with_its_training_reward(
    tiny_service: Any, plain_calls: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    prompts, others, pairs = (tmp_path / name for name in ("prompts.jsonl", "others.jsonl", "pairs.jsonl"))
    prompts.write_text('{"prompt": "Say hello."}\n{"prompt": "Cheer."}\n')
    rows = (("Greet.", 1), ("Cry.", 2), ("Go.", 3))
    others.write_text("".join(f'{{"prompt": "{prompt}", "bonus": {bonus}}}\n' for prompt, bonus in rows))
    pairs.write_text('{"prompt": "Greet.", "completion": "HELLO", "bonus": 1}\n' * 2)
    work = tmp_path.as_uri()
    judge = {"reward": "own_rewards:shouting", "group_size": 4}
    common = {"name": "mine", "resume": "mine", "work": work, "model": {"rank": 8, "seed": 3}, "samples": {"rows": 0}}
    training = {"steps": 2, "batch_size": 2, "learning_rate": 0.01}
    held_out = {"url": str(others)}
    trained = await rl(
        RlParameters.model_validate(
            {**common, **judge, "answer_tokens": 4, "data": {"url": str(prompts)}, "held_out": held_out}
            | {"training": training}
        )
    )
    values = {"name": "again", "work": work, **judge, "weights": trained.weights, "max_tokens": 4, "seed": 3}
    values |= {"data": held_out, "rows_at_once": 2}
    scores = (await evaluate(EvaluateParameters.model_validate(values))).scores
    mine = scores["weights"]
    assert mine.loss is None
    # The samples are equal, but the last bits of a logprob depend on the batch, so one answer of 12 may differ.
    assert mine.reward == pytest.approx(trained.held_out["held_out_reward"], abs=1 / 12)
    assert (mine.rows, mine.answers) == (3, 12) and mine.reward_error is not None and 0.5 < mine.reward_error < 0.65
    assert scores["base model"].value("reward") >= 2.0
    assert numbers_of(open_work(work), "evaluations", trained.training_run) == [1]
    found = read_rollouts(open_work(work), "evaluations", trained.training_run, 1)
    assert found.evaluation is not None and found.evaluation.reward == mine.reward
    assert [group.prompt[0].text for group in found.groups] == ["Greet.", "Cry.", "Go."]

    night = {**common, **judge, "resume": "night", "champion": "loud", "metric": "reward", "training": training}
    night |= {"data": {"url": str(pairs)}, "held_out": {"url": str(pairs)}, "margin": 0.0}
    made = await nightly(NightlyParameters.model_validate(night))
    new, old = made.scores["new"].value("reward"), made.scores["base model"].value("reward")
    best = champion(work, "loud")
    assert (made.outcome == "promoted") == (best is not None) == (new > old)


MORTAL = """
import os, signal

calls = 0

def shouting(facts, answer):
    global calls
    calls += 1
    if calls == int(os.environ.get("DIES_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(letter.isupper() for letter in answer) / max(1, len(answer))
"""
RUN = """
import asyncio, sys
from tinkerflow.deployments.testing import calls_as_functions
from tinkerflow.flows.pipelines.rl import rl
from tinkerflow.tasks.pipelines.parameters import RlParameters

with calls_as_functions():
    asyncio.run(rl(RlParameters.model_validate_json(sys.argv[1])))
"""


@pytest.fixture
def invariant_server(start_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The server that the pipelines use, with TINKERFLOW_BATCH_INVARIANT."""
    monkeypatch.setenv("TINKERFLOW_BATCH_INVARIANT", "true")
    (data_dir := tmp_path / "data").mkdir()
    with start_server(data_dir, prefect="off") as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.api_url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-test")
        yield server


def ahead_by_one(folder: Path, module: str, reward: str, batch_size: int) -> dict[str, Any]:
    """Write a reward and prompts to `folder`; return parameters of `rl`, whose samples may be one step old."""
    (folder / f"{module}.py").write_text(reward)
    (folder / "prompts.jsonl").write_text('{"prompt": "Say hello."}\n{"prompt": "Cheer."}\n')
    return {
        "work": folder.as_uri(),
        "data": {"url": str(folder / "prompts.jsonl")},
        "reward": f"{module}:shouting",
        "group_size": 4,
        "answer_tokens": 12,
        "max_staleness": 1,
        "model": {"rank": 8, "seed": 5},
        "samples": {"rows": 0},
        "training": {"steps": 4, "segment_steps": 4, "batch_size": batch_size, "learning_rate": 0.01},
    }


def weights_of(server: Any, report: Any) -> dict[str, np.ndarray]:
    return Store.open(f"file://{server.data_dir / 'store'}").load(report.state)[0].weights


def assert_same(weights: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name], expected[name]) for name in weights)


@pytest.mark.thorough
async def test_killed_flow_that_samples_ahead_ends_with_equal_bits(
    invariant_server: Any, plain_calls: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow is killed while it rewards the answers of step 5 and trains step 4. Then the workers are killed."""
    monkeypatch.syspath_prepend(tmp_path)
    values = ahead_by_one(tmp_path, "mortal_rewards", MORTAL, 1) | {"name": "killed", "answer_tokens": 6}
    values["training"] |= {"steps": 6, "segment_steps": 3}
    killed = RlParameters.model_validate(values | {"resume": "killed"})
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", RUN, killed.model_dump_json()],
        env={**os.environ, "PYTHONPATH": paths, "DIES_AT": str(4 * 4 + 2)},
        timeout=500,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    invariant_server.kill()
    found, work = await rl(killed), open_work(killed.work)
    assert found.steps == 6 and numbers_of(work, "rollouts", found.training_run) == [4, 5, 6], "none is made twice"
    ages = [read_rollouts(work, "rollouts", found.training_run, step).staleness for step in (4, 5, 6)]
    assert ages == [0, 1, 1], "a segment begins with fresh samples"
    undisturbed = await rl(RlParameters.model_validate(values | {"resume": "undisturbed"}))
    assert_same(weights_of(invariant_server, found), weights_of(invariant_server, undisturbed))


async def test_rerun_rl_among_other_requests_ends_with_equal_bits(
    invariant_server: Any, plain_calls: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline samples ahead while a client draws samples of other sizes."""
    monkeypatch.syspath_prepend(tmp_path)
    values = ahead_by_one(tmp_path, "own_rewards", REWARD, 2)

    async def disturb() -> None:
        with invariant_server.client() as client:
            sampler = await client.create_sampling_client(base_model=invariant_server.base_model)
            for number in range(10_000):
                prompt, length = tinker.ModelInput.from_ints([7] * (1 + 37 * number % 200)), 1 + 5 * number % 40
                params = tinker.SamplingParams(max_tokens=length, temperature=1.0, seed=number)
                await sampler.sample(prompt, 1 + number % 5, params)

    async def trained(name: str) -> dict[str, np.ndarray]:
        report = await rl(RlParameters.model_validate(values | {"name": name, "resume": name}))
        return weights_of(invariant_server, report)

    expected = await trained("alone")
    others = asyncio.create_task(disturb())
    weights = await trained("crowd")
    assert not others.done()
    others.cancel()
    await asyncio.wait((others,))
    assert_same(weights, expected)
