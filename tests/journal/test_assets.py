"""Uploaded images: their start, their single arrival, their project, and their count as stored bytes."""

from __future__ import annotations

import pytest

from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.journal import Limits
from tinkerflow.backend.journal.quotas import NO_LIMITS


def test_image_exists_after_upload_for_its_project_only(journal):
    assets = journal.assets
    assert assets.begin("asset-1", "team", 10, NO_LIMITS).piece == ""
    assert assets.found(["asset-1"], "team") == {}
    assert assets.arrived("asset-1", "team", "put-1") == "put-1"
    assert assets.arrived("asset-1", "team", "put-2") == "put-1"  # another upload was faster
    again = assets.begin("asset-1", "team", 10, NO_LIMITS)
    assert (again.piece, again.size_bytes) == ("put-1", 10)
    assert assets.found(["asset-1", "asset-2"], "team") == {"asset-1": again}
    assert assets.found(["asset-1"], "other") == {}
    assets.forget("asset-1", "other")
    with pytest.raises(NotFoundError):
        assets.withdraw("asset-1", "other")
    assets.withdraw("asset-1", "team")
    assert assets.found(["asset-1"], "team") == {}
    assert assets.arrived("asset-1", "team", "put-3") == "put-3"
    assert assets.forget("asset-1", "team") == "put-3"
    assert assets.forget("asset-1", "team") == ""
    with pytest.raises(NotFoundError):
        assets.arrived("asset-1", "team", "put-4")


def test_images_count_as_stored_bytes(journal):
    limits = Limits(stored_bytes=15)
    journal.assets.begin("asset-1", "team", 10, limits)
    journal.assets.begin("asset-1", "team", 10, limits)
    journal.assets.begin("asset-2", "other", 10, limits)
    with pytest.raises(UserError, match=r"the image has 6 bytes, .* images 10: .* at most 15 \(max_stored_bytes\)"):
        journal.assets.begin("asset-3", "team", 6, limits)
    journal.assets.begin("asset-3", "team", 5, limits)
