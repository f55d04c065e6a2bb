"""Views of charts: positions on the x axis, means, zoom, and links to the same view."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tinkerflow.api.console.curves import ChartView, RunCurves, chart_view, charts, smoothed, steps_by_place
from tinkerflow.api.console.render import NONE
from tinkerflow.backend.journal import Curve, Metric, StepFigures

CREATED = datetime(2026, 1, 1, tzinfo=UTC)


def run(steps: list[int], *metrics: Metric, tokens_before: int = 0) -> RunCurves:
    points = (StepFigures(step, CREATED + timedelta(minutes=6 * step), 100, 1.0 / step, *[None] * 9) for step in steps)
    return RunCurves("value", CREATED, Curve(tuple(points), len(steps), tokens_before), metrics)


def test_a_point_has_its_place_by_step_time_and_tokens() -> None:
    part = run([5, 6, 8], tokens_before=400)
    assert part.places("step") == [5, 6, 8]
    assert part.places("time") == [0.5, 0.6, 0.8]
    assert part.places("tokens") == [500, 600, 700]


def test_stored_metrics_are_placed_between_the_steps_of_the_curve() -> None:
    part = run([2, 4])
    assert part.placed([(2, 0.5), (3, 0.6), (9, 0.7)], "tokens") == [(100.0, 0.5), (150.0, 0.6), (200.0, 0.7)]
    assert part.placed([(3, 0.6)], "step") == [(3, 0.6)]
    assert run([]).placed([(3, 0.6)], "time") == [], "no time of a step is known"


def test_a_mean_begins_with_the_first_value_and_keeps_gaps() -> None:
    points = smoothed([(1, 4.0), (2, None), (3, 0.0), (4, 0.0)], 0.5)
    assert points == [(1, 4.0), (2, None), (3, pytest.approx(4 / 3)), (4, pytest.approx(4 / 7))]


def test_link_query_holds_exactly_the_view() -> None:
    assert chart_view().query == ""
    view = ChartView("time", True, 0.9, 3, 40)
    assert view.query == "x=time&log=yes&smooth=0.9&first=3&last=40"
    assert (view.steps, chart_view(first=0).query) == ((3, 40), "first=0")


def test_rewards_precede_the_loss_and_a_smoothed_line_shows_its_values() -> None:
    rewards = (Metric("held_out_reward", ((1, 0.5),)), Metric("reward", ((1, 0.0), (3, 1.0))))
    part = run([1, 2, 3], Metric("kl", ((1, 1.0),)), *rewards)
    drawn = charts([part], chart_view(smooth=0.6))
    titles = [str(one).split("<figcaption>")[1].split("<")[0].strip() for one in drawn]
    assert titles == ["reward", "held_out_reward", "Loss per weight", "kl", "Gradient norm"]
    assert (part.reward, run([1]).reward) == (1.0, None)
    own = run([1, 2], Metric("loss", ((1, 0.7),)))
    assert [str(one).count("Loss per weight") for one in charts([own], chart_view())] == [0, 0], "its own loss is shown"
    assert sum("Loss per weight" in str(one) for one in charts([own, part], chart_view())) == 1
    assert 'class="faint line-0"' in drawn[0] and 'class="faint' not in charts([part], chart_view())[0]


def test_zooming_by_time_needs_the_steps_of_places() -> None:
    assert steps_by_place([run([1, 2])], chart_view()) is None
    assert steps_by_place([run([1, 2]), run([])], chart_view(x="time")) == "[[[0.1,1],[0.2,2]]]"


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ({"x": "day"}, "x: Input should be"),
        ({"smooth": "1"}, "smooth: Input should be less than"),
        ({"first": "-1"}, "first: Input should be greater than or equal to 0"),
    ],
)
def test_invalid_view_is_named(browser: Any, server: Any, engine: Any, query: dict[str, str], text: str) -> None:
    page = browser.get(f"/training_runs/{server.model()}", params=query)
    assert page.status_code == 404 and text in page.text


def test_table_links_keep_the_search(browser: Any, server: Any, engine: Any) -> None:
    for name in ("pig", "latin"):
        server.model(name=name, pipeline="sft")
    page = browser.get("/training_runs", params={"q": "pipeline=sft", "columns": "reward", "group": "pipeline"}).text
    assert "pig" in page and "pipeline: sft" in page
    assert 'href="/training_runs?q=pipeline%3Dsft&amp;columns=reward&amp;group=pipeline&amp;sort=name"' in page
    assert 'q=pipeline%3Dsft&amp;columns=reward&amp;group=pipeline&amp;up=yes"' in page, "the other way round"
    assert "No run matches" in browser.get("/training_runs?q=cow").text
    wrong = browser.get("/training_runs?sort=lost")
    assert wrong.status_code == 400 and "did you mean" in wrong.text


def test_forms_pick_at_most_the_runs_of_a_page(browser: Any) -> None:
    for action in ("archive", "delete"):
        refused = browser.send(f"/training_runs/{action}", {"run": ["x"] * 51})
        assert refused.status_code == 400 and "run is given 51 times: must be at most 50" in refused.text


def test_runs_of_another_project_are_not_archived(server: Any, journal: Any, engine: Any, browse: Any) -> None:
    found = {}
    for name in ("ann", "bob"):
        _, secret = journal.keys.create(name, f"team-{name}")
        server.clock.advance(2.0)
        found[name] = browse(server)
        found[name].sign_in(secret)
        found[f"{name}'s"] = server.model(secret)
    answer = found["bob"].send("/training_runs/archive", {"run": found["ann's"]})
    assert answer.status_code == 303
    assert not journal.models.get(found["ann's"], None).archived
    found["ann"].send("/training_runs/archive", {"run": found["ann's"]})
    assert journal.models.get(found["ann's"], None).archived
    assert found["ann"].post("/training_runs/archive", {"run": found["ann's"]}).status_code == 403, "no mark"
    for who, status in (("bob", 404), ("ann", 400)):  # ann's run has not ended
        picked = {"run": found["ann's"]}
        question = found[who].get("/training_runs/delete", params=picked)
        answer = found[who].send("/training_runs/delete", picked)
        assert (question.status_code, answer.status_code) == (status, status)
    assert "only runs that have ended can be deleted" in question.text


def test_a_run_that_reports_a_reward_shows_it_in_tables(
    browser: Any, server: Any, engine: Any, journal: Any, put_steps: Any
) -> None:
    runs = [server.model(), server.model()]
    for run in runs:
        put_steps(run, 4)
    journal.run_metrics.record(runs[0], "local", {1: {"reward": 0.25}, 4: {"reward": 0.75}})
    table = browser.get("/training_runs").text
    assert '<td class="n"><span class="soft">reward</span> 0.75</td>' in table and '<td class="n">2.5</td>' in table
    compared = browser.get("/compare", params={"run": runs}).text
    assert f"<th>Last reward</th><td>0.75</td><td>{NONE}</td>" in compared
    assert "Last reward" not in browser.get("/compare", params={"run": runs[1:]}).text
