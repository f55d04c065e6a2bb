"""The whole service as users start it, for the installed SDK: real engine, real worker, the embedded tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tinker
from tests.compat.cli import Cli
from tests.compat.registry import is_method, watched
from tests.e2e.conftest import Server, running
from tinker import types

TOKENS = [11, 22, 33, 44, 55, 66]


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, compiled_programs: Path) -> Iterator[Server]:
    """One service for the folder, without Prefect, because no test here is about tracking."""
    with (
        running(tmp_path_factory.mktemp("compat"), compiled=compiled_programs, prefect="off") as found,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("TINKER_BASE_URL", found.api_url)
        environment.setenv("TINKER_API_KEY", "tml-test")
        yield found


@pytest.fixture(scope="package")
def base_model(server: Server) -> str:
    return server.base_model


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    """A client for each module, with its own session."""
    with tinker.ServiceClient(base_url=server.api_url, api_key="tml-test") as service:
        yield service


@pytest.fixture(scope="module")
def rest(server: Server) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.api_url, api_key="tml-test")


@pytest.fixture(scope="module")
def trainer(service: tinker.ServiceClient, base_model: str) -> tinker.TrainingClient:
    """A model whose adapter has been trained for a step, so that it differs from the base model."""
    model = service.create_lora_training_client(base_model, rank=4, seed=7, user_metadata={"made": "here"}).result()
    model.forward_backward([datum()], "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return model


@pytest.fixture(scope="module")
def sampler(trainer: tinker.TrainingClient) -> tinker.SamplingClient:
    """A sampler of the weights of `trainer`."""
    return trainer.save_weights_and_get_sampling_client().result()


@pytest.fixture(scope="module")
def run(trainer: tinker.TrainingClient) -> str:
    """The model id of `trainer`."""
    return trainer.get_info().model_id


@pytest.fixture
def cli(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Iterator[Cli]:
    """The command line. Fails a test that has not run every command that it declares."""
    cli = Cli(server.api_url, tmp_path)
    yield cli
    wanted = {name for name in getattr(request.function, "exercises", ()) if name.startswith("tinker ")}
    assert wanted <= cli.ran, f"declared but not run: {sorted(wanted - cli.ran)}"


@pytest.fixture(autouse=True)
def watch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that has not called every method that it declares."""
    names = getattr(request.function, "exercises", ())
    with watched(names) as called:
        yield
    wanted = set(filter(is_method, names))
    assert called >= wanted, f"declared but not called: {sorted(wanted - called)}"


def datum(tokens: list[int] = TOKENS, **inputs: object) -> types.Datum:
    """A datum for cross_entropy: each token predicts the next."""
    n = len(tokens)
    targets = types.TensorData(data=[*tokens[1:], 1], dtype="int64", shape=[n])
    ones = types.TensorData(data=[1.0] * n, dtype="float32", shape=[n])
    given = {"target_tokens": targets, "weights": ones, **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=given)  # type: ignore[arg-type]


def window() -> tuple[str, str]:
    """The start of the last hour and the end of the next one, as arguments of the SDK's usage methods."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return (hour - timedelta(hours=1)).isoformat(), (hour + timedelta(hours=2)).isoformat()
