"""The checkpoint store: training state and sampler weights as PEFT folders on a file system, committed atomically.

The files are written under a new attempt, and `commit.json` last. A checkpoint without `commit.json` does not exist.
"""

from tinkerflow.backend.checkpoint_paths import RECOVERY, CheckpointPath
from tinkerflow.backend.commands import BLOCK, Digest
from tinkerflow.backend.store.commit import CheckpointMeta, Saved
from tinkerflow.backend.store.store import Store

__all__ = ["BLOCK", "RECOVERY", "CheckpointMeta", "CheckpointPath", "Digest", "Saved", "Store"]
