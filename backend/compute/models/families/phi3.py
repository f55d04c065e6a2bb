"""Phi-3 and Phi-4 (arXiv 2404.14219): Mistral with fused matrices (q, k and v; gate and up), and LongRoPE."""

from functools import partial

from tinkerflow.backend.compute.models.families.mistral import mistral
from tinkerflow.backend.compute.models.family import Family

FAMILY = Family(model_type="phi3", title="Phi-4", parse=partial(mistral, fused=True, eps=1e-5))
