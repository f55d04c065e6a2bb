"""Records for stable_reinforce: found by sequence id in their session, for a day after the last use."""

from __future__ import annotations

import numpy as np
import pytest

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.journal import SequencesRecorded
from tinkerflow.backend.spec.commands import StabilityInfo


def record(scene, session, *names):
    sampler = scene.sampler(session, len(scene.journal.samplers.of_session(session)))
    request = scene.sample(sampler, 0)
    pending = next(p for p in scene.journal.requests.pending_samples(10) if p.id == request)
    infos = tuple(StabilityInfo(n, np.arange(3, dtype=np.int32), np.float32([-1, -2, -3])) for n in names)
    scene.journal.results.finish([pending.done(b"", "proto", SequencesRecorded(session, infos))])


def test_recorded_with_the_answer_and_found_in_its_session(scene):
    session = scene.session()
    record(scene, session, "req-1-0", "req-1-1")
    found = scene.journal.custom_losses.stability(session, {"req-1-0", "req-1-1"})
    assert found.keys() == {"req-1-0", "req-1-1"}
    assert found["req-1-0"].tokens_T.tolist() == [0, 1, 2]
    assert found["req-1-1"].logprobs_T.tolist() == [-1, -2, -3]


def test_unknown_and_foreign_sequences_look_alike(scene):
    session = scene.session()
    record(scene, session, "req-1-0")
    with pytest.raises(NotFoundError, match="'req-9-0'"):
        scene.journal.custom_losses.stability(session, {"req-1-0", "req-9-0"})
    with pytest.raises(NotFoundError, match="'req-1-0'"):
        scene.journal.custom_losses.stability(scene.session(), {"req-1-0"})


def test_a_use_begins_its_day_anew(scene, clock):
    session = scene.session()
    record(scene, session, "used", "unused")
    clock.advance(20 * 3600)
    scene.journal.custom_losses.stability(session, {"used"})
    clock.advance(5 * 3600)
    assert scene.journal.custom_losses.stability(session, {"used"}).keys() == {"used"}
    with pytest.raises(NotFoundError, match="'unused'"):
        scene.journal.custom_losses.stability(session, {"unused"})
    record(scene, session, "new")  # this deletes records that were not used for a day
    clock.advance(-24 * 3600)
    with pytest.raises(NotFoundError, match="'unused'"):
        scene.journal.custom_losses.stability(session, {"unused"})
