"""A careful user's own program, without a server: Hugging Face's model, PEFT's LoRA, torch's AdamW. Needs peft."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # ours adapts lm_head too
IGNORED = -100  # torch's cross_entropy ignores this target


def trainer(folder: str, lengths: list[int], rank: int) -> Callable[[], object]:
    """A function that makes a training step on random sequences of these lengths, padded to the longest and masked."""
    model = _model(folder, rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    longest = max(lengths)
    ids = torch.randint(8, 1000, (len(lengths), longest))
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    targets = ids.roll(-1, dims=1).masked_fill(~mask, IGNORED)

    def step() -> Any:
        logits = model(input_ids=ids, attention_mask=mask.long() if min(lengths) < longest else None).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def generator(folder: str, prompts: list[list[int]], new: int, rank: int) -> Callable[[], object]:
    """A function that samples `new` tokens after each prompt at temperature 1."""
    model, ids = _model(folder, rank), torch.tensor(prompts)

    def generate() -> Any:
        with torch.inference_mode():
            return model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )

    return generate


@functools.cache
def _model(folder: str, rank: int) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=32, target_modules=TARGETS))
