"""The sampler: a continuous-batching engine with its own cache of immutable snapshots.

`Sampler.step` executes one command and returns the results of finished requests. A second sampler serves models whose
parameters were all trained (`full_models`).
"""

from tinkerflow.backend.compute.sampler.full_models import FullModelSampler, GroupSampler
from tinkerflow.backend.compute.sampler.sampler import Sampler

__all__ = [
    "FullModelSampler",
    "GroupSampler",
    "Sampler",
    "decode",
    "kv_cache",
    "pages",
    "prefill",
    "prompt_scores",
    "shapes",
    "snapshot_cache",
]
