"""The metrics page: counts of requests, figures of the service, and base models with any name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tinkerflow.api.metrics import Known, Metrics
from tinkerflow.backend.journal import BaseModelView, ProcessView, ServiceFigures
from tinkerflow.backend.spec.commands import CompileStatus
from tinkerflow.backend.spec.drift import DRIFT_FIGURES


def test_each_metric_is_a_family_with_one_line_per_base_model() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    group = {"generation": 3, "memory": {"weights": 5, "kv_cache": 7}}
    bases = [
        BaseModelView("a/b", "", now, CompileStatus(9, 4, 1, 2, 3, 64, 10, 8, 6), group),
        BaseModelView('odd "name"\\', "", now, CompileStatus(0, 0, 0, 5, 0)),
        BaseModelView("new", "", now),
    ]
    used = {("a/b", "sample"): 12, ("a/b", "training"): 5, ("a/b", "checkpoint"): 2}
    earlier = now - timedelta(seconds=90)
    drift = {figure.name: {"a/b": value} for figure, value in zip(DRIFT_FIGURES, (0.25, 0.75, 0.875, 0.5), strict=True)}
    observed = ServiceFigures(used, {"a/b": 4}, {"a/b": earlier}, {"samples": earlier, "training": None}, drift)
    parts = [ProcessView("engine", 3, now, now)]
    text = Metrics().page(Known(bases, {"samples": 1, "models": 2}, observed, parts, now)).decode()
    lines = text.splitlines()
    assert 'tinkerflow_programs_planned{base_model="a/b"} 9.0' in lines
    assert 'tinkerflow_programs_late_total{base_model="a/b"} 3.0' in lines
    assert 'tinkerflow_programs_needed_total{base_model="odd \\"name\\"\\\\"} 5.0' in lines
    assert sum(line.startswith("# TYPE tinkerflow_programs_") for line in lines) == 5 and text.endswith("\n")
    assert 'tinkerflow_tokens_total{base_model="a/b",kind="sample"} 12.0' in lines
    assert 'tinkerflow_checkpoints_saved_total{base_model="a/b"} 2.0' in lines
    assert 'tinkerflow_models_live{base_model="a/b"} 4.0' in lines
    assert 'tinkerflow_unsaved_seconds{base_model="a/b"} 90.0' in lines
    assert 'tinkerflow_oldest_wait_seconds{kind="samples"} 90.0' in lines
    assert 'tinkerflow_oldest_wait_seconds{kind="training"} 0.0' in lines
    assert 'tinkerflow_kl_sample_train{base_model="a/b"} 0.25' in lines
    assert 'tinkerflow_routing_agreement{base_model="a/b"} 0.75' in lines
    assert 'tinkerflow_first_routing_agreement{base_model="a/b"} 0.875' in lines
    assert 'tinkerflow_support_replay{base_model="a/b"} 0.5' in lines
    assert 'tinkerflow_beat_age_seconds{part="engine"} 0.0' in lines
    assert 'tinkerflow_part_starts_total{part="engine"} 3.0' in lines
    assert 'tinkerflow_worker_group_generation{base_model="a/b"} 3.0' in lines
    assert 'tinkerflow_kv_pages{base_model="a/b",state="used"} 10.0' in lines
    assert 'tinkerflow_kv_pages{base_model="a/b",state="free"} 54.0' in lines
    assert 'tinkerflow_draft_tokens_total{base_model="a/b",result="accepted"} 6.0' in lines
    assert 'tinkerflow_draft_tokens_total{base_model="a/b",result="rejected"} 2.0' in lines
    assert 'tinkerflow_device_memory_bytes{base_model="a/b",use="kv_cache"} 7.0' in lines


def test_embedded_model_has_one_line_for_all_its_folders_under_its_alias() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    old, new = (f"/{data_dir}/models/tinkerflow/tiny-qwen3" for data_dir in ("old", "new"))
    bases = [BaseModelView(new, "", now, CompileStatus(9, 4, 1, 2, 3), {"generation": 3, "memory": {"weights": 5}})]
    used = {(old, "sample"): 1, (new, "sample"): 2, (old, "checkpoint"): 3, (new, "checkpoint"): 4}
    observed = ServiceFigures(used, {new: 4}, {new: now}, {"samples": None}, {"kl_sample_train": {new: 0.25}})
    text = Metrics().page(Known(bases, {"samples": 1, "models": 2}, observed, [], now)).decode()
    assert "/models/" not in text
    for line in (
        'tinkerflow_tokens_total{base_model="tinkerflow/tiny",kind="sample"} 3.0',
        'tinkerflow_checkpoints_saved_total{base_model="tinkerflow/tiny"} 7.0',
        'tinkerflow_models_live{base_model="tinkerflow/tiny"} 4.0',
        'tinkerflow_programs_planned{base_model="tinkerflow/tiny"} 9.0',
    ):
        assert text.splitlines().count(line) == 1


def counts(server: Any, family: str, sample: str) -> dict[tuple[str, ...], float]:
    page = server.get("metrics").text
    found = next(one for one in text_string_to_metric_families(page) if one.name == family)
    return {tuple(one.labels.values()): one.value for one in found.samples if one.name == sample}


def test_requests_are_counted_by_operation_and_status(server: Any) -> None:
    assert server.session()
    assert server.post("get_info", {"model_id": "nobody"}).status_code == 404
    assert server.get("sessions", key="wrong").status_code == 401
    assert server.get("no/such/endpoint").status_code == 404
    assert server.get("healthz").status_code == 200
    seen = counts(server, "tinkerflow_requests", "tinkerflow_requests_total")
    expected = {("create_session", "200"), ("get_info", "404"), ("sessions", "401"), ("none", "404")}
    expected.add(("healthz", "200"))
    assert expected <= seen.keys() and all(seen[one] == 1 for one in expected)
    timed = counts(server, "tinkerflow_request_seconds", "tinkerflow_request_seconds_count")
    assert timed["create_session",] == 1


def test_a_failure_of_the_service_is_counted_when_its_client_reads_it(server: Any) -> None:
    def failed() -> dict[tuple[str, ...], float]:
        found = counts(server, "tinkerflow_operations_failed", "tinkerflow_operations_failed_total")
        assert ("save_weights",) in found, "Prometheus sees no increase in a line that is new"
        return {labels: count for labels, count in found.items() if count}

    broken, refused = (server.journal.requests.ready(server.model())[0] for _ in range(2))
    server.journal.results.finish([broken.failed("no", "server"), refused.failed("no", "user")])
    assert failed() == {}
    for request in (broken, broken, refused):
        assert server.result(request.id).json()["error"] == "no"
    assert failed() == {("create_model",): 1.0}


def test_two_apps_in_one_process_count_separately(start: Any) -> None:
    one, other = start(), start()
    one.session()
    assert ("create_session", "200") not in counts(other, "tinkerflow_requests", "tinkerflow_requests_total")


def test_metrics_count_waiting_requests(server: Any) -> None:
    opened = {"session_id": server.session(), "sampling_session_seq_id": 0, "base_model": "tiny/bigram"}
    sampler = server.post("create_sampling_session", opened).json()["sampling_session_id"]
    for seq in range(3):
        server.post("asample", {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": []}})
    server.model()
    assert counts(server, "tinkerflow_waiting_samples", "tinkerflow_waiting_samples") == {(): 3}
    assert counts(server, "tinkerflow_waiting_models", "tinkerflow_waiting_models") == {(): 1}
