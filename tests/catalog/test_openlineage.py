"""Events of training runs, written by the real library to a file and to a server that fails, and read back as JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import pytest
from tests.journal.conftest import Scene
from tests.manual_clock import ManualClock

from tinkerflow.backend.catalog.openlineage import LineageMirror, run_uuid
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import CheckpointKind, CheckpointSaved, Journal, Kind, ModelState, NewRequest
from tinkerflow.backend.store import Store
from tinkerflow.backend.tracking.journal_runs import alone
from tinkerflow.backend.tracking.mirror import TrackerError
from tinkerflow.backend.wire import tinker_pb2 as pb

pytest.importorskip("openlineage.client", reason="the extra openlineage is not installed")


@dataclass
class Service:
    """A journal and a store without an engine. Tests answer the requests."""

    folder: Path
    journal: Journal
    clock: ManualClock
    store: Store
    _seqs: dict[str, int] = field(default_factory=dict)

    def run(self, **said: Any) -> str:
        scene = Scene(self.journal)
        self.clock.advance(1.0)
        return scene.model(scene.session(), base_model="Qwen/Qwen3-8B@main", **said)

    def answer(self, run: str, kind: Kind, payload: bytes, *effects: Any) -> None:
        self.clock.advance(1.0)
        seq = self._seqs[run] = self._seqs.get(run, 0) + 1
        request = NewRequest(kind, "local", payload, f"content {seq}", model_id=run, seq_id=seq)
        self.journal.requests.submit(request)
        (pending,) = self.journal.requests.ready(run)
        self.journal.results.finish([pending.done(b"{}", "json", *effects)])

    def train(self, run: str, *tokens: int) -> None:
        """Train one step, with one row for each of these tokens."""
        rows = []
        for token in tokens:
            row = pb.Datum()
            row.model_input.add().encoded_text.tokens = token.to_bytes(4, "little") * 3
            rows.append(row)
        self.answer(run, Kind.FORWARD_BACKWARD, pb.ForwardBackwardRequest(data=rows).SerializeToString())
        self.answer(run, Kind.OPTIM_STEP, b"{}")

    def save(self, run: str, name: str) -> str:
        path, kind = f"tinker://{run}/weights/{name}", CheckpointKind.WEIGHTS
        spec = ("Qwen/Qwen3-8B", 8, True, True, True, 1, 1000)
        saved = CheckpointSaved(path, run, kind, name, "local", *spec, attempt=f"{name}-1")
        self.answer(run, Kind.SAVE_WEIGHTS, orjson.dumps({"path": name}), saved)
        return path

    def mirror(self, url: str = "", *projects: str) -> LineageMirror:
        return LineageMirror(url or self.file.as_uri(), self.journal, self.store, self.folder / "tracking", projects)

    @property
    def file(self) -> Path:
        return self.folder / "lineage.ndjson"

    def events(self) -> list[Any]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


@pytest.fixture
def service(tmp_path: Path, journal_template: Path) -> Iterator[Service]:
    shutil.copy(journal_template, tmp_path / "journal.db")
    clock = ManualClock()
    journal = Journal.open(f"sqlite:///{tmp_path / 'journal.db'}", clock=clock)
    yield Service(tmp_path, journal, clock, Store.open((tmp_path / "store").as_uri()))
    journal.close()


def named(datasets: list[Any]) -> list[str]:
    return [f"{one['namespace']}:{one['name']}" for one in datasets]


def test_a_run_begins_saves_and_ends_with_its_data_and_its_checkpoints(service: Service) -> None:
    first = service.run(history=True, user_metadata={"name": "sums"})
    service.train(first, 5, 5, 6)
    path = service.save(first, "a")
    service.train(first, 7)
    second = service.run(origin=path, user_metadata={"data": "sha256:0a"})
    service.journal.models.end(first, ModelState.UNLOADED, "the end")
    service.journal.models.end(second, ModelState.LOST, "its snapshot is gone")
    service.mirror().once()
    events = service.events()
    began, saved, ended = (one for one in events if one["run"]["runId"] == run_uuid(first))
    assert [one["eventType"] for one in (began, saved, ended)] == ["START", "RUNNING", "COMPLETE"]
    assert UUID(run_uuid(first)).version == 5 and began["job"]["name"] == "sums"
    assert began["job"]["namespace"] == "tinkerflow/local" and began["outputs"] == []
    assert began["eventTime"] < saved["eventTime"] < ended["eventTime"] and "+00:00" in began["eventTime"]
    (base,) = began["inputs"]
    assert named([base]) == ["https://huggingface.co:Qwen/Qwen3-8B"]
    assert base["facets"]["version"]["datasetVersion"] == "main"

    _, data = saved["inputs"]
    assert named([data]) == [f"tinker:{first}/data"] and data["inputFacets"]["inputStatistics"]["rowCount"] == 3
    figures = data["inputFacets"]["tinkerflow_trainedData"]
    assert (figures["differentRows"], figures["tokens"], figures["steps"]) == (2, 9, 1)
    assert figures["_producer"].startswith("urn:tinkerflow:")
    assert figures["_schemaURL"].startswith("https://openlineage.io/spec/")
    (output,) = saved["outputs"]
    assert f"{output['namespace']}://{output['name']}" == path
    assert output["facets"]["version"]["datasetVersion"] == "a-1"
    assert output["facets"]["dataSource"]["uri"] == service.store.url
    assert output["outputFacets"]["outputStatistics"]["size"] == 1000
    at_end = ended["inputs"][1]
    assert at_end["inputFacets"]["inputStatistics"]["rowCount"] == 4
    versions = [one["facets"]["version"]["datasetVersion"] for one in (data, at_end)]
    assert len(set(versions)) == 2 and all(len(one) == 64 for one in versions)

    began, failed = (one for one in events if one["run"]["runId"] == run_uuid(second))
    assert (began["eventType"], failed["eventType"]) == ("START", "FAIL")
    assert named(began["inputs"])[1:] == [f"tinker:{first}/weights/a", f"tinker:{second}/data"]
    assert began["inputs"][2]["facets"]["version"]["datasetVersion"] == "sha256:0a"
    assert failed["run"]["facets"]["errorMessage"]["message"] == "lost: its snapshot is gone"


def test_events_are_sent_once_and_resent_unchanged_after_a_crash(service: Service) -> None:
    run = service.run(history=True)
    mirrored = service.mirror()
    mirrored.turn()
    service.train(run, 1)
    service.save(run, "a")
    mirrored.turn()
    mirrored.turn()
    service.save(run, "b")
    service.mirror().once()  # another process continues
    assert [one["eventType"] for one in service.events()] == ["START", "RUNNING", "RUNNING"]
    sent = service.folder / "tracking/openlineage/sent.txt"
    sent.write_text(sent.read_text()[:-3])  # the mirror was killed while it recorded the last event
    service.mirror().once()
    *_, last, again = service.events()
    assert last == again and named(last["outputs"]) == [f"tinker:{run}/weights/b"]
    service.journal.models.end(run, ModelState.UNLOADED, "the end")
    service.mirror().once()
    service.mirror().once()
    assert [one["eventType"] for one in service.events()][3:] == ["RUNNING", "COMPLETE"]


def test_checkpoint_event_waits_for_the_history_of_its_request(service: Service) -> None:
    run = service.run(history=True)
    service.train(run, 1)
    path = f"tinker://{run}/weights/a"
    spec = ("Qwen/Qwen3-8B", 8, True, True, True, 1, 1000)
    early = CheckpointSaved(path, run, CheckpointKind.WEIGHTS, "a", "local", *spec, attempt="early")
    service.journal.checkpoints.record_fork(early)
    mirrored = service.mirror()
    mirrored.turn()
    assert [one["eventType"] for one in service.events()] == ["START"]
    service.journal.models.end(run, ModelState.UNLOADED, "the end")
    mirrored.turn()
    assert [one["eventType"] for one in service.events()] == ["START", "RUNNING", "COMPLETE"]


def test_checkpoint_after_the_end_is_an_event_of_another_type(service: Service) -> None:
    run = service.run(history=True)
    service.train(run, 1)
    service.journal.models.end(run, ModelState.UNLOADED, "the end")
    service.mirror().once()
    spec = ("Qwen/Qwen3-8B", 8, True, True, True, 1, 1000)
    path = f"tinker://{run}/weights/@1"
    service.journal.checkpoints.record_fork(
        CheckpointSaved(path, run, CheckpointKind.WEIGHTS, "@1", "local", *spec, attempt="fork")
    )
    service.mirror().once()
    assert [one["eventType"] for one in service.events()] == ["START", "COMPLETE", "OTHER"]


class Receiver(HTTPServer):
    """An OpenLineage server that answers with `statuses`, and then with 201. It refuses the run `refused`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses: list[int] = []
        self.refused = ""
        self.received: list[Any] = []
        self.keys: set[str] = set()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.server.statuses.pop(0) if self.server.statuses else 201
        if event["run"]["runId"] == self.server.refused:
            status = 422
        if status == 201:
            self.server.received.append(event)
            self.server.keys.add(f"{self.path} {self.headers.get('Authorization')}")
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_server_gets_missed_events_and_a_refused_run_blocks_no_other(
    service: Service, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "secret")
    refused, other = service.run(), service.run()
    service.save(other, "a")
    receiver.statuses, url = [503], f"http://127.0.0.1:{receiver.server_port}"
    mirrored = service.mirror(url)
    with pytest.raises(TrackerError, match=f"event START of run {refused} was not sent: .*503"):
        mirrored.turn()
    receiver.refused = run_uuid(refused)
    with pytest.raises(TrackerError, match=f"event START of run {refused} was not sent: .*422"):
        mirrored.turn()
    assert [one["eventType"] for one in receiver.received] == ["START", "RUNNING"]
    assert receiver.keys == {"/api/v1/lineage Bearer secret"}
    service.save(other, "b")
    with pytest.raises(TrackerError, match=f"event START of run {refused} was not sent: .*422"):
        service.mirror(url).once()
    receiver.refused = ""
    service.mirror(url).once()
    assert [one["run"]["runId"] for one in receiver.received] == [run_uuid(other)] * 3 + [run_uuid(refused)]


def test_the_command_sends_the_events_of_a_service(service: Service) -> None:
    run = service.run()
    own = {"TINKERFLOW_DATA_DIR": str(service.folder), "TINKERFLOW_OPENLINEAGE_URL": service.file.as_uri()}
    words = [sys.executable, "-m", "tinkerflow", "track", "--once"]
    done = subprocess.run(words, env=os.environ | own, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert [one["run"]["runId"] for one in service.events()] == [run_uuid(run)]


def test_one_process_sends_the_runs_of_its_projects_only(service: Service) -> None:
    service.run()
    service.mirror("", "search").once()
    assert not service.file.exists()
    with alone(service.folder / "tracking/openlineage"), pytest.raises(UserError, match="another `tinkerflow track`"):
        service.mirror().once()
