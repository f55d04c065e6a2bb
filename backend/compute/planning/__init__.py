"""The memory plan: how a worker group divides each device's memory between weights, training and sampling."""

__all__ = [
    "device_bytes",
    "memory",
    "roofline",
    "topologies",
    "training_memory",
]
