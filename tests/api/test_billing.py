"""Usage through the SDK: tokens and bytes of one's own project, and their costs if prices are configured."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import tinker

from tinkerflow.backend.journal import CheckpointKind, CheckpointSaved, ModelLive, UsageKind, Used

BASE, GIGABYTE = "tiny/bigram", 10**9


@pytest.fixture
def window() -> tuple[datetime, datetime]:
    """From the start of the previous hour to the end of the next hour."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return hour - timedelta(hours=1), hour + timedelta(hours=2)


@pytest.fixture
def used(journal: Any) -> Any:
    """used(server, secret): records usage by a new model of the key, as the engine does; returns its session."""

    def use(server: Any, secret: str) -> str:
        model = server.model(secret)
        session = model.split(":")[0]
        (creation,) = journal.requests.ready(model)
        amounts = {
            UsageKind.TRAINING: 2_000_000,
            UsageKind.PREFILL: 500,
            UsageKind.CACHED_PREFILL: 300,
            UsageKind.SAMPLE: 100,
            UsageKind.CHECKPOINT: 1,
        }
        saved = CheckpointSaved(
            f"tinker://{model}/weights/a", model, CheckpointKind.WEIGHTS, "a", creation.owner, BASE,
            8, True, True, True, step=1, size_bytes=3 * GIGABYTE,
        )  # fmt: skip
        effects = [Used(session, BASE, kind, amount) for kind, amount in amounts.items()]
        journal.results.finish([creation.done(b"{}", "json", ModelLive(model), saved, *effects)])
        return session

    return use


def test_usage_covers_one_project_or_all_for_an_admin(start: Any, journal: Any, used: Any, window: Any) -> None:
    server = start(host="0.0.0.0", price_training=1.5, price_storage=7.2)
    secrets = {name: journal.keys.create(name, name, admin=name == "root")[1] for name in ("ann", "bob", "root")}
    session = used(server, secrets["ann"])
    client = {name: tinker.AdminClient(base_url=server.url, api_key=secret) for name, secret in secrets.items()}
    answer = client["ann"].get_billing_usage(*window).result()
    events = {(e.event_info.type, getattr(e.event_info, "cached", None)): e for e in answer.data}
    training = events["training", None]
    assert (training.event_info.token_count, training.estimated_cost_usd) == (2_000_000, pytest.approx(3.0))
    assert (training.session_id, training.user_name, training.project_id) == (session, "ann", "ann")
    assert training.bucket_end - training.bucket_start == timedelta(hours=1)
    prefill = events["sampling_prefill", False], events["sampling_prefill", True]
    assert [e.event_info.token_count for e in prefill] == [500, 300]
    assert [e.estimated_cost_usd for e in prefill] == [None, None]
    assert events["sampling_sample", None].event_info.token_count == 100
    assert events["checkpoint", None].event_info.count == 1
    assert answer.sessions[session].user_metadata == {}
    (now,) = client["ann"].get_current_checkpoint_storage_usage().result().data
    assert (now.project_id, now.checkpoint_count, now.size_gigabytes) == ("ann", 1, 3.0)
    assert now.estimated_monthly_cost_usd == pytest.approx(21.6)
    assert client["bob"].get_billing_usage(*window).result().data == []
    assert client["bob"].get_current_checkpoint_storage_usage(project_id="ann").result().data == []
    root = client["root"].get_billing_usage(*window).result()
    assert {event.project_id for event in root.data} == {"ann"}


def test_prices_of_served_models_are_listed_for_the_cookbook(start: Any, server: Any) -> None:
    assert server.get("billing/prices").json() == [{"tinker_id": BASE}]
    priced = start(price_training=1.5, price_prefill=0.25, price_cached_prefill=0.00001, price_sample=3)
    (entry,) = priced.get("billing/prices").json()
    prices = {"prefill": "$0.25", "cached_prefill": "$1e-05", "sample": "$3.0", "train": "$1.5"}
    assert entry == {"tinker_id": BASE, **prices}
    costs = pytest.importorskip("tinker_cookbook.utils.cost_estimation", reason="needs tinker-cookbook 0.6")
    assert costs.rates_from_pricing_entry(entry) == costs.TokenCostRates(0.25, 0.00001, 3.0, 1.5)


@pytest.mark.parametrize(
    ("start_at", "end_at", "said"),
    [
        ("2026-01-01T00:30:00Z", "2026-01-02T00:00:00Z", "starting_on is 2026-01-01T00:30:00+00:00: must be a whole"),
        ("2026-01-01T00:00:00Z", "2026-01-16T00:00:00Z", "at most 14 days"),
        ("2026-01-02T00:00:00Z", "2026-01-02T00:00:00Z", "must be after starting_on"),
    ],
)
def test_invalid_billing_window_is_named_with_its_rule(server: Any, start_at: str, end_at: str, said: str) -> None:
    answer = server.get("billing/usage/events", params={"starting_on": start_at, "ending_before": end_at})
    assert answer.status_code == 400
    assert said in answer.json()["detail"]
