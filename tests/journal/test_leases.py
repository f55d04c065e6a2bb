"""Leases: a fenced engine changes nothing. Heartbeats: sessions survive an outage of the API."""

from __future__ import annotations

import pytest

from tinkerflow.backend.core.errors import FencedError
from tinkerflow.backend.journal import Journal
from tinkerflow.backend.journal.leases import LEASE_SECONDS


@pytest.fixture
def other(url, clock):
    opened = Journal.open(url, clock=clock)
    yield opened
    opened.close()


def test_a_second_engine_waits_until_the_lease_has_run_out(scene, other, clock):
    assert scene.journal.leases.acquire("first") is None
    clock.advance(LEASE_SECONDS * 2 / 3)
    scene.journal.leases.renew()
    clock.advance(LEASE_SECONDS * 2 / 3)
    assert other.leases.acquire("second") == "first"
    clock.advance(LEASE_SECONDS * 2 / 3)
    assert other.leases.acquire("second") is None


def test_a_fenced_off_engine_changes_nothing(scene, other):
    model = scene.model()
    request = scene.submit(model, 1)
    scene.journal.leases.acquire("first")
    (pending,) = scene.journal.requests.ready(model)
    assert other.leases.acquire("second", force=True) is None
    with pytest.raises(FencedError, match="another engine"):
        scene.journal.results.finish([pending.done(b"old", "json")])
    with pytest.raises(FencedError):
        scene.journal.leases.renew()
    with pytest.raises(FencedError):
        scene.journal.checkpoints.before_save("tinker://m/weights/x", model)
    scene.journal.leases.release()  # the lease belongs to another engine, so nothing happens
    assert other.results.get(request, "local") is None
    assert other.results.finish([pending.done(b"new", "json")]) == [request]


def test_returned_lease_is_free(scene, other):
    scene.journal.leases.acquire("first")
    scene.journal.leases.release()
    assert other.leases.acquire("second") is None


def test_sessions_do_not_expire_during_a_server_outage(scene, clock):
    session = scene.session()
    scene.journal.leases.beat()
    clock.advance(1000)
    assert scene.journal.sessions.expire(300) == [], "the API is away"
    scene.journal.leases.beat()
    assert scene.journal.sessions.expire(300) == [], "it is back since a moment"
    for _ in range(31):
        clock.advance(10)
        scene.journal.leases.beat()
    assert scene.journal.sessions.expire(300) == [session]


def test_no_sequence_id_is_skipped_before_clients_could_send_it_after_an_outage(scene, clock):
    model = scene.model()
    scene.submit(model, 2)
    scene.journal.leases.beat()
    clock.advance(1000)
    assert scene.journal.queue.gaps(60) == [], "the API is away"
    for _ in range(6):
        scene.journal.leases.beat()
        assert scene.journal.queue.gaps(60) == []
        clock.advance(10)
    assert [gap.missing for gap in scene.journal.queue.gaps(60)] == [1]


def test_sessions_expire_after_the_clock_was_set_back(scene, clock):
    scene.journal.leases.beat()
    clock.advance(-86400)
    session = scene.session()
    for _ in range(32):
        scene.journal.leases.beat()
        clock.advance(10)
    assert scene.journal.sessions.expire(300) == [session], "and not a day later"


def test_results_do_not_expire_before_clients_could_read_them_after_an_outage(scene, clock):
    scene.execute(scene.model())
    scene.journal.leases.beat()
    clock.advance(4000)
    assert scene.journal.results.expire(3600) == 0, "the API is away"
    for _ in range(60):
        scene.journal.leases.beat()
        assert scene.journal.results.expire(3600) == 0
        clock.advance(10)
    assert scene.journal.results.expire(3600) == 1


def test_the_last_heartbeats_are_shown(scene, clock):
    assert scene.journal.leases.beats() == []
    scene.journal.leases.beat(starts=True)
    began = clock.now()
    clock.advance(5)
    scene.journal.leases.acquire("us")
    scene.journal.leases.beat()
    scene.journal.leases.acquire("again", force=True)
    scene.journal.leases.beat(starts=True)
    api, engine = scene.journal.leases.beats()
    assert (api.epoch, engine.epoch) == (2, 2), "each was started twice"
    assert (api.name, api.began_at, api.beat_at) == ("api", began, clock.now())
    assert engine.name == "engine"
