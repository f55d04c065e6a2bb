"""The points of a sweep, their validation, and the choice of the best point."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from prefect.states import Completed
from pydantic import ValidationError

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines import nightly as nightly_module
from tinkerflow.flows.pipelines import sweep as sweep_module
from tinkerflow.flows.pipelines.fine_tuning import TrainingResult, decisive_parameters, flat
from tinkerflow.flows.pipelines.sweep import SweepParameters, points
from tinkerflow.tasks.pipelines.artifacts import RunArtifacts
from tinkerflow.tasks.pipelines.parameters import EvaluateParameters, NightlyParameters, SftParameters
from tinkerflow.tasks.pipelines.progress import RunProgress
from tinkerflow.tasks.pipelines.scoring import Scores

IS_ANSWER = "tinkerflow.tasks.pipelines.rewards:is_answer"


def rows_in(folder: Path) -> str:
    """The path of a file with a row."""
    (file := folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return str(file)


def parameters(**grid: Any) -> SweepParameters:
    rows = {"url": "rows.jsonl"}
    return SweepParameters.model_validate({"data": rows, "held_out": rows, "grid": grid})


def test_sweep_points_are_all_combinations_with_their_place_in_the_picture() -> None:
    found = points(parameters(learning_rate=[0.001, 0.01, 0.001], rank=[8, 16]))
    assert [point.label for point in found] == [
        "learning_rate 0.001, rank 8", "learning_rate 0.001, rank 16",
        "learning_rate 0.01, rank 8", "learning_rate 0.01, rank 16",
    ]  # fmt: skip
    assert found[1].changes == {"training": {"learning_rate": 0.001}, "model": {"rank": 16}}
    assert (found[1].axis, found[1].x, found[1].line) == ("log10(learning_rate)", pytest.approx(-3), "rank 16")
    assert found[1].slug == "0-001-16"


def test_parameter_with_one_value_is_no_axis() -> None:
    found = points(parameters(learning_rate=[0.001], steps=[4, 8]))
    assert [(point.axis, point.x, point.line) for point in found] == [("steps", 4.0, "all"), ("steps", 8.0, "all")]
    assert all(point.changes["training"]["learning_rate"] == 0.001 for point in found)


def test_each_value_is_a_point_of_its_own() -> None:
    seeds, rates = points(parameters(seed=[1234567, 1234568])), points(parameters(learning_rate=[1e-5, 1.2345678e-4]))
    assert [point.label for point in seeds] == ["seed 1234567", "seed 1234568"]
    assert [point.label for point in rates] == ["learning_rate 1e-05", "learning_rate 0.00012345678"]
    assert [point.slug for point in (*seeds, *rates)] == ["1234567", "1234568", "1e-05", "0-00012345678"]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "list values for at least one parameter"),
        ({"rank": [0]}, "grid.rank.0\n  Input should be greater than or equal to 1"),
        ({"rank": list(range(1, 102)), "steps": [1, 2, 3]}, "303 combinations: must be at most 256"),
        ({"momentum": [0.9]}, "grid.momentum\n  Extra inputs are not permitted"),
    ],
)
def test_invalid_grid_is_refused(grid: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        parameters(**grid)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("given", "measured", "best"),
    [
        ({}, "loss", "seed 1"),
        ({"metric": "exact_match"}, "exact match", "seed 0"),
        ({"metric": "reward", "reward": IS_ANSWER, "group_size": 3}, "reward", "seed 2"),
    ],
)
async def test_best_sweep_point_is_chosen_by_the_metric(
    given: dict[str, Any], measured: str, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[SftParameters] = []
    shown: dict[str, Any] = {}

    async def sft(parameters: SftParameters, *, return_state: bool) -> Any:
        trained.append(parameters)
        seed = parameters.model.seed
        return Completed(
            data=TrainingResult(run=parameters.resume, data="d", state=f"state {seed}", weights=f"weights {seed}",
                                steps=1, first={}, last={"loss": 0.5}, held_out={}, samples=[])
        )  # fmt: skip

    async def score_all(wanted: EvaluateParameters, candidates: dict[str, str]) -> dict[str, Scores]:
        assert (wanted.reward, wanted.group_size) == (given.get("reward", ""), given.get("group_size", 8))
        losses, matches, rewards = [2.0, 1.0, 3.0, 9.0], [0.5, 0.25, 0.0, 0.0], [0.0, 0.25, 0.5, 0.75]
        figures: list[dict[str, Any]] = [{"loss": a, "exact_match": b} for a, b in zip(losses, matches, strict=True)]
        if wanted.judge:
            figures = [{"reward": reward, "parts": {"form": 1.0}, "answers": 3} for reward in rewards]
        assert list(candidates.values()) == ["weights 0", "weights 1", "weights 2", ""]
        return {name: Scores(rows=1, samples=[], **one) for name, one in zip(candidates, figures, strict=True)}

    async def show(self: RunArtifacts, kind: str, data: object, title: str) -> None:
        shown[kind] = data

    monkeypatch.setattr(sweep_module, "sft", sft)
    monkeypatch.setattr(sweep_module, "score_all", score_all)
    for kind in ("table", "pictures", "text"):
        monkeypatch.setattr(RunArtifacts, kind, show)
    rows = {"url": rows_in(tmp_path), "ignore": ["id"]}
    values = {"data": rows, "held_out": rows, "grid": {"seed": [0, 1, 2]}, "work": tmp_path.as_uri(), "resume": "x"}
    found = await sweep_module.sweep.fn(SweepParameters.model_validate(values | given))
    assert found.best == best and found.weights == best.replace("seed", "weights")
    assert [row["point"] for row in shown["points"] if row["best"]] == [best]
    assert {measured, "last training loss"} <= shown["points"][0].keys()
    assert f"{measured.replace(' ', '_')} over seed" in shown["comparison"]
    assert f"# Best: {best}" in shown["best"] and f"{measured} " in shown["best"]
    ignored = ["id", "*"] if "reward" in given else ["id"]  # fields of rows for the reward are not trained on
    assert [(one.pipeline, one.data.ignore, one.held_out and one.held_out.ignore) for one in trained] == [
        ("sft", ignored, ignored)
    ] * 3


@pytest.mark.parametrize(
    ("held_out", "given", "error"),
    [
        ({"text": "a"}, {}, "held_out .*: schema text: evaluate needs chat or prompt_completion"),
        ({"prompt": "a", "completion": "b"}, {"metric": "reward", "reward": "no_rewards:f"}, "no module 'no_rewards'"),
    ],
)
async def test_comparison_that_would_fail_is_refused_before_training(
    held_out: dict[str, str], given: dict[str, str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, begin in ((sweep_module, "sft"), (nightly_module, "fine_tune")):
        monkeypatch.setattr(module, begin, lambda *_, **__: pytest.fail("training began"))
    (file := tmp_path / "held-out.jsonl").write_text(json.dumps(held_out))
    values = {"data": {"url": rows_in(tmp_path)}, "held_out": {"url": str(file)}, "work": tmp_path.as_uri()} | given
    with pytest.raises(UserError, match=error):
        await sweep_module.sweep.fn(SweepParameters.model_validate(values | {"grid": {"seed": [0]}}))
    with pytest.raises(UserError, match=error):
        await nightly_module.nightly.fn(NightlyParameters.model_validate(values | {"champion": "best"}))


async def test_resumed_sweep_compares_no_points_of_other_parameters_or_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, names = list[int](), set[str]()
    result = TrainingResult(run="r", data="rows 1", state="s", weights="w", steps=1, first={}, last={"loss": math.nan},
                            held_out={}, samples=[])  # fmt: skip

    async def sft(parameters: SftParameters, *, return_state: bool) -> Any:
        RunProgress(parameters.work_url, parameters.resume, "plan", flat(decisive_parameters(parameters)))
        trained.append(parameters.model.seed)
        names.add(parameters.resume)
        return Completed(data=result.model_copy(update={"run": parameters.resume}))

    async def score_all(wanted: EvaluateParameters, candidates: dict[str, str]) -> dict[str, Scores]:
        return {name: Scores(rows=1, samples=[], loss=1.0, exact_match=0.0) for name in candidates}

    async def sweep(seeds: list[int], resume: str = "x", **training: Any) -> None:
        rows = {"url": rows_in(tmp_path)}
        values = {"data": rows, "held_out": rows, "grid": {"seed": seeds}, "work": tmp_path.as_uri(), "resume": resume}
        await sweep_module.sweep.fn(SweepParameters.model_validate(values | {"training": training}))

    monkeypatch.setattr(sweep_module, "sft", sft)
    monkeypatch.setattr(sweep_module, "score_all", score_all)
    await sweep([0, 1], steps=4)
    await sweep([0, 1, 2], steps=4, segment_steps=2)
    assert trained == [0, 1, 2], "finished points are not trained again"
    for last in "ab":  # the names of points are valid, and differ for each sweep
        await sweep([0, 1], "x" * 127 + last, steps=4)
    assert len(names) == 3 + 2 + 2
    changed = r"resume 'x': this run was started with .* \(training.steps was 4 and is 5\); give it another name"
    with pytest.raises(UserError, match=changed):
        await sweep([0, 1], steps=5)
    result = result.model_copy(update={"data": "rows 2"})
    with pytest.raises(UserError, match=r"resume 'x': its points were trained on different data \(rows 1, rows 2\)"):
        await sweep([0, 3], steps=4)


@pytest.mark.parametrize("given", [{"metric": "reward"}, {"reward": "rewards:right"}])
def test_a_reward_and_its_metric_go_together(given: dict[str, Any]) -> None:
    rows = {"url": "rows.jsonl"}
    with pytest.raises(ValidationError, match="metric: reward needs a reward or an environment"):
        SweepParameters.model_validate({"data": rows, "held_out": rows, "grid": {"seed": [1]}} | given)


async def test_a_retry_does_not_take_the_results_of_other_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect names the subflow runs of a retry by the number of the call, and returns those that are finished."""
    finished: list[TrainingResult] = []  # by the number of the call
    calls = retries = 0

    async def sft(parameters: SftParameters, *, return_state: bool) -> Any:
        nonlocal calls
        calls += 1
        seed = parameters.model.seed
        if calls > len(finished):
            if seed == 2 and not retries:
                raise RuntimeError("killed")
            finished.append(
                TrainingResult(run=parameters.resume, data="d", state="", weights=f"weights {seed}", steps=1, first={},
                               last={"loss": 0.5}, held_out={}, samples=[])
            )  # fmt: skip
        return Completed(data=finished[calls - 1])

    async def score_all(wanted: EvaluateParameters, candidates: dict[str, str]) -> dict[str, Scores]:
        assert [*candidates.values()] == [*(f"weights {seed}" for seed in range(3)), ""]
        return {name: Scores(rows=1, samples=[], loss=1.0, exact_match=0.0) for name in candidates}

    monkeypatch.setattr(sweep_module, "sft", sft)
    monkeypatch.setattr(sweep_module, "score_all", score_all)
    rows = {"url": rows_in(tmp_path)}
    values = {"data": rows, "held_out": rows, "grid": {"seed": [0, 1, 2]}, "work": tmp_path.as_uri(), "resume": "x"}
    with pytest.raises(RuntimeError, match="killed"):
        await sweep_module.sweep.fn(SweepParameters.model_validate(values))
    calls, retries = 0, 1
    await sweep_module.sweep.fn(SweepParameters.model_validate(values))
    assert [one.weights for one in finished] == ["weights 0", "weights 1", "weights 2"]
