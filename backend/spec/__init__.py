"""The vocabulary of requests: commands, losses, optimizers, limits, packing, checkpoint paths.

Requests, the engine and the workers share these facts. Importing this room does not load JAX.
"""

__all__ = [
    "checkpoint",
    "commands",
    "constraints",
    "drift",
    "formats",
    "history",
    "images",
    "limits",
    "losses",
    "optimizers",
    "outliers",
    "packing",
    "pool_message",
    "prefix_trees",
    "ranks",
    "registry",
    "run_metadata",
    "supports",
    "torch_names",
    "traced_graph",
    "traced_shapes",
    "traced_work",
]
