"""The list of base models: replaced as a whole, with compile status, worker group and progress."""

from __future__ import annotations

from tinkerflow.backend.spec.commands import CompileStatus, GroupInfo


def test_registering_replaces_the_list(scene):
    journal = scene.journal
    assert journal.base_models.all() == []
    journal.base_models.register([("b", '{"x": 1}'), ("a", "{}")])
    assert [(model.name, model.card) for model in journal.base_models.all()] == [("a", "{}"), ("b", '{"x": 1}')]
    journal.base_models.register([("b", "{}")])
    assert [(model.name, model.card) for model in journal.base_models.all()] == [("b", "{}")]
    journal.base_models.register([])
    assert journal.base_models.all() == []


def test_compile_status_is_kept_until_the_base_models_are_replaced(scene):
    journal = scene.journal
    journal.base_models.register([("a", "{}"), ("b", "{}")])
    warmth = CompileStatus(planned=9, ready=4, failed=1, needed=2, late=0)
    journal.base_models.note_compile_status("b", warmth)
    journal.base_models.note_compile_status("gone", warmth)
    assert [model.compile_status for model in journal.base_models.all()] == [None, warmth]
    journal.base_models.register([("b", "{}")])
    assert journal.base_models.all()[0].compile_status is None


def test_base_model_row_has_worker_group_card_and_progress(scene):
    journal = scene.journal
    journal.base_models.register([("a", "{}")])
    group = GroupInfo(("cpu:0",), 7, 32, 1, 64, 128, "the model's context", 2, memory={"weights": 2**40})
    journal.base_models.note_worker_group("a", group)
    journal.base_models.note_progress("a", "the group starts")
    journal.base_models.note_card("a", '{"max_context": 128}')
    (found,) = journal.base_models.all()
    assert found.card == '{"max_context": 128}'
    assert found.worker_group is not None and found.worker_group["devices"] == ["cpu:0"]
    assert (found.worker_group["memory"], found.progress) == ({"weights": 2**40}, "the group starts")
