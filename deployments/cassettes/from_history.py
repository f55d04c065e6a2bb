"""Make a cassette from the history of a training run: its requests, and results that are computed again.

The history (docs/history.md) contains the body of each request, but only the digest of each result. So the run is
executed again, as `tinkerflow rerun` does, and each result must match the recorded digest. The cassette contains the
ids of the recorded run, so a program receives the same bytes as the original one.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.core.ids import CheckpointKind, sampler_id
from tinkerflow.backend.spec.checkpoint import CheckpointPath
from tinkerflow.backend.spec.history import Kind, digest
from tinkerflow.backend.wire import (
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    encode_loaded,
    encode_model_created,
    encode_sampler_opened,
    encode_saved,
)
from tinkerflow.deployments.cassettes.file import CassetteWriter, Exchange, FutureResult
from tinkerflow.deployments.cassettes.record import tokenizer_of
from tinkerflow.deployments.cassettes.requests import API, without_secrets
from tinkerflow.deployments.recorded_run import RecordedRequest, RecordedRun
from tinkerflow.deployments.rerun import Changes, Rerun

_JSON, _PROTOBUF = "application/json", "application/x-protobuf"
_ENDPOINTS = {
    Kind.LOAD_MODEL: "load_weights",
    Kind.FORWARD: "forward_backward",
    Kind.SAVE_FOR_SAMPLER: "save_weights_for_sampler",
}
_FORWARD = (Kind.FORWARD, Kind.FORWARD_BACKWARD)
_COMPUTED = (*_FORWARD, Kind.OPTIM_STEP)


@dataclass(frozen=True)
class WrittenRun:
    """A summary of a cassette. requests: how many a replay compares. missing: lines for people on missing results."""

    requests: int
    missing: list[str]


def write_run(run: RecordedRun, writer: CassetteWriter) -> WrittenRun:
    """Write the requests and results of a run into a cassette. The server executes the run again, as a new run.

    UserError: a result differs from the recorded one; the text names its step. NotFoundError: the history does not
    begin with the creation of the run. Failed requests raise the errors of `Rerun`.
    """
    return _RunWriter(run, writer).write()


class _RunWriter:
    def __init__(self, run: RecordedRun, writer: CassetteWriter) -> None:
        self._run, self._api, self._writer = run, run.api, writer
        self._session: dict[str, Any] = run.about["session"]
        self._number = 0
        self._missing: list[str] = []
        self._loaded: list[str] = []  # paths of checkpoints

    def write(self) -> WrittenRun:
        Rerun(self._run, Changes(), on_result=self._keep).execute()
        flags = orjson.dumps(self._api.ask("client/config", {"sdk_version": "tinkerflow"}))
        self._writer.write(Exchange(0, "POST", f"{API}client/config", b"", 200, _JSON, flags))
        session_id = self._session["session_id"]
        described = {name: self._session[name] for name in ("tags", "user_metadata", "project_id", "display_name")}
        created = {"type": "create_session", "session_id": session_id}
        self._exchange("create_session", orjson.dumps({**described, "type": "create_session"}), created)
        for recorded in self._run.requests():
            self._request(recorded)
            if recorded.seq_id == 0:
                about = {"type": "get_info", "model_id": self._run.run_id}
                if files := tokenizer_of(self._ask_again("POST", "get_info", about), set()):
                    self._writer.write(files)
        self._ask_again("GET", "get_server_capabilities")
        for path in self._loaded:
            with suppress(NotFoundError):  # the checkpoint was deleted
                self._ask_again("POST", "weights_info", {"tinker_path": path})
        samplers = self._api.ask(f"sessions/{session_id}")["sampler_ids"]
        if samplers:
            self._missing.append(
                f"the samples of {len(samplers)} samplers are missing, because the history of a run contains none: "
                "`tinkerflow cassette record -o FILE -- COMMAND` records them while the program runs"
            )
        return WrittenRun(self._number, self._missing)

    # ------------------------------------------------------------------ requests
    def _exchange(self, name: str, body: bytes, answer: Any, method: str = "POST") -> None:
        self._number += 1
        content = answer if isinstance(answer, bytes) else orjson.dumps(answer)
        self._writer.write(Exchange(self._number, method, API + name, body, 200, _JSON, content))

    def _ask_again(self, method: str, name: str, body: Any = None) -> bytes:
        """Record a read-only request with the server's current answer."""
        answer = orjson.dumps(self._api.ask(name, body))
        self._exchange(name, b"" if body is None else orjson.dumps(body), answer, method)
        return answer

    def _request(self, recorded: RecordedRequest) -> None:
        kind = Kind(recorded.kind)
        body = recorded.payload if kind in _FORWARD else without_secrets(recorded.payload, set())
        future, name = recorded.request_id, _ENDPOINTS.get(kind, kind.value)
        self._exchange(name, body, {"request_id": future, "model_id": self._run.run_id})
        if recorded.error is not None:
            failure = orjson.dumps({"error": recorded.error, "category": "user"})  # a history records no categories
            self._writer.write(FutureResult(future, _JSON, failure))
        elif kind not in _COMPUTED:
            self._keep_json(recorded, self._result(kind, recorded))

    # ------------------------------------------------------------------ results
    def _keep(self, recorded: RecordedRequest, result: bytes) -> None:
        """Write a recomputed result. UserError: the result differs from the recorded one."""
        if recorded.kind not in _COMPUTED:
            return  # these results name the new run
        if recorded.result_hash and digest(result) != recorded.result_hash:
            raise UserError(
                f"the result of {recorded.kind} of step {recorded.step} (request {recorded.seq_id}) differs when "
                "it is computed again, so there is no cassette: results are equal on the same type of machine "
                "with the same release and settings"
            )
        media = _JSON if recorded.kind == Kind.OPTIM_STEP else _PROTOBUF
        self._writer.write(FutureResult(recorded.request_id, media, result))

    def _keep_json(self, recorded: RecordedRequest, result: bytes) -> None:
        """Write a result that names the run, unless it differs from the recorded one."""
        if recorded.result_hash in ("", digest(result)):
            self._writer.write(FutureResult(recorded.request_id, _JSON, result))
        else:
            self._missing.append(
                f"the result of {recorded.kind} (request {recorded.seq_id}) is not in it: its checkpoint has changed"
            )

    def _result(self, kind: Kind, recorded: RecordedRequest) -> bytes:
        run_id, payload = self._run.run_id, recorded.payload
        match kind:
            case Kind.CREATE_MODEL:
                return encode_model_created(run_id)
            case Kind.LOAD_MODEL | Kind.LOAD_WEIGHTS:
                self._loaded.append(path := orjson.loads(payload)["path"])
                return encode_loaded(run_id, path)
            case Kind.SAVE_WEIGHTS:
                return encode_saved(self._path(CheckpointKind.WEIGHTS, SaveWeights.decode(payload).name))
            case Kind.SAVE_EXTERNAL:
                path = self._path(CheckpointKind.EXTERNAL_WEIGHTS, SaveExternal.decode(payload).name)
                return encode_saved(path, kind="save_weights_external", size_bytes=self._size(path))
        save = SaveForSampler.decode(payload)
        if save.sampling_session_seq_id is not None:
            return encode_sampler_opened(sampler_id(self._session["session_id"], save.sampling_session_seq_id))
        path = self._path(CheckpointKind.SAMPLER_WEIGHTS, str(save.name))
        return encode_saved(path, kind="save_weights_for_sampler")

    def _path(self, kind: CheckpointKind, name: str) -> str:
        return str(CheckpointPath(self._run.run_id, kind, name))

    def _size(self, path: str) -> int | None:
        """The size of a checkpoint in bytes; None if the checkpoint was deleted."""
        listed = self._api.ask(f"training_runs/{self._run.run_id}/checkpoints")["checkpoints"]
        return next((saved["size_bytes"] for saved in listed if saved["tinker_path"] == path), None)
