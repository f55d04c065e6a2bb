"""Sampling options that the SDK lacks, over HTTP: constraints, penalties and biases."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from tokenizers import Tokenizer

from tinkerflow.backend.wire import tinker_pb2 as pb

pytestmark = pytest.mark.thorough

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "seen": {"type": "boolean"}, "year": {"type": "integer"}},
    "required": ["city", "seen", "year"],
    "additionalProperties": False,
}
SCHEMA["properties"]["year"] |= {"minimum": 1900, "maximum": 2100}


class Client:
    """Requests samples of the base model over HTTP."""

    def __init__(self, server):
        self.url = f"{server.api_url}/api/v1"
        session = self.post("create_session", {"tags": [], "sdk_version": "0.38.0", "type": "create_session"})
        opened = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": server.base_model}
        self.sampler = self.post("create_sampling_session", opened)["sampling_session_id"]
        self.numbers = count(1)

    def open(self, path, body):
        headers = {"Content-Type": "application/json", "X-API-Key": "tml-test"}
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=120)

    def post(self, path, body):
        with self.open(path, body) as answer:
            return json.load(answer)

    def sample(self, **params):
        """Draw two samples; return the tokens of each."""
        body = {
            "sampling_session_id": self.sampler,
            "seq_id": next(self.numbers),
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [17, 45, 99]}]},
            "sampling_params": {"max_tokens": 200, "seed": 7, **params},
        }
        future = self.post("asample", body)["request_id"]
        for _ in range(600):
            try:
                with self.open("retrieve_future", {"request_id": future}) as answer:
                    kind, found = answer.headers["Content-Type"], answer.read()
            except urllib.error.HTTPError as error:
                assert error.code == 408, error.read()
                continue
            if kind.startswith("application/x-protobuf"):
                response = pb.SampleResponse.FromString(found)
                return [memoryview(one.tokens).cast("i").tolist() for one in response.sequences]
            assert "error" not in json.loads(found), found
            time.sleep(0.1)
        raise AssertionError("no answer")


@pytest.fixture(scope="module")
def client(server):
    return Client(server)


@pytest.fixture(scope="module")
def text(server):
    tokenizer = Tokenizer.from_file(str(next(server.data_dir.rglob("tokenizer.json"))))
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def test_an_answer_is_json_of_its_schema(client, text):
    constraint = {"type": "json_schema", "value": SCHEMA}
    first = client.sample(constraint=constraint)
    for tokens in first:
        found = json.loads(text(tokens))
        assert list(found) == ["city", "seen", "year"]
        assert found["city"] in ("Paris", "Oslo") and type(found["seen"]) is bool and 1900 <= found["year"] <= 2100
    assert client.sample(constraint=constraint) == first, "the seed decides"
    assert all(
        re.fullmatch("(ab){2,5}c", text(one))
        for one in client.sample(constraint={"type": "regex", "value": "(ab){2,5}c"})
    )


def test_penalties_and_biases_determine_the_sampled_tokens(client):
    options = {"max_tokens": 30, "stop": [], "temperature": 0.0}
    once = client.sample(repetition_penalty=100.0, **options)
    assert all(len(set(tokens)) == 30 for tokens in once)
    assert client.sample(logit_bias={"5": 100, "6": -100}, **options) == [[5] * 30] * 2
    assert client.sample(min_p=1.0, **{**options, "temperature": 1.0}) == client.sample(**options), "the most likely"
    assert client.sample(frequency_penalty=2.0, presence_penalty=2.0, logit_bias={"5": 20}, **options) != [[5] * 30] * 2


def test_a_killed_worker_changes_no_token(server, client):
    said = {"max_tokens": 300, "stop": [], "temperature": 1.0, "frequency_penalty": 1.0, "logit_bias": {"9": 4}}
    held = {"constraint": {"type": "regex", "value": "(ab|c){60}"}}
    before = [client.sample(**said), client.sample(**held)]
    with ThreadPoolExecutor(2) as threads:
        again = [threads.submit(client.sample, **options) for options in (said, held)]
        time.sleep(0.3)  # results must be equal whenever the kill comes
        server.kill()
        assert [one.result() for one in again] == before
