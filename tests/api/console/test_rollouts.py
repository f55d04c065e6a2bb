"""The page of a run's rollouts: groups, filters, token probabilities, evaluations and access."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import pytest
from tests.api.console.conftest import of_checkpoint

from tinkerflow.backend.catalog.rollouts import (
    DroppedRollout,
    EvaluationFacts,
    RolloutGroup,
    RolloutMessage,
    RolloutSample,
    StepRollouts,
    write_evaluation,
    write_rollouts,
)
from tinkerflow.backend.store.blobs import open_blobs
from tinkerflow.backend.store.local import LocalBlobs


@pytest.mark.parametrize("how", ["rerun_of", "fork_of"])
def test_repeated_run_links_to_the_rollouts_of_its_source(browser: Any, server: Any, how: str) -> None:
    first = server.model(pipeline="rl")
    where = f"/training_runs/{quote(first, safe='')}/rollouts"
    assert f'href="{where}">Rollouts by step</a>' in browser.get(f"/training_runs/{first}").text
    again = server.model(pipeline="rl", **{how: first})
    page = browser.get(f"/training_runs/{again}").text
    assert f'href="{where}">Rollouts by step of the run that it repeats</a>' in page
    assert browser.get(where).status_code == 200


def put_rollouts(server: Any, run: str, step: int = 3) -> None:
    def sample(reward: float, text: str, tokens: list[int]) -> RolloutSample:
        answer = RolloutMessage(role="assistant", text=text, tokens=tokens, logprobs=[-4.0, -0.1][: len(tokens)])
        tool = RolloutMessage(role="tool", name="adder", text="4")
        messages = [answer, tool] if reward > 0 else [answer]
        parts = {"form": 0.25}
        return RolloutSample(reward=reward, parts=parts, advantage=reward, length=2, attempt=1, messages=messages)

    prompt = [RolloutMessage(role="user", text="What is <b>2 + 2</b>?")]
    samples = [sample(-1.0, "<script>five", [3, 4]), sample(1.0, "four", [2, 3])]
    dropped = [DroppedRollout(prompt="Why?", fate="left out", reason="ConnectionError: <gone>")]
    rollouts = StepRollouts(
        step=step, staleness=1, groups=[RolloutGroup(prompt=prompt, samples=samples)], dropped=dropped
    )
    write_rollouts(open_blobs(server.settings.pipelines_url), run, rollouts)


def test_step_page_shows_its_groups_and_dropped_samples(browser: Any, server: Any, furnish: Any, lettered: Any) -> None:
    run = furnish().run
    where = f"/training_runs/{run}/rollouts"
    work = server.settings.pipelines_url
    page = browser.get(where).text
    assert (
        f"No rollouts are in <code>{work}/rollouts/{run.replace(':', '.')}</code>" in page
        and f"must be <code>{work}</code>" in page
    )
    assert 'the <code class="whole">--data-dir</code> of <code>tinkerflow up</code>' in page
    for step in (3, 4):
        put_rollouts(server, run, step)
    page = browser.get(where).text
    assert "Rollouts of step 4" in page and f'href="{where}?step=3&amp;find=' in page and "1 step old" in page
    assert page.index("Reward 1") < page.index("Reward -1"), "the best sample is first"
    assert "&lt;b&gt;2 + 2" in page and "&lt;script&gt;five" in page and "<script>five" not in page
    for words in (
        "mean 0, standard deviation 1",
        "tools: adder",
        "form 0.25",
        "restarted",
        "left out",
        "ConnectionError: &lt;gone&gt;",
    ):
        assert words in page, words
    worst = browser.get(where, params={"step": 3, "order": "worst"}).text
    assert "Rollouts of step 3" in worst and worst.index("Reward -1") < worst.index("Reward 1")
    chances = browser.get(where, params={"chances": "yes"}).text
    assert '<span title="1.83 %" class="shade-0">b</span><span title="90.5 %">c</span>' in chances


def test_evaluations_by_a_reward_are_a_page_of_the_run(browser: Any, server: Any, furnish: Any) -> None:
    things = furnish()
    where = f"/training_runs/{things.run}/evaluations"
    linked = "Evaluations of its weights by a reward</a>"
    assert "No evaluations of the weights of this run are in" in browser.get(where).text
    assert f'href="{quote(where)}">{linked}' in browser.get(f"/training_runs/{things.run}").text
    assert linked not in browser.get(f"/training_runs/{server.model()}").text, "it saved no weights for samplers"
    answer = RolloutMessage(role="assistant", text="<b>four")
    sample = RolloutSample(reward=1.0, parts={"form": 0.25}, advantage=0.0, length=1, messages=[answer])
    group = RolloutGroup(prompt=[RolloutMessage(role="user", text="What is 2 + 2?")], samples=[sample])
    work = open_blobs(server.settings.pipelines_url)
    for mean in (0.25, 0.5):
        facts = EvaluationFacts(
            name="sums",
            weights=things.sampler_weights,
            judge="reward rewards:right",
            data="sums.jsonl 1",
            reward=mean,
            reward_error=0.125,
            parts={"form": 0.75},
            rows=2,
            answers=4,
            evaluated_at=server.clock.now(),
        )
        write_evaluation(work, things.run, StepRollouts(step=0, groups=[group], evaluation=facts))
    page = browser.get(where).text
    facts = ("Evaluation 2", "sums", "0.5 ± 0.125", "0.75", "4 to 2 prompts", "rewards:right", things.sampler_weights)
    for words in (*facts, "&lt;b&gt;four", "form 0.25", f'href="{where}?number=1&amp;find='):
        assert words in page, words
    assert "advantage" not in page
    assert "0.25 ± 0.125" in browser.get(where, params={"number": 1}).text
    missing = browser.get(where, params={"number": 3})
    assert missing.status_code == 404 and "has no evaluation number 3" in missing.text


def test_run_without_steps_shows_its_failure_instead_of_advice(browser: Any, server: Any) -> None:
    run = server.model()
    where = f"/training_runs/{run}/rollouts"
    assert "No step was trained yet, so there are no rollouts." in browser.get(where).text
    server.post(f"training_runs/{run}/outcome", {"outcome": "failed", "reason": "reward a:b: KeyError"})
    page = browser.get(where).text
    assert "No step was trained, so there are no rollouts. The run failed: reward a:b: KeyError" in page
    assert "--data-dir" not in page


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"find": "FOUR"}, ["Reward 1"]),
        ({"find": "2 + 2"}, ["Reward 1", "Reward -1"]),
        ({"low": "0"}, ["Reward 1"]),
        ({"high": "0"}, ["Reward -1"]),
        ({"low": "0.5", "find": "five"}, []),
    ],
)
def test_samples_are_found_by_text_and_reward(
    asked: dict[str, str], found: list[str], browser: Any, server: Any, engine: Any
) -> None:
    run = server.model()
    put_rollouts(server, run)
    page = browser.get(f"/training_runs/{run}/rollouts", params=asked).text
    assert [words for words in ("Reward 1<", "Reward -1<") if words in page] == [f"{one}<" for one in found]
    assert ("No sample of this step matches" in page) == (not found)


def test_invalid_choices_are_named(browser: Any, server: Any, engine: Any) -> None:
    run = server.model()
    put_rollouts(server, run)
    for asked, status, words in (
        ({"low": "much"}, 400, "must be a number, or empty"),
        ({"step": "nan"}, 400, "must be a number, or empty"),
        ({"step": "1e300"}, 404, "has no rollouts"),
        ({"step": "4"}, 404, "step 4 of training run"),
        ({"order": "none"}, 404, "order"),
    ):
        page = browser.get(f"/training_runs/{run}/rollouts", params=asked)
        assert (page.status_code, words in page.text) == (status, True), page.text


def test_rollouts_are_private_to_their_project_and_admin_reads_are_logged(
    server: Any, journal: Any, engine: Any, browse: Any
) -> None:
    browsers, run = {}, ""
    for name, admin in (("ann", False), ("bob", False), ("boss", True)):
        _, secret = journal.keys.create(name, f"team-{name}", admin=admin)
        server.clock.advance(2.0)
        browsers[name] = browse(server)
        browsers[name].sign_in(secret)
        run = run or server.model(secret)
    put_rollouts(server, run)
    answers = {name: one.get(f"/training_runs/{run}/rollouts").status_code for name, one in browsers.items()}
    assert answers == {"ann": 200, "bob": 404, "boss": 200}
    looks = [entry.details["samples"] for entry in journal.audit.entries("team-ann")
             if entry.event == "project_sample_read"]  # fmt: skip
    assert looks == [[f"{run}/rollouts/3"]]


def test_rollouts_that_are_removed_while_their_page_is_read_do_not_exist(
    browser: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = server.model()
    put_rollouts(server, run)
    gone = {"rollouts": "has no rollouts", "evaluations": "has no evaluation number 9"}
    monkeypatch.setattr("tinkerflow.api.console.pages.rollouts.numbers_of", lambda *_: [9])  # as listed before
    for kind, text in gone.items():
        page = browser.get(f"/training_runs/{run}/{kind}")
        assert page.status_code == 404 and text in page.text


def test_unreachable_files_of_pipelines_are_an_error_of_the_store(
    browser: Any, server: Any, furnish: Any, lettered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    things = furnish()
    folder = Path(server.settings.pipelines_url.removeprefix("file://"), "champions", "helpdesk (old)")
    folder.mkdir(parents=True)  # a copy that a person made
    assert browser.get(of_checkpoint(things.weights)).status_code == 200
    monkeypatch.setattr(LocalBlobs, "children", Mock(side_effect=TimeoutError("no answer")))
    reads = [f"/training_runs/{things.run}/rollouts", of_checkpoint(things.weights), "/playground"]
    assert [browser.get(path).status_code for path in reads] == [503] * 3
