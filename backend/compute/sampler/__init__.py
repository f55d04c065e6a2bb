"""The sampler: a continuous-batching engine with its own cache of immutable snapshots.

`Sampler.step` takes one command and answers with what was finished; everything else here is a part of it.
"""

from tinkerflow.backend.compute.sampler.sampler import Sampler

__all__ = ["Sampler"]
