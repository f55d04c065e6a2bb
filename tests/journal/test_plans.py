"""SQLite finds what waits through the partial indexes, so that the cost does not grow with what is done."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa


@pytest.mark.parametrize(
    ("call", "index"),
    [
        (lambda scene, model: scene.journal.pending_models(), "ix_request_pending_of_model"),
        (lambda scene, model: scene.journal.ready(model), "ix_request_pending_of_model"),
        (lambda scene, model: scene.journal.gaps(1), "ix_request_pending_of_model"),
        (lambda scene, model: scene.journal.pending_samples(10), "ix_request_pending_samples"),
        (lambda scene, model: scene.journal.expire_results(10), "ix_request_finished_with_bytes"),
    ],
    ids=["pending_models", "ready", "gaps", "pending_samples", "expire_results"],
)
def test_the_partial_index_is_used(scene, url, statements, call, index):
    model = scene.model()
    if not url.startswith("sqlite"):
        return  # Postgres reads a small table whole, whatever its indexes
    with statements() as made:
        call(scene, model)
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        numbered = made[0]
        rows = connection.exec_driver_sql("EXPLAIN QUERY PLAN " + numbered, ("2026-01-01",) * numbered.count("?")).all()
    engine.dispose()
    plan = "\n".join(row.detail for row in rows)
    assert index in plan, plan
    assert "SCAN request" not in plan.replace(f"SCAN request USING INDEX {index}", "").replace(
        f"SCAN request USING COVERING INDEX {index}", ""
    ), plan
    assert Path(url.removeprefix("sqlite:///")).exists()
