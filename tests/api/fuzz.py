"""Valid requests with a few random defects, shared by a short test and a long benchmark.

A `Target` has one valid request for each endpoint that takes a body. Hypothesis draws `Attack`s, which break them.
Each answer must arrive in time and must not be a 5xx. An accepted operation must resolve its future.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import zstandard
from hypothesis import strategies as st
from tests.wire.test_custom_losses import GOOD as CUSTOM_LOSS

from tinkerflow.backend.wire import tinker_pb2 as pb

BASE, KEY = "tiny/bigram", "tml-fuzz"
ANSWERED_WITHIN = 60.0  # in seconds, enough on a busy machine; a longer wait is a hang
PROTO = "forward_backward"
MODEL_OPERATIONS = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights")

# ------------------------------------------------------------------ how to break things
NASTY = (
    None, True, 0, -1, 1.5, 2**31, 2**63, -(2**63) - 1, 2**64, 10**400, math.nan, math.inf, -math.inf, 1e308,
    "", "\0", "a\0b", "\ud800", "é" * 3000, "x" * 70_000, "1e5", "%00", "refused-e30", "sess-",
    "../../etc/passwd", "tinker://../weights/x", "tinker://a:b/weights/..", "tinker://",
    [], {}, [None], {"": None}, [[0, 1], [2]], {"type": "image", "data": "eA==", "format": "png"},
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(NASTY),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    ),
)


@dataclass(frozen=True)
class Edit:
    """One change of a JSON value: `put` another value at its part number `place`, `cut` that part, or `add` a field."""

    place: int
    what: str
    value: Any
    name: str


@dataclass(frozen=True)
class Bytes:
    """One change of bytes: at the fraction `where`, `flip` a bit, `cut` the rest or `add` bytes; or `double` all."""

    where: float
    what: str
    some: bytes


@dataclass(frozen=True)
class TensorEdit:
    """A tensor that replaces one input of a forward_backward."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    dense: bytes | None
    crow: tuple[int, ...]
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Attack:
    """One broken request. `endpoint` is `PROTO`, or the number of a valid request (see `Target.endpoints`)."""

    endpoint: str
    edits: tuple[Edit, ...] = ()
    tensors: tuple[TensorEdit, ...] = ()
    loss: str = "cross_entropy"
    bytes_: tuple[Bytes, ...] = ()
    encoding: str | None = None
    compressed: bool = False


_INDICES = st.lists(st.integers(-2, 5) | st.sampled_from([2**40, -(2**63)]), max_size=4).map(tuple)
_EDITS = st.lists(
    st.builds(
        Edit,
        st.integers(0, 60),
        st.sampled_from(["put", "put", "put", "cut", "add"]),
        VALUES,
        st.sampled_from(["type", "seq_id", "x", "\0", "ttl_seconds", "weights_access_token", "model_id", "session_id"]),
    ),
    max_size=3,
).map(tuple)
_BYTES = st.lists(
    st.builds(Bytes, st.floats(0, 1), st.sampled_from(["flip", "cut", "add", "double"]), st.binary(max_size=12)),
    max_size=3,
).map(tuple)
_TENSORS = st.lists(
    st.builds(
        TensorEdit,
        st.sampled_from(["target_tokens", "weights", "advantages", "logprobs", "nonsense", ""]),
        st.sampled_from([0, 1, 2, 3, 4, 99]),
        st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**62]), max_size=3).map(tuple),
        st.none() | st.binary(max_size=40),
        _INDICES,
        _INDICES,
    ),
    max_size=2,
).map(tuple)
_ENCODINGS = st.sampled_from([None, None, None, "zstd", "gzip", "identity"])


def attacks(json_endpoints: list[str]) -> st.SearchStrategy[Attack]:
    """Broken requests to these endpoints and to forward_backward."""
    of_json = st.builds(
        Attack,
        st.sampled_from(json_endpoints),
        edits=_EDITS,
        bytes_=st.just(()) | _BYTES,
        encoding=_ENCODINGS,
        compressed=st.booleans(),
    )
    of_proto = st.builds(
        Attack,
        st.just(PROTO),
        tensors=_TENSORS,
        loss=st.sampled_from(["cross_entropy", "ppo", "custom", "stable_reinforce", "gspo", "nonsense", ""]),
        bytes_=st.just(()) | _BYTES,
        encoding=_ENCODINGS,
        compressed=st.booleans(),
    )
    return st.one_of(of_json, of_json, of_proto)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All parts of a JSON value, each as its container and its key there."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [place for key in keys for place in [(value, key), *(_places(value[key]) if _holds(value[key]) else [])]]


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)


def edited(body: dict[str, Any], edits: tuple[Edit, ...]) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for edit in edits:
        places = _places(body)
        if edit.what == "add" or not places:
            body[edit.name] = edit.value
            continue
        holder, key = places[edit.place % len(places)]
        if edit.what == "put":
            holder[key] = copy.deepcopy(edit.value)
        else:
            del holder[key]
    return body


def broken(content: bytes, changes: tuple[Bytes, ...]) -> bytes:
    for change in changes:
        at = int(change.where * len(content))
        match change.what:
            case "flip" if at < len(content):
                content = content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]
            case "cut":
                content = content[:at]
            case "add":
                content = content[:at] + change.some + content[at:]
            case "double":
                content = content + content
    return content


# ------------------------------------------------------------------ the server under attack
@dataclass
class Target:
    """A server with one object of each kind, and valid requests for it."""

    http: httpx.Client
    url: str
    seq: int = 1  # the model's next sequence id
    sample_seq: int = 0
    ids: dict[str, str] = field(default_factory=dict)
    sent: int = 0
    statuses: dict[int, int] = field(default_factory=dict)

    def post(self, path: str, body: Any) -> Any:
        """Send a valid request, and return its answer."""
        answer = self.http.post(f"{self.url}/api/v1/{path}", json=body, headers={"X-API-Key": KEY})
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        return answer.json()

    def prepare(self) -> None:
        """Create one object of each kind that has an id."""
        session = self.post("create_session", {"sdk_version": "0", "tags": []})["session_id"]
        done = self.post("create_session", {"sdk_version": "0", "tags": []})["session_id"]
        made = self.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": BASE})
        opening = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = self.post("create_sampling_session", opening)["sampling_session_id"]
        self.ids = {"session": session, "finished": done, "model": made["model_id"], "sampler": sampler}
        save = self.post("save_weights", {"model_id": made["model_id"], "seq_id": self.seq, "path": "first"})
        self.seq += 1
        self.ids |= {"request": save["request_id"], "checkpoint": str(self.answer(save["request_id"])["path"])}

    def valid(self) -> dict[str, dict[str, Any]]:
        """Valid JSON bodies by path, with the current sequence ids."""
        ids = self.ids
        on_model = {"model_id": ids["model"], "seq_id": self.seq}
        checkpoint = ids["checkpoint"].removeprefix("tinker://").split("/")
        one = f"training_runs/{quote(checkpoint[0])}/checkpoints/{checkpoint[1]}/{checkpoint[2]}"
        chunk = {"type": "encoded_text", "tokens": [1, 2, 3]}
        return {
            "client/config": {"sdk_version": "0.38.0"},
            "auth/token": {},
            "create_session": {"sdk_version": "0", "tags": ["a"], "user_metadata": {"a": "b"}, "project_id": "p"},
            "session_heartbeat": {"session_id": ids["session"]},
            f"sessions/{ids['finished']}/finish": {"reason": {"type": "success"}, "detail": "done"},
            f"sessions/{ids['session']}/project": {"project_id": "p"},
            "sessions/search": {
                "session_id": ids["session"], "user_metadata": {"a": "b"}, "owner": {"type": "own"},
                "statuses": [{"type": "active"}], "limit": 5,
                "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "s"},
            },
            "checkpoints/search": {
                "project_ids": None, "user_metadata": {"a": "b"}, "checkpoint_type": "training",
                "owner": {"type": "own"}, "base_models": [BASE], "limit": 5,
                "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_checkpoint_uuid": "tinker://a/weights/b"},
            },
            "telemetry": {"session_id": "s", "events": [{"event": "GENERIC_EVENT", "error_message": "m"}]},
            "create_sampling_session": {
                "session_id": ids["session"], "sampling_session_seq_id": 0, "base_model": BASE, "model_path": None,
            },
            "join_sampling_session": {"sampling_session_id": ids["sampler"]},
            "create_model": {
                "session_id": ids["session"], "model_seq_id": 0, "base_model": BASE, "user_metadata": {"a": "b"},
                "lora_config": {"rank": 4, "seed": 1, "train_mlp": True}, "optimizer_config": {"type": "adamw"},
            },
            "get_info": {"model_id": ids["model"]},
            "optim_step": {**on_model, "adam_params": {"learning_rate": 0.1, "beta1": 0.9, "grad_clip_norm": 1.0}},
            "save_weights": {
                **on_model, "path": "again", "ttl_seconds": 3600, "overwrite": True, "user_metadata": {"a": "b"},
            },
            "save_weights_for_sampler": {**on_model, "sampling_session_seq_id": self.seq, "kind": "snapshot"},
            "save_weights_external": {**on_model, "path": f"e{self.seq}", "age_encryption_recipients": []},
            "load_weights": {
                **on_model, "path": ids["checkpoint"], "optimizer": False, "weights_access_token": "t",
            },
            "create_custom_loss": {**CUSTOM_LOSS, "session_id": ids["session"], "custom_loss_seq_id": self.seq},
            "asample": {
                "sampling_session_id": ids["sampler"], "seq_id": self.sample_seq, "num_samples": 2,
                "prompt": {"chunks": [chunk]}, "prompt_logprobs": True, "topk_prompt_logprobs": 2,
                "sampling_params": {"max_tokens": 3, "seed": 1, "temperature": 1.0, "top_k": -1, "stop": ["x"]},
            },
            "retrieve_future": {"request_id": ids["request"], "allow_metadata_only": True},
            "retrieve_futures": {
                "target": {"sampling_session_id": ids["sampler"], "cloned_sampler_id": 0},
                "prev_cursor": 0, "timeout": 0.0, "retrieved_request_ids": [ids["request"]],
            },
            "cancel_future": {"request_id": "refused-"},
            "weights_info": {"tinker_path": ids["checkpoint"]},
            "copy_weights": {"source_path": ids["checkpoint"], "ttl_seconds": 3600},
            "external_weights_upload_start": {"base_model": BASE, "lora_config": {"rank": 4}},
            "external_weights_upload_finish": {"upload_id": "upload-1"},
            f"{one}/ttl": {"ttl_seconds": None},
            f"training_runs/{quote(ids['model'])}/metrics": {"steps": [{"step": 1, "values": {"reward": 0.5}}]},
            **self.of_other_clients(),
        }  # fmt: skip

    def of_other_clients(self) -> dict[str, dict[str, Any]]:
        """Valid JSON bodies by path, for the endpoints of other vendors' clients."""
        said = {"messages": [{"role": "user", "content": "abc"}], "model": BASE, "max_tokens": 3}
        return {
            "/v1/completions": {
                "model": BASE, "prompt": [[2, 3], [4]], "max_tokens": 3, "n": 2, "seed": 1, "temperature": 0.5,
                "top_p": 0.9, "stop": ["ab"], "logprobs": 2, "echo": True, "stop_token_ids": [3],
                "logit_bias": {"3": 1.0}, "return_token_ids": True, "presence_penalty": 0.1,
            },
            "/v1/completions#stream": {
                "model": BASE, "prompt": "abc", "max_tokens": 3, "stream": True, "logprobs": 1,
                "stream_options": {"include_usage": True},
            },
            "/v1/chat/completions": {**said, "stream": False, "n": 1, "logprobs": True, "top_logprobs": 2},
            "/v1/messages": {**said, "system": "s", "stop_sequences": ["x"]},
            "/v1/messages/count_tokens": {"model": BASE, "messages": said["messages"]},
            "/v1/feedback": {"id": self.ids["request"], "reward": 1.0, "label": "good", "text": "t"},
        }  # fmt: skip

    def launch(self, attack: Attack) -> None:
        """Send a broken request, and check the rules for all answers."""
        if attack.endpoint == PROTO:
            path, content, media = PROTO, self._message(attack), "application/x-protobuf"
        else:
            path, body = list(self.valid().items())[self._place(attack.endpoint)]
            content, media = json.dumps(edited(body, attack.edits)).encode(), "application/json"
        content = broken(content, attack.bytes_)
        if attack.compressed:
            content = zstandard.ZstdCompressor().compress(content)
        headers = {"X-API-Key": KEY, "Content-Type": media}
        if attack.encoding or attack.compressed:
            headers["Content-Encoding"] = attack.encoding or "zstd"
        method = "PUT" if path.endswith(("/ttl", "/project")) else "POST"
        answer = self.request(method, path, content=content, headers=headers)
        if path in (PROTO, *MODEL_OPERATIONS) or path == "asample":
            assert path != PROTO or answer.status_code == 200, "a refused chunk hangs the client"
            self._settle(path, answer)

    def endpoints(self) -> list[str]:
        """The choices for `attacks`: numbers of the requests in `valid`, whose paths contain ids."""
        return [str(n) for n in range(len(self.valid()))]

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send one request. AssertionError: the answer is a 5xx, or does not arrive in time."""
        try:
            whole = path.partition("#")[0] if path.startswith("/") else f"/api/v1/{path}"
            answer = self.http.request(method, f"{self.url}{whole}", timeout=ANSWERED_WITHIN, **more)
        except httpx.TimeoutException as e:
            raise AssertionError(f"{method} {path}: no answer within {ANSWERED_WITHIN:g} s") from e
        self.note(answer.status_code)
        assert answer.status_code < 500, (method, path, answer.status_code, answer.text)
        return answer

    def note(self, status: int) -> None:
        self.sent += 1
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def answer(self, request_id: str) -> Any:
        """The result of an accepted operation: its JSON, or {} for protobuf."""
        until = time.monotonic() + ANSWERED_WITHIN
        while time.monotonic() < until:
            body = {"request_id": request_id, "allow_metadata_only": False}
            polled = self.http.post(f"{self.url}/api/v1/retrieve_future", json=body, headers={"X-API-Key": KEY})
            assert polled.status_code == 200, (request_id, polled.status_code, polled.text)
            if polled.headers["content-type"] == "application/x-protobuf":
                return {}
            if polled.json().get("type") != "try_again":
                return polled.json()
        raise AssertionError(f"request {request_id} was never answered")

    def _place(self, endpoint: str) -> int:
        return int(endpoint) % len(self.valid())

    def _settle(self, path: str, answer: httpx.Response) -> None:
        """Use the sequence id for a valid request, unless the broken one has used it. Either must be answered."""
        if path == "asample":
            good = {**self.valid()["asample"], "sampling_params": {"max_tokens": 1}, "num_samples": 1}
        else:
            path, good = "optim_step", {"model_id": self.ids["model"], "seq_id": self.seq, "adam_params": {}}
        headers = {"X-API-Key": KEY}
        second = self.http.post(f"{self.url}/api/v1/{path}", json=good, headers=headers)
        if second.status_code == 200:
            after = self.answer(second.json()["request_id"])
            assert "error" not in after, after
        else:
            assert second.status_code == 422 and "used before" in second.text, (path, second.status_code, second.text)
            assert answer.status_code == 200, answer.text
            self.answer(answer.json()["request_id"])
        if path == "asample":
            self.sample_seq += 1
        else:
            self.seq += 1

    def _message(self, attack: Attack) -> bytes:
        message = pb.ForwardBackwardRequest(model_id=self.ids["model"], seq_id=self.seq, loss_fn=attack.loss)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([1, 2, 3], np.int32).tobytes()
        put: Callable[[str, Any, int], None] = lambda name, values, dtype: _dense(datum, name, values, dtype)  # noqa: E731
        put("target_tokens", np.array([2, 3, 4]), 2)
        put("weights", np.ones(3, np.float32), 1)
        for edit in attack.tensors:
            tensor = datum.loss_fn_inputs[edit.name]
            tensor.dtype = edit.dtype
            tensor.shape[:] = edit.shape
            if edit.dense is not None:
                tensor.dense = edit.dense
            else:
                tensor.sparse_csr.values = bytes(4 * len(edit.columns))
                tensor.sparse_csr.crow_indices = np.array(edit.crow, np.int64).tobytes()
                tensor.sparse_csr.col_indices = np.array(edit.columns, np.int64).tobytes()
        return bytes(message.SerializeToString())


def _dense(datum: Any, name: str, values: Any, dtype: int) -> None:
    datum.loss_fn_inputs[name].dense, datum.loss_fn_inputs[name].dtype = values.tobytes(), dtype
