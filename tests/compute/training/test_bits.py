"""Neither neighbouring rows nor an export nor the way that few rows are multiplied change the bits of training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close
from tests.compute.conftest import examples, forward

from tinkerflow.backend.compute.kernels.matmul import matmul
from tinkerflow.backend.spec.commands import CreateAdapter, ExportAdapter, ImportAdapter, LoraSpec, OptimStep
from tinkerflow.backend.spec.optimizers.adamw import AdamParams


def test_neighboring_rows_change_no_bit(executor):

    def run(name: str, between) -> list[bytes]:
        executor.execute(CreateAdapter(name, LoraSpec(4), 11))
        seen = []
        for step in range(3):
            result = forward(executor, name, examples((20, 30), seed=step), backward=True)
            between(step)
            seen += [a.tobytes() for a in result.logprobs]
            executor.execute(OptimStep(name, AdamParams(learning_rate=1e-2)))
            between(step)
        state = executor.execute(ExportAdapter(name, True))
        return seen + [a.tobytes() for _, a in sorted({**state.weights, **state.moments}.items())]

    executor.execute(CreateAdapter("other", LoraSpec(8, train_mlp=False), 1))

    def other(step: int) -> None:
        forward(executor, "other", examples((50, 9), seed=step + 50), "ppo", backward=True)
        executor.execute(OptimStep("other", AdamParams(learning_rate=1.0, weight_decay=0.5)))

    assert run("alone", lambda step: None) == run("beside", other)


def test_continuing_from_an_export_is_bitwise_equal(executor):
    executor.execute(CreateAdapter("first", LoraSpec(4), 2))
    for step in range(2):
        forward(executor, "first", examples((20, 30), seed=step), backward=True)
        executor.execute(OptimStep("first", AdamParams(learning_rate=1e-2)))
    forward(executor, "first", examples((20, 30), seed=9), backward=True)  # the export includes accumulated gradients
    executor.execute(ImportAdapter("second", executor.execute(ExportAdapter("first", True))))
    ends = []
    for name in ("first", "second"):
        executor.execute(OptimStep(name, AdamParams(learning_rate=1e-2)))
        ends.append(executor.execute(ExportAdapter(name, True)))
    assert ends[0].step == ends[1].step == 3
    assert all((w == ends[1].weights[n]).all() for n, w in ends[0].weights.items())
    assert all((m == ends[1].moments[n]).all() for n, m in ends[0].moments.items())


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (384, 128), (768, 2048)])
def test_64_rows_have_the_bits_of_the_plain_product(inputs: int, outputs: int) -> None:
    """Includes gradients of the matrix, which full-parameter training needs."""
    rng = np.random.default_rng(0)
    x, slope = (jnp.asarray(rng.normal(size=(64, size)), jnp.float32) for size in (inputs, outputs))
    weight = jnp.asarray(rng.normal(size=(outputs, inputs)), jnp.float32)
    y, pull = jax.vjp(jax.jit(matmul), x, weight)
    assert np.array_equal(y, jax.jit(lambda x, weight: jnp.einsum("mi,oi->mo", x, weight))(x, weight))
    close(np.asarray(pull(slope)[1]), np.asarray(slope).T @ np.asarray(x), ulps=128)
