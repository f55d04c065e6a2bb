"""The room's public names: sorted, documented, and those that its __init__ promises."""

from __future__ import annotations

import inspect

import tinkerflow.backend.journal as room


def test_every_public_name_exists_and_is_documented():
    assert room.__all__ == sorted(room.__all__, key=lambda name: (name.islower(), name))
    for name in room.__all__:
        thing = getattr(room, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, name


def test_every_method_of_the_journal_is_documented():
    methods = inspect.getmembers(
        room.Journal, lambda member: inspect.isfunction(member) or isinstance(member, property)
    )
    assert [name for name, method in methods if not name.startswith("_") and not method.__doc__] == []
