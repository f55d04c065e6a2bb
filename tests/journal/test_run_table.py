"""The table of runs: search, columns, orders, groups, and the archive."""

from __future__ import annotations

import shlex

import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import LossMeasured, ModelEnded, ModelState, RunQuery, StepMade, StepMeasured


@pytest.fixture
def table(scene, clock):
    """table(**query): query four runs. Returns the names of the found rows, and the rows."""
    for name, loss, metadata in (
        ("Pig Latin", 3.0, {"pipeline": "sft", "note": "half of it: 50 %"}),
        ("Überläufer", 1.0, {"pipeline": "rl", "team": "ÄLTESTE", "note": "Ärzte des Jahres"}),
        ("arithmetic", 2.0, {"pipeline": "rl", "reward": "from a file"}),
        ("", None, {}),
    ):
        clock.advance(60)
        base = {"arithmetic": "qwen/big", "Pig Latin": "/data/models/tinkerflow/tiny-qwen3"}.get(name, "qwen/small")
        session = scene.session(display_name="evening session")
        run = scene.model(session, base_model=base, user_metadata=metadata | ({"name": name} if name else {}))
        if loss is not None:
            one = scene.taken(run, 1)
            scene.journal.results.finish([one.done(b"", "proto", LossMeasured(run, 4, 2.0, 2.0 * loss))])
            two = scene.taken(run, 2)
            scene.journal.results.finish([two.done(b"", "proto", StepMeasured(run, 2, 1, 1.0, 1e-4))])
        if name == "Überläufer":
            scene.journal.run_metrics.record(run, "local", {1: {"reward": 0.25}, 9: {"reward": 0.75, "a/reward": 5.0}})

    def look(**query):
        page = scene.journal.run_table.page("local", RunQuery(**query), limit=10, offset=0)
        assert page.total == len(page.rows)
        return [row.name for row in page.rows], page.rows

    return look


NEWEST_FIRST = ["evening session", "arithmetic", "Überläufer", "Pig Latin"]


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("", NEWEST_FIRST),
        ("LATIN", ["Pig Latin"]),  # an id may contain "pig"
        ("latin pig", ["Pig Latin"]),
        ('"pig latin"', ["Pig Latin"]),
        ('"latin pig"', []),
        ("pipeline=rl", ["arithmetic", "Überläufer"]),
        ("pipeline=r", []),
        ("model=QWEN/big", ["arithmetic"]),
        ("model=big", ["arithmetic"]),
        ("model=tinkerflow/tiny", ["Pig Latin"]),
        ("model=Tiny pipeline=sft", ["Pig Latin"]),
        ("state=live", NEWEST_FIRST),
        ("50 %", ["Pig Latin"]),
        ("5_", []),
        ("Überläufer", ["Überläufer"]),
        ("überläufer", ["Überläufer"]),
        ("ÜBERLÄUFER", ["Überläufer"]),
        ("ärzte", ["Überläufer"]),
        ("ÄRZTE DES JAHRES", ["Überläufer"]),
        ("team=älteste", ["Überläufer"]),
        ("train:0", NEWEST_FIRST),
        ("rl file", ["arithmetic"]),
        ('a "quote', []),
    ],
)
def test_a_run_is_found_by_all_the_words(table, search, found):
    assert table(search=search)[0] == found


def test_rows_sort_by_any_column_with_missing_values_last(table):
    names, rows = table(sort="loss")
    assert names == ["Überläufer", "Pig Latin", "arithmetic", "evening session"], "rewards are before losses"
    assert [(row.reward, row.loss) for row in rows] == [(0.75, 1.0), (None, 3.0), (None, 2.0), (None, None)]
    assert table(sort="loss", descending=False)[0] == ["Überläufer", "arithmetic", "Pig Latin", "evening session"]
    assert table(sort="name", descending=False)[0][:2] == ["arithmetic", "evening session"]
    names, rows = table(columns=("reward", "pipeline"), sort="reward")
    assert names[0] == "Überläufer" and rows[0].values == (0.75, "rl")
    assert rows[1].values == ("from a file", "rl") and rows[2].values[0] is None
    with pytest.raises(UserError, match=r"sort 'lost': must be a column.*did you mean 'loss'"):
        table(sort="lost")
    with pytest.raises(UserError, match="column is given 9 times: must be at most 8"):
        table(columns=tuple("abcdefghi"))


def test_runs_are_grouped_by_equal_values(table):
    names, rows = table(group="pipeline", sort="loss")
    assert names == ["Überläufer", "arithmetic", "Pig Latin", "evening session"]
    assert [row.group for row in rows] == ["rl", "rl", "sft", ""]


def test_archived_runs_are_listed_separately_and_restored(table, scene):
    ids = [row.model.id for row in table()[1]]
    assert scene.journal.run_table.archive(ids[:2], "stranger") == 0
    assert scene.journal.run_table.archive([*ids[:2], "none"], "local") == 2
    assert (table()[0], table(archived=True)[0]) == (NEWEST_FIRST[2:], NEWEST_FIRST[:2])
    assert scene.journal.models.runs("local", limit=9, offset=0).total == 4, "clients still see them"
    scene.journal.run_table.archive(ids[:1], "local", archived=False)
    assert table()[0] == [NEWEST_FIRST[0], *NEWEST_FIRST[2:]]


def test_run_table_is_limited_to_its_owner_and_session(table, scene):
    assert scene.journal.run_table.page("stranger", RunQuery(), limit=9, offset=0).total == 0
    assert scene.journal.run_table.page(None, RunQuery(), limit=2, offset=1).total == 4
    (_, second, *_) = table()[1]
    assert table(session_id=second.model.session_id)[0] == ["arithmetic"]
    assert scene.journal.run_table.names_of_columns([row.model.id for row in table()[1]]) == ["a/reward", "reward"]


def test_runs_that_ended_without_work_are_found_by_a_search_or_in_their_session(table, scene, save):
    session = scene.session()
    saved, failed, exported = (scene.model(session, n, origin="tinker://x/weights/y") for n in range(3))
    refused = scene.model(session, 3, live=False)
    save(saved, "kept")
    end_of = {saved: (2, []), failed: (1, []), exported: (1, [StepMade(exported, 12)]), refused: (0, [])}
    for run, (seq, effects) in end_of.items():
        if seq:
            scene.submit(run, seq)
        (request,) = scene.journal.requests.ready(run)
        state = ModelState.FAILED if run == refused else ModelState.UNLOADED
        scene.journal.results.finish([request.done(b"", "json", *effects, ModelEnded(run, state, "limit reached"))])
    scene.journal.models.note_outcome(failed, "local", "failed", "no reward")
    shown = [row.model.id for row in table()[1]]
    assert [run in shown for run in (saved, failed, exported, refused)] == [True, True, False, False]
    assert refused in [row.model.id for row in table(search="state=failed")[1]]
    assert len(table(session_id=session)[1]) == 4
    listed = scene.journal.models.runs("local", limit=20, offset=0)
    assert [run.model.id for run in listed.rows] == shown and listed.total == len(shown), "clients see the same"
    assert scene.journal.models.run(refused, "local").model.id == refused


@pytest.mark.parametrize("key", ["größe", 'a"b', "a\\b", "a\tb", "a.b", "a[0]", "$", "a'b", "\N{WINE GLASS} %s:x"])
def test_any_key_of_the_metadata_can_be_a_column_a_group_and_a_search(scene, key):
    run = scene.model(user_metadata={key: "Ärzte", "other": "5"})
    for query in (RunQuery(columns=(key, "none")), RunQuery(group=key), RunQuery(shlex.quote(f"{key}=Ärzte"))):
        (row,) = scene.journal.run_table.page("local", query, limit=10, offset=0).rows
        assert (row.model.id, row.values, row.group) == (
            run,
            ("Ärzte", None) if query.columns else (),
            "Ärzte" if query.group else "",
        )
    assert not scene.journal.run_table.page("local", RunQuery('"a=b'), limit=10, offset=0).rows
