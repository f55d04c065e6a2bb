"""The playground's page and its answers: streams of text and tokens, and errors as alerts."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tinkerflow.api.console.pages.playground import COMPILES
from tinkerflow.backend.spec.commands import CompileStatus

FIELDS = {"model": "tiny/bigram", "mode": "text", "prompt": "bcd", "max_tokens": "6", "temperature": "1"}


def events(answer: Any) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]


def test_playground_of_an_empty_service_shows_the_missing_base_model(browser: Any, journal: Any) -> None:
    journal.base_models.register([])
    assert "No base model is served yet" in browser.get("/playground").text


def test_playground_lists_models_and_accepts_links_of_the_sdk(browser: Any, furnish: Any, lettered: Any) -> None:
    things = furnish()
    page = browser.get("/playground", params={"mode": "checkpoint", "checkpoint": things.sampler_weights}).text
    assert f'value="{things.sampler_weights}" placeholder' in page
    assert '<option value="tiny/bigram">' in page and f'<option value="{things.sampler_weights}">' in page
    page = browser.get("/playground", params={"model": "champion/a", "other": "<b>"}).text
    assert 'value="champion/a"' in page and 'value="&lt;b&gt;"' in page


def test_playground_shows_that_the_first_answer_waits_for_compiling(browser: Any, journal: Any) -> None:
    assert f'data-waits="{COMPILES}"' in browser.get("/playground").text
    journal.base_models.note_compile_status(
        "tiny/bigram", CompileStatus(planned=84, ready=4, failed=0, needed=0, late=0)
    )
    assert f'data-waits="{COMPILES} 4 of 84 programs are ready."' in browser.get("/playground").text


def test_a_text_is_continued_with_the_probability_of_each_token(browser: Any, engine: Any, lettered: Any) -> None:
    *bits, last = events(browser.send("/playground/answer", FIELDS))
    tokens = [token for bit in bits for token in bit["tokens"]]
    assert last["count"] == len(tokens) >= 1 and last["stop"] in ("stop", "length")
    assert all(math.isclose(token["p"], 1 / 16, rel_tol=1e-3) for token in tokens)
    shown = browser.get(f"/samples/{last['id']}").text
    assert "bcd" in shown and "".join(bit["text"] for bit in bits) in shown
    assert browser.server.journal.samples.get(last["id"], "local").model_path is None


def test_a_checkpoint_answers_with_its_own_weights(browser: Any, furnish: Any, lettered: Any) -> None:
    things = furnish()
    *_, last = events(browser.send("/playground/answer", {**FIELDS, "model": things.sampler_weights}))
    assert browser.server.journal.samples.get(last["id"], "local").model_path == things.sampler_weights


def test_conversation_is_rendered_by_the_template_of_the_model(browser: Any, engine: Any, lettered: Any) -> None:
    said = [{"role": role, "content": text} for role, text in (("user", "bc"), ("assistant", "d"), ("user", "ef"))]
    *_, last = events(browser.send("/playground/answer", {**FIELDS, "mode": "chat", "messages": json.dumps(said)}))
    assert "bcdef" in browser.get(f"/samples/{last['id']}").text


@pytest.mark.parametrize(
    ("wrong", "status", "text"),
    [
        ({"model": "nobody"}, 404, "does not exist"),
        ({"mode": "song"}, 400, "must be chat or text"),
        ({"mode": "chat", "messages": "no"}, 400, "must be a JSON list"),
        ({"mode": "chat", "messages": "[]"}, 400, "must not be empty"),
        ({"mode": "chat", "messages": '[{"role": "x", "content": "y"}]'}, 400, "each role one of"),
        ({"mode": "chat", "messages": '[{"role": "user", "content": ""}]'}, 400, "prompt has 0 tokens"),
        ({"prompt": ""}, 400, "prompt has 0 tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens is &#39;many&#39;: must be a number"),
        ({"temperature": "nan"}, 400, "temperature"),
        ({"max_tokens": "0"}, 400, "max_tokens"),
    ],
)
def test_playground_answers_invalid_input_with_an_alert(
    browser: Any, engine: Any, lettered: Any, wrong: dict[str, str], status: int, text: str
) -> None:
    answer = browser.send("/playground/answer", {**FIELDS, **wrong})
    assert answer.status_code == status and text in answer.text and 'role="alert"' in answer.text


def test_weights_of_another_project_are_refused_in_the_playground(
    server: Any, journal: Any, furnish: Any, lettered: Any, browse: Any
) -> None:
    secrets = [journal.keys.create(name, f"team-{name}")[1] for name in ("ann", "bob")]
    server.clock.advance(2.0)
    things, bob = furnish(secrets[0]), browse(server)
    bob.sign_in(secrets[1])
    for model in (things.sampler_weights, things.run):
        assert bob.send("/playground/answer", {**FIELDS, "model": model}).status_code == 404
    assert things.sampler_weights not in bob.get("/playground").text
