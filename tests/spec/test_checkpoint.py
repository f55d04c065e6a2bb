"""tinker:// paths: a parsed path is printed unchanged, and no path leaves its folder."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.store import CheckpointPath


def test_a_path_with_colons() -> None:
    path = CheckpointPath.parse("tinker://sess-1:train:0/sampler_weights/step-0001")
    assert path == CheckpointPath("sess-1:train:0", "sampler_weights", "step-0001")
    assert str(path) == "tinker://sess-1:train:0/sampler_weights/step-0001"
    assert path.commit == "runs/sess-1:train:0/sampler_weights/step-0001/commit.json"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tinker:",
        "tinker://",
        "tinker://run/weights",
        "tinker://run/weights/x/y",
        "tinker://run//x",
        "http://run/weights/x",
        "run/weights/x",
        "tinker://../weights/x",
        "tinker://run/weights/..",
        "tinker://run/optimizer/x",
        "tinker://run/weights/%2e%2e",
        "TINKER://run/weights/x",
    ],
)
def test_invalid_checkpoint_paths_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        CheckpointPath.parse(text)


@given(st.text(), st.sampled_from(["weights", "sampler_weights"]), st.text())
def test_any_text_is_refused_or_stays_in_its_place(run: str, kind: str, name: str) -> None:
    try:
        path = CheckpointPath(run, kind, name)
    except UserError:
        return
    assert CheckpointPath.parse(str(path)) == path
    assert posixpath.normpath(path.commit) == path.commit
    assert path.commit.count("/") == 4


@given(
    st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._:-]{0,199}", fullmatch=True),
    st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", fullmatch=True),
)
def test_every_allowed_path_comes_back(run: str, name: str) -> None:
    path = CheckpointPath(run, "weights", name)
    assert CheckpointPath.parse(str(path)) == path
