"""The long-lived group of JAX processes, and the one object through which the engine commands it.

A group is one failure unit: when one of its processes dies, hangs or differs from the others, all are ended, everything
outstanding fails by name, and a new generation starts. Importing this room does not load JAX; only the workers do.
"""

from tinkerflow.backend.pool.host.agent import HostConfig, serve_group
from tinkerflow.backend.pool.host.hosts import Hosts
from tinkerflow.backend.pool.pool import GroupLost, Pool

__all__ = ["GroupLost", "HostConfig", "Hosts", "Pool", "serve_group"]
