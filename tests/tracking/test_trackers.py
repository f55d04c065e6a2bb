"""Trackers: each has an extra and a row in the docs, and an unusable tracker is refused with the fix."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.tracking import tracker as module
from tinkerflow.backend.tracking.trackers import TRACKERS, trackers_named

ROOT = Path(__file__).parents[2]


def test_every_tracker_has_an_extra_and_a_row_in_the_docs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert TRACKERS.keys() <= extras.keys()
    assert (
        set(re.findall(r"^\| `(\w+)` \| `tinkerflow\[", (ROOT / "docs/trackers.md").read_text(), re.MULTILINE))
        == TRACKERS.keys()
    )


def test_unknown_tracker_is_refused_with_the_list_of_trackers() -> None:
    with pytest.raises(UserError, match=r"^tracker 'wanbd': must be one of mlflow, .*did you mean 'wandb'"):
        trackers_named(["tensorboard", "wanbd"])
    assert [one.name for one in trackers_named(["tensorboard"] * 2)] == ["tensorboard"]


def test_tracker_without_its_library_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    with pytest.raises(UserError, match=r"library wandb is not installed; pip install 'tinkerflow\[wandb\]'$"):
        trackers_named(["wandb"])


def test_names_that_mlflow_refuses_are_replaced() -> None:
    legal = TRACKERS["mlflow"].legal
    names = ["loss", "reward/mean", "a?b", "/a//b/", "../a/./b", "metadata." + "k" * 300, "metadata." + "k" * 301]
    *short, one, other = map(legal, names)
    assert short == ["loss", "reward/mean", "a_b", "_/a/_/b/_", "_/a/_/b"]
    assert len(one) == len(other) == 250 and one != other
