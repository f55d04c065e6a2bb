"""AdminClient: the audit log; and the same under the RestClient's old names."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import tinker
from tinker.lib.public_interfaces.admin_client import AdminClient

from tests.compat.registry import exercises


@pytest.fixture(scope="module")
def admin(server) -> AdminClient:
    return AdminClient(base_url=server.api_url, api_key="tml-test")


@exercises(
    "AdminClient.get_audit_log",
    "AdminClient.get_audit_log_async",
    "AdminClient.get_telemetry",
    "RestClient.get_audit_log",
    "RestClient.get_audit_log_async",
)
async def test_the_audit_log_tells_of_a_save(
    admin: AdminClient, rest: tinker.RestClient, trainer: tinker.TrainingClient
) -> None:
    path = trainer.save_state("audited").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    today = datetime.now(UTC).date()
    log = admin.get_audit_log("checkpoints", today).result()
    events = [entry.event for entry in log.entries if entry.tinker_path == path]
    assert len(events) >= 1
    assert log == await admin.get_audit_log_async("checkpoints", today)
    assert rest.get_audit_log("checkpoints", today).result() == log
    assert await rest.get_audit_log_async("checkpoints", today) == log
    assert admin.get_telemetry() is None
