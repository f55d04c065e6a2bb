"""Images of a request reach the worker group in the form that the base model's processor produces."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tinkerflow.backend.journal import Kind
from tinkerflow.backend.spec.commands import Forward, SampleStep
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.flows.sampling_runner import SamplingRunner
from tinkerflow.tasks.execution.memory_quota import MemoryQuota
from tinkerflow.tasks.execution.operation import ExecutionContext

CONFIG = {
    "model_type": "qwen3_vl",
    "image_token_id": 31,
    "text_config": {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    },
    "vision_config": {
        "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16,
        "num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": [0],
    },
}  # fmt: skip
PROCESSOR = {
    "size": {"shortest_edge": 64, "longest_edge": 1024}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


@pytest.fixture
def context(context: ExecutionContext, tmp_path: Path) -> ExecutionContext:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return replace(context, card=replace(context.card, path=str(tmp_path)))


def file() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (24, 16), (9, 8, 7)).save(out, "png")
    return out.getvalue()


def request(model: str, seq_id: int, expected: int) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([5], np.int32).tobytes()
    image = datum.model_input.add().image
    image.data, image.format, image.expected_tokens = file(), "png", expected
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dense, targets.dtype = np.full(7, 3, np.int64).tobytes(), pb.DTYPE_INT64
    weights.dense, weights.dtype = np.ones(7, np.float32).tobytes(), pb.DTYPE_FLOAT32
    return message.SerializeToString()


async def test_an_image_reaches_the_group_as_pixels(
    journal: Any, connect: Any, context: ExecutionContext, make_runner: Any, running: Any, pool: Any
) -> None:
    client = await connect(journal)
    model, created = client.submit_create()
    runner = make_runner(model)

    async def forward_backward(expected: int) -> Any:
        body = request(model, client.seqs[model], expected)
        return await client.result(client.submit(model, Kind.FORWARD_BACKWARD, body))

    async with running(runner.serve()), running(client.ring("model:", runner)):
        assert (await client.result(created)).error is None
        done, refused = await forward_backward(6), await forward_backward(5)
    assert done.error is None
    (command,) = [command for command in pool.log if isinstance(command, Forward)]
    (example,) = command.examples
    assert example.tokens_T.tolist() == [5] + [31] * 6
    (image,) = example.images
    assert image.start == 1
    assert image.pixels_HWC.tolist() == [[[9, 8, 7]] * 24] * 16
    assert "chunks[1].expected_tokens is 5: must be 6, the tokens of 24 x 16 pixels" in refused.error
    assert context.image_memory.reserved(client.owner) == 0


def shown(expected: int = 6) -> dict[str, Any]:
    """The fields of a sample request with a prompt of a token and an image."""
    data = base64.b64encode(file()).decode()
    image = {"type": "image", "format": "png", "data": data, "expected_tokens": expected}
    return {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}, image]}}


async def test_an_image_of_a_prompt_reaches_the_group_as_pixels(
    journal: Any, connect: Any, context: ExecutionContext, running: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, held = await connect(journal), list[int]()
    real = MemoryQuota.reserve
    monkeypatch.setattr(MemoryQuota, "reserve", lambda room, owner, size: held.append(size) or real(room, owner, size))
    runner = SamplingRunner(context, (), most_waiting=8)

    def ask(expected: int) -> Any:
        return client.result(client.sample(sampler, shown(expected)))

    async with running(runner.serve()):
        sampler = client.sampler(1)
        done, refused = await ask(6), await ask(5)
    assert done.error is None
    (asked,) = [one for command in pool.log if isinstance(command, SampleStep) for one in command.admit]
    assert asked.prompt_T.tolist() == [5] + [31] * 6
    (image,) = asked.images
    assert image.start == 1
    assert image.pixels_HWC.tolist() == [[[9, 8, 7]] * 24] * 16
    assert held == [24 * 16 * 3]
    assert "prompt.chunks[1].expected_tokens is 5: must be 6, the tokens of 24 x 16 pixels" in refused.error


async def test_waiting_images_cost_other_projects_nothing_and_are_skipped_once_cancelled(
    journal: Any, connect: Any, context: ExecutionContext, running: Any, pool: Any, until: Any, monkeypatch: Any
) -> None:
    client, other = await connect(journal), await connect(journal, owner="another")
    runner, read, decoded = SamplingRunner(context, (), most_waiting=4), ImageProcessor.read, list[int]()

    def reading(self: ImageProcessor, *given: Any, blank: bool = False) -> Any:
        decoded.extend([] if blank else [1])
        return read(self, *given, blank=blank)

    monkeypatch.setattr(ImageProcessor, "read", reading)
    pool.hold = asyncio.Event()
    async with running(runner.serve()):
        await until(lambda: runner._taken is not None)
        taken = runner._taken
        assert taken is not None
        monkeypatch.setattr(taken._images, "_quota", 1)  # one request at a time
        sampler, its = client.sampler(1), other.sampler(1)
        large = shown() | {"pad": "x" * 70_000}
        asked = [client.sample(sampler, large if number % 2 else shown()) for number in range(9)]
        await until(lambda: decoded and pool.log)
        text = other.sample(its)
        await until(lambda: text in [one.item.request_id for one in taken.batch._admit])
        assert taken.owners == {client.owner: 4, other.owner: 1}
        waiting = [taken._samples[one] for one in asked if one in taken.ids]
        assert [len(one.request.payload) for one in waiting if one.request.left] == [0, 0]
        gone = asked[3]
        journal.requests.cancel(gone, client.owner)
        runner.cancel(gone)
        pool.hold.set()
        results = await client.results(*asked)
    assert [result.error for result in results] == ["cancelled by the client" if one == gone else None for one in asked]
    assert len(decoded) == 8
