"""Models: pauses, revival, ends, and payloads that are dropped when a model cannot be revived."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import ModelEnded, ModelState


def trained(scene, model):
    """Execute a request of the model that a replay needs."""
    request = scene.submit(model, 1)
    (pending,) = scene.journal.requests.ready(model)
    scene.journal.results.finish([replace(pending.done(b"r", "proto"), replays=True)])
    return request


def test_pause_reason_is_shown_to_clients_until_it_ends(scene):
    model = scene.model()
    request = scene.submit(model, 1)
    scene.journal.models.note_progress(model, "restoring")
    scene.journal.models.pause(model, "for the night")
    assert scene.journal.models.get(model, "local").paused == "for the night"
    assert scene.journal.queue.waits_for(request) == "for the night"
    scene.journal.models.pause(model, None)
    assert scene.journal.models.get(model, "local").paused is None
    assert scene.journal.queue.waits_for(request) == "restoring"


def test_run_label_comes_from_its_metadata_or_its_session(scene):
    named = scene.session(user_metadata={"recipe_name": "sl_basic"}, display_name="my session")
    assert scene.journal.models.label(scene.model(named)) == "sl_basic"
    own = {"name": "pig latin", "recipe_name": "sl_basic"}
    assert scene.journal.models.label(scene.model(named, n=1, user_metadata=own)) == "pig latin"
    assert scene.journal.models.label(scene.model(scene.session(display_name="my session"))) == "my session"
    odd = scene.session(user_metadata={"name": None, "recipe_name": "  "})
    assert scene.journal.models.label(scene.model(odd)) == ""
    assert scene.journal.models.label("sess-unknown:train:0") == ""


@pytest.mark.parametrize("state", [ModelState.LOST, ModelState.FAILED])
def test_lost_model_is_revived_while_its_session_is_active(scene, state):
    session = scene.session()
    model = scene.model(session)
    trained(scene, model)
    scene.journal.models.end(model, state, "the group died")
    assert scene.journal.models.get(model, "local").detail == "the group died"
    scene.journal.models.revive(model)
    view = scene.journal.models.get(model, "local")
    assert (view.state, view.detail) == (ModelState.LIVE, None)
    scene.journal.models.revive(model)  # nothing changes, because the model is live
    assert scene.submit(model, 2) in {pending.id for pending in scene.journal.requests.ready(model)}
    scene.journal.models.end(model, state, "again")
    scene.journal.sessions.finish(session, "local")
    with pytest.raises(UserError, match="is finished: no client could use it"):
        scene.journal.models.revive(model)


def test_unloaded_or_never_created_model_is_not_revived(scene):
    unloaded, never = scene.model(n=0), scene.model(n=1)
    trained(scene, unloaded)
    scene.journal.models.end(unloaded, ModelState.UNLOADED, "by its client")
    scene.journal.models.end(never, ModelState.FAILED, "no place")
    with pytest.raises(UserError, match=r"was unloaded \(by its client\)"):
        scene.journal.models.revive(unloaded)
    with pytest.raises(UserError, match=r"was never created \(no place\)"):
        scene.journal.models.revive(never)


def test_executed_requests_of_an_ended_model_are_deleted_with_its_session(scene):
    session = scene.session()
    model = scene.model(session)
    trained(scene, model)
    pending = scene.taken(model, 2)
    scene.journal.results.finish([pending.done(b"", "json", ModelEnded(model, ModelState.FAILED, "no memory"))])
    scene.journal.models.forget_ended()
    assert scene.journal.recovery.count_executed(model, 0) == 1
    scene.journal.sessions.finish(session, "local")
    scene.journal.models.forget_ended()
    assert scene.journal.recovery.count_executed(model, 0) == 0


def test_simultaneous_unloads_and_outcomes_of_a_model_do_not_interfere(scene):
    models, together = [scene.model() for _ in range(5)], Barrier(2, timeout=60)

    def end(outcome):
        unloads = []
        for model in models:
            together.wait()
            unloads.append(scene.journal.models.request_unload(model, outcome))
            together.wait()
            scene.journal.models.note_outcome(model, "local", "completed", outcome)
        return unloads

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(end, ("one", "other"))
    assert one == other and len(set(one)) == 5
    assert all(len(scene.journal.requests.ready(model)) == 1 for model in models)
