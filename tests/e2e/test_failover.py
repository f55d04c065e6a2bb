"""An engine and an API replica are killed under load. With 50 clients: `python -m tests.benchmarks.failover`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.benchmarks.failover import disturb
from tests.benchmarks.replicas import replicas

pytestmark = pytest.mark.thorough


def test_a_killed_engine_and_a_killed_replica_lose_nothing(
    tmp_path: Path, postgres_database: Callable[[str], str], compiled_programs: Path
) -> None:
    (tmp_path / "jax-cache").symlink_to(compiled_programs)
    with replicas(tmp_path, postgres_database("failover"), {}) as found:
        (worker,) = found.workers
        tenants, failovers = disturb(found, clients=2, rounds=6, kills=1)
        said = worker.log.read_text()
    assert [failover.what for failover in failovers] == ["engine", "API replica"]
    assert all(len(tenant.losses) == 6 and len(tenant.tokens) == 8 for tenant in tenants)
    assert "its processes here are kept for its next driver" in said
