"""Samples are found by project, and by the run of their weights."""

from __future__ import annotations

import pytest

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.journal.requests import CANCELLED
from tinkerflow.backend.journal.results import FIRST_SHOWN
from tinkerflow.backend.journal.samples import AnswersGiven


def test_newest_first_by_project_and_by_run(scene, clock, as_owner):
    run = scene.model()
    session = run.split(":")[0]
    scene.submit(run, 1)
    base, named = scene.sampler(session, 0), scene.sampler(session, 1, model_path=f"tinker://{run}/sampler_weights/a")
    inflight = scene.sampler(session, 2, snapshot_id=f"{run}:inflight")
    asked = []
    for n, sampler in enumerate((base, named, inflight, named)):
        clock.advance(1)
        asked.append(scene.sample(sampler, n))
    stranger = as_owner("other")
    stranger.sample(stranger.sampler(stranger.session()), 0)
    found = scene.journal.samples.recent("local")
    assert [one.id for one in found] == asked[::-1]
    assert [one.snapshot_id for one in found] == [None, f"{run}:inflight", None, None]
    assert found[0].model_path == f"tinker://{run}/sampler_weights/a" and found[0].size == 2
    assert [one.id for one in scene.journal.samples.recent("local", limit=2)] == asked[:1:-1]
    assert [one.id for one in scene.journal.samples.recent("local", run_id=run)] == asked[:0:-1]
    assert len(scene.journal.samples.recent(None)) == 5
    with pytest.raises(NotFoundError):
        scene.journal.samples.recent("other", run_id=run)


def test_outcome_of_a_sample_is_known_after_its_bytes_are_dropped(scene, clock):
    sampler = scene.sampler(scene.session())
    asked = []
    for seq in range(FIRST_SHOWN + 6):
        clock.advance(1)
        asked.append(scene.sample(sampler, seq))
    *done, failed, given_up, waits = asked
    pending = {one.id: one for one in scene.journal.requests.pending_samples(100)}
    scene.journal.results.finish(
        [pending[failed].failed("no", "user"), *(pending[one].done(b"1", "proto") for one in done)]
    )
    scene.journal.requests.cancel(given_up, "local")
    for one in done:
        scene.journal.results.get(one, "local")
    scene.journal.results.acknowledge(sampler, "local", done, clone=0)
    dropped = done[FIRST_SHOWN:]

    def states() -> list[tuple[str, str | None]]:
        return [(one.state, one.error) for one in scene.journal.samples.recent("local", limit=100)]

    known = [("pending", None), ("cancelled", CANCELLED), ("failed", "no"), *[("done", None)] * FIRST_SHOWN]
    assert states() == known + [("done", None)] * len(dropped)
    few = scene.journal.samples.recent("local", limit=FIRST_SHOWN + 4)
    assert [one.id for one in few] == [waits, given_up, failed, *done[:FIRST_SHOWN][::-1], dropped[-1]]
    assert [one.size == 0 for one in few] == [False] * (FIRST_SHOWN + 3) + [True]
    newest = scene.journal.samples.recent("local", limit=6, texts_first=False)
    assert [one.id for one in newest] == asked[:-7:-1]
    scene.journal.results.expire(-1)
    assert states() == known + [("done", None)] * len(dropped)


def test_sample_is_read_by_its_owner_only(scene):
    sampler = scene.sampler(scene.session())
    request = scene.sample(sampler, 0)
    assert scene.journal.samples.get(request, "local").sampler_id == sampler
    assert scene.journal.samples.whole(request, "local").payload == b"{}"
    model = scene.model()
    training = scene.submit(model, 1)
    for wrong, owner in ((request, "other"), ("req-none", "local"), (training, "local")):
        for read in (scene.journal.samples.get, scene.journal.samples.whole):
            with pytest.raises(NotFoundError):
                read(wrong, owner)


def test_answers_of_a_checkpoint_are_counted_over_its_samplers(scene, clock, as_owner):
    path, other = (f"tinker://{scene.model()}/sampler_weights/{name}" for name in "ab")
    samples, session = scene.journal.samples, scene.session()
    assert samples.answers_of(path, "local") == AnswersGiven(0, None, None)
    samplers = [scene.sampler(session, n, model_path=one) for n, one in enumerate((path, path, other))]
    strangers = as_owner("other")
    samplers.append(strangers.sampler(strangers.session(), model_path=path))
    asked = [(strangers if n == 3 else scene).sample(sampler, 0) for n, sampler in enumerate(samplers)]
    asked.append(scene.sample(samplers[0], 1))
    pending, times = {one.id: one for one in scene.journal.requests.pending_samples(100)}, []
    for one in asked[:-1]:
        clock.advance(1)
        times.append(clock.now())
        scene.journal.results.finish([pending[one].done(b"1", "proto")])
    scene.journal.results.finish([pending[asked[-1]].failed("no", "user")])
    assert samples.answers_of(path, "local") == AnswersGiven(2, times[0], times[1])
    assert samples.answers_of(path, None) == AnswersGiven(3, times[0], times[3])
    scene.journal.results.expire(-1)
    assert samples.answers_of(path, "local").number == 2, "also when the bytes are dropped"
