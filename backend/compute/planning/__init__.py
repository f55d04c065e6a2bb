"""The memory plan of a worker group, and the highest speed that the peak rates of its devices allow."""

__all__ = [
    "adapter_quota",
    "array_sizes",
    "memory_plan",
    "roofline",
    "topologies",
    "training_memory",
]
