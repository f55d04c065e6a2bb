"""Group sequence policy optimization, in its token form (Zheng et al., arXiv 2507.18071, section 4.3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinkerflow.backend.spec.losses import (
    CLIP,
    CLIP_INPUTS,
    POLICY,
    POLICY_MASKS,
    Float32,
    Float64,
    LossSpec,
    TokenInput,
    clip_config,
)

_MASK = TokenInput("sequence_ratio_mask", required=False, low=0.0, some=True)


def gspo(logprobs_TK: Float64, inputs: Mapping[str, Float32], config: Mapping[str, float]) -> tuple[float, Float64]:
    """-sum over tokens of w * min(s * A, clip(s) * A), where a token's slope is taken as if s were its own ratio.

    s = exp(mean of (lp - q)) over the sequence's tokens is the ratio of the whole sequence. The paper divides by the
    sequence's length, but our losses are sums. Scale the advantages to get a mean. The mean in s is weighted by
    sequence_ratio_mask if given, and otherwise over the tokens with weight and advantage.
    """
    weights, old, advantages = (inputs[name].astype(np.float64) for name in ("weights", "logprobs", "advantages"))
    counted = weights * advantages != 0
    mask = inputs.get(_MASK.name, counted.astype(np.float64))
    total = mask.sum()
    ratio = np.exp(np.where(mask != 0, mask * (logprobs_TK - old), 0.0).sum() / total) if total else 1.0
    low, high = (inputs.get(name, config[name]) for name in CLIP)
    unclipped, clipped = ratio * advantages, np.clip(ratio, low, high) * advantages
    slope_TK = np.where(counted & (unclipped <= clipped), -weights * unclipped, 0.0)
    return float(-np.where(counted, weights * np.minimum(unclipped, clipped), 0.0).sum()), slope_TK


# The documentation gives no defaults. The paper uses 3e-4 and 4e-4 (section 5.1).
LOSS = LossSpec(
    "gspo",
    inputs=(*POLICY, *CLIP_INPUTS, _MASK),
    config=clip_config(1 - 3e-4, 1 + 4e-4),
    masks=POLICY_MASKS,
    ordered=CLIP,
    per_sequence=gspo,
)
