"""Compares small models in the executor on the device with the same models in float32 on the CPU.

The stage `reference` runs on the CPU. The stages `parity_float32` and `parity_bfloat16` run on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tests.accelerators.models import MODELS
from tests.accelerators.on_device.measure import (
    TINY,
    Run,
    example,
    make_executor,
    relative_error,
    reply_of,
    sample,
)

from tinkerflow.backend.spec.commands import (
    CreateAdapter,
    ExportAdapter,
    Forward,
    LoraSpec,
    OptimStep,
    PublishSnapshot,
    SampleRequest,
)
from tinkerflow.backend.spec.optimizers.adamw import AdamParams

_DENSE = {**MODELS["0.6B"], "num_hidden_layers": 4, "vocab_size": 8192}
_EXPERTS = {
    **MODELS["30B-A3B"],
    "num_hidden_layers": 2,
    "vocab_size": 8192,
    "num_experts": 16,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_MOST = {"float32": 1e-3, "bfloat16": 0.1}  # limits of |logprob - reference| and of the gradients' relative error


def measure(run: Run) -> None:
    """Run the small models, and compare them with the reference, which the stage `reference` stores."""
    kinds = {"dense": TINY} if run.tiny else {"dense": _DENSE, "experts": _EXPERTS}
    dtype = "bfloat16" if run.stage.endswith("bfloat16") else "float32"
    for kind, fields in kinds.items():
        with run.attempt(kind):
            found = _compute(fields, dtype)
            file = run.folder / f"reference-{kind}.npz"
            if run.stage == "reference":
                np.savez(file, **dict[str, Any](found))
            _compare_sampler(run, kind, found, _MOST[dtype])
            if run.stage != "reference":
                _compare(run, kind, found, file, _MOST[dtype])


def _compute(fields: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """The results of three training steps and three greedy samples, and the trainer's logprobs of the sampled texts."""
    made, rng, vocab = make_executor(fields, dtype=dtype), np.random.default_rng(0), fields["vocab_size"]
    reply_of(made, CreateAdapter("a", LoraSpec(8), 0))
    data = tuple(example(rng.integers(0, vocab, size + 1)) for size in (200, 90, 33, 128))
    kept: dict[str, np.ndarray] = {}
    for step in range(3):
        result = reply_of(made, Forward("a", data, "cross_entropy"))
        kept |= {f"logprobs.{step}.{number}": logprobs for number, logprobs in enumerate(result.logprobs)}
        moments = reply_of(made, ExportAdapter("a", optimizer=True)).moments
        kept |= {f"gradient.{step}.{name}": value for name, value in moments.items() if name.endswith(".grad")}
        reply_of(made, OptimStep("a", AdamParams(1e-2)))
    reply_of(made, PublishSnapshot("a", "s"))
    prompts = [rng.integers(0, vocab, size).astype(np.int32) for size in (5, 140, 300)]
    requests = [
        SampleRequest(f"{number}", "o", "s", prompt, 1, 24, 0.0, -1, 1.0, number, prompt_logprobs=True)
        for number, prompt in enumerate(prompts)
    ]
    for request_id, result in sample(made, requests).items():
        prompt, (sequence,) = prompts[int(request_id)], result.sequences
        kept[f"tokens.{request_id}"], kept[f"sampled.{request_id}"] = sequence.tokens_T, sequence.logprobs_T
        kept[f"prompt.{request_id}"] = result.prompt_logprobs_T[1:]
        text = example(np.concatenate([prompt, sequence.tokens_T]))
        scored = reply_of(made, Forward("a", (text,), "cross_entropy", backward=False)).logprobs[0]
        kept[f"trainer.{request_id}"] = scored[len(prompt) - 1 :].reshape(-1)
    return kept


def _compare_sampler(run: Run, kind: str, found: Mapping[str, np.ndarray], most: float) -> None:
    names = [name.removeprefix("sampled.") for name in found if name.startswith("sampled.")]
    gap = max(float(np.abs(found[f"sampled.{name}"] - found[f"trainer.{name}"]).max()) for name in names)
    run.add(f"{kind}: sampler against trainer", gap <= most, largest_logprob_difference=gap)


def _compare(run: Run, kind: str, found: Mapping[str, np.ndarray], file: Path, most: float) -> None:
    with np.load(file) as stored:
        wanted = dict(stored)

    def largest_difference(prefix: str) -> float:
        return max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted if name.startswith(prefix))

    gradients = [name for name in wanted if name.startswith("gradient.0.") and np.any(wanted[name])]
    figures = {
        "logprobs": largest_difference("logprobs.0."),
        "logprobs_after_2_steps": largest_difference("logprobs.2."),
        "prompt_logprobs": largest_difference("prompt."),
        "gradients": relative_error([found[name] for name in gradients], [wanted[name] for name in gradients]),
    }
    equal = sum(np.array_equal(found[name], wanted[name]) for name in wanted if name.startswith("tokens."))
    ok = max(figures["logprobs"], figures["gradients"]) <= most
    run.add(f"{kind}: device against float32 on the CPU", ok, **figures, equal_greedy_answers=f"{equal} of 3")
