"""The mirror of the journal: the runs and values that it writes, and trackers that fail without blocking others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event
from tests.logged import logged_by

from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import ModelState
from tinkerflow.backend.tracking import journal_runs
from tinkerflow.backend.tracking.journal_runs import JournalMirror, alone
from tinkerflow.backend.tracking.mirror import TrackerError
from tinkerflow.backend.tracking.trackers import TRACKERS
from tinkerflow.backend.tracking.trackers.tensorboard import _summaries

Values = dict[str, dict[int, float]]


def mirror(runs: Any, *projects: str) -> JournalMirror:
    return JournalMirror(TRACKERS["tensorboard"], runs.journal, runs.folder / "tracking", SystemClock(), projects)


def shown(runs: Any, run: str, project: str = "local") -> Values:
    """The values in the event files of a run. Asserts that each is there once."""
    found: Values = {}
    for file in files_of(runs, run, project):
        for event in _summaries(file):
            assert isinstance(event, Event)
            for value in event.summary.value:
                if not value.HasField("tensor"):
                    assert event.step not in found.setdefault(value.tag, {}), "twice"
                    found[value.tag][event.step] = value.simple_value
    return found


def files_of(runs: Any, run: str, project: str = "local") -> list[Path]:
    return sorted((runs.folder / "tracking/tensorboard" / project / run.replace(":", "-")).glob("*.tfevents.*"))


def test_steps_repeated_from_an_earlier_checkpoint_are_appended(runs: Any) -> None:
    run = runs.run()
    mirrored = mirror(runs)
    runs.train(run, 1, 2, 3)
    mirrored.turn()
    runs.train(run, 3, 4)  # steps made again from the checkpoint after step 2
    mirrored.turn()
    assert shown(runs, run)["loss"] == {1: 1.0, 2: 2.0, 3: 3.0, 4: 3.0, 5: 4.0}
    mirrored.close()
    (runs.folder / "tracking/tensorboard/stored.txt").unlink()  # as after a kill
    mirror(runs).once()
    assert shown(runs, run)["loss"] == {1: 1.0, 2: 2.0, 3: 3.0, 4: 3.0, 5: 4.0}


def test_values_of_clients_are_written_in_any_order_and_our_own_figures_win(runs: Any) -> None:
    run, metrics = runs.run(), runs.journal.run_metrics
    mirrored = mirror(runs)
    runs.train(run, 1)
    for steps in ({5: {"reward": 5.0}}, {2: {"reward": 2.0, "loss": 9.0}, 7: {"reward": 7.0}}, {1: {"loss": 9.0}}):
        metrics.record(run, "local", steps)
        mirrored.turn()
    mirrored.close()
    assert shown(runs, run)["reward"] == {2: 2.0, 5: 5.0, 7: 7.0}
    assert shown(runs, run)["loss"] == {1: 1.0, 2: 9.0}


def test_only_runs_of_selected_projects_are_mirrored_with_name_and_settings(runs: Any) -> None:
    ours, theirs, empty = runs.run("search", display_name="first", tags=("a", "b")), runs.run(), runs.run("search")
    for run in (ours, theirs):
        runs.train(run, 1)
    mirror(runs, "search").once()
    assert shown(runs, ours, "search")["loss"] == {1: 1.0}
    assert not files_of(runs, theirs) and not files_of(runs, empty, "search")
    (file,) = files_of(runs, ours, "search")
    text = next(iter(_summaries(file))).summary.value[0].tensor.string_val[0].decode()
    assert "| name | first |" in text and "| tags | a, b |" in text and "| rank | 8 |" in text


def test_mirrored_run_is_reopened_only_for_new_steps(runs: Any) -> None:
    run = runs.run()
    runs.train(run, 1)
    mirror(runs).once()
    mirror(runs).once()
    assert len(files_of(runs, run)) == 1
    stored = runs.folder / "tracking/tensorboard/stored.txt"
    stored.write_text(stored.read_text() + run[:5])  # a crash cut this line off
    runs.train(run, 2)
    runs.journal.models.end(run, ModelState.UNLOADED, "the end")
    mirror(runs).once()
    mirror(runs).once()
    assert len(files_of(runs, run)) == 2 and shown(runs, run)["loss"] == {1: 1.0, 2: 2.0}


def test_truncated_event_at_the_end_of_a_file_is_rewritten(runs: Any) -> None:
    run = runs.run()
    runs.train(run, 1, 2)
    mirror(runs).once()
    (file,) = files_of(runs, run)
    file.write_bytes(file.read_bytes()[:-3])
    (runs.folder / "tracking/tensorboard/stored.txt").unlink()
    mirror(runs).once()
    assert shown(runs, run)["loss"] == {1: 1.0, 2: 2.0}


def test_failing_run_is_retried_and_blocks_no_other(runs: Any, caplog: pytest.LogCaptureFixture) -> None:
    run, other = runs.run(), runs.run()
    for one in (run, other):
        runs.train(one, 1)
    obstacle = runs.folder / "tracking/tensorboard/local" / run.replace(":", "-")
    obstacle.parent.mkdir(parents=True)
    obstacle.write_text("no folder")
    with pytest.raises(TrackerError, match=f"^tracker tensorboard: not stored: {run}$"):
        mirror(runs).once()
    assert shown(runs, other)["loss"] == {1: 1.0}
    (line,) = [record.getMessage() for record in logged_by(caplog, journal_runs)]
    assert f"run {run} is not shown now, trying again in" in line and "FileExistsError" in line
    obstacle.unlink()
    mirror(runs).once()
    assert shown(runs, run)["loss"] == {1: 1.0}


def test_a_run_that_a_person_deletes_is_closed_and_blocks_no_other(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, unopened, other = runs.run(), runs.run(), runs.run()
    for run in (opened, other):
        runs.train(run, 1)
    mirrored = mirror(runs)
    mirrored.turn()
    runs.train(unopened, 1)
    listed = runs.journal.run_values.extents((), live_only=False)
    for run in (opened, unopened):
        runs.journal.models.end(run, ModelState.UNLOADED, "the end")
        runs.journal.sessions.finish(runs.journal.models.get(run, None).session_id, "local")
        runs.journal.run_deletions.delete([run], "local")
    mirrored.turn()
    stored = runs.folder / "tracking/tensorboard/stored.txt"
    assert opened in stored.read_text() and other not in stored.read_text()
    runs.train(other, 2)
    listed = [*listed[:2], *runs.journal.run_values.extents((), live_only=True)]
    monkeypatch.setattr(runs.journal.run_values, "extents", lambda *_, **__: listed)  # read before the deletion
    mirrored.turn()
    assert shown(runs, other)["loss"] == {1: 1.0, 2: 2.0} and not files_of(runs, unopened)
    mirrored.close()


def test_only_one_process_mirrors_to_a_folder(runs: Any) -> None:
    mirrored = mirror(runs)
    with alone(runs.folder / "tracking/tensorboard"), pytest.raises(UserError, match="another `tinkerflow track`"):
        mirrored.once()


def test_tensorboard_takes_any_name(runs: Any) -> None:
    run = runs.run("a/b: c")
    runs.journal.run_metrics.record(run, "a/b: c", {1: {"eval/größe (%)": 0.5}})
    mirror(runs).once()
    assert json.dumps(shown(runs, run, "a-b- c")) == json.dumps({"eval/größe (%)": {1: 0.5}})
