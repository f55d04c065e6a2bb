"""The room's public names and its aggregates' methods are documented."""

from __future__ import annotations

import inspect

import pytest

import tinkerflow.backend.journal as room
from tinkerflow.backend.journal.database import Aggregate


def test_every_public_name_is_documented():
    public = {name: thing for name, thing in vars(room).items() if not name.startswith("_")}
    things = [thing for thing in public.values() if inspect.isclass(thing) or inspect.isfunction(thing)]
    assert things and [thing.__name__ for thing in things if not thing.__doc__] == []


@pytest.mark.parametrize("aggregate", [room.Journal, *Aggregate.__subclasses__()], ids=lambda found: found.__name__)
def test_every_method_is_documented(aggregate):
    methods = inspect.getmembers(aggregate, lambda member: inspect.isfunction(member) or isinstance(member, property))
    assert [name for name, method in methods if not name.startswith("_") and not method.__doc__] == []


def test_the_journal_hands_out_every_aggregate_once(journal):
    handed = [type(part) for part in vars(journal).values() if isinstance(part, Aggregate)]
    assert sorted(handed, key=repr) == sorted(Aggregate.__subclasses__(), key=repr)
