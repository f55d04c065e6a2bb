"""The console in a real browser: every page, empty and full, light and dark, on a phone, and with clicks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.api.console.conftest import of_checkpoint
from tests.api.console.test_rollouts import put_rollouts
from tests.e2e.browser import Page, open_page
from tests.waiting import wait_for

from tinkerflow.api.endpoints import sse
from tinkerflow.backend.journal import ModelState

PAGES = (
    *("/", "/sessions", "/training_runs", "/compare", "/samples"),
    *("/checkpoints", "/playground", "/pool", "/usage", "/keys"),
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page of Chromium, shared by the module's tests."""
    with open_page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(chromium: Page) -> Page:
    """An empty page without a sign-in."""
    chromium.open("about:blank")  # the previous test's page may still send requests to its server, which has ended
    chromium.look()
    chromium.forget()
    chromium.complaints()
    return chromium


def inspect(page: Page, url: str) -> None:
    """Check a page for accessibility barriers (light and dark), sideways scrolling on a phone, and errors."""
    for width in (1400, 360):
        page.look(width=width)
        page.open(url)
        for dark in (False, True):
            page.look(width=width, dark=dark)
            assert page.barriers() == [], f"{url}, {width} wide{', dark' if dark else ''}"
        assert page.run("return document.documentElement.scrollWidth") <= width, f"{url} is wider than {width}"
        page.picture(f"console{urlsplit(url).path.replace('/', '-').replace(':', '')}-{width}")
    assert page.complaints() == [], url


def test_every_page_of_an_empty_service(page: Page, server: Any) -> None:
    for path in (*PAGES, "/training_runs/none"):
        page.complaints()
        page.open(server.url + path)
        page.complaints()  # a 404 is a complaint
        inspect(page, server.url + path) if path in PAGES else None


def test_every_page_of_a_service_in_use(
    page: Page, server: Any, furnish: Any, put_steps: Any, lettered: Any, journal: Any
) -> None:
    things, other = furnish(), furnish()
    put_steps(things.run, 700)
    put_steps(other.run, 30)
    for step in (1, 2):
        put_rollouts(server, things.run, step)
    journal.run_metrics.record(things.run, "local", {n: {"reward": n / 700, "kl": 1 / n} for n in range(1, 700)})
    journal.leases.beat()
    for path in (
        *PAGES,
        f"/sessions/{things.session}",
        f"/training_runs/{things.run}",
        f"/compare?run={things.run}&run={other.run}",
        f"/samples/{things.sample}",
        f"/training_runs/{things.run}/rollouts?chances=yes",
        of_checkpoint(things.weights),
        f"{of_checkpoint(things.weights)}/delete",
    ):
        inspect(page, server.url + path)


def test_curve_of_a_live_run_moves_and_shows_its_values(page: Page, server: Any, engine: Any, put_steps: Any) -> None:
    run = server.model()
    page.open(f"{server.url}/training_runs/{run}")
    page.shows("No steps yet")
    put_steps(run, 2)
    page.shows("2 steps measured")
    line = "return document.querySelector('.line-0').getAttribute('d')"
    before = page.run(line)
    put_steps(run, 3, first=3)
    page.shows("5 steps measured")
    assert page.run(line) != before
    page.point_at("figure.chart svg")
    wait_for(
        lambda: page.run("return document.querySelector('figure output').textContent").startswith(
            "step 3\nvalue  3.3333"
        )
    )
    assert page.complaints() == []


def test_runs_are_picked_and_compared(page: Page, server: Any, engine: Any, put_steps: Any) -> None:
    runs = [server.model(), server.model()]
    for run in runs:
        put_steps(run, 4)
    page.open(f"{server.url}/training_runs")
    for run in runs:
        page.click(f"input[value='{run}']")
    page.press("Compare the selected runs")
    text = page.shows("Compare runs", *runs, "Differences", "Equal in all runs")
    assert "Last loss" in text
    assert page.run("return document.querySelectorAll('path.line.line-1').length") == 5


def test_selected_part_of_a_chart_is_restored_by_its_link(page: Page, server: Any, engine: Any, put_steps: Any) -> None:
    run = server.model()
    put_steps(run, 200)
    page.open(f"{server.url}/training_runs/{run}?x=tokens&smooth=0.6")
    page.shows("200 steps measured")
    assert page.run("return document.querySelectorAll('path.faint').length") > 0
    page.drag("figure.chart svg", 0.3, 0.7)
    text = page.shows("steps shown")
    assert "200 steps" not in text
    url = page.run("return location.href")
    assert "x=tokens" in url and "first=" in url and "last=" in url
    first, last = (int(page.run(f"return document.querySelector('[name={name}]').value")) for name in ("first", "last"))
    assert 20 < first < 80 and 110 < last < 160
    page.open(url)
    page.shows("steps shown")
    page.run("document.querySelector('[name=log]').click()")
    page.shows("Logarithmic")
    wait_for(lambda: "log=yes" in page.run("return location.href"))
    assert page.barriers() == [] and page.complaints() == []


def test_a_chart_stays_while_a_part_of_it_is_selected(page: Page, server: Any, engine: Any, put_steps: Any) -> None:
    run = server.model()
    put_steps(run, 6)
    page.open(f"{server.url}/training_runs/{run}")
    page.shows("6 steps measured")
    page.drag("figure.chart svg", 0.5, 0.55)  # a range without a step
    page.run(
        "const real = fetch; window.answers = 0;"
        "window.fetch = (...all) => real(...all).finally(() => { window.answers += 1; })"
    )
    with page.dragging("figure.chart svg", 0.3, 0.65):
        put_steps(run, 200, first=7)
        before = page.run("return window.answers")
        wait_for(lambda: page.run("return window.answers") > before + 1)
        assert "live 6 steps measured" in page.text()
    page.shows("live 2 steps shown")
    assert "first=3&last=4" in page.run("return location.href") and page.complaints() == []


def test_runs_are_found_sorted_and_archived(page: Page, server: Any, engine: Any) -> None:
    runs = [server.model(name=name) for name in ("apple", "banana", "cherry")]
    page.open(f"{server.url}/training_runs")
    page.fill("[name=q]", "an")
    page.press("Show")
    assert "apple" not in page.shows("banana")
    page.open(f"{server.url}/training_runs")
    page.click("th:nth-child(2) a")
    names = "return [...document.querySelectorAll('td a:first-child')].map((a) => a.textContent).join()"
    wait_for(lambda: page.run(names).startswith("cherry,banana,apple"))
    page.click(f"input[value='{runs[1]}']")
    page.press("Archive the selected runs")
    wait_for(lambda: page.run(names) == "cherry,apple")
    page.open(f"{server.url}/training_runs?archived=yes")
    page.click(f"input[value='{runs[1]}']")
    page.press("Restore the selected runs")
    page.shows("No archived runs")


def test_archived_runs_are_deleted_after_a_confirmation(page: Page, server: Any, furnish: Any) -> None:
    things, journal = furnish(), server.journal
    journal.checkpoints.publish(things.weights, "local")
    journal.sessions.finish(things.session, "local")
    journal.models.end(things.run, ModelState.UNLOADED, "its session ended")
    journal.run_table.archive([things.run], "local")
    page.open(f"{server.url}/training_runs")
    assert "Delete" not in page.shows("No training run yet")
    page.click("p.empty a")
    page.shows("Archived training runs")
    page.click(f"input[value='{things.run}']")
    page.press("Delete the selected runs")
    page.shows("Delete this run?", "1 of the checkpoints is published", "cannot be undone")
    assert page.barriers() == [] and page.complaints() == []
    page.press("Delete for good")
    page.shows("No archived runs")
    assert server.get(f"training_runs/{things.run}").status_code == 404
    assert dict(journal.upkeep.unpurged()).keys() <= {things.weights, things.sampler_weights}


def test_checkpoint_is_published_and_deleted_after_a_confirmation(page: Page, server: Any, furnish: Any) -> None:
    path = furnish().weights
    page.open(server.url + of_checkpoint(path))
    page.press("Publish")
    page.shows("all keys may read it")
    assert server.journal.checkpoints.get(path, "stranger").public
    page.press("Unpublish")
    page.shows("its project may read it")
    page.click("a.danger")
    page.shows("Delete this checkpoint?", "cannot be undone")
    page.click("main form a")
    page.shows("Lineage")
    kept = server.journal.checkpoints.get(path, None)
    page.click("a.danger")
    page.press("Delete for good")
    wait_for(lambda: server.journal.checkpoints.before_save(path, kept.run_id).is_gone)


def test_sign_in_accepts_only_a_valid_key(page: Page, server: Any, journal: Any) -> None:
    _, secret = journal.keys.create("ann", "team")
    server.clock.advance(2.0)
    inspect(page, f"{server.url}/")
    page.look()
    page.open(f"{server.url}/pool")
    page.shows("Sign in")
    page.fill("#key", "tml-wrong")
    page.press("Sign in")
    page.shows("the API key is unknown or revoked")
    page.fill("#key", secret)
    page.press("Sign in")
    page.shows("ann · team")
    page.shows("Worker groups")
    server.clock.advance(13 * 3600.0)
    page.shows("These values are old: your sign-in has ended. Reload the page.")
    page.open(f"{server.url}/pool")
    page.fill("#key", secret)
    page.press("Sign in")
    page.shows("Worker groups")
    page.press("Sign out")
    page.shows("Sign in")


def test_two_models_answer_side_by_side_with_the_probabilities_of_their_tokens(
    page: Page, server: Any, furnish: Any, lettered: Any
) -> None:
    things = furnish()
    page.open(f"{server.url}/playground?mode=checkpoint&checkpoint={things.sampler_weights}")
    page.fill("#model-1", lettered.name)
    page.run("document.getElementById('mode').value = 'text'")
    page.fill("#max_tokens", "5")
    page.fill("#temperature", "0")  # a random token could end both answers before their first word
    page.press("Send")
    assert page.run("return document.querySelectorAll('.turn').length") == 0, "an empty text is not sent"
    page.fill("#say", "bcd")
    page.run(
        "const key = (shiftKey) => new KeyboardEvent('keydown', {key: 'Enter', shiftKey, cancelable: true});"
        "const say = document.getElementById('say');"
        "window.breaksLine = say.dispatchEvent(key(true)); window.sends = !say.dispatchEvent(key(false))"
    )
    assert page.run("return window.breaksLine && window.sends")
    wait_for(lambda: page.run("return document.querySelectorAll('.turns small').length") == 2)
    page.point_at(".turn.model span")
    wait_for(lambda: "%" in page.run("return document.getElementById('probability').textContent"))
    assert page.barriers() == []
    page.fill("#model-1", "nobody")
    page.fill("#say", "bcd")
    page.press("Send")
    page.shows("model 'nobody' does not exist")
    page.press("Start over")
    assert page.run("return document.querySelectorAll('.turn').length") == 0
    assert [one for one in page.complaints() if "404" not in one] == []


@pytest.mark.usefixtures("engine")
def test_comments_of_a_stream_are_no_part_of_the_answer(
    page: Page, server: Any, lettered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that waits contains comments."""
    monkeypatch.setattr(sse, "_COMMENT_SECONDS", 0.0)
    page.open(f"{server.url}/playground?model={lettered.name}")
    page.fill("#max_tokens", "5")
    page.fill("#say", "bcd")
    page.press("Send")
    ended = ".turns small, .turns .notice.bad"
    wait_for(lambda: page.run(f"return document.querySelectorAll('{ended}').length") == 1)
    assert page.run("return document.querySelectorAll('.turns .notice.bad').length") == 0
    assert page.complaints() == []


def test_message_without_an_answer_is_left_out_of_the_next_prompt(
    page: Page, server: Any, engine: Any, lettered: Any
) -> None:
    page.open(f"{server.url}/playground?model=nobody")
    page.fill("#max_tokens", "5")
    page.fill("#say", "bcd")
    page.press("Send")
    page.shows("model 'nobody' does not exist")
    page.fill("#model-0", lettered.name)
    page.fill("#say", "efg")
    page.press("Send")
    page.click(".turns small a")
    page.shows("Prompt", "efg")
    assert page.run("return document.querySelector('pre').textContent") == "efg"
