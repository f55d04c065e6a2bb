"""A mixture of experts in bfloat16 with and without routing replay: `python -m tests.benchmarks.routing_replay`.

A random Qwen3-MoE (4 layers, 16 experts, 4 for each token) samples, and scores its samples as training does. Prints the
share of expert sets that are equal in both, and the KL divergence of their logprobs.
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
    Forward,
    ForwardResult,
    GroupConfig,
    LoraSpec,
    PublishSnapshot,
    SampleRequest,
)
from tinkerflow.backend.spec.drift import AGREEMENT, KL_MAX, KL_MEAN, kl_sample_train

LAYERS, EXPERTS, PER_TOKEN = 4, 16, 4
PROMPT, ANSWER, SAMPLES = 32, 200, 4


def make_model(folder: Path) -> Path:
    """Write the model to `folder`, and return `folder`."""
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 64, "num_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN}
    shape = {"hidden_size": 128, "num_hidden_layers": LAYERS, "initializer_range": 0.1, "norm_topk_prob": True}
    random_model("qwen3_moe", {**SHAPE, **experts, **shape}).save_pretrained(folder)
    return folder


def sampled(executor: Executor) -> list[tuple[Example, np.ndarray]]:
    """Samples as examples with their experts, each with the sampler's logprobs."""
    prompt_T = np.random.default_rng(0).integers(0, VOCAB, PROMPT).astype(np.int32)
    request = SampleRequest("r", "owner", "s", prompt_T, SAMPLES, ANSWER, 1.0, -1, 1.0, seed=0, routes=True)
    found = []
    for sequence in run_all(executor, request)["r"].sequences:
        whole = np.concatenate([prompt_T, sequence.tokens_T])
        routes_Tn = np.full((len(whole) - 1, LAYERS * PER_TOKEN), -1, np.int16)
        routes_Tn[PROMPT - 1 :] = sequence.routes_Tn
        weights_TK = (np.arange(len(whole) - 1) >= PROMPT - 1).astype(np.float32)[:, None]
        example = Example(whole[:-1], whole[1:, None], weights_TK, routes_Tn=routes_Tn)
        found.append((example, sequence.logprobs_T))
    return found


def only(example: Example, layer: int) -> Example:
    """The example with the experts of one layer only, so that its router's input does not depend on replay."""
    assert example.routes_Tn is not None
    routes_TLk = np.full((len(example.tokens_T), LAYERS, PER_TOKEN), -1, np.int16)
    routes_TLk[:, layer] = example.routes_Tn.reshape(routes_TLk.shape)[:, layer]
    return replace(example, routes_Tn=routes_TLk.reshape(len(routes_TLk), -1))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {
            "decode_chunk": 8,
            "fsdp": 1,
            "tensor": 1,
            "max_context": 512,
            "microbatch_tokens": 2048,
            "compile_cache_dir": "",
        }
        config = GroupConfig(str(make_model(Path(folder))), dtype="bfloat16", sample_slots=SAMPLES, **sizes)
        executor = Executor(config, lambda line: None, 1, 0)
        executor.execute(CreateAdapter("a", LoraSpec(8), 0))
        executor.execute(PublishSnapshot("a", "s"))
        data = sampled(executor)

        def scored(examples: list[Example]) -> ForwardResult:
            result = executor.execute(Forward("a", tuple(examples), "cross_entropy", backward=False))
            assert isinstance(result, ForwardResult)
            return result

        def drift(result: ForwardResult) -> dict[str, float]:
            pairs = zip(result.logprobs, (logprobs_T for _, logprobs_T in data), strict=True)
            return kl_sample_train((then, now[PROMPT - 1 :], np.ones(len(then), bool)) for now, then in pairs)

        examples = [example for example, _ in data]
        replayed, plain = scored(examples), scored([replace(one, routes_Tn=None) for one in examples])
        alone = [scored([only(one, layer) for one in examples]).metrics[AGREEMENT] for layer in range(LAYERS)]
        for name, agreement, kl in (
            ("without", float(np.mean(alone)), drift(plain)),
            ("with", replayed.metrics[AGREEMENT], drift(replayed)),
        ):
            print(f"{name:7} replay: agreement {agreement:.4f}, KL mean {kl[KL_MEAN]:.2e}, largest {kl[KL_MAX]:.2e}")


if __name__ == "__main__":
    main()
