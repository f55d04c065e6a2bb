"""Run as a separate process: adds a loss file and an optimizer file, and uses them in all steps of training.

Arguments: a folder for the new files, and a base model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TOY_LOSS = """
from tinkerflow.backend.spec.losses import WEIGHTS, ConfigKey, LossSpec, TokenInput

def toy(logprobs, inputs, config):
    return -config["gain"] * inputs["focus"] * logprobs

LOSS = LossSpec("toy", inputs=(WEIGHTS, TokenInput("focus", low=0.0)), config={"gain": ConfigKey(2.0)}, per_token=toy)
"""
TOY_OPTIMIZER = """
from tinkerflow.backend.spec.optimizers import Finite, Fraction, NotNegative, OptimizerParams, OptimizerSpec

class SgdParams(OptimizerParams, frozen=True):
    learning_rate: NotNegative
    momentum: Fraction = 0.5
    grad_clip_norm: Finite = 0.0

def update(weights, grads, state, count, params):
    import jax
    velocity = jax.tree.map(lambda v, g: params.momentum * v + g, state["velocity"], grads)
    return jax.tree.map(lambda w, v: w - params.learning_rate * v, weights, velocity), {"velocity": velocity}

OPTIMIZER = OptimizerSpec("sgd", params=SgdParams, state=("velocity",), update=update)
"""


def main() -> None:
    folder, model = Path(sys.argv[1]), sys.argv[2]
    from tinkerflow.backend.spec import losses, optimizers
    from tinkerflow.backend.spec.registry import registered

    for room, file, text in ((losses, "toy.py", TOY_LOSS), (optimizers, "sgd.py", TOY_OPTIMIZER)):
        place = folder / room.__name__.rpartition(".")[2]
        place.mkdir()
        (place / file).write_text(text)
        room.__path__.append(str(place))
    losses.LOSSES |= registered(losses.__name__, "LOSS", losses.LossSpec)  # as at the start of the process
    optimizers.OPTIMIZERS |= registered(optimizers.__name__, "OPTIMIZER", optimizers.OptimizerSpec)
    print(json.dumps(use(model)))


def use(model: str) -> dict[str, object]:
    """Run all steps from a request's bytes to the trained adapter, and return the results."""
    import numpy as np

    from tinkerflow.backend.compute.executor import Executor
    from tinkerflow.backend.core.errors import UserError
    from tinkerflow.backend.pool.protocol import codec
    from tinkerflow.backend.pool.scheduler import in_parts
    from tinkerflow.backend.spec import commands as c
    from tinkerflow.backend.wire import CreateModel, OptimStepBody, decode_forward, read_forward
    from tinkerflow.backend.wire import tinker_pb2 as pb

    def body(**config: float) -> bytes:
        request = pb.ForwardBackwardRequest(model_id="a", seq_id=1, loss_fn="toy", loss_fn_config=config)
        for number in range(3):
            length = 60 + number
            tokens = np.arange(length, dtype="<i4") % 90
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = tokens.tobytes()
            targets, focus = tokens.astype("<i8"), np.linspace(0, 2, length, dtype="<f4")
            datum.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dtype=pb.DTYPE_INT64, dense=targets.tobytes()))
            datum.loss_fn_inputs["focus"].CopyFrom(pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=focus.tobytes()))
        return request.SerializeToString()

    def refused(action: object) -> str:
        try:
            action()  # type: ignore[operator]
        except UserError as error:
            return error.message
        raise AssertionError("nothing was refused")

    def through(command: c.Command) -> c.Command:
        return codec.decode(b"".join(codec.encode(command)))

    def step(**given: object) -> c.OptimizerParams:
        return OptimStepBody.decode(json.dumps({"optimizer_params": {"type": "sgd", **given}}).encode()).params

    made = CreateModel.decode(b'{"base_model": "m", "optimizer_config": {"type": "sgd"}}')
    executor = Executor(c.GroupConfig(model, "float32", 1, 1, 512, 64, 4, 4, ""), lambda line: None, 1, 0)
    executor.execute(through(c.CreateAdapter("a", c.LoraSpec(4), 0, made.optimizer)))
    forward = through(decode_forward(read_forward(body(gain=3.0)), vocab_size=96, max_context=512))
    parts = in_parts(forward, executor.microbatch_tokens, 1)
    result = [executor.execute(through(part)) for part in parts][-1]
    expected = -sum(
        float(3.0 * example.inputs["focus"][:, 0] @ logprobs)
        for example, logprobs in zip(forward.examples, result.logprobs, strict=True)
    )
    stepped = executor.execute(through(c.OptimStep("a", step(learning_rate=0.1))))
    state = executor.execute(c.ExportAdapter("a", optimizer=True))
    executor.execute(through(c.ImportAdapter("b", state)))
    return {
        "parts": len(parts),
        "loss": result.loss_sum,
        "expected": expected,
        "norm": stepped.grad_norm,
        "optimizer": state.optimizer,
        "ends": sorted({name.rpartition(".")[2] for name in state.moments}),
        "moved": max(float(np.abs(array).max()) for name, array in state.weights.items() if "lora_B" in name),
        "refused": [
            refused(lambda: read_forward(body(gain=-1.0))),
            refused(lambda: read_forward(body(loss=1.0))),
            refused(lambda: step(learning_rate=0.1, momentum=1.0)),
        ],
    }


if __name__ == "__main__":
    main()
