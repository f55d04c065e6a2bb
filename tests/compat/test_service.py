"""ServiceClient: making clients of every kind, and ending a session."""

from __future__ import annotations

import pytest
import tinker
from tests.compat.conftest import TOKENS, datum
from tests.compat.registry import exercises
from tinker import types


def loss_of(model: tinker.TrainingClient) -> float:
    return float(model.forward([datum()], "cross_entropy").result().metrics["loss:sum"])


@exercises("ServiceClient.create_lora_training_client", "ServiceClient.create_lora_training_client_async")
async def test_models_are_created_with_the_requested_options(service: tinker.ServiceClient, base_model: str) -> None:
    sync = service.create_lora_training_client(base_model, rank=4, seed=1).result()
    twin = await service.create_lora_training_client_async(base_model, rank=8, seed=1)
    first, second = sync.get_info(), twin.get_info()
    assert (first.lora_rank, second.lora_rank, first.model_name) == (4, 8, base_model)
    assert first.model_id != second.model_id
    assert loss_of(sync) == loss_of(twin)  # LoRA's B is zero at first, so both are the base model


@exercises(
    "ServiceClient.create_training_client_from_state",
    "ServiceClient.create_training_client_from_state_async",
    "ServiceClient.create_training_client_from_state_with_optimizer",
    "ServiceClient.create_training_client_from_state_with_optimizer_async",
)
async def test_a_saved_state_becomes_a_model(service: tinker.ServiceClient, trainer: tinker.TrainingClient) -> None:
    path = trainer.save_state("resumed").result().path
    saved = loss_of(trainer)
    plain = [
        service.create_training_client_from_state(path).result(),
        await service.create_training_client_from_state_async(path),
    ]
    whole = [
        service.create_training_client_from_state_with_optimizer(path).result(),
        await service.create_training_client_from_state_with_optimizer_async(path),
    ]
    models = [*plain, *whole, trainer]
    assert {loss_of(model) for model in models} == {saved}
    steps = [model.optim_step(types.AdamParams()).result().metrics["optimizer_step"] for model in models]
    assert steps == [1.0, 1.0, 2.0, 2.0, 2.0]  # with its optimizer, a model continues to count steps
    for model in models[2:]:
        model.forward_backward([datum()], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert len({loss_of(model) for model in models[2:]}) == 1, "resuming equals continuing bit for bit"


@exercises("ServiceClient.create_sampling_client", "ServiceClient.create_sampling_client_async")
async def test_samplers_of_the_base_model_and_of_a_checkpoint(
    service: tinker.ServiceClient, trainer: tinker.TrainingClient, base_model: str
) -> None:
    path = trainer.save_weights_for_sampler("sampled").result().path
    base = service.create_sampling_client(base_model=base_model).result()
    tuned = await service.create_sampling_client_async(model_path=path)
    prompt = types.ModelInput.from_ints(TOKENS)
    of_base, of_tuned = base.compute_logprobs(prompt).result(), tuned.compute_logprobs(prompt).result()
    assert of_base[0] is None
    assert sum(of_tuned[1:]) > sum(of_base[1:])  # trained on exactly these tokens


@exercises("ServiceClient.get_server_capabilities", "ServiceClient.get_server_capabilities_async")
async def test_capabilities(service: tinker.ServiceClient, base_model: str) -> None:
    sync = service.get_server_capabilities()
    twin = await service.get_server_capabilities_async()
    assert sync == twin
    (model,) = sync.supported_models
    assert (model.model_name, model.trainable, model.sampleable) == (base_model, True, True)
    assert (model.max_context_length or 0) > 0


@exercises("ServiceClient.create_custom_loss")
def test_a_custom_loss(service: tinker.ServiceClient, trainer: tinker.TrainingClient) -> None:
    def weighted(logprobs, weights):
        loss = -(logprobs * weights).sum()
        return loss, {"custom/weighted:sum": loss}

    handle = service.create_custom_loss(weighted, {"logprobs": 1, "weights": 1}).result()
    given = trainer.forward_backward_custom([datum()], handle).result()
    assert given.metrics["custom/weighted:sum"] == pytest.approx(loss_of(trainer), rel=1e-5)
    trainer.optim_step(types.AdamParams(learning_rate=0.0)).result()  # clears the gradient


@exercises(
    "ServiceClient.holder",
    "ServiceClient.create_rest_client",
    "ServiceClient.get_console_url",
    "ServiceClient.get_telemetry",
    "ServiceClient.close",
)
def test_a_session_from_its_start_to_its_end(server, rest: tinker.RestClient, base_model: str) -> None:
    service = tinker.ServiceClient(base_url=server.api_url, user_metadata={"purpose": "closing"})
    service.create_sampling_client(base_model=base_model).result()
    session = service.holder.get_session_id()
    assert session in service.get_console_url()
    assert not service.get_console_url().startswith(server.api_url), "the page is ours: no more ELSEWHERE"
    assert service.get_telemetry() is None  # TINKER_TELEMETRY=0
    own = service.create_rest_client()  # ends with the service
    assert own.get_session(session).result().user_metadata == {"purpose": "closing"}
    service.close("errored", "the test says so").result()
    found = rest.search_sessions(types.SessionSearchRequest(session_id=session)).result().sessions
    status = found[0].status
    assert status is not None
    assert (status.type, status.reason.type, status.detail) == ("client_finished", "errored", "the test says so")


@exercises("ServiceClient.copy_weights")
def test_a_copy_has_the_same_weights(
    service: tinker.ServiceClient, trainer: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = trainer.save_state("copied").result().path
    monkeypatch.setenv("TINKER_PROJECT_ID", "archive")  # the SDK reads the project from it
    copy = service.copy_weights(source).result()
    assert copy != source
    assert loss_of(service.create_training_client_from_state(copy).result()) == loss_of(trainer)
