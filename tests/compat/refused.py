"""What is not served, each with its reason; docs/compatibility.md shows it, and test_refused.py proves it."""

from __future__ import annotations

REFUSED: dict[str, str] = {
    "types.ImageChunk": "the models served take text",
    "types.ImageAssetPointerChunk": "the models served take text; pointers are never fetched",
    "types.DmelChunk": "the models served take text",
}
