"""The checkpoint store: training state and sampler weights as PEFT folders on a file system, committed atomically.

Blobs are written under a fresh attempt, `commit.json` last: what has no commit does not exist.
"""

from tinkerflow.backend.store.commit import BLOCK, CheckpointMeta, Digest, Saved
from tinkerflow.backend.store.paths import RECOVERY, CheckpointPath
from tinkerflow.backend.store.store import Store

__all__ = ["BLOCK", "RECOVERY", "CheckpointMeta", "CheckpointPath", "Digest", "Saved", "Store"]
