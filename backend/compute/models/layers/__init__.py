"""The layers of decoders, one file each: their shapes, the declarations of their weights, and their computation.

Importing this package does not load JAX. Importing `step`, `delta_rule`, `embedding` or `expert_dispatch` does. The
other modules import JAX inside their computations.
"""

from tinkerflow.backend.compute.models.layers.attention import ATTENTION, GLOBAL, Attention
from tinkerflow.backend.compute.models.layers.decoder_layer import DecoderLayer
from tinkerflow.backend.compute.models.layers.experts import EXPERT_MATRICES, SWIGLU_ALPHA, Experts
from tinkerflow.backend.compute.models.layers.gated_deltanet import DELTA, DeltaRuleWeights, GatedDeltaNet
from tinkerflow.backend.compute.models.layers.latent_attention import LatentAttention
from tinkerflow.backend.compute.models.layers.layer_input import LayerInput
from tinkerflow.backend.compute.models.layers.mlp import MLP
from tinkerflow.backend.compute.models.layers.norms import POST_NORM, PRE_NORM, SANDWICH_NORM, RMSNorm
from tinkerflow.backend.compute.models.layers.routers import SigmoidRouter, SoftmaxRouter

__all__ = [
    "ATTENTION",
    "DELTA",
    "EXPERT_MATRICES",
    "GLOBAL",
    "MLP",
    "POST_NORM",
    "PRE_NORM",
    "SANDWICH_NORM",
    "SWIGLU_ALPHA",
    "Attention",
    "DecoderLayer",
    "DeltaRuleWeights",
    "Experts",
    "GatedDeltaNet",
    "LatentAttention",
    "LayerInput",
    "RMSNorm",
    "SigmoidRouter",
    "SoftmaxRouter",
    "delta_rule",
    "embedding",
    "matrices",
    "mlp",
    "step",
]
