"""The long-lived worker groups of JAX processes, and `Pool`, the object through which the engine commands them.

A group fails as a unit. When one of its processes dies, hangs or differs from the others, the pool kills all of
them, fails every outstanding command with a named error, and starts a new generation. Only the worker processes load
JAX; importing this package does not.

A command's path: `Pool.submit` (pool.py) -> the queue (scheduler.py) -> the group's outbox (group.py) -> frames
(protocol/frames.py) -> the worker's main thread (worker.py) -> the executor. The reply returns the same way.
"""

from tinkerflow.backend.pool.config import PoolConfig
from tinkerflow.backend.pool.generations import GroupLost
from tinkerflow.backend.pool.host.agent import HostConfig, serve_group
from tinkerflow.backend.pool.host.hosts import Hosts
from tinkerflow.backend.pool.host.places import ThisMachine
from tinkerflow.backend.pool.pool import Pool

__all__ = ["GroupLost", "HostConfig", "Hosts", "Pool", "PoolConfig", "ThisMachine", "serve_group"]
