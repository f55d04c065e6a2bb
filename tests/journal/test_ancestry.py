"""The runs before and after a run, found by the checkpoints that they began from."""

from __future__ import annotations

from tinkerflow.backend.journal import ModelState
from tinkerflow.backend.journal.ancestry import MOST_AFTER, MOST_BEFORE, RelatedRun, RunSaves


def test_run_has_its_ancestors_and_its_forks(scene, as_owner, clock):
    ancestries, first = scene.journal.ancestries, scene.model(user_metadata={"name": "first"})
    paths = [f"tinker://{first}/weights/@3", f"tinker://{first}/weights/last"]
    clock.advance(1.0)
    forked = scene.model(origin=paths[0])
    clock.advance(1.0)
    later, foreign = scene.model(origin=paths[1]), as_owner("other").model(origin=paths[1])
    latest = scene.model(origin=f"tinker://{forked}/weights/x")
    one, two = RelatedRun(first, "first", None), RelatedRun(forked, "", paths[0])
    three = RelatedRun(latest, "", f"tinker://{forked}/weights/x")
    assert ancestries.before(latest, "local") == [one, two, three]
    assert ancestries.before(first, "local") == [one]
    assert ancestries.after(first, "local") == [RelatedRun(later, "", paths[1]), two]
    assert [run.id for run in ancestries.before(foreign, "other")] == [foreign], "the run before it is not theirs"
    assert {run.id for run in ancestries.after(first, None)} == {forked, later, foreign}


def test_long_chains_and_many_forks_are_truncated(scene, clock):
    ancestries, first = scene.journal.ancestries, scene.model()
    for _ in range(MOST_AFTER + 1):
        clock.advance(1.0)
        scene.model(origin=f"tinker://{first}/weights/a")
    assert len(ancestries.after(first, "local")) == MOST_AFTER
    last = first
    for _ in range(MOST_BEFORE + 5):
        last = scene.model(origin=f"tinker://{last}/weights/a")
    chain = ancestries.before(last, "local")
    assert len(chain) == MOST_BEFORE + 1 and chain[-1].id == last


def test_a_run_has_the_number_of_its_saves_and_the_time_of_the_newest(scene, as_owner, save, clock):
    first = scene.model()
    clock.advance(1.0)
    other = as_owner("other").model()
    save(first, "a")
    clock.advance(1.0)
    newest = scene.journal.checkpoints.get(save(first, "b"), "local").created_at
    scene.journal.checkpoints.delete(f"tinker://{first}/weights/b", "local")
    scene.journal.models.end(other, ModelState.UNLOADED, "the end")
    saves = scene.journal.ancestries.saves
    ours = RunSaves(first, ModelState.LIVE, 2, newest)
    assert saves((), live_only=False) == [ours, RunSaves(other, ModelState.UNLOADED, 0, None)]
    assert saves((), live_only=True) == [ours] and saves(("other",), live_only=True) == []
