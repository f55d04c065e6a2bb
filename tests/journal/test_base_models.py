"""The list of base models is replaced as a whole."""

from __future__ import annotations

from tinkerflow.backend.commands import CompileStatus


def test_registering_replaces_the_list(scene):
    journal = scene.journal
    assert journal.base_models() == []
    journal.register_base_models([("b", '{"x": 1}'), ("a", "{}")])
    assert [(model.name, model.card) for model in journal.base_models()] == [("a", "{}"), ("b", '{"x": 1}')]
    journal.register_base_models([("b", "{}")])
    assert [(model.name, model.card) for model in journal.base_models()] == [("b", "{}")]
    journal.register_base_models([])
    assert journal.base_models() == []


def test_what_is_compiled_is_kept_until_the_list_is_replaced(scene):
    journal = scene.journal
    journal.register_base_models([("a", "{}"), ("b", "{}")])
    warmth = CompileStatus(planned=9, ready=4, failed=1, needed=2, late=0)
    journal.recovery.note_warmth("b", warmth)
    journal.recovery.note_warmth("gone", warmth)
    assert [model.warmth for model in journal.base_models()] == [None, warmth]
    journal.register_base_models([("b", "{}")])
    assert journal.base_models()[0].warmth is None
