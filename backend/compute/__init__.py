"""Pure JAX: the model, its adapters, losses, optimizer, training steps and sampler, behind one `Executor`.

State goes in and comes out; the executor holds it between commands. Only worker processes import this room.
"""

from backend.compute.executor import Executor

__all__ = ["Executor"]
