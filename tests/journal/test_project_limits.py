"""Limits of single projects, which replace the limits of the settings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import Limits
from tinkerflow.backend.journal.project_limits import SETTINGS


def test_project_limits_replace_those_of_the_settings(scene: Any) -> None:
    own, settings = scene.journal.project_limits, Limits(live_models=9, sessions=7)
    assert own.set("search", {"max_live_models": 2, "max_stored_bytes": 2**40}) == {
        "live_models": 2,
        "stored_bytes": 2**40,
    }
    assert own.set("search", {"max_stored_bytes": None, "max_sessions": 0}) == {"live_models": 2, "sessions": 0}
    assert own.of("search", settings) == Limits(live_models=2, sessions=0)
    assert own.of("other", settings) == settings
    _, secret = scene.journal.keys.create("laptop", "search")
    assert scene.journal.keys.verify(secret).limits == {"live_models": 2, "sessions": 0}
    own.set("search", {"max_live_models": None, "max_sessions": None})
    assert own.all() == {} and scene.journal.keys.verify(secret).limits is None
    events = [(one.event, one.actor) for one in scene.journal.audit.entries("search")]
    assert events.count(("project_limits_set", "service")) == 3


def test_the_use_of_each_limit_is_counted(scene: Any, save: Any) -> None:
    every = Limits(**{limit.name: 10**6 for limit in fields(Limits)})
    model = scene.model()
    save(model, "kept")
    scene.submit(model, 2)
    used = {one.setting: one.used for one in scene.journal.project_limits.use("local", every)}
    assert list(used) == SETTINGS
    assert (used["max_live_models"], used["max_sessions"], used["max_training_runs"]) == (1, 1, 1)
    assert used["max_stored_bytes"] > 0 and used["max_kept_bytes"] > 0 and used["max_samplers"] == 0
    stranger = scene.journal.project_limits.use("other", every)
    assert {one.used for one in stranger} == {0} and not any(one.own for one in stranger)
    assert scene.journal.project_limits.use("other", Limits()) == []


def test_invalid_limits_are_named(scene: Any) -> None:
    with pytest.raises(UserError, match=r"'max_live_model': must be one of .*did you mean 'max_live_models'"):
        scene.journal.project_limits.set("search", {"max_live_model": 2})
    with pytest.raises(UserError, match="max_live_models: -1 must be from 0"):
        scene.journal.project_limits.set("search", {"max_live_models": -1})
    assert scene.journal.project_limits.all() == {}


def test_simultaneous_changes_of_a_project_are_all_kept(journal: Any) -> None:
    names = sorted(SETTINGS)[:6]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda name: journal.project_limits.set("team", {name: 1}), names))
    assert journal.project_limits.all() == {"team": {name.removeprefix("max_"): 1 for name in names}}
