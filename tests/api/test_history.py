"""Histories over HTTP: their choice by metadata or setting, pages, receipts, rows of steps, and access."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.api.conftest import BASE

from tinkerflow.api.routes import history as module
from tinkerflow.backend.catalog.receipt import check_receipt
from tinkerflow.backend.core.errors import JournalBusyError, UserError
from tinkerflow.backend.journal import history as journal_history
from tinkerflow.backend.spec.history import digest
from tinkerflow.backend.spec.outliers import BlamedRow
from tinkerflow.backend.store.history import HistoryStore
from tinkerflow.flows.sweeps import write_histories

pytestmark = pytest.mark.usefixtures("engine")


def make(server: Any, **metadata: str) -> str:
    body = {"session_id": server.session(), "model_seq_id": 0, "base_model": BASE, "user_metadata": metadata}
    accepted = server.post("create_model", body).json()
    server.result(accepted["request_id"])
    return str(accepted["model_id"])


def train(server: Any, run: str, steps: int) -> list[bytes]:
    """Make `steps` optimizer steps, and return their results."""
    results = []
    for seq_id in range(1, steps + 1):
        body = {"model_id": run, "seq_id": seq_id, "adam_params": {"learning_rate": seq_id / 1000}}
        results.append(server.result(server.post("optim_step", body).json()["request_id"]).content)
    return results


@pytest.mark.parametrize(
    ("setting", "kept"), [("off", [False, False]), ("chosen", [True, False]), ("all", [True, True])]
)
def test_the_setting_and_the_metadata_choose_runs(start: Any, setting: str, kept: list[bool]) -> None:
    server = start(history=setting)
    runs = [make(server, history="true"), make(server, name="plain")]
    assert [server.get(f"training_runs/{run}/history").status_code == 200 for run in runs] == kept
    refused = server.get(f"training_runs/{runs[1]}/receipt") if not kept[1] else None
    assert refused is None or "has no history: must be created with" in refused.json()["detail"]
    assert server.get(f"training_runs/{runs[0]}/history?after={2**63}").status_code == 400


def test_pages_have_every_request_with_its_digests(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_REQUESTS", 3)
    monkeypatch.setattr(journal_history, "_DUE_REQUESTS", 1)
    run = make(server, history="true", name="asked")
    results = train(server, run, 3)
    write_histories(server.journal, server.store)
    results += train(server, run, 0)
    assert len(server.journal.histories.segments(run)) == 1
    first = server.get(f"training_runs/{run}/history").json()
    second = server.get(f"training_runs/{run}/history", params={"after": first["next"], "payloads": False}).json()
    assert (first["next"], second["next"]) == (2, None)
    about = first["run"]
    assert about == second["run"] and about["user_metadata"] == {"history": "true", "name": "asked"}
    assert (about["training_run_id"], about["base_model"], about["optimizer"]) == (run, BASE, "adamw")
    rows = [*first["requests"], *second["requests"]]
    assert [(row["seq_id"], row["kind"], row["step"]) for row in rows] == [
        (0, "create_model", None),
        (1, "optim_step", 1),
        (2, "optim_step", 2),
        (3, "optim_step", 3),
    ]
    assert [row["result_hash"] for row in rows[1:]] == [digest(result) for result in results]
    bodies = [base64.b64decode(row["payload"]) for row in rows[:3]]
    assert [row["payload_hash"] for row in rows[:3]] == [digest(body) for body in bodies]
    assert orjson.loads(bodies[2])["adam_params"] == {"learning_rate": 0.002}
    assert rows[3]["payload"] is None


@pytest.mark.parametrize("committed", [False, True])
def test_a_segment_remains_in_the_store_only_if_the_journal_has_recorded_it(
    server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, committed: bool
) -> None:
    """The database fails while it records a segment, before or after its commit."""
    monkeypatch.setattr(journal_history, "_DUE_REQUESTS", 1)
    run = make(server, history="true")
    train(server, run, 3)
    with monkeypatch.context() as outage:

        def fail(model_id: str, segment: Any, record: Any = server.journal.histories.record_segment) -> bool:
            if committed:
                record(model_id, segment)
            raise JournalBusyError("the connection was lost")

        outage.setattr(server.journal.histories, "record_segment", fail)
        with pytest.raises(JournalBusyError):
            write_histories(server.journal, server.store)
    (lost,) = tmp_path.glob("**/history/*/*")
    body = {"model_id": run, "seq_id": 4, "adam_params": {"learning_rate": 1.0}}
    server.result(server.post("optim_step", body).json()["request_id"])
    write_histories(server.journal, server.store)
    segments = [one.name for one in server.journal.histories.segments(run)]
    assert sorted(file.name for file in tmp_path.glob("**/history/*/*")) == segments
    assert (lost.name in segments, len(segments)) == ((True, 2) if committed else (False, 1))
    assert [row["seq_id"] for row in server.get(f"training_runs/{run}/history").json()["requests"]] == [0, 1, 2, 3, 4]


def test_receipt_is_signed_and_damage_is_a_final_error(
    server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(journal_history, "_DUE_REQUESTS", 1)
    run = make(server, history="true")
    train(server, run, 70)
    write_histories(server.journal, server.store)
    receipt = server.get(f"training_runs/{run}/receipt").json()
    found = check_receipt(receipt)
    assert (len(found), found[-1].step, found[-1].seq_id) == (64, 70, 70)
    assert receipt["run"]["id"] == run
    with pytest.raises(UserError, match="was changed after it was issued"):
        check_receipt({**receipt, "issued_at": "yesterday"})
    with pytest.raises(UserError, match="a part is absent or malformed"):
        check_receipt({**receipt, "public_key": "no"})

    (file,) = tmp_path.glob("**/history/*/*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))
    server.store.histories = HistoryStore(server.store.url, server.store.blobs)
    answer = server.get(f"training_runs/{run}/receipt")
    assert answer.status_code == 500 and "is damaged in the request after number" in answer.json()["detail"]


def test_step_rows_are_kept_and_invalid_ones_are_refused(server: Any) -> None:
    run, plain = make(server, history="true"), make(server)
    row = {"number": 3, "tokens": 7, "loss": 2.5, "grad_norm": None, "worst": [[1, 65, -9.5]], "repeated": [4]}
    row |= {"surprise": 2.5, "weight": 80.0, "share": 0.9, "reason": "weight", "score": 9.0}
    assert server.post(f"training_runs/{run}/blames", {"step": 12, "rows": [row]}).json() == {}
    kept = BlamedRow(3, 7, 2.5, None, ((1, 65, -9.5),), (4,), 2.5, 80.0, share=0.9, reason="weight", score=9.0)
    assert server.store.histories.blames(run) == {12: [kept]}
    for body, text in (
        ({"step": 0, "rows": [row]}, "step"),
        ({"step": 1, "rows": []}, "rows"),
        ({"step": 1, "rows": [row] * 21}, "rows"),
        ({"step": 1, "rows": [{**row, "worst": [[1, 2, 0.0]] * 6}]}, "worst"),
        ({"step": 1, "rows": [{**row, "reason": "<b>"}]}, "reason"),
    ):
        refused = server.post(f"training_runs/{run}/blames", body)
        assert refused.status_code in (400, 422) and text in refused.text, body
    assert "has no history" in server.post(f"training_runs/{plain}/blames", {"step": 1, "rows": [row]}).text


def test_foreign_runs_do_not_exist(start: Any) -> None:
    server = start()
    (_, key), (_, mine) = (server.journal.keys.create(name, name) for name in ("other", "mine"))
    body = {"sdk_version": "0", "tags": []}
    session = server.post("create_session", body, mine).json()["session_id"]
    made = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "user_metadata": {"history": "true"}}
    run = server.post("create_model", made, mine).json()["model_id"]
    for part in ("history", "receipt"):
        assert server.get(f"training_runs/{run}/{part}", key).status_code == 404
    assert server.get(f"training_runs/{run}/history", mine).status_code == 200
    rows = [{"number": 0, "tokens": 1, "loss": 1.0, "grad_norm": 1.0}]
    assert server.post(f"training_runs/{run}/blames", {"step": 1, "rows": rows}, key).status_code == 404
