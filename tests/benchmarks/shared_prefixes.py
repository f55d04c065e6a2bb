"""Training with and without shared prefixes: `python -m tests.benchmarks.shared_prefixes [--model FOLDER]`.

Two services take turns, one of them with TINKERFLOW_SHARE_PREFIXES=false. A step trains a group of answers to one
prompt with `importance_sampling`, or sequences without common prefixes, which should cost the same in both. Prints the
clients' tokens per CPU-second of the whole server. A round with a compilation does not count.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import tinker
from tests.benchmarks.service import compared_services, cpu_seconds, offered_model, random_ids, warm
from tinker import types

GROUP, PROMPT, ANSWER = 16, 512, 64
RANK = 32


def sample_of(prompt: list[int], answer: list[int]) -> types.Datum:
    """A sampled answer in the form of the cookbook's RL loops: the prompt has advantages of 0."""
    tokens, first = prompt + answer, len(prompt) - 1
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [0.0] * first + [-5.0] * len(answer),
        "advantages": [0.0] * first + [0.5] * len(answer),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def group() -> list[types.Datum]:
    """GROUP answers to one prompt."""
    prompt = random_ids(PROMPT)
    return [sample_of(prompt, random_ids(ANSWER)) for _ in range(GROUP)]


def strangers() -> list[types.Datum]:
    """GROUP answers, each to its own prompt."""
    return [sample_of(random_ids(PROMPT), random_ids(ANSWER)) for _ in range(GROUP)]


def step(client: tinker.TrainingClient, data: Callable[[], list[types.Datum]]) -> None:
    forward = client.forward_backward(data(), "importance_sampling")
    client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    forward.result()


def main() -> None:
    sides = {share: {"SHARE_PREFIXES": share} for share in ("true", "false")}
    with compared_services(sides) as (folder, repeat, services), ExitStack() as stack:
        rounds = {}
        for share, (url, pid) in services.items():
            service = stack.enter_context(tinker.ServiceClient(base_url=url, api_key="tml-benchmark"))
            client = service.create_lora_training_client(base_model=offered_model(url), rank=RANK).result()
            rounds[share] = partial(measured, client, pid, folder / share)
        for data in (group, strangers):
            found = [{share: turn(data) for share, turn in rounds.items()} for _ in range(repeat)]
            median = {share: statistics.median(each[share] for each in found) for share in rounds}
            rates = {share: GROUP * (PROMPT + ANSWER - 1) / seconds for share, seconds in median.items()}
            print(
                f"{data.__name__:9} shared {rates['true']:.0f}, not shared {rates['false']:.0f} tokens a CPU-second; "
                f"{rates['true'] / rates['false']:.2f} x; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )


def measured(client: tinker.TrainingClient, pid: int, data_dir: Path, data: Callable[[], list[types.Datum]]) -> float:
    """The server's CPU-seconds for a step."""

    def once() -> float:
        before = sum(cpu_seconds(pid).values())
        step(client, data)
        return sum(cpu_seconds(pid).values()) - before

    return warm(once, data_dir)


if __name__ == "__main__":
    main()
