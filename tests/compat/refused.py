"""Parts of the SDK that do not work, with reasons. docs/compatibility.md lists them, and tests here verify them."""

from __future__ import annotations

REFUSED: dict[str, str] = {
    "types.ImageChunk": "where the model takes text; works [where it sees](base-models.md#images)",
    "types.ImageAssetPointerChunk": "where the model takes text; works [where it sees](base-models.md#uploaded-images)",
    "types.DmelChunk": "no model that is served takes audio",
}

ELSEWHERE: dict[str, str] = {
    f"{client}.get_console_url": "names the vendor's host: [ours in its place](console.md#links-from-the-sdk)"
    for client in ("ServiceClient", "TrainingClient")
}
"""Methods that describe another server, so they do not count as working. Tests exercise them nevertheless."""
