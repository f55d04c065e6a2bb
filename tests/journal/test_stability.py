"""Records for stable_reinforce: found by sequence id in their session, for a day after the last use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.journal import SequencesRecorded, database
from tinkerflow.backend.spec.commands import StabilityInfo
from tinkerflow.backend.spec.supports import Supports


def record(scene, session, *names, infos=()):
    sampler = scene.sampler(session, len(scene.journal.samplers.of_session(session)))
    request = scene.sample(sampler, 0)
    pending = next(p for p in scene.journal.requests.pending_samples(10) if p.id == request)
    infos += tuple(StabilityInfo(n, np.arange(3, dtype=np.int32), np.float32([-1, -2, -3])) for n in names)
    scene.journal.results.finish([pending.done(b"", "proto", SequencesRecorded(session, infos))])


def test_stability_is_recorded_with_the_answer_and_found_in_its_session(scene):
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


def test_more_sequences_than_a_statement_takes_are_read_in_chunks(scene, monkeypatch, statements):
    monkeypatch.setattr(database, "_AT_ONCE", 2)  # SQLite takes 32,766 parameters, or 250,000
    session, names = scene.session(), [f"req-{n}-0" for n in range(5)]
    record(scene, session, *names)
    with statements() as made:
        assert scene.journal.custom_losses.stability(session, names).keys() == set(names)
    assert len(made) == 3


def test_use_of_a_record_restarts_its_day(scene, clock):
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


def test_experts_are_found_for_the_model_that_chose_them(scene):
    session, routes_Tn = scene.session(), np.int16([[0, -1], [300, -1], [2, -1]])
    known = StabilityInfo("req-1-0", np.arange(3, dtype=np.int32), np.float32([-1, -2, -3]), routes_Tn, "moe")
    record(scene, session, "req-2-0", infos=(known,))

    def found(name, base_model=None):
        return scene.journal.custom_losses.stability(session, {name}, routes_of=base_model)[name].routes_Tn

    assert found("req-1-0", "moe").tolist() == routes_Tn.tolist()
    assert found("req-1-0", "other") is None
    assert found("req-1-0") is None
    assert found("req-2-0", "moe") is None
    with pytest.raises(NotFoundError, match="'req-1-0'"):
        scene.journal.custom_losses.stability(scene.session(), {"req-1-0"}, routes_of="moe")


def test_supports_are_found_for_the_model_that_drew_from_them(scene):
    """Experts and supports are requested separately, because a service may replay only one of them."""
    session, routes_Tn = scene.session(), np.int16([[0], [1], [2]])
    supports = Supports(np.int32([2, 0, 1]), np.int32([7, 2**17, 3]), np.float32([-0.25, 0, -1.5]))
    plain = StabilityInfo("req-1-0", np.arange(3, dtype=np.int32), np.float32([-1, -2, -3]), routes_Tn, "moe")
    record(scene, session, infos=(replace(plain, supports=supports),))

    def found(**wanted):
        return scene.journal.custom_losses.stability(session, {"req-1-0"}, **wanted)["req-1-0"]

    both = found(routes_of="moe", supports_of="moe")
    assert both.routes_Tn.tolist() == routes_Tn.tolist()
    for name in ("counts_N", "tokens_M", "log_mass_N"):
        stored, given = getattr(both.supports, name), getattr(supports, name)
        assert stored.dtype == given.dtype and stored.tolist() == given.tolist()
    assert found(routes_of="moe").supports is None and found(supports_of="moe").routes_Tn is None
    assert found(supports_of="other").supports is None
