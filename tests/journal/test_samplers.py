"""Sampling sessions that a client opens."""

from __future__ import annotations

import pytest

from tinkerflow.backend.core.errors import ConflictError, NotFoundError, UserError
from tinkerflow.backend.core.ids import sampler_id
from tinkerflow.backend.journal import NewSampler, SamplerState


def test_opening_is_idempotent_and_conflicts_are_named(scene):
    session = scene.session()
    sampler = scene.sampler(session, 0, model_path="tinker://a/sampler_weights/b")
    assert scene.sampler(session, 0, model_path="tinker://a/sampler_weights/b") == sampler == f"{session}:sample:0"
    with pytest.raises(ConflictError, match="exists already for tinker://a/sampler_weights/b"):
        scene.sampler(session, 0)
    published = NewSampler(sampler_id(session, 1), session, "local", "tiny", snapshot_id="req-1")
    scene.journal.samplers.check_free(published)
    scene.journal.samplers.open(published)
    scene.journal.samplers.check_free(published)
    with pytest.raises(ConflictError, match="exists already for req-1, not for tiny: sampling_session_seq_id must be"):
        scene.sampler(session, 1)  # of the base model
    view = scene.journal.samplers.get(sampler, "local")
    assert (view.base_model, view.model_path, view.snapshot_id) == ("tiny", "tinker://a/sampler_weights/b", None)
    assert view.state is SamplerState.LIVE


def test_finished_session_opens_no_sampler(scene):
    session = scene.session()
    scene.journal.sessions.finish(session, "local", None)
    with pytest.raises(UserError, match=f"session {session} is finished"):
        scene.sampler(session)


def test_samplers_are_visible_to_their_owners_only(scene, as_owner):
    session = scene.session()
    sampler = scene.sampler(session)
    with pytest.raises(NotFoundError):
        scene.journal.samplers.get(sampler, "stranger")
    with pytest.raises(NotFoundError):
        as_owner("stranger").sampler(session, 1)
    assert scene.journal.samplers.get(sampler, None).id == sampler
