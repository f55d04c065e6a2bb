"""Feedback over HTTP: stored with its sample, private to its project, and turned into rows for pipelines."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.api.conftest import BASE, KEY, Engine, Running

from tinkerflow.api.text import Tokenizer
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.spec.commands import SampledSequence, SampleResult
from tinkerflow.backend.wire import encode_sample
from tinkerflow.tasks.pipelines import DataSource, Use, read_source
from tinkerflow.tasks.pipelines.rated import rated_rows

pytestmark = pytest.mark.usefixtures("lettered", "engine")


def ask(server: Running, method: str, path: str, body: Any = None, key: str = KEY, **more: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    return server.http.request(method, f"{server.url}/v1/{path}", json=body, headers=headers, **more)


def answered(server: Running, prompt: str, key: str = KEY, **more: Any) -> Any:
    body = {"model": BASE, "prompt": prompt, "max_tokens": 6, "ignore_eos": True, **more}
    return ask(server, "POST", "completions", body, key).json()


def rate(server: Running, answer_id: str, **said: Any) -> Any:
    kept = ask(server, "POST", "feedback", {"id": answer_id, **said})
    assert kept.status_code == 200, kept.text
    return kept.json()


def test_feedback_is_kept_with_its_sample(server: Running, journal: Any) -> None:
    answer = answered(server, "bcd", n=2, seed=1, return_token_ids=True)
    first = rate(server, answer["id"], reward=0.5)
    second = rate(server, answer["choices"][1]["id"], label="good", text="dd")
    assert first["sample_id"] == answer["choices"][0]["id"]
    assert second["sample_id"] == answer["choices"][1]["id"]
    shown = ask(server, "GET", "feedback").json()["data"]
    assert [(one["reward"], one["label"], one["text"]) for one in shown] == [(0.5, None, None), (None, "good", "dd")]
    assert [one["answer"] for one in shown] == [choice["text"] for choice in answer["choices"]]
    assert {one["prompt"] for one in shown} == {"bcd"}
    assert {one["model"] for one in shown} == {BASE}
    (one, two) = journal.feedback.page("local")
    assert list(memoryview(one.tokens).cast("i")) == answer["choices"][0]["token_ids"]
    assert ask(server, "GET", f"feedback?after={one.id}").json()["data"] == shown[1:]
    assert ask(server, "GET", "feedback?since=2999-01-01T00:00:00Z").json()["data"] == []
    audit = server.get("audit").json()["entries"]
    noted = [entry["event_details"]["sample_id"] for entry in audit if entry["event"] == "feedback_given"]
    assert sorted(noted) == sorted([one.sample_id, two.sample_id])


def test_rated_answer_is_the_text_that_its_client_saw(server: Running) -> None:
    whole = answered(server, "bcd", seed=1)["choices"][0]["text"]
    for stop in (whole[2], [whole[3], whole[4:]]):
        rate(server, (answer := answered(server, "bcd", seed=1, stop=stop))["id"], label="good")
        assert len(seen := answer["choices"][0]["text"]) < len(whole)
        assert ask(server, "GET", "feedback").json()["data"][-1]["answer"] == seen
    begun = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "cc "}]
    answer = ask(server, "POST", "messages", {"model": BASE, "max_tokens": 6, "messages": begun}).json()
    rate(server, answer["id"], label="good")
    shown = ask(server, "GET", "feedback").json()["data"][-1]
    assert shown["answer"] == "cc" + answer["content"][0]["text"] and shown["prompt"] == begun[:1]


def test_rated_completion_keeps_the_space_before_its_first_word(
    server: Running, engine: Engine, lettered: ModelCard
) -> None:
    """The decoder of Llama 2, Mistral and Phi-3 drops the space before the first word of a text."""
    vocabulary = {word: number for number, word in enumerate(("<unk>", "</s>", "▁The", "▁end", "s"))}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    words.normalizer = tokenizers.normalizers.Prepend("▁")
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    words.decoder = tokenizers.decoders.Sequence(parts)
    words.save(f"{lettered.path}/tokenizer.json")
    sampled = SampledSequence(np.array([3, 4], np.int32), np.zeros(2, np.float32), "length")
    engine.next_outcome = lambda request: request.done(encode_sample(SampleResult(request.id, (sampled,))), "proto")
    answer = answered(server, "The")
    assert answer["choices"][0]["text"] == " ends"
    rate(server, answer["id"], label="good")
    (shown,) = ask(server, "GET", "feedback").json()["data"]
    assert (shown["prompt"], shown["answer"]) == ("The", " ends")


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ({"id": "req-none", "label": "good"}, 404, "id 'req-none' does not exist"),
        ({"id": "", "label": "good"}, 404, "does not exist"),
        ({"id": "ID-9", "label": "good"}, 404, "does not exist"),
        ({"id": "ID"}, 400, "at least one"),
        ({"id": "ID", "label": "fine"}, 400, "label"),
        ({"id": "ID", "reward": "much"}, 400, "reward"),
        ({"id": "ID", "stars": 5}, 400, "stars"),
        ({"id": "ID", "text": "a" * (2**20 + 1)}, 400, "text"),
    ],
)
def test_invalid_feedback_is_refused(said: dict[str, Any], status: int, words: str, server: Running) -> None:
    request = answered(server, "a")["id"]
    said = {name: str(value).replace("ID", request) if name == "id" else value for name, value in said.items()}
    refused = ask(server, "POST", "feedback", said)
    assert (refused.status_code, words in refused.json()["error"]["message"]) == (status, True), refused.text


def test_answered_sdk_sample_can_be_rated_and_an_unanswered_one_cannot(server: Running, engine: Engine) -> None:
    opened = {"session_id": server.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = server.post("create_sampling_session", opened).json()["sampling_session_id"]
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [2]}, {"tokens": [3]}]},
        "sampling_params": {"max_tokens": 2},
        "messages": {"role": ["of another client"]},
    }
    request = server.post("asample", body).json()["request_id"]
    server.result(request)
    rate(server, request, label="bad")
    assert ask(server, "GET", "feedback").json()["data"][0]["prompt"] == "bc"
    engine.paused = True
    waiting = server.post("asample", {**body, "seq_id": 1}).json()["request_id"]
    refused = ask(server, "POST", "feedback", {"id": waiting, "label": "good"})
    assert (refused.status_code, "is waiting" in refused.json()["error"]["message"]) == (400, True)
    engine.paused = False


def test_a_sample_of_the_sdk_with_an_image_can_be_rated(server: Running, engine: Engine) -> None:
    opened = {"session_id": server.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = server.post("create_sampling_session", opened).json()["sampling_session_id"]
    chunks = [{"tokens": [2]}, {"type": "image", "format": "png", "data": "AAAA"}, {"tokens": [3]}]
    answer = SampledSequence(np.array([4], np.int32), np.zeros(1, np.float32), "length")
    engine.next_outcome = lambda request: request.done(encode_sample(SampleResult(request.id, (answer,))), "proto")
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": chunks}, "sampling_params": {}}
    request = server.post("asample", body).json()["request_id"]
    server.result(request)
    rate(server, request, label="good")
    assert ask(server, "GET", "feedback").json()["data"][0]["prompt"] == "bc"


def test_answer_with_a_nul_character_can_be_rated(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = answered(server, "b", max_tokens=1)
    monkeypatch.setattr(Tokenizer, "decode", lambda _, tokens, **__: "a\0b" * len(tokens))
    rate(server, answer["id"], label="good")
    (shown,) = ask(server, "GET", "feedback").json()["data"]
    assert (shown["answer"], shown["prompt"]) == ("a\N{REPLACEMENT CHARACTER}b", "a\0b")


def test_rated_answers_are_rows_for_every_pipeline(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    good, bad, written, poor = (answered(server, prompt, seed=seed) for prompt, seed in
                                [("bb", 1), ("bb", 2), ("cc", 3), ("dd", 4)])  # fmt: skip
    rate(server, good["id"], label="bad")
    rate(server, good["id"], label="good")  # the newest rating counts
    rate(server, bad["id"], reward=-1)
    rate(server, written["id"], text="ee")
    rate(server, poor["id"], label="bad")
    said = {name: one["choices"][0]["text"] for name, one in {"good": good, "bad": bad, "written": written}.items()}
    url = "journal://?rated=true&since=1d"
    assert list(rated_rows(url, "auto")) == [
        {"prompt": "bb", "completion": said["good"]},
        {"prompt": "cc", "completion": "ee"},
    ]
    assert list(rated_rows(url, "chat"))[1] == {
        "messages": [{"role": "user", "content": "cc"}, {"role": "assistant", "content": "ee"}]
    }
    assert list(rated_rows(url, "preference")) == [
        {"prompt": "bb", "chosen": said["good"], "rejected": said["bad"]},
        {"prompt": "cc", "chosen": "ee", "rejected": said["written"]},
    ]
    assert list(rated_rows(url, "prompt")) == [
        {"prompt": "bb", "answer": said["good"]},
        {"prompt": "cc", "answer": "ee"},
        {"prompt": "dd", "answer": ""},
    ]
    assert list(rated_rows(f"journal://?rated=true&since={time.strftime('%Y')}-01-01", "auto"))
    read = read_source(DataSource(url=url, kind="preference"), Use("dpo", ("preference",), 64))
    assert (len(read.good), read.bad) == (2, [])
    assert read.good[0][1].chosen[0]["content"] == said["good"]


def test_project_has_a_daily_limit_of_ratings(start: Any, engine: Any) -> None:
    server = start(max_feedback_per_day=1)
    answer = answered(server, "bcd")
    rate(server, answer["id"], label="good")
    refused = ask(server, "POST", "feedback", {"id": answer["id"], "label": "good"})
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert "max_feedback_per_day" in refused.json()["error"]["message"]
