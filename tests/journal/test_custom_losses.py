"""Custom losses: stored once, answered when stored, and visible in their session only."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from tinkerflow.backend.core.errors import ConflictError, NotFoundError
from tinkerflow.backend.journal import NewCustomLoss


@pytest.fixture
def loss(scene):
    return NewCustomLoss(scene.session(), "local", 0, "mine", '{"graph": 1}', "hash")


def test_custom_loss_is_answered_with_its_id_and_found_by_it(scene, loss):
    request = scene.journal.custom_losses.submit(loss)
    answer = scene.journal.results.get(request, "local")
    loss_id = f"{loss.session_id}:loss:0"
    assert orjson.loads(answer.result) == {"type": "create_custom_loss", "loss_id": loss_id}
    assert scene.journal.custom_losses.definition(loss_id, loss.session_id) == '{"graph": 1}'
    for stranger in (scene.session(), "nobody"):
        with pytest.raises(NotFoundError, match="this session has no custom loss"):
            scene.journal.custom_losses.definition(loss_id, stranger)


def test_replay_gives_the_first_answer_and_different_content_is_a_conflict(scene, loss):
    request = scene.journal.custom_losses.submit(loss)
    assert scene.journal.custom_losses.submit(loss) == request
    with pytest.raises(ConflictError, match="custom_loss_seq_id 0 of session"):
        scene.journal.custom_losses.submit(replace(loss, content_hash="other"))


def test_invalid_loss_is_a_failed_future_and_never_found(scene, loss):
    request = scene.journal.custom_losses.submit(replace(loss, error="graph.nodes[3]: no"))
    answer = scene.journal.results.get(request, "local")
    assert (answer.error, answer.category) == ("graph.nodes[3]: no", "user")
    with pytest.raises(NotFoundError):
        scene.journal.custom_losses.definition(f"{loss.session_id}:loss:0", loss.session_id)


def test_finished_and_foreign_sessions_take_no_custom_loss(scene, loss):
    with pytest.raises(NotFoundError):
        scene.journal.custom_losses.submit(replace(loss, owner="stranger"))
    scene.journal.sessions.finish(loss.session_id, "local", None)
    request = scene.journal.custom_losses.submit(loss)
    assert "is finished" in scene.journal.results.get(request, "local").error
