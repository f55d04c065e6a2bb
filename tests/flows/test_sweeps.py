from __future__ import annotations

from typing import Any

import pytest

from tinkerflow.backend.journal import Kind, NewRequest
from tinkerflow.flows import sweeps


def test_results_expire_as_fast_as_requests_arrive(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep dropped 500 results every five seconds. With more requests, payloads would accumulate forever."""
    model, _ = client.submit_create()
    for seq in range(1, 8):
        failed = NewRequest(Kind.OPTIM_STEP, "local", b"{}", f"{seq}", model_id=model, seq_id=seq, error="wrong")
        client.journal.requests.submit(failed)
    monkeypatch.setattr(sweeps, "_EXPIRED_AT_ONCE", 3)
    sweeps.expire_results(client.journal, -1)  # results of the future are old, too
    assert client.journal.results.expire(-1) == 0
