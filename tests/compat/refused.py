"""What is not served, each with the reason that the README's table gives; test_refused.py shows that it is refused."""

from __future__ import annotations

REFUSED: dict[str, str] = {
    "types.ImageChunk": "the models served take text",
    "types.ImageAssetPointerChunk": "the models served take text; pointers are never fetched",
    "types.DmelChunk": "the models served take text",
}
