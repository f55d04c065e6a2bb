"""Samples are found again by project and by the run whose weights they sampled."""

from __future__ import annotations

import pytest

from tinkerflow.backend.errors import NotFoundError


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


def test_one_sample(scene):
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
