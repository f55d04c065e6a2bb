"""Training on top-p samples, with and without support replay: `python -m tests.benchmarks.support_replay`.

A random Qwen3 samples with top-p 0.8. Prints two figures of the loss importance_sampling with advantages of 1. With
exact ratios, the mean ratio of policies that differ from the sampler by a random adapter is 1. The gradient of the
sampler's own policy is then 0 on average, so the gradients of two halves of the samples have the cosine 0.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.compute.conftest import SHAPE, VOCAB, random_model, run_all

from tinkerflow.backend.compute.executor import Executor
from tinkerflow.backend.spec.commands import (
    CreateAdapter,
    Example,
    ExportAdapter,
    Forward,
    GroupConfig,
    ImportAdapter,
    LoraSpec,
    PublishSnapshot,
    SampleRequest,
)
from tinkerflow.backend.spec.supports import Supports

PROMPT, ANSWER, SAMPLES, POLICIES = 32, 100, 64, 16
TOP_P = 0.8


def sampled(executor: Executor) -> tuple[Example, ...]:
    """Samples as examples with advantages of 1 and with their supports."""
    prompt_T = np.random.default_rng(0).integers(0, VOCAB, PROMPT).astype(np.int32)
    request = SampleRequest("r", "owner", "s", prompt_T, SAMPLES, ANSWER, 1.0, -1, TOP_P, seed=0, supports=True)
    found = []
    for sequence in run_all(executor, request)["r"].sequences:
        whole, before = np.concatenate([prompt_T, sequence.tokens_T]), PROMPT - 1
        logprobs_TK = np.concatenate([np.zeros(before, np.float32), sequence.logprobs_T])[:, None]
        counted_TK = (np.arange(len(whole) - 1) >= before).astype(np.float32)[:, None]
        supports = Supports.joined([Supports.unrestricted(before), sequence.supports])
        inputs = {"logprobs": logprobs_TK, "advantages": counted_TK}
        found.append(Example(whole[:-1], whole[1:, None], counted_TK, inputs=inputs, supports=supports))
    return tuple(found)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        shape = {"hidden_size": 128, "num_hidden_layers": 2, "initializer_range": 0.15}
        random_model("qwen3", {**SHAPE, **shape}).save_pretrained(Path(folder))
        sizes: dict[str, Any] = {"decode_chunk": 8, "fsdp": 1, "tensor": 1, "max_context": 512, "sample_slots": 16}
        config = GroupConfig(folder, dtype="float32", microbatch_tokens=2048, compile_cache_dir="", **sizes)
        executor = Executor(config, lambda line: None, 1, 0)
        executor.execute(CreateAdapter("a", LoraSpec(8), 0))
        executor.execute(PublishSnapshot("a", "s"))
        replayed = sampled(executor)
        plain = tuple(replace(one, supports=None) for one in replayed)
        counts = np.concatenate([one.supports.counts_N[PROMPT - 1 :] for one in replayed if one.supports is not None])
        print(f"supports of {np.median(counts):.0f} tokens (median), {np.mean(counts == 0):.1%} too large")
        start = executor.execute(ExportAdapter("a", optimizer=False))
        rng = np.random.default_rng(1)
        for policy in range(POLICIES):
            changed = {
                name: rng.normal(size=array.shape, scale=0.02).astype(np.float32) if "lora_B" in name else array
                for name, array in sorted(start.weights.items())
            }
            executor.execute(ImportAdapter(f"{policy}", type(start)(start.spec, 0, changed)))

        def ratio(data: tuple[Example, ...], policy: int) -> float:
            result = executor.execute(Forward(f"{policy}", data, "importance_sampling", backward=False))
            return float(-result.loss_sum / (SAMPLES * ANSWER))

        def gradient(data: tuple[Example, ...]) -> Any:
            executor.execute(ImportAdapter("own", start))
            executor.execute(Forward("own", data, "importance_sampling", backward=True))
            moments = executor.execute(ExportAdapter("own", optimizer=True)).moments
            slope = np.concatenate([array.ravel() for name, array in sorted(moments.items()) if name.endswith(".grad")])
            return slope / np.linalg.norm(slope)

        for name, data in (("without", plain), ("with", replayed)):
            ratios = [ratio(data, policy) for policy in range(POLICIES)]
            error, cosine = np.std(ratios, ddof=1) / np.sqrt(POLICIES), gradient(data[::2]) @ gradient(data[1::2])
            print(f"{name:7} replay: mean ratio {np.mean(ratios):.4f} +- {error:.4f}, cosine of gradients {cosine:.3f}")


if __name__ == "__main__":
    main()
