"""The sampler: a continuous-batching engine with its own cache of immutable snapshots.

`Sampler.step` takes one command and answers with what was finished; everything else here is a part of it. A second
one serves models of which all parameters were trained (`whole`).
"""

from tinkerflow.backend.compute.sampler.sampler import Sampler
from tinkerflow.backend.compute.sampler.whole import GroupSampler, WholeSampler

__all__ = [
    "GroupSampler",
    "Sampler",
    "WholeSampler",
    "decode",
    "kv_cache",
    "pages",
    "prefill",
    "prompt_scores",
    "shapes",
    "snapshot_cache",
]
