"""The checkpoint store: training state and sampler weights as PEFT folders on a file system, committed atomically.

The files are written under a new attempt, and `commit.json` last. A checkpoint without `commit.json` does not exist.
"""

from tinkerflow.backend.spec.checkpoint import BLOCK, RECOVERY, CheckpointMeta, CheckpointPath, Digest, Saved
from tinkerflow.backend.store.store import Store

__all__ = [
    "BLOCK",
    "RECOVERY",
    "CheckpointMeta",
    "CheckpointPath",
    "Digest",
    "Saved",
    "Store",
    "blobs",
    "commit",
    "failures",
    "gcs",
    "history",
    "local",
    "parts",
    "peft",
    "upkeep",
]
