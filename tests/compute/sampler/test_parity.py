"""The sampler against Hugging Face, and against our own training forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import ask, result_of
from tests.compute.sampler.conftest import prompt, random_lora, training_logprobs

from tinkerflow.backend.spec.commands import LoraSpec


def hugging_face(folder: Any, prompt: list[int], tokens: int) -> list[int]:
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.parametrize("length", [1, 2, 31, 33, 130, 300])
def test_greedy_tokens_equal_those_of_hugging_face(tiny: Any, length: int) -> None:
    tokens = prompt(length)
    (sequence,) = result_of(tiny.sampler(), ask("a", tokens, 40)).sequences
    assert sequence.tokens_T.tolist() == hugging_face(tiny.folder, tokens, 40)
    assert sequence.stop_reason == "length"


@pytest.mark.parametrize("length", [1, 40, 200])
@pytest.mark.parametrize("adapted", [False, True])
def test_sampled_logprobs_equal_the_training_forward(tiny: Any, length: int, adapted: bool) -> None:
    sampler, spec = tiny.sampler(), LoraSpec(rank=5)
    lora = random_lora(tiny.cfg, spec, 3) if adapted else None
    if lora is not None:
        sampler.publish("snap", lora, spec)
    tokens = prompt(length)
    request = ask(
        "a", tokens, 150, temperature=1.0, seed=5, prompt_logprobs=True, snapshot_id="snap" if adapted else None
    )
    result = result_of(sampler, request)
    (sequence,) = result.sequences
    expected = training_logprobs(tiny, lora, [*tokens, *sequence.tokens_T.tolist()])
    assert result.prompt_logprobs_T is not None
    assert result.prompt_logprobs_T.dtype == sequence.logprobs_T.dtype == np.float32
    assert len(result.prompt_logprobs_T) == length and np.isnan(result.prompt_logprobs_T[0])
    close_logprobs(result.prompt_logprobs_T[1:], expected[: length - 1], ulps=1024)
    close_logprobs(sequence.logprobs_T, expected[length - 1 :], ulps=1024)
