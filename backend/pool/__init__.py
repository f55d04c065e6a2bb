"""The long-lived group of JAX processes, and the one object through which the engine commands it.

A group fails as a unit. When one of its processes dies, hangs or differs from the others, the pool kills all of
them, fails every outstanding command with a named error, and starts a new generation. Only the worker processes load
JAX; importing this package does not.

A command's path: `Pool.submit` (pool.py) -> its place in the queue (scheduler.py) -> the group's outbox (group.py) ->
frames (protocol/frames.py) -> the worker's main thread (worker.py) -> its executor, and back.
"""

from tinkerflow.backend.pool.config import PoolConfig
from tinkerflow.backend.pool.generations import GroupLost
from tinkerflow.backend.pool.host.agent import HostConfig, serve_group
from tinkerflow.backend.pool.host.hosts import Hosts
from tinkerflow.backend.pool.host.places import ThisMachine
from tinkerflow.backend.pool.pool import Pool

__all__ = ["GroupLost", "HostConfig", "Hosts", "Pool", "PoolConfig", "ThisMachine", "serve_group"]
