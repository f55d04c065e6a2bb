"""TrainingClient: every operation, each with its asynchronous twin."""

from __future__ import annotations

from typing import Any

import pytest
import tinker
from tests.compat.conftest import TOKENS, datum
from tests.compat.registry import exercises
from tinker import types

STILL = types.AdamParams(learning_rate=0.0)  # a step that clears the gradient and changes no weight


async def settled(pending: Any) -> Any:
    """The result of an `_async` method. Some of them return a future of a future."""
    return await pending.result_async()


@exercises(
    "TrainingClient.forward",
    "TrainingClient.forward_async",
    "TrainingClient.forward_backward",
    "TrainingClient.forward_backward_async",
    "TrainingClient.optim_step",
    "TrainingClient.optim_step_async",
)
async def test_sync_and_async_steps_are_bitwise_equal(service: tinker.ServiceClient, base_model: str) -> None:
    sync = service.create_lora_training_client(base_model, rank=4, seed=3).result()
    twin = service.create_lora_training_client(base_model, rank=4, seed=3).result()
    rate = types.AdamParams(learning_rate=1e-2)
    before = sync.forward([datum()], "cross_entropy").result()
    same = await settled(await twin.forward_async([datum()], "cross_entropy"))
    assert before.loss_fn_outputs[0]["logprobs"].tolist() == same.loss_fn_outputs[0]["logprobs"].tolist()
    first = sync.forward_backward([datum()], "cross_entropy").result()
    second = await settled(await twin.forward_backward_async([datum()], "cross_entropy"))
    assert first.metrics["loss:sum"] == second.metrics["loss:sum"]
    # A forward alone is another program: on some CPUs its sum differs in the last bit.
    assert first.metrics["loss:sum"] == pytest.approx(before.metrics["loss:sum"], rel=1e-6)
    norm = sync.optim_step(rate).result().metrics["grad_norm"]
    assert norm == (await settled(await twin.optim_step_async(rate))).metrics["grad_norm"] > 0
    after = sync.forward([datum()], "cross_entropy").result()
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"]


@exercises("TrainingClient.forward_backward_custom", "TrainingClient.forward_backward_custom_async")
async def test_custom_loss_of_the_user_runs_in_the_client(trainer: tinker.TrainingClient) -> None:
    def negative(data: Any, logprobs: Any) -> Any:
        loss = -sum(each.sum() for each in logprobs)
        return loss, {"doubled": float(loss.detach()) * 2}

    sync = trainer.forward_backward_custom([datum()], negative).result()
    twin = await settled(await trainer.forward_backward_custom_async([datum()], negative))
    usual = trainer.forward_backward([datum()], "cross_entropy").result().metrics["loss:sum"]
    norm = trainer.optim_step(STILL).result().metrics["grad_norm"]
    assert sync.metrics["doubled"] == twin.metrics["doubled"] == pytest.approx(2 * usual, rel=1e-5)
    trainer.forward_backward([datum()], "cross_entropy")
    alone = trainer.optim_step(STILL).result().metrics["grad_norm"]
    assert norm == pytest.approx(3 * alone, rel=1e-4)  # three equal gradients had accumulated


@exercises(
    "TrainingClient.save_state",
    "TrainingClient.save_state_async",
    "TrainingClient.load_state",
    "TrainingClient.load_state_async",
    "TrainingClient.load_state_with_optimizer",
    "TrainingClient.load_state_with_optimizer_async",
)
async def test_saving_and_loading_into_a_model(service: tinker.ServiceClient, base_model: str) -> None:
    model = service.create_lora_training_client(base_model, rank=4, seed=5).result()

    def now() -> float:
        return float(model.forward([datum()], "cross_entropy").result().metrics["loss:sum"])

    first = model.save_state("a", user_metadata={"k": "v"}).result().path
    loss = now()
    model.forward_backward([datum()], "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    second = (await settled(await model.save_state_async("b", ttl_seconds=3600))).path
    assert (first.rsplit("/", 1)[1], second.rsplit("/", 1)[1]) == ("a", "b")
    trained = now()
    assert trained < loss
    model.load_state(first).result()
    assert now() == loss
    await settled(await model.load_state_with_optimizer_async(second))
    assert now() == trained
    await settled(await model.load_state_async(first))
    assert now() == loss
    model.load_state_with_optimizer(second).result()
    assert model.optim_step(STILL).result().metrics["optimizer_step"] == 2.0


@exercises(
    "TrainingClient.save_weights_for_sampler",
    "TrainingClient.save_weights_for_sampler_async",
    "TrainingClient.create_sampling_client",
    "TrainingClient.create_sampling_client_async",
    "TrainingClient.save_weights_and_get_sampling_client",
    "TrainingClient.save_weights_and_get_sampling_client_async",
)
async def test_every_way_to_sample_saved_weights_gives_equal_results(trainer: tinker.TrainingClient) -> None:
    named = trainer.save_weights_for_sampler("way-1").result().path
    twin = (await settled(await trainer.save_weights_for_sampler_async("way-2"))).path
    clients = [
        trainer.create_sampling_client(named).result(),
        await trainer.create_sampling_client_async(twin),
        trainer.save_weights_and_get_sampling_client().result(),
        await trainer.save_weights_and_get_sampling_client_async(),
    ]
    prompt = types.ModelInput.from_ints(TOKENS)
    first, *others = [client.compute_logprobs(prompt).result() for client in clients]
    assert others == [first] * 3
    trained = trainer.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    assert first[1:] == pytest.approx(trained[:-1], abs=2e-3)


@exercises("TrainingClient.save_weights_external", "TrainingClient.save_weights_external_async")
async def test_exports(trainer: tinker.TrainingClient) -> None:
    first = trainer.save_weights_external("export-1").result()
    twin = await settled(await trainer.save_weights_external_async("export-2", ttl_seconds=3600))
    assert first.path.endswith("/external_weights/export-1")
    assert twin.path.endswith("/external_weights/export-2")


@exercises(
    "TrainingClient.get_info",
    "TrainingClient.get_info_async",
    "TrainingClient.get_tokenizer",
    "TrainingClient.get_console_url",
    "TrainingClient.get_telemetry",
)
async def test_training_client_describes_its_model(server, trainer: tinker.TrainingClient, base_model: str) -> None:
    info = trainer.get_info()
    assert info == await trainer.get_info_async()
    assert (info.model_name, info.lora_rank, info.is_lora) == (base_model, 4, True)
    tokenizer = trainer.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("pig latin")) == "pig latin"
    assert info.model_id.split(":")[0] in trainer.get_console_url()
    assert not trainer.get_console_url().startswith(server.api_url), "the page is ours: no more ELSEWHERE"
    assert trainer.get_telemetry() is None
