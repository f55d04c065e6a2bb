"""A training run with a history, as a client of the server reads it."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import orjson

from tinkerflow.backend.catalog.receipt import Link
from tinkerflow.backend.core.errors import NotFoundError, ServerError, UserError
from tinkerflow.backend.spec.checkpoint import CheckpointPath
from tinkerflow.backend.spec.history import last_request
from tinkerflow.backend.wire import tinker_pb2 as pb

_HEARTBEAT_SECONDS = 20.0
_AWAY_SECONDS = 120.0  # how long a server may be away
_AGAIN = (429, 502, 503, 504)  # statuses after which a request is repeated
LOADS = ("load_model", "load_weights")


# ------------------------------------------------------------------ the server
class Api:
    """The server's API, for one session, which is created on first use and finished at the end."""

    def __init__(self, url: str, key: str) -> None:
        """url, key: the server's."""
        self.url = url
        headers = {"X-API-Key": key}
        self._http = httpx.Client(base_url=f"{url}/api/v1/", headers=headers, timeout=90, follow_redirects=True)
        self._session: str | None = None
        self._beat = 0.0
        self._answered = False
        self._models = 0

    def __enter__(self) -> Api:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if self._session is not None:
                reason = "success" if kind is None else "errored"
                self.ask(f"sessions/{self._session}/finish", {"reason": {"type": reason}})
        finally:
            self._http.close()

    def ask(self, path: str, body: Mapping[str, Any] | bytes | None = None, **params: Any) -> Any:
        """The JSON answer to a POST of `body`, or to a GET without one.

        A server that has answered before may be away for two minutes. ServerError: the server does not answer.
        """
        return orjson.loads(self._ask(path, body, **params))

    def submit(self, path: str, body: Mapping[str, Any] | bytes) -> str:
        """Send a request of the session. Returns its id."""
        self._keep_alive()
        return str(self.ask(path, body)["request_id"])

    def result(self, request_id: str) -> bytes:
        """Wait for a result. Returns its bytes. UserError: the request failed."""
        while True:
            self._keep_alive()
            answer = self._ask("retrieve_future", {"request_id": request_id})
            if not answer.startswith(b"{"):
                return answer
            values = orjson.loads(answer)
            if "error" in values:
                raise UserError(str(values["error"]))
            if values.get("type") != "try_again":
                return answer

    def new_model(self, operation: str, body: Mapping[str, Any]) -> str:
        """Create a model with `create_model` or `load_weights`. Returns its id."""
        if self._session is None:
            session = {"sdk_version": "tinkerflow", "tags": ["rerun"]}
            self._session = str(self.ask("create_session", session)["session_id"])
        address = {"session_id": self._session, "model_seq_id": self._models}
        self._models += 1
        self._keep_alive()
        accepted = self.ask(operation, {**body, **address})
        self.result(accepted["request_id"])
        return str(accepted["model_id"])

    def unload(self, model_id: str) -> None:
        """Unload a model of the session, and wait until it no longer counts toward max_live_models."""
        self.result(self.ask("unload_model", {"model_id": model_id})["request_id"])

    def _keep_alive(self) -> None:
        if self._session is not None and time.monotonic() - self._beat > _HEARTBEAT_SECONDS:
            self.ask("session_heartbeat", {"session_id": self._session})
            self._beat = time.monotonic()

    def _ask(self, path: str, body: Mapping[str, Any] | bytes | None, **params: Any) -> bytes:
        content = orjson.dumps(body) if isinstance(body, Mapping) else body
        kind = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        until = time.monotonic() + _AWAY_SECONDS
        while True:
            try:
                answer = self._http.request(
                    "GET" if body is None else "POST",
                    path,
                    content=content,
                    headers={"Content-Type": kind},
                    params=params,
                )
            except httpx.TransportError as error:
                if not self._answered or time.monotonic() > until:
                    fix = "start it with `tinkerflow up`, or set TINKER_BASE_URL"
                    raise ServerError(f"no server answers at {self.url} ({error}): {fix}") from error
                time.sleep(0.5)
                continue
            self._answered = True
            if answer.is_success:
                return answer.content
            if answer.status_code not in _AGAIN or time.monotonic() > until:
                kind_of_error = {404: NotFoundError}.get(answer.status_code, UserError)
                raise (ServerError if answer.status_code >= 500 else kind_of_error)(_reason(answer))
            time.sleep(0.5)


class NewRun:
    """A new model of the session, with a counter of its requests. id: the model's id."""

    def __init__(self, api: Api, operation: str, body: Mapping[str, Any]) -> None:
        """Create the model with `create_model` or `load_weights`."""
        self._api, self.id, self._made = api, api.new_model(operation, body), 0

    def submit(self, kind: str, body: pb.ForwardBackwardRequest | Mapping[str, Any]) -> str:
        """Send the next request of the model. Returns its id."""
        self._made += 1
        if isinstance(body, Mapping):
            return self._api.submit(kind, {**body, "model_id": self.id, "seq_id": self._made})
        body.model_id, body.seq_id = self.id, self._made
        return self._api.submit(kind, body.SerializeToString())

    def save(self, name: str) -> str:
        """Save the state of the model. Returns its path."""
        return str(orjson.loads(self._api.result(self.submit("save_weights", {"path": name})))["path"])


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]


# ------------------------------------------------------------------ the history
@dataclass(frozen=True)
class RecordedRequest:
    """A request of the history, with its payload decoded from base64. step: the optimizer step that it belongs to."""

    seq_id: int
    request_id: str
    kind: str
    step: int
    payload: bytes
    result_hash: str
    error: str | None


@dataclass(frozen=True)
class RecordedRun:
    """A run with a history. about: its row, as the API describes it."""

    api: Api
    run_id: str
    about: Mapping[str, Any]

    @classmethod
    def find(cls, api: Api, run_id: str) -> RecordedRun:
        """Find a run. NotFoundError: the run is unknown, or has no history."""
        page = api.ask(f"training_runs/{quoted(run_id)}/history", payloads=False, after=2**62)
        return cls(api, run_id, page["run"])

    def requests(self) -> Iterator[RecordedRequest]:
        """The answered requests in order."""
        after: int | None = -1
        step = 1
        while after is not None:
            page = self._page(after=after)
            for row in page["requests"]:
                if row["kind"] in LOADS and row["error"] is None:
                    step = self._step_after_load(row["seq_id"])
                yield RecordedRequest(
                    row["seq_id"],
                    row["request_id"],
                    row["kind"],
                    row["step"] or step,
                    base64.b64decode(row["payload"]),
                    row["result_hash"],
                    row["error"],
                )
                step = row["step"] + 1 if row["step"] else step
            after = page["next"]

    def links(self, after: int | None = -1) -> Iterator[Link]:
        """The parts that a receipt covers of all requests with a seq_id above `after`."""
        names = ("seq_id", "kind", "step", "payload_hash", "result_hash", "error")
        return (Link(*(row[name] for name in names)) for row in self._rows(after))

    def last_request(self, path: CheckpointPath) -> int:
        """The seq_id of the last request in a checkpoint of the run. A name or step may have several: the last counts.

        NotFoundError: no request made the checkpoint.
        """
        rows = list(self._rows())
        if path.step is not None:
            last = last_request({row["seq_id"]: row["step"] for row in rows if row["step"] is not None}, path.step)
        else:
            made = (row["seq_id"] for row in rows if row["saves"] == str(path) and row["error"] is None)
            last = max(made, default=None)
        if last is None:
            raise NotFoundError(f"checkpoint {str(path)!r}: the history of its run has no request that made it")
        return last

    def made(self) -> dict[int, int]:
        """The seq_id of the optim_step that made each step. After a load, a run may make a step again: the last counts.

        The steps are in the order in which they were first made. A run that began with a state continues its steps.
        """
        return {link.step: link.seq_id for link in self.links() if link.step is not None}

    def _step_after_load(self, seq_id: int) -> int:
        """The step of the first optim_step after a load, which continues the steps of the state; 1 if none."""
        for link in self.links(seq_id):
            if link.step is not None:
                return link.step
            if link.kind in LOADS and link.error is None:
                break
        return 1

    def _rows(self, after: int | None = -1) -> Iterator[Any]:
        """All requests with a seq_id above `after`, without payloads, as the API describes them."""
        while after is not None:
            page = self._page(after=after, payloads=False)
            yield from page["requests"]
            after = page["next"]

    def _page(self, **params: Any) -> Any:
        return self.api.ask(f"training_runs/{quoted(self.run_id)}/history", **params)

    def fork(self, step: int, metadata: Mapping[str, str]) -> NewRun:
        """Create a run that begins with the state after `step`, and with the optimizer's state."""
        path = f"tinker://{self.run_id}/weights/@{step}"
        return NewRun(self.api, "load_weights", {"path": path, "optimizer": True, "user_metadata": metadata})


def quoted(run_id: str) -> str:
    """The id, escaped for a URL."""
    return quote(run_id, safe="")
