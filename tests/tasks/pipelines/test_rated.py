"""The data source `journal://`: its URL, pages and refusals. tests/api/test_feedback.py tests it with a server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.tasks.pipelines.conftest import SFT

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines import DataSource, Renderer, check_source, preparation, rated
from tinkerflow.tasks.pipelines.data import load_rows
from tinkerflow.tasks.pipelines.preparation import begun_with
from tinkerflow.tasks.pipelines.rated import rated_rows


@pytest.mark.parametrize(
    "url",
    [
        "journal://",
        "journal://?rated=false",
        "journal://?rated=true&sinse=1d",
        "journal://?rated=true&since=yesterday",
        "journal://block/path?rated=true",
    ],
)
def test_invalid_journal_url_lists_the_accepted_forms(url: str) -> None:
    with pytest.raises(UserError, match=r"^data\.url is 'journal://"):
        list(rated_rows(url, "auto"))


def test_all_pages_are_read_and_a_refusal_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://service/prefix")
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")
    one = {"prompt": "p", "answer": "a", "reward": None, "label": "good", "text": None}
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        after = int(request.url.params.get("after", 0))
        numbers = range(after + 1, after + 1001)
        page = [{**one, "id": n, "sample_id": f"r-{n}", "prompt": str(n)} for n in numbers]
        return httpx.Response(200, json={"data": page if after < 2000 else page[: 2001 - after]})

    real = httpx.Client

    def client(**more: Any) -> httpx.Client:
        return real(transport=httpx.MockTransport(answer), **more)

    monkeypatch.setattr(httpx, "Client", client)
    assert len(list(rated_rows("journal://?rated=true", "auto"))) == 2001
    assert {(str(one.url).partition("?")[0], one.headers["x-api-key"]) for one in asked} == {
        ("http://service/prefix/v1/feedback", "tml-key")
    }
    monkeypatch.setattr(httpx, "Client", lambda **more: real(
        transport=httpx.MockTransport(lambda request: httpx.Response(401, text="who are you?")), **more))  # fmt: skip
    with pytest.raises(UserError, match="answered 401: who are you"):
        list(rated_rows("journal://?rated=true", "auto"))


def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")
    with pytest.raises(UserError, match=r"^data\.url: no server answers at http://127\.0\.0\.1:9 \("):
        list(rated_rows("journal://?rated=true", "auto"))


def test_a_run_keeps_the_ratings_that_it_began_with(
    work: str, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "1", "completion": "a"}]
    monkeypatch.setattr(rated, "rated_rows", lambda url, kind: iter(rows))
    monkeypatch.setattr(preparation, "check_data", check_source)
    source = DataSource(url="journal://?rated=true&since=1d")

    def prompts(run: str, **changes: Any) -> list[str]:
        use = replace(SFT, **changes)
        return [row.prompt[0]["content"] for row in load_rows(work, begun_with(source, run, work, renderer, use))]

    assert prompts("first") == prompts("") == ["1"]
    rows.append({"prompt": "2", "completion": "b"})
    assert prompts("first") == ["1"], "a retry goes on with the same rows"
    assert prompts("second") == prompts("") == prompts("first", max_tokens=1024) == ["1", "2"]
