"""A cassette made from a run's history answers the loop that made the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tinker
from tests.api.conftest import BASE, Engine
from tests.api.test_sdk import datum
from tests.deployments.cassettes.test_replay import fails, replaying, run
from tinker import types
from typer.testing import CliRunner

from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.deployments.cassettes.file import read_cassette
from tinkerflow.deployments.commands import every_command
from tinkerflow.flows.sweeps import write_histories

pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED.*load_state")


def loop(service: tinker.ServiceClient, rate: float = 0.1, *, sample: bool = False) -> Any:
    """Make every kind of a run's requests; return the run's id, and the metrics, logprobs and paths of the answers."""
    trainer = service.create_lora_training_client(BASE, rank=8, user_metadata={"history": "true"}).result()
    found: list[Any] = [trainer.get_info().model_data.model_name]
    for step in range(3):
        forward = trainer.forward_backward([datum([1, 2, 3 + step]), datum([4, 5, 6])], "cross_entropy")
        made = trainer.optim_step(types.AdamParams(learning_rate=rate))
        result = forward.result()
        found += [result.metrics, [outputs["logprobs"].data for outputs in result.loss_fn_outputs]]
        found.append(made.result().metrics)
    found.append(trainer.save_state("middle").result().path)
    found.append(trainer.forward([datum([7, 8, 9])], "cross_entropy").result().metrics)
    with pytest.raises(tinker.RequestFailedError, match="does not exist") as failed:
        trainer.load_state(f"tinker://{trainer.model_id}/weights/none").result()
    found.append(str(failed.value))
    trainer.load_state(found[-3]).result()
    found.append(trainer.forward([datum([7, 8, 9])], "cross_entropy").result().metrics)
    found.append(trainer.save_weights_for_sampler("last").result().path)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    if sample:
        sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=2)).result()
    return trainer.model_id, found


@pytest.fixture
def command(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """command(*words) runs `tinkerflow cassette record` and returns its output."""
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")

    def call(*words: str) -> str:
        done = CliRunner().invoke(every_command(), ["cassette", "record", *words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.output

    return call


@pytest.mark.usefixtures("engine")
def test_a_run_becomes_a_cassette_that_answers_its_loop(server: Any, command: Any, tmp_path: Path) -> None:
    run_id, wanted = run(server.url, loop, user_metadata={"who": "me"}, project_id="mine")
    write_histories(server.journal, server.store)
    file = tmp_path / "run.cassette"
    said = command(run_id, "-o", str(file))
    assert said.startswith(f"recorded 18 requests in {file}: ")
    assert "the samples of 1 samplers are missing, because the history of a run contains none" in said
    recording = read_cassette(file)
    with replaying(recording) as (url, replay):
        assert run(url, loop, user_metadata={"who": "me"}, project_id="mine") == (run_id, wanted)
        assert replay.script.report() == []

    def changed(service: tinker.ServiceClient) -> Any:
        return loop(service, rate=0.2)

    named = {"user_metadata": {"who": "me"}, "project_id": "mine"}
    text = r"request 5 \(optim_step of model 0\): adam_params.learning_rate is 0.2, but was 0.1 in the recording"
    fails(changed, recording, text, **named)
    fails(lambda service: loop(service, sample=True), recording, "asample of sampler 0, .*is not in the rec", **named)


def test_changed_result_leaves_no_cassette(
    server: Any, engine: Engine, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, _ = run(server.url, loop)
    step = Engine._optim_step

    def drifting(self: Engine, request: Any) -> Any:
        if self.steps[str(request.model_id)] == 1:
            self.grads[str(request.model_id)] *= 1 + 1e-9
        return step(self, request)

    monkeypatch.setattr(Engine, "_optim_step", drifting)
    with pytest.raises(UserError, match=r"the result of optim_step of step 2 \(request 4\) differs"):
        command(run_id, "-o", str(tmp_path / "run.cassette"))
    with pytest.raises(NotFoundError, match="no history"):
        command(server.model(), "-o", str(tmp_path / "run.cassette"))
    assert not list(tmp_path.glob("*.cassette*"))
