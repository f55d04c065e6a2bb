"""Measures the whole service on the device: training and sampling through the SDK in `tinkerflow.local`."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tests.accelerators.on_device.measure import Run
from tests.benchmarks.service import datum, random_ids, step
from tests.benchmarks.small_model import make_small
from tinker import types

import tinkerflow

_STEPS = 4


def measure(run: Run) -> None:
    """Train and sample a model of 82 million parameters, or the embedded model in a tiny run."""
    with tempfile.TemporaryDirectory() as scratch:
        model = "" if run.tiny else str(make_small(Path(scratch, "small-qwen3")))
        began, lines = time.perf_counter(), list[str]()
        settings = {"warm_up": False, "platform": run.platform}
        with tinkerflow.local(model, data_dir=Path(scratch, "data"), progress=lines.append, **settings) as client:
            run.add("start", None, s=time.perf_counter() - began)
            with run.attempt("the SDK"):
                _use(run, client, model or "tinkerflow/tiny")


def _use(run: Run, client: tinker.ServiceClient, model: str) -> None:
    training = client.create_lora_training_client(base_model=model, rank=8).result()
    count, tokens = (2, 32) if run.tiny else (32, 512)
    data = [datum(random_ids(tokens)) for _ in range(count)]
    times = [step(training, data) for _ in range(_STEPS)]
    rate = count * tokens / min(times[1:])
    run.add(f"training of {count} x {tokens} tokens", None, first_s=times[0], tokens_per_s=rate)
    sampler = training.save_weights_and_get_sampling_client().result()
    params: Any = types.SamplingParams(max_tokens=16 if run.tiny else 128, temperature=1.0)
    for rows in (1, 3) if run.tiny else (1, 8, 64):
        for turn in ("first", "measured"):
            prompts = [types.ModelInput.from_ints(random_ids(100)) for _ in range(rows)]
            began = time.perf_counter()
            futures = [sampler.sample(prompt, num_samples=1, sampling_params=params) for prompt in prompts]
            made = sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)
            took = time.perf_counter() - began
            if turn == "measured":
                run.add(f"{rows} samples at once", made > 0, s=took, tokens_per_s=made / took)
