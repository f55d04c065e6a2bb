"""The list of base models is replaced as a whole."""

from __future__ import annotations


def test_registering_replaces_the_list(scene):
    journal = scene.journal
    assert journal.base_models() == []
    journal.register_base_models([("b", '{"x": 1}'), ("a", "{}")])
    assert [(model.name, model.card) for model in journal.base_models()] == [("a", "{}"), ("b", '{"x": 1}')]
    journal.register_base_models([("b", "{}")])
    assert [(model.name, model.card) for model in journal.base_models()] == [("b", "{}")]
    journal.register_base_models([])
    assert journal.base_models() == []
