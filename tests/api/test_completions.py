"""`/v1/models` and `/v1/completions` over HTTP, with a small engine: formats, errors and limits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.api.conftest import BASE, EOS, KEY, Engine, Running

from tinkerflow.api.submit import base_model_card
from tinkerflow.api.text import Tokenizer
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.errors import NotFoundError, StateLostError
from tinkerflow.backend.journal import Journal

pytestmark = pytest.mark.usefixtures("lettered")


def post(server: Running, path: str, body: Any, **headers: str) -> httpx.Response:
    return server.http.post(f"{server.url}/v1/{path}", json=body, headers={"Authorization": f"Bearer {KEY}", **headers})


def complete(server: Running, **body: Any) -> Any:
    answer = post(server, "completions", {"model": BASE, "prompt": "bcd", "max_tokens": 5, "seed": 1, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Running, **body: Any) -> list[Any]:
    answer = post(server, "completions", {"model": BASE, "prompt": "bcd", "max_tokens": 5, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(line) for line in lines]


def test_embedded_model_is_found_under_its_short_name(server: Running, lettered: ModelCard, journal: Journal) -> None:
    folder = "/data/models/tinkerflow/tiny-qwen3"
    journal.base_models.register([(BASE, lettered.to_json()), (folder, replace(lettered, name=folder).to_json())])
    listed = server.http.get(f"{server.url}/v1/models", headers={"x-api-key": KEY}).json()["data"]
    assert {model["id"]: model["root"] for model in listed} == {BASE: BASE, folder: folder, "tinkerflow/tiny": folder}
    for model in listed:
        assert server.http.get(f"{server.url}/v1/models/{model['id']}", headers={"x-api-key": KEY}).json() == model
    assert base_model_card(journal, "tinkerflow/tiny") == base_model_card(journal, folder)
    with pytest.raises(
        NotFoundError, match=r"base_model is 'tinkerflow/tinny': .* \(did you mean 'tinkerflow/tiny'\?\)"
    ):
        base_model_card(journal, "tinkerflow/tinny")


def test_models_are_listed_and_shown(server: Running, lettered: ModelCard) -> None:
    listed = server.http.get(f"{server.url}/v1/models", headers={"x-api-key": KEY}).json()
    (model,) = listed["data"]
    assert (listed["object"], model["id"], model["object"], model["root"]) == ("list", BASE, "model", BASE)
    one = server.http.get(f"{server.url}/v1/models/{BASE}", headers={"Authorization": f"Bearer {KEY}"})
    assert one.json() == model
    assert (model["type"], model["display_name"], model["max_model_len"]) == ("model", BASE, lettered.max_context)
    missing = server.http.get(f"{server.url}/v1/models/nobody", headers={"x-api-key": KEY})
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "not_found"
    empty = post(server, "completions", {"model": "", "prompt": "b"})
    assert empty.json()["error"]["message"].startswith("model '' does not exist: must be a base model")
    session = server.session()
    mistaken = post(server, "completions", {"model": session, "prompt": "b"}).json()["error"]["message"]
    assert f"(this is the id of a session: a training run of it is '{session}:train:0'" in mistaken
    opening = {"session_id": session, "sampling_session_seq_id": 0}
    for name in ("base_model", "model_path"):
        refused = server.post("create_sampling_session", {**opening, name: session})
        assert refused.status_code == 404 and f"'tinker://{session}:train:0/sampler_weights/" in refused.text


def test_a_completion_has_ids_tokens_and_logprobs(server: Running, engine: Engine, lettered: ModelCard) -> None:
    whole = complete(server, n=2, logprobs=0, return_token_ids=True)
    assert whole["object"] == "text_completion"
    assert whole["model"] == BASE
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    for number, choice in enumerate(whole["choices"]):
        tokens = choice["token_ids"]
        assert choice["id"] == f"{whole['id']}-{number}"
        assert choice["prompt_token_ids"] == [2, 3, 4]
        assert choice["text"] == "".join(chr(96 + token) for token in tokens if token != EOS).replace("`", "a")
        assert len(choice["logprobs"]["token_logprobs"]) == len(tokens) == len(choice["logprobs"]["tokens"])
        assert choice["finish_reason"] == ("stop" if tokens[-1] == EOS else "length")
    sampled = sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == sampled
    assert whole["usage"]["total_tokens"] == 3 + sampled
    named = complete(server, logprobs=0, return_tokens_as_token_ids=True)["choices"][0]
    assert all(name.startswith("token_id:") for name in named["logprobs"]["tokens"])


def test_streamed_completion_equals_the_whole_one(server: Running, engine: Engine) -> None:
    body = {"n": 2, "seed": 7, "logprobs": 0, "return_token_ids": True}
    whole = complete(server, **body)
    parts = events(server, **body, stream_options={"include_usage": True})
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]
    assert {part["id"] for part in parts} == {parts[0]["id"]}
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
        logprobs = [value for part in mine for value in part["logprobs"]["token_logprobs"]]
        assert logprobs == choice["logprobs"]["token_logprobs"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]


def test_prompts_are_texts_or_tokens_or_lists_of_them(server: Running, engine: Engine) -> None:
    texts = complete(server, prompt=["bcd", "b"], n=2)
    tokens = complete(server, prompt=[[2, 3, 4], [2]], n=2)
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in texts["choices"]] == [choice["text"] for choice in tokens["choices"]]
    assert complete(server, prompt=[2, 3, 4])["choices"][0]["text"] == texts["choices"][0]["text"]
    streamed = events(server, prompt=["bcd", "b"], n=2, seed=1)
    said = dict.fromkeys(range(4), "")
    for part in streamed:
        said[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert said == {choice["index"]: choice["text"] for choice in texts["choices"]}


def test_an_echo_has_the_prompt_and_its_logprobs(server: Running, engine: Engine) -> None:
    plain = complete(server, logprobs=0)["choices"][0]
    echo = complete(server, logprobs=0, echo=True)["choices"][0]
    assert echo["text"] == "bcd" + plain["text"]
    assert echo["logprobs"]["token_logprobs"][0] is None
    assert echo["logprobs"]["token_logprobs"][3:] == plain["logprobs"]["token_logprobs"]
    assert echo["logprobs"]["tokens"][:3] == ["b", "c", "d"]
    assert echo["logprobs"]["text_offset"][:4] == [0, 1, 2, 3]
    only = complete(server, logprobs=0, echo=True, max_tokens=0)
    assert only["choices"][0]["text"] == "bcd"
    assert len(only["choices"][0]["logprobs"]["tokens"]) == 3
    assert only["usage"]["completion_tokens"] == 0


def test_temperature_may_be_any_integer(server: Running, engine: Engine) -> None:
    answer = post(server, "completions", {"model": BASE, "prompt": "a", "max_tokens": 1, "temperature": 2**64})
    assert answer.status_code == 200, answer.text


def test_an_answers_id_is_in_its_headers(server: Running, engine: Engine) -> None:
    for stream in (False, True):
        answer = post(server, "completions", {"model": BASE, "prompt": "bcd", "max_tokens": 2, "stream": stream})
        assert f'"id":"{answer.headers["x-request-id"]}"' in answer.text


@pytest.mark.parametrize(
    ("path", "given", "field"),
    [
        ("completions", {"prompt": "a" * 1025}, "prompt"),
        ("completions", {"prompt": ["a", "a" * 1025]}, "prompt[1]"),
    ],
)
def test_text_longer_than_any_context_is_not_tokenized(
    path: str, given: dict[str, Any], field: str, server: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(Tokenizer, "encode", lambda _, text: read.append(text) or [2])
    refused = post(server, path, {"model": BASE, **given})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        f"{field} has 1025 characters: must have at most 1024, 16 for each token of the context"
    )
    assert read in ([], ["a"])


def test_many_long_prompts_are_bounded_together(
    server: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkerflow.api.routes.completions._MOST_PROMPTED", 2000)
    refused = post(server, "completions", {"model": BASE, "prompt": ["a" * 1001, "b" * 1000]})
    assert refused.status_code == 400
    rule = "prompt has 2001 characters and token ids in all its texts: must have at most 2000"
    assert refused.json()["error"]["message"] == rule
    refused = post(server, "completions", {"model": BASE, "prompt": ["a" * 1000, "b" * 1000], "max_tokens": 1})
    assert "in all its texts" not in refused.text  # each is refused, but because it is too long for the context


def test_errors_have_the_openai_format(server: Running, journal: Any, start: Any, engine: Engine) -> None:
    missing = post(server, "completions", {"model": "nobody", "prompt": "a"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
    assert "embeddings" in post(server, "embeddings", {}).json()["error"]["message"]
    assert post(server, "nothing", {}).json()["error"]["type"] == "not_found_error"
    for key in ("", "Bearer wrong"):
        refused = post(server, "completions", {}, Authorization=key)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
    lost = StateLostError("gone")
    engine.next_outcome = lambda request: request.failed(lost)
    failed = post(server, "completions", {"model": BASE, "prompt": "a"})
    assert (failed.status_code, failed.json()["error"]["message"]) == (503, "gone")


def test_project_over_its_limit_gets_429_with_retry_after(start: Any, engine: Engine) -> None:
    engine.paused = True
    server = start(max_sampling_requests=2)
    refused = post(server, "completions", {"model": BASE, "prompt": ["a", "b", "c"]})
    rule = "prompt has 3 prompts: must have at most 2 (max_sampling_requests)"
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, rule), "waiting would not help"
    opening = {"session_id": server.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = server.post("create_sampling_session", opening).json()["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [2]}]}
    assert server.post("asample", {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt}).status_code == 200
    answer = post(server, "completions", {"model": BASE, "prompt": ["a", "b"]})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    engine.paused = False
    assert complete(server)["choices"], "those that were accepted were given up"
