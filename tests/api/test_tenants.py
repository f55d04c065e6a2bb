"""The tenant matrix: each route of the app treats another project's ids of all kinds like unknown ids.

The matrix is derived from the app's routes. A new route fails here until the tables below contain it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.api.conftest import BASE, Running
from tests.api.test_auth import routes_of
from tests.api.test_uploads import ASKED as UPLOAD
from tests.api.test_uploads import FILES as ADAPTER_FILES
from tests.catalog.test_peft_import import CONFIG as TINY
from tests.waiting import wait_for
from tests.wire.test_custom_losses import GOOD as CUSTOM_LOSS

from tinkerflow.api import console
from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.wire import tinker_pb2 as pb

NOBODYS = {
    "upload-": "upload-" + "0" * 16,
    "asset-": "asset-" + "0" * 32,
    "sess-": "sess-" + "0" * 16,
    "req-": "req-" + "0" * 16,
    "team-": "team-none",
}
PNG = b"\x89PNG\r\n\x1a\n"
_late = itertools.count(100)  # sequence ids of operations that need not be executed


@dataclass
class Person:
    """A key with its own project, and one object of each kind."""

    server: Running
    key: str
    ids: dict[str, str] = field(default_factory=dict)
    seq: int = 0

    def next_seq(self) -> int:
        """The next sequence id of the person's model."""
        self.seq += 1
        return self.seq

    def send(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request. body: JSON, or protobuf as bytes."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        url, headers = f"{self.server.url}{path if path[:1] == '/' else f'/api/v1/{path}'}", {"X-API-Key": self.key}
        return self.server.http.request(method, url, headers=headers, follow_redirects=False, **content)

    def outcome(self, method: str, path: str, body: Any = None, *, follow: bool = False) -> tuple[int, str]:
        """Send a request, and return its status and text. follow: return those of the future that the request opens."""
        answer = self.send(method, path, body)
        if answer.status_code == 200 and (follow or "refused-" in answer.text):
            return self.poll(answer.json()["request_id"])
        return answer.status_code, answer.text

    def poll(self, request_id: str) -> tuple[int, str]:
        """Wait for an operation, and return the status and text of its answer."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            answer = self.send("POST", "retrieve_future", {"request_id": request_id})
            if "try_again" not in answer.text:
                return answer.status_code, answer.text
        raise AssertionError(f"request {request_id} was never answered")

    def furnish(self, project: str) -> None:
        """Create one object of each kind that has an id."""
        model = self.server.model(self.key, history="true")
        session = model.split(":")[0]
        self.ids = {"project": project, "session": session, "model": model}
        for kind, path in (
            ("weights", "save_weights"),
            ("sampler_weights", "save_weights_for_sampler"),
            ("external_weights", "save_weights_external"),
        ):
            saved = self.send("POST", path, {"model_id": model, "seq_id": self.next_seq(), "path": "ck"}).json()
            assert kind in self.poll(saved["request_id"])[1]
            self.ids[kind] = f"tinker://{model}/{kind}/ck"
        step = {"model_id": model, "seq_id": self.next_seq(), "adam_params": {}}
        self.ids["request"] = self.send("POST", "optim_step", step).json()["request_id"]
        self.poll(self.ids["request"])
        opening = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        self.ids["sampler"] = self.send("POST", "create_sampling_session", opening).json()["sampling_session_id"]
        sampled = self.send("POST", "asample", sample(self.ids["sampler"], 0)).json()
        self.ids["sample"] = sampled["request_id"]
        self.poll(self.ids["sample"])
        loss = {**CUSTOM_LOSS, "session_id": session, "custom_loss_seq_id": 0}
        self.ids["loss_request"] = self.send("POST", "create_custom_loss", loss).json()["request_id"]
        self.ids["loss"] = f"{session}:loss:0"
        self.ids["asset"] = self.send("POST", "assets", PNG).json()["asset_id"]
        upload = self.send("POST", "external_weights_upload_start", UPLOAD).json()
        self.ids["upload"] = upload["upload_id"]
        for file, url in upload["urls"].items():
            assert self.server.http.put(url, content=ADAPTER_FILES[file]).status_code == 200


def sample(sampler: str, seq: int) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [2, 3]}]}
    return {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": {"max_tokens": 2}}


def chunk(model: str) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=next(_late), loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1], np.int32).tobytes()
    return bytes(message.SerializeToString())


CHECKPOINTS = ("weights", "sampler_weights", "external_weights")
Body = Callable[[str, Person], Any]  # a function that makes a body from an id and the sender


@dataclass(frozen=True)
class Probe:
    """A request body that names an object of this kind.

    follow: the error is in the result of a stored future. found: a search, which answers 200 and finds nothing.
    """

    kind: str
    body: Body
    follow: bool = False
    found: bool = False


def on_model(**more: Any) -> list[Probe]:
    return [Probe("model", lambda it, me: {"model_id": it, "seq_id": next(_late), **more})]


def in_session(**more: Any) -> Probe:
    return Probe("session", lambda it, me: {"session_id": it, **more})


def of_checkpoint(body: Body, *kinds: str, follow: bool = False) -> list[Probe]:
    return [Probe(kind, body, follow=follow) for kind in kinds or CHECKPOINTS]


def of_model(path: str) -> list[Probe]:
    more = {"max_tokens": 1} if path != "/v1/messages/count_tokens" else {}
    messages = [{"role": "user", "content": "b"}]
    return [
        Probe(kind, lambda it, me: {"model": it, "messages": messages, **more})
        for kind in ("weights", "sampler_weights", "model")
    ]


# ------------------------------------------------------------------ the tables
IN_BODY: dict[str, list[Probe]] = {
    "/v1/completions": [
        Probe(kind, lambda it, me: {"model": it, "prompt": [2], "max_tokens": 1})
        for kind in ("weights", "sampler_weights", "model")
    ],
    "/v1/feedback": [Probe("sample", lambda it, me: {"id": it, "label": "good"})],
    "/v1/chat/completions": of_model("/v1/chat/completions"),
    "/v1/messages": of_model("/v1/messages"),
    "/v1/messages/count_tokens": of_model("/v1/messages/count_tokens"),
    "/v1/responses": [
        Probe(kind, lambda it, me: {"model": it, "input": "b", "max_output_tokens": 1})
        for kind in ("weights", "sampler_weights", "model")
    ],
    "retrieve_future": [
        Probe(kind, lambda it, me: {"request_id": it}) for kind in ("request", "sample", "loss_request")
    ],
    "retrieve_futures": [
        Probe("sampler", lambda it, me: {"target": {"sampling_session_id": it}, "timeout": 0.0}),
        Probe(
            "sample",  # acknowledging a request of another project changes nothing
            lambda it, me: {
                "target": {"sampling_session_id": me.ids["sampler"]},
                "retrieved_request_ids": [it],
                "prev_cursor": 2**40,
                "timeout": 0.0,
            },
            found=True,
        ),
    ],
    "cancel_future": [Probe("sample", lambda it, me: {"request_id": it})],  # training requests cannot be cancelled
    "forward_backward": [Probe("model", lambda it, me: chunk(it), follow=True)],
    "optim_step": on_model(adam_params={}),
    "create_custom_loss": [
        Probe("session", lambda it, me: {**CUSTOM_LOSS, "session_id": it, "custom_loss_seq_id": 7})
    ],
    "create_model": [in_session(model_seq_id=7, base_model=BASE)],
    "load_weights": [
        in_session(model_seq_id=8, path="tinker://a/weights/b", optimizer=False),
        *on_model(path="tinker://a/weights/b", optimizer=False),
        *of_checkpoint(
            lambda it, me: {
                "session_id": me.ids["session"], "model_seq_id": next(_late), "path": it, "optimizer": False,
            },
            "weights", "sampler_weights",
            follow=True,
        ),
        *of_checkpoint(
            lambda it, me: {"model_id": me.ids["model"], "seq_id": me.next_seq(), "path": it, "optimizer": False},
            "weights", "sampler_weights",
            follow=True,
        ),
    ],
    "get_info": [Probe("model", lambda it, me: {"model_id": it})],
    "unload_model": [Probe("model", lambda it, me: {"model_id": it})],
    "asample": [Probe("sampler", lambda it, me: sample(it, next(_late)))],
    "create_sampling_session": [
        in_session(sampling_session_seq_id=7, base_model=BASE),
        *of_checkpoint(
            lambda it, me: {
                "session_id": me.ids["session"], "sampling_session_seq_id": next(_late), "model_path": it,
            },
            "weights", "sampler_weights",
        ),
    ],
    "join_sampling_session": [Probe("sampler", lambda it, me: {"sampling_session_id": it})],
    "session_heartbeat": [in_session()],
    "save_weights": on_model(path="x"),
    "save_weights_for_sampler": on_model(path="x"),
    "save_weights_external": on_model(path="x"),
    "weights_info": of_checkpoint(lambda it, me: {"tinker_path": it}),
    "copy_weights": of_checkpoint(lambda it, me: {"source_path": it}),
    "external_weights_upload_finish": [Probe("upload", lambda it, me: {"upload_id": it})],
    "checkpoints/search": [
        Probe("project", lambda it, me: {"project_ids": [it]}),
        Probe("project", lambda it, me: {"owner": {"type": "user", "owner_urns": [it]}}, found=True),
    ],
    "sessions/search": [
        Probe("session", lambda it, me: {"session_id": it}, found=True),
        Probe("project", lambda it, me: {"project_ids": [it]}),
        Probe(
            "project",
            lambda it, me: {"owner": {"type": "user", "owner_urns": [it]}},
            found=True,
        ),
    ],
}  # fmt: skip
# Bodies of routes with ids in their path.
WITH_PATH = {
    "sessions/{session_id}/finish": {"reason": {"type": "success"}},
    "sessions/{session_id}/project": {"project_id": "p"},
    "training_runs/{run_id}/checkpoints/{kind}/{name}/ttl": {"ttl_seconds": None},
    "training_runs/{run_id}/metrics": {"steps": [{"step": 1, "values": {"reward": 0.5}}]},
    "training_runs/{run_id}/outcome": {"outcome": "failed", "reason": "r"},
    "training_runs/{run_id}/blames": {"step": 1, "rows": [{"number": 0, "tokens": 9, "loss": 1.0, "grad_norm": 2.0}]},
}
IN_QUERY = {"training_runs": "project_id", "billing/usage/checkpoints/current": "project_id"}
NO_ID = {
    "/", "/openapi.json", "/v1/models", "/v1/embeddings", "/v1/feedback",
    "healthz", "client/config", "client/dynamic_config", "get_server_capabilities", "create_session", "auth/token",
    "auth/apikey/me", "metrics", "checkpoints", "sessions", "audit", "billing/usage/events", "billing/prices",
    "assets", "external_weights_upload_start",  # its destination_project_id is a label, like that of copy_weights
    "telemetry",  # its session_id is only logged
}  # fmt: skip
ONLY_EXTERNAL = {"training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls"}


@dataclass(frozen=True)
class Try:
    """One cell of the matrix: a request by `me` that names the object `it`."""

    route: tuple[str, str]
    kind: str
    path: Callable[[str], str]
    body: Body
    follow: bool = False
    found: bool = False

    def __str__(self) -> str:
        return f"{self.route[0]} {self.route[1]} with a {self.kind}"


def tries(method: str, path: str) -> list[Try]:
    """The cells of one route. KeyError: no table contains the route."""
    route = (method, path)
    if path in IN_BODY and method != "GET":
        probes = IN_BODY[path]
        return [Try(route, one.kind, lambda it: path, one.body, one.follow, one.found) for one in probes]
    if path in IN_QUERY:
        return [Try(route, "project", lambda it: f"{path}?{IN_QUERY[path]}={it}", lambda it, me: None, found=True)]
    body = WITH_PATH.get(path)
    if "{kind}" in path:
        kinds = ("external_weights",) if path in ONLY_EXTERNAL else CHECKPOINTS
        return [Try(route, kind, lambda it: of_parts(path, it), lambda it, me: body) for kind in kinds]
    if "{" not in path:
        if path not in NO_ID:
            raise KeyError(f"{method} {path} is new: say in the tables which ids it takes, or that it takes none")
        return []
    if path == "/v1/models/{model:path}":
        of = "/v1/models/{}".format
        return [Try(route, kind, of, lambda it, me: None) for kind in ("weights", "sampler_weights", "model")]
    name = path[path.index("{") + 1 : path.index("}")]
    kind = {"asset_id": "asset", "session_id": "session", "run_id": "model", "wanted": "sampler"}[name]
    return [Try(route, kind, lambda it: path.replace("{" + name + "}", it), lambda it, me: body)]


def of_parts(path: str, checkpoint: str) -> str:
    run, kind, name = checkpoint.removeprefix("tinker://").split("/")
    return path.format(run_id=run, kind=kind, name=name)


def nobodys(some_id: str) -> str:
    """An id of the same form that does not exist."""
    prefix = next(prefix for prefix in NOBODYS if prefix in some_id)
    start = some_id.index(prefix)
    mine = some_id[start : start + len(NOBODYS[prefix])] if prefix != "team-" else some_id
    return some_id.replace(mine, NOBODYS[prefix])


@pytest.fixture
def people(server: Running, engine: Any, journal: Any, lettered: Any) -> tuple[Person, Person]:
    """Ann and Bob, in different projects. Bob sends requests for Ann's objects."""
    (Path(lettered.path) / "config.json").write_text(json.dumps(TINY))
    found = []
    for name in ("ann", "bob"):
        _, secret = journal.keys.create(name, f"team-{name}")
        server.clock.advance(1.0)
        found.append(Person(server, secret))
        found[-1].furnish(f"team-{name}")
    return found[0], found[1]


def cells(server: Running) -> list[Try]:
    """The whole matrix, with routes that end objects last. The console's pages have their own tests."""
    prefix = "/api/v1/"
    pages = {route.path for router in console.routers() for route in router.routes} - {"/"}
    routes = [
        (method, path.removeprefix(prefix))
        for method, path, by_link in routes_of(server.app)
        if not by_link and path not in pages
    ]
    found = [one for method, path in sorted(routes) for one in tries(method, path)]
    ends = {"finish": 3, "DELETE training_runs/{run_id}/checkpoints/{kind}/{name} ": 2, "cancel_future": 1}
    return sorted(found, key=lambda one: max(n * (word in str(one)) for word, n in ends.items()))


def everything(person: Person) -> list[str]:
    """Everything that the person's project can read about itself."""
    ids = person.ids
    asked = [
        "training_runs", "checkpoints", "sessions", "audit", f"sessions/{ids['session']}", f"samplers/{ids['sampler']}",
        f"training_runs/{ids['model']}", f"training_runs/{ids['model']}/checkpoints",
    ]  # fmt: skip
    polls = [person.poll(ids[name])[1] for name in ("request", "sample", "loss_request")]
    return [person.send("GET", path).text for path in asked] + polls


def test_routes_treat_objects_of_another_project_as_missing(server: Running, people: tuple[Person, Person]) -> None:
    ann, bob = people
    matrix = cells(server)
    assert len(matrix) >= 60
    before = everything(ann)
    theirs: dict[int, tuple[int, str]] = {}
    for n, one in enumerate(matrix):
        it = ann.ids[one.kind]
        none = nobodys(it)
        assert none != it
        foreign = bob.outcome(one.route[0], one.path(it), one.body(it, bob), follow=one.follow)
        missing = bob.outcome(one.route[0], one.path(none), one.body(none, bob), follow=one.follow)
        assert (foreign[0], foreign[1].replace(it, none)) == missing, str(one)
        if one.follow:
            assert foreign[0] == 200 and '"category":"user"' in foreign[1], (str(one), foreign)
            assert "does not exist" in foreign[1], (str(one), foreign)
        else:
            assert foreign[0] == (200 if one.found else 404), (str(one), foreign)
            if "{kind}" in one.route[1]:
                assert json.loads(foreign[1]) == {"detail": f"checkpoint {it!r} does not exist"}, (str(one), foreign)
        theirs[n] = missing
    assert everything(ann) == before, "the requests changed nothing"
    # The same requests succeed for the owner, so no cell above is vacuous.
    for n, one in enumerate(matrix):
        it = ann.ids[one.kind]
        mine = ann.outcome(one.route[0], one.path(it), one.body(it, ann), follow=one.follow and one.kind != "model")
        assert "does not exist" not in mine[1], (str(one), mine)
        if not one.found:
            assert mine[0] < 400, (str(one), mine)
            assert mine != theirs[n]


def test_lists_contain_no_objects_of_other_projects(people: tuple[Person, Person]) -> None:
    ann, bob = people
    hour = "2020-01-01T00:00:00Z"
    paths = [
        f"{path}?access_scope={scope}" for path in ("training_runs", "sessions") for scope in ("owned", "accessible")
    ]
    paths += ["checkpoints", "audit", "billing/usage/checkpoints/current"]
    assert (
        ann.send("GET", f"billing/usage/events?starting_on={hour}&ending_before=2020-01-02T00:00:00Z").json()["data"]
        == []
    )
    for path in paths:
        mine, yours = bob.send("GET", path), ann.send("GET", path)
        assert (mine.status_code, yours.status_code) == (200, 200)
        assert mine.text != yours.text
        assert ann.ids["session"] not in mine.text and "team-ann" not in mine.text, path
        assert "team-ann" in yours.text or ann.ids["session"] in yours.text, path
    for one in people:
        assert [each["asset_id"] for each in one.send("GET", "assets").json()["assets"]] == [one.ids["asset"]]
    assert ann.send("POST", "/v1/feedback", {"id": ann.ids["sample"], "label": "good"}).status_code == 200
    assert len(ann.send("GET", "/v1/feedback").json()["data"]) == 1
    assert bob.send("GET", "/v1/feedback").json()["data"] == []
    found = bob.send("POST", "sessions/search", {"owner": {"type": "accessible"}})
    assert [one["owner"] for one in found.json()["sessions"]] == ["team-bob"]


def test_signed_routes_refuse_requests_without_a_signature(server: Running, people: tuple[Person, Person]) -> None:
    ann, bob = people
    shut = [(method, path) for method, path, by_link in routes_of(server.app) if by_link]
    assert len(shut) >= 5
    for method, path in shut:
        for it in (ann.ids["weights"], nobodys(ann.ids["weights"])):
            run, kind, name = it.removeprefix("tinker://").split("/")
            where = path.removeprefix("/api/v1/").format(
                run_id=run, kind=kind, name=name, attempt="a", file="f", session_id=run.split(":")[0], upload_id="u"
            )
            assert bob.send(method, f"{where}?expires=99999999999&signature=x").status_code == 403


def test_forward_backward_finds_custom_losses_of_its_own_session_only(
    journal: Any, people: tuple[Person, Person]
) -> None:
    ann, bob = people
    assert "placeholder" in journal.custom_losses.definition(ann.ids["loss"], ann.ids["session"])
    for it in (ann.ids["loss"], nobodys(ann.ids["loss"])):
        with pytest.raises(NotFoundError, match="this session has no custom loss with that id"):
            journal.custom_losses.definition(it, bob.ids["session"])


def test_published_checkpoints_are_read_by_all_keys_and_changed_by_their_owner(people: tuple[Person, Person]) -> None:
    ann, bob = people
    reads = [one for path in ("weights_info", "copy_weights", "create_sampling_session", "load_weights")
             for one in tries("POST", path) if one.kind in ("weights", "sampler_weights")]  # fmt: skip
    for kind in CHECKPOINTS:
        one = of_parts("training_runs/{run_id}/checkpoints/{kind}/{name}", ann.ids[kind])
        assert ann.send("POST", f"{one}/publish").status_code == 204
        assert bob.send("DELETE", one).status_code == 404
        assert bob.send("DELETE", f"{one}/publish").status_code == 404
        assert bob.send("PUT", f"{one}/ttl", {"ttl_seconds": 3600}).status_code == 404
        assert bob.send("GET", f"{one}/archive").status_code == 302
    for one in reads:
        it = ann.ids[one.kind]
        status, text = bob.outcome(one.route[0], one.path(it), one.body(it, bob), follow=one.follow)
        assert (status, "error" in text) == (200, False), (str(one), text)


def test_call_of_a_project_precedes_waiting_calls_of_another_project(
    server: Running, people: tuple[Person, Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that opens thousands of samples would otherwise delay other projects until all of them are stored."""
    turns, begun = threading.Semaphore(0), list[str | None]()
    found = server.journal.results.get

    def get(request_id: str, owner: str | None, **more: Any) -> Any:
        begun.append(owner)
        assert turns.acquire(timeout=60)
        return found(request_id, owner, **more)

    monkeypatch.setattr(server.journal.results, "get", get)
    ann, bob = people
    waiting = server.app.state.services.subscriptions._requests
    with ThreadPoolExecutor(31) as pool:
        polls = [pool.submit(ann.poll, ann.ids["request"]) for _ in range(30)]
        try:
            wait_for(lambda: len(begun) == 8 and len(waiting[ann.ids["request"]]) == 30, 60)  # 8: all threads are busy
            polls.append(pool.submit(bob.poll, bob.ids["request"]))
            wait_for(lambda: bob.ids["request"] in waiting, 60)
            turns.release()
            wait_for(lambda: len(begun) == 9, 60)
        finally:
            turns.release(100)
        assert [one.result()[0] for one in polls] == [200] * 31
    assert begun[8] == "team-bob"
