"""What a tenant whose requests cannot fit costs another one: `python -m tests.benchmarks.oversized`.

A service plans with so little device memory that it fits half of the model's context. One tenant trains on short
examples; in every second round another tenant asks for the whole context again and again, and is refused. Printed are
the times of the first one's requests with and without the second one, and how long a refusal takes.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

from tinkerflow.deployments.local import API_KEY
from tinkerflow.deployments.testing import serve_tiny

GB = 0.25  # of device memory: 4,096 tokens fit, of the tiny model's 8,192
TOO_LONG = 8192
ROUNDS, REQUESTS = 4, 40


def datum(tokens: int) -> types.Datum:
    """An example of so many tokens."""
    ids = [5 + i % 50 for i in range(tokens)]
    targets = types.TensorData(data=ids, dtype="int64", shape=[tokens])
    weights = types.TensorData(data=[1.0] * tokens, dtype="float32", shape=[tokens])
    inputs = {"target_tokens": targets, "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs)


def main() -> None:
    """Measure, and print."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_tiny(Path(folder), device_memory=GB) as service,
        service.client() as one,
        service.client() as two,
    ):
        (served,) = (
            tinker.RestClient(base_url=service.url, api_key=API_KEY).get_server_capabilities().result().supported_models
        )
        print(f"max_context_length {served.max_context_length}")
        plain: Any = {"base_model": service.base_model, "rank": 8}
        quiet, greedy = (client.create_lora_training_client(**plain).result() for client in (one, two))
        refusals, stop = list[float](), threading.Event()

        def oversized() -> None:
            while not stop.wait(0.1):
                began = time.perf_counter()
                try:
                    greedy.forward_backward([datum(TOO_LONG)], "cross_entropy").result()
                    raise AssertionError("it was not refused")
                except tinker.RequestFailedError as error:
                    if not refusals:
                        print(error)
                refusals.append(time.perf_counter() - began)

        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 + ROUNDS):
            disturbed, thread = number % 2 == 1, threading.Thread(target=oversized)
            stop.clear()
            if disturbed:
                thread.start()
            for _ in range(REQUESTS):
                began = time.perf_counter()
                quiet.forward_backward([datum(40)], "cross_entropy").result()
                if number >= 2:
                    seconds[disturbed].append(time.perf_counter() - began)
            stop.set()
            if disturbed:
                thread.join()
        for disturbed, times in seconds.items():
            p50, p99 = np.percentile(times, (50, 99)) * 1000
            print(f"{'with' if disturbed else 'without'} the other tenant: p50 {p50:.0f} ms, p99 {p99:.0f} ms")
        print(f"{len(refusals)} refusals, the slowest after {max(refusals) * 1000:.0f} ms")


if __name__ == "__main__":
    main()
