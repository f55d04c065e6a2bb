"""Mistral (arXiv 2310.06825): a dense decoder. In the first releases, every layer has a sliding window."""

from dataclasses import replace
from functools import partial

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count, windows
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import MLP, Attention, DecoderLayer, RMSNorm
from tinkerflow.backend.compute.models.rope import FULL, SLIDING


def mistral(
    fields: ConfigFields,
    *,
    fused: bool = False,
    window: int | None = None,
    eps: float = 1e-6,
    growth: tuple[float, int] = (0.0, 0),
) -> ModelConfig:
    """The decoder of a `config.json`. fused: q, k and v are one matrix, and so are gate and up.

    window, eps: the sliding window and the epsilon of norms, if the file does not contain these fields.
    growth: `query_beta` and `query_period` of the rotary embedding.
    """
    fields = fields.with_defaults(sliding_window=window)
    norm = RMSNorm.read(fields, eps)
    attention, mlp = Attention.read(fields, partial=fused, fused=fused), MLP.read(fields, fused=fused)
    assert attention.rope is not None
    attention = replace(attention, rope=replace(attention.rope, query_beta=growth[0], query_period=growth[1]))
    usual = FULL if fields.get("sliding_window") is None else SLIDING
    layers = [
        DecoderLayer(replace(attention, window=window), mlp, norm)
        for window in windows(fields, [usual] * layer_count(fields))
    ]
    return decoder(fields, norm, layers)


FAMILY = Family(model_type="mistral", title="Mistral", parse=partial(mistral, window=4096))
