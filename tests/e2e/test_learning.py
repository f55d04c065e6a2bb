"""The pipelines other than `sft`, at a small scale on the real service: each learns its task and shows progress."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.deployments.config import read_config
from tinkerflow.deployments.run import example_file
from tinkerflow.flows.pipelines import pipelines as registered
from tinkerflow.flows.pipelines.dpo import DpoRecipe
from tinkerflow.flows.pipelines.sft import SftRecipe

pytestmark = pytest.mark.thorough


async def run(pipelines, pipeline: str, name: str, training: dict, **changes):
    """Run a smaller version of the pipeline's example, at the rank whose programs other tests have compiled."""
    values = read_config(example_file(f"{pipeline}.yaml"))
    values |= {"name": name, "work": pipelines.work, "model": {"rank": 8}, "samples": {"rows": 1, "max_tokens": 8}}
    values["training"] |= {"batch_size": 4, "segment_steps": 2} | training
    found = registered()[pipeline]
    return await found.flow(found.parameters.model_validate(values | changes))


async def panels(pipelines, prefix: str) -> str:
    """The SVG of the run's curves."""
    found = await pipelines.artifacts(prefix)
    assert {"data", "progress", "curves", "steps", "samples", "checkpoints"} <= found.keys()
    return base64.b64decode(found["curves"]["data"].partition(",")[2]).decode()


async def column(pipelines, prefix: str, name: str) -> list[float]:
    """A metric's values at all steps, from the table of steps."""
    return [row[name] for row in json.loads((await pipelines.artifacts(prefix))["steps"]["data"])]


async def test_dpo_prefers_chosen_answers_and_resumes_after_a_failure(pipelines, monkeypatch):
    trained = await run(pipelines, "dpo", "shown", {"steps": 4})
    assert trained.first["loss"] == pytest.approx(np.log(2), abs=1e-4)  # the reference is the model itself
    assert trained.last["loss"] < 0.5 * trained.first["loss"]
    assert trained.last["accuracy"] == 1.0
    assert trained.last["margin"] > 0.5
    assert trained.held_out["held_out_accuracy"] == 1.0
    picture = await panels(pipelines, "dpo-shown-")
    assert all(f">{name}<" in picture for name in ("loss", "accuracy", "margin", "chosen_reward", "held_out_margin"))

    submit, asked = DpoRecipe.submit, []

    async def dies(self, client, step, params):
        asked.append(step)
        if step == 3:
            raise UserError("it ends here")  # never retried
        return await submit(self, client, step, params)

    monkeypatch.setattr(DpoRecipe, "submit", dies)
    with pytest.raises(UserError, match="it ends here"):
        await run(pipelines, "dpo", "died", {"steps": 4}, resume="died")
    assert asked == [0, 1, 2, 3]  # segments have two steps, so step 2 is lost with its adapter
    monkeypatch.setattr(DpoRecipe, "submit", submit)
    resumed = await run(pipelines, "dpo", "died", {"steps": 4}, resume="died")
    one, other = pipelines.weights(resumed.weights), pipelines.weights(trained.weights)
    assert all(np.array_equal(one[name], other[name]) for name in one | other)
    assert [row["step"] for row in json.loads((await pipelines.artifacts("dpo-died-"))["steps"]["data"])] == [
        1,
        2,
        3,
        4,
    ]


async def test_rl_raises_the_reward_and_distill_approaches_its_teacher(pipelines):
    training = {"batch_size": 2, "segment_steps": 4, "learning_rate": 0.03, "schedule": "constant"}
    data = {"url": str(example_file("prompts.jsonl")), "limit": 2}
    earned = await run(pipelines, "rl", "earns", training | {"steps": 8}, data=data, answer_tokens=6)
    rewards = await column(pipelines, "rl-earns-", "reward")
    assert np.mean(rewards[-2:]) > 1.5 * np.mean(rewards[:2])
    assert abs(earned.first["kl_to_base"]) < 1e-3 < earned.last["kl_to_base"]  # `rl` begins with the base model
    picture = await panels(pipelines, "rl-earns-")
    assert all(f">{name}<" in picture for name in ("reward", "kl_to_base", "entropy", "varied_groups"))

    # The trained model is a good teacher: it answers every prompt with the same few letters.
    teacher = {"weights": earned.weights}
    await run(
        pipelines, "distill", "nearer", training | {"steps": 8}, data=data, held_out=data, answer_tokens=6,
        teacher=teacher,
    )  # fmt: skip
    divergence = await column(pipelines, "distill-nearer-", "reverse_kl")
    assert np.mean(divergence[-2:]) < 0.8 * np.mean(divergence[:2])
    picture = await panels(pipelines, "distill-nearer-")
    assert ">reverse_kl<" in picture and ">held_out_reverse_kl<" in picture and ">reward<" not in picture


async def test_distill_learns_from_a_teacher_that_sees_the_answer(pipelines, tmp_path):
    """Supervised steps teach the model to follow a hint, and to guess without one. Distilled, it needs no hint."""

    def data(name: str, rows: list[dict]) -> dict:
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return {"url": str(tmp_path / name)}

    things, hint = ("banana", "sea"), "{prompt} Say {answer}."
    hints = [(f"Which word is it for the {thing}?", answer) for thing in things for answer in ("yes", "no")]
    told = [
        {"prompt": prompt, "completion": answer}
        for asked, answer in hints
        for prompt in (asked, hint.format(prompt=asked, answer=answer))
    ]
    training = {"schedule": "linear", "learning_rate": 0.005, "segment_steps": 60}
    taught = await run(
        pipelines, "sft", "hinted", training | {"steps": 60, "batch_size": 8}, data=data("told.jsonl", told)
    )
    asked = data("asked.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in (hints[0], hints[3])])
    found = await run(
        pipelines,
        "distill",
        "hinted",
        training | {"steps": 24, "batch_size": 2, "learning_rate": 0.001},
        data=asked,
        held_out=asked,
        answer_tokens=6,
        model={"rank": 8, "start_from": taught.state},
        teacher={"weights": taught.weights, "prompt": hint},
        samples={"rows": 2, "max_tokens": 6},
    )
    divergence = await column(pipelines, "distill-hinted-", "reverse_kl")
    assert np.mean(divergence[-2:]) < 0.2 * np.mean(divergence[:2])
    assert [sample.answer for sample in found.samples] == ["yes", "no"]


async def test_sweep_uses_a_reward_whose_fields_are_not_trained_on(pipelines, tmp_path):
    rows = [json.loads(line) for line in example_file("colours-train.jsonl").read_text().splitlines()[:4]]
    pairs = [row | {"answer": row["messages"][-1]["content"].split()[-1]} for row in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    data = {"url": str(tmp_path / "pairs.jsonl")}
    judge = {"metric": "reward", "reward": "tinkerflow.tasks.pipelines.rewards:holds_answer", "group_size": 2}
    changes = {"data": data, "held_out": data, "grid": {"learning_rate": [0.005, 1e-6]}, "samples": {"max_tokens": 16}}
    swept = await run(pipelines, "sweep", "rewarded", {"steps": 16, "schedule": "constant"}, **changes, **judge)
    rewards = {name: scores.reward for name, scores in swept.scores.items()}
    assert swept.best == "learning_rate 0.005" and rewards[swept.best] > 0.5 > rewards["learning_rate 1e-06"]
    found = await pipelines.artifacts("sweep-rewarded-")
    assert f"reward {rewards[swept.best]:.4g}" in found["best"]["data"]
    assert [row["reward"] for row in json.loads(found["points"]["data"])] == list(rewards.values())[:2]


async def test_sweep_names_the_best_point_and_repeats_none(pipelines, monkeypatch):
    held_out = {"url": str(example_file("colours-test.jsonl")), "limit": 2}
    grid = {"learning_rate": [1e-6, 0.005], "rank": [8]}
    asked: list[float] = []
    submit = SftRecipe.submit

    def counted(self, client, step, params):
        asked.append(params.learning_rate)
        if params.learning_rate == 0.005 and len(asked) == 4:
            raise UserError("it ends here")
        return submit(self, client, step, params)

    monkeypatch.setattr(SftRecipe, "submit", counted)
    changes = {"held_out": held_out, "grid": grid, "at_once": 1, "resume": "again"}
    training = {"steps": 3, "schedule": "constant"}
    with pytest.raises(UserError, match="it ends here"):
        await run(pipelines, "sweep", "grid", training, **changes)
    assert asked == [1e-6] * 3 + [0.005]
    swept = await run(pipelines, "sweep", "grid", training, **changes)
    assert asked[4:] == [0.005] * 3  # the first point was done
    assert swept.best == "learning_rate 0.005, rank 8"
    assert swept.scores[swept.best].loss < swept.scores["learning_rate 1e-06, rank 8"].loss - 0.3
    found = await pipelines.artifacts("sweep-grid-")
    assert {one["type"] for one in found.values()} == {"markdown", "table", "image"}
    assert swept.weights in found["best"]["data"] and swept.best in found["best"]["data"]
    rows = json.loads(found["points"]["data"])
    assert [(row["learning_rate"], row["best"]) for row in rows] == [(1e-6, ""), (0.005, "best")]
