"""The pipelines beside `sft`, small, on the real service: each learns what it is for, and shows it."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from backend.errors import UserError
from deployments.run import example_file, read_config
from flows.pipelines import PIPELINES
from tasks.pipelines.prefer import Prefer

pytestmark = pytest.mark.slow


async def run(pipelines, pipeline: str, name: str, training: dict, **changes):
    """The pipeline's example, smaller, of the rank that other tests use: its programs are compiled already."""
    values = read_config(example_file(f"{pipeline}.yaml"))
    values |= {"name": name, "work": pipelines.work, "model": {"rank": 8}, "samples": {"rows": 1, "max_tokens": 8}}
    values["training"] |= {"batch_size": 4, "segment_steps": 2} | training
    flow, parameters = PIPELINES[pipeline]
    return await flow(parameters.model_validate(values | changes))


async def panels(pipelines, prefix: str) -> str:
    """The picture of the curves."""
    found = await pipelines.artifacts(prefix)
    assert {"data", "progress", "curves", "steps", "samples", "checkpoints"} <= found.keys()
    return base64.b64decode(found["curves"]["data"].partition(",")[2]).decode()


async def test_dpo_prefers_what_was_chosen_and_goes_on_where_it_died(pipelines, monkeypatch):
    trained = await run(pipelines, "dpo", "shown", {"steps": 4})
    assert trained.first["loss"] == pytest.approx(np.log(2), abs=1e-4)  # the reference is the model itself
    assert trained.last["loss"] < 0.5 * trained.first["loss"]
    assert trained.last["accuracy"] == 1.0
    assert trained.last["margin"] > 0.5
    assert trained.held_out["held_out_accuracy"] == 1.0
    picture = await panels(pipelines, "dpo-shown-")
    assert all(f">{name}<" in picture for name in ("loss", "accuracy", "margin", "chosen_reward", "held_out_margin"))

    submit, asked = Prefer.submit, []

    async def dies(self, client, step, params):
        asked.append(step)
        if step == 3:
            raise UserError("it ends here")  # which nothing tries again
        return await submit(self, client, step, params)

    monkeypatch.setattr(Prefer, "submit", dies)
    with pytest.raises(UserError, match="it ends here"):
        await run(pipelines, "dpo", "died", {"steps": 4}, resume="died")
    assert asked == [0, 1, 2, 3]  # segments are of two steps: step 2 is lost with its adapter
    monkeypatch.setattr(Prefer, "submit", submit)
    resumed = await run(pipelines, "dpo", "died", {"steps": 4}, resume="died")
    one, other = pipelines.weights(resumed.weights), pipelines.weights(trained.weights)
    assert all(np.array_equal(one[name], other[name]) for name in one | other)
    assert [row["step"] for row in json.loads((await pipelines.artifacts("dpo-died-"))["steps"]["data"])] == [
        1,
        2,
        3,
        4,
    ]
