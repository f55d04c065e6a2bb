"""RestClient: reading runs, sessions, samplers and checkpoints, and changing checkpoints."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import tinker
from tests.compat.registry import exercises
from tinker import types


@pytest.fixture(scope="module")
def saved(trainer: tinker.TrainingClient) -> str:
    return trainer.save_state("kept").result().path


@exercises(
    "RestClient.get_training_run",
    "RestClient.get_training_run_async",
    "RestClient.get_training_run_by_tinker_path",
    "RestClient.get_training_run_by_tinker_path_async",
    "RestClient.list_training_runs",
    "RestClient.list_training_runs_async",
)
async def test_runs(rest: tinker.RestClient, run: str, saved: str, base_model: str) -> None:
    found = rest.get_training_run(run).result()
    assert (found.training_run_id, found.base_model, found.lora_rank) == (run, base_model, 4)
    assert found.user_metadata == {"made": "here"}
    assert found.last_checkpoint is not None
    assert found.last_checkpoint.tinker_path == saved
    assert found == await rest.get_training_run_async(run)
    assert found == rest.get_training_run_by_tinker_path(saved).result()
    assert found == await rest.get_training_run_by_tinker_path_async(saved)
    listed = rest.list_training_runs(limit=1000).result()
    assert run in [each.training_run_id for each in listed.training_runs]
    assert listed.cursor.total_count == len(listed.training_runs)
    page = await rest.list_training_runs_async(limit=1, offset=1)
    assert page.training_runs == listed.training_runs[1:2]


@exercises(
    "RestClient.list_checkpoints",
    "RestClient.list_checkpoints_async",
    "RestClient.list_user_checkpoints",
    "RestClient.list_user_checkpoints_async",
    "RestClient.get_weights_info_by_tinker_path",
)
async def test_checkpoints(rest: tinker.RestClient, run: str, saved: str, base_model: str) -> None:
    listed = rest.list_checkpoints(run).result().checkpoints
    kept = next(each for each in listed if each.tinker_path == saved)
    assert (kept.checkpoint_id, kept.checkpoint_type, kept.public) == ("weights/kept", "training", False)
    assert (kept.size_bytes or 0) > 1000
    assert listed == (await rest.list_checkpoints_async(run)).checkpoints
    everything = rest.list_user_checkpoints(limit=1000).result()
    assert kept in everything.checkpoints
    assert everything.cursor is not None
    assert everything.cursor.total_count == len(everything.checkpoints)
    assert (await rest.list_user_checkpoints_async(limit=1)).checkpoints == everything.checkpoints[:1]
    info = rest.get_weights_info_by_tinker_path(saved).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (base_model, True, 4)


@exercises(
    "RestClient.delete_checkpoint",
    "RestClient.delete_checkpoint_async",
    "RestClient.delete_checkpoint_from_tinker_path",
    "RestClient.delete_checkpoint_from_tinker_path_async",
)
async def test_deleted_checkpoints_are_gone(
    rest: tinker.RestClient, trainer: tinker.TrainingClient, service: tinker.ServiceClient, run: str
) -> None:
    paths = [trainer.save_state(f"gone-{i}").result().path for i in range(4)]
    rest.delete_checkpoint(run, "weights/gone-0").result()
    await rest.delete_checkpoint_async(run, "weights/gone-1")
    rest.delete_checkpoint_from_tinker_path(paths[2]).result()
    await rest.delete_checkpoint_from_tinker_path_async(paths[3])
    assert not {each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints} & set(paths)
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint(run, "weights/gone-0").result()
    with pytest.raises(tinker.RequestFailedError, match="gone-2"):
        service.create_training_client_from_state(paths[2]).result()


@exercises(
    "RestClient.publish_checkpoint_from_tinker_path",
    "RestClient.publish_checkpoint_from_tinker_path_async",
    "RestClient.unpublish_checkpoint_from_tinker_path",
    "RestClient.unpublish_checkpoint_from_tinker_path_async",
    "RestClient.set_checkpoint_ttl_from_tinker_path",
    "RestClient.set_checkpoint_ttl_from_tinker_path_async",
)
async def test_publishing_and_expiry(rest: tinker.RestClient, trainer: tinker.TrainingClient, run: str) -> None:
    path = trainer.save_state("shown").result().path

    def now() -> types.Checkpoint:
        return next(each for each in rest.list_checkpoints(run).result().checkpoints if each.tinker_path == path)

    rest.publish_checkpoint_from_tinker_path(path).result()
    assert now().public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert not now().public
    await rest.publish_checkpoint_from_tinker_path_async(path)
    assert now().public
    await rest.unpublish_checkpoint_from_tinker_path_async(path)
    assert not now().public
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    expires = now().expires_at
    assert expires is not None
    assert abs(expires - datetime.now(UTC) - timedelta(hours=2)) < timedelta(minutes=1)
    await rest.set_checkpoint_ttl_from_tinker_path_async(path, None)
    assert now().expires_at is None


@exercises(
    "RestClient.get_session",
    "RestClient.get_session_async",
    "RestClient.list_sessions",
    "RestClient.list_sessions_async",
    "RestClient.search_sessions",
    "RestClient.get_sampler",
    "RestClient.get_sampler_async",
)
async def test_sessions_and_samplers(
    rest: tinker.RestClient, trainer: tinker.TrainingClient, run: str, base_model: str
) -> None:
    session = run.split(":", maxsplit=1)[0]
    path = trainer.save_weights_for_sampler("looked-at").result().path
    trainer.create_sampling_client(path).result()
    found = rest.get_session(session).result()
    assert run in found.training_run_ids
    assert found == await rest.get_session_async(session)
    sampler = rest.get_sampler(found.sampler_ids[-1]).result()
    assert (sampler.base_model, sampler.model_path) == (base_model, path)
    assert sampler == await rest.get_sampler_async(found.sampler_ids[-1])
    listed = rest.list_sessions(limit=100).result().sessions
    assert session in listed
    assert (await rest.list_sessions_async(limit=1, offset=listed.index(session))).sessions == [session]
    (summary,) = rest.search_sessions(types.SessionSearchRequest(session_id=session)).result().sessions
    assert summary.status is not None
    assert summary.status.type == "active"
    assert summary.checkpoints_count == len(rest.list_checkpoints(run).result().checkpoints)


@exercises("RestClient.assign_session_project", "RestClient.assign_session_project_async")
async def test_a_session_moves_to_a_project(rest: tinker.RestClient, run: str) -> None:
    session = run.split(":", maxsplit=1)[0]
    rest.assign_session_project(session, "lab").result()
    search = types.SessionSearchRequest(session_id=session)
    assert [each.project_id for each in rest.search_sessions(search).result().sessions] == ["lab"]
    await rest.assign_session_project_async(session, "lab-2")
    found = rest.list_training_runs(project_id="lab-2").result()
    assert run in [each.training_run_id for each in found.training_runs]
    assert rest.list_training_runs(project_id="lab").result().training_runs == []
    with pytest.raises(tinker.NotFoundError):
        rest.assign_session_project("sess-that-is-not", "lab").result()


@exercises("RestClient.get_server_capabilities", "RestClient.get_telemetry")
def test_capabilities(rest: tinker.RestClient, base_model: str) -> None:
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.trainable, model.sampleable) == (base_model, True, True)
    assert rest.get_telemetry() is None


@exercises("RestClient.copy_weights", "RestClient.copy_weights_async")
async def test_copies(rest: tinker.RestClient, service: tinker.ServiceClient, saved: str) -> None:
    first = rest.copy_weights(saved, "archive").result()
    twin = await rest.copy_weights_async(saved, "archive", ttl_seconds=7200)
    assert len({first, twin, saved}) == 3
    rows = {each.tinker_path: each for each in rest.list_user_checkpoints(limit=1000).result().checkpoints}
    assert rows[first].size_bytes == rows[saved].size_bytes
    assert (rows[first].expires_at is None, rows[twin].expires_at is None) == (True, False)


@exercises("RestClient.get_external_weights_urls", "RestClient.get_external_weights_urls_async")
async def test_exported_files_can_be_fetched(rest: tinker.RestClient, trainer: tinker.TrainingClient) -> None:
    exported = trainer.save_weights_external("fetched").result()
    links = rest.get_external_weights_urls(exported.path).result()
    assert {"adapter_model.safetensors", "adapter_config.json"} <= links.urls.keys()
    assert links.expires > datetime.now(UTC)
    twin = await rest.get_external_weights_urls_async(exported.path)
    assert twin.urls.keys() == links.urls.keys()
    async with httpx.AsyncClient() as http:
        files = {name: (await http.get(url)).content for name, url in links.urls.items()}
    assert json.loads(files["adapter_config.json"])["r"] == 4
    assert sum(map(len, files.values())) > 1000


@exercises("RestClient.whoami")
def test_whoami(rest: tinker.RestClient) -> None:
    who = rest.whoami().result()
    assert who.user_urn
    assert who.org_urn


@exercises("RestClient.export_session_trace", "RestClient.export_session_trace_async")
async def test_a_trace_shows_the_session(rest: tinker.RestClient, run: str) -> None:
    session = run.split(":", maxsplit=1)[0]
    links = [rest.export_session_trace(session).result(), await rest.export_session_trace_async(session)]
    for link in links:
        async with httpx.AsyncClient() as http:
            events = (await http.get(link)).json()["traceEvents"]
        process = next(event["pid"] for event in events if event["ph"] == "M" and event["args"]["name"] == run)
        steps = {event["name"]: event for event in events if event["ph"] == "X" and event["pid"] == process}
        assert steps["forward_backward 1"]["ts"] <= steps["optim_step 2"]["ts"]
