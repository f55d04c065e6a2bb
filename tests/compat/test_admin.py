"""AdminClient: the audit log and usage, also through the RestClient's older methods."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import tinker
from tests.compat.conftest import TOKENS, datum, window
from tests.compat.registry import exercises
from tinker.lib.public_interfaces.admin_client import AdminClient


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
async def test_audit_log_contains_a_save(
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


@exercises(
    "AdminClient.get_billing_usage",
    "AdminClient.get_billing_usage_async",
    "RestClient.get_billing_usage",
    "RestClient.get_billing_usage_async",
)
async def test_token_usage_is_counted(admin: AdminClient, rest: tinker.RestClient, base_model: str) -> None:
    with tinker.ServiceClient() as service:
        model = service.create_lora_training_client(base_model, rank=4).result()
        for _ in range(2):
            model.forward_backward([datum(), datum()], "cross_entropy").result()
        session = service.holder.get_session_id()
    found = admin.get_billing_usage(*window()).result()
    (event,) = [one for one in found.data if (one.session_id, one.event_info.type) == (session, "training")]
    assert (event.event_info.token_count, event.base_model) == (4 * len(TOKENS), base_model)
    assert event.estimated_cost_usd is None  # no prices are configured
    assert session in found.sessions
    for twin in (
        await admin.get_billing_usage_async(*window()),
        rest.get_billing_usage(*window()).result(),
        await rest.get_billing_usage_async(*window()),
    ):
        assert event in twin.data


@exercises(
    "AdminClient.get_current_checkpoint_storage_usage",
    "AdminClient.get_current_checkpoint_storage_usage_async",
    "RestClient.get_current_checkpoint_storage_usage",
    "RestClient.get_current_checkpoint_storage_usage_async",
)
async def test_stored_bytes_are_counted(
    admin: AdminClient, rest: tinker.RestClient, trainer: tinker.TrainingClient
) -> None:
    (before,) = admin.get_current_checkpoint_storage_usage().result().data or [None]
    path = trainer.save_state("weighed").result().path
    size = {each.tinker_path: each.size_bytes for each in rest.list_user_checkpoints(limit=1000).result().checkpoints}
    found = admin.get_current_checkpoint_storage_usage().result()
    (now,) = found.data
    assert now.checkpoint_count == (before.checkpoint_count if before else 0) + 1
    assert now.size_bytes == (before.size_bytes if before else 0) + (size[path] or 0)
    assert found == await admin.get_current_checkpoint_storage_usage_async()
    assert found == rest.get_current_checkpoint_storage_usage().result()
    assert found == await rest.get_current_checkpoint_storage_usage_async()
