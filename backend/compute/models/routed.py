"""The layers of DeepSeek V3, GLM-4.5 and similar models: the first layers have an MLP, the others a mixture of experts.

The router scores by sigmoids with corrections. Every token also goes to the shared experts, which are one MLP. No JAX.
"""

from __future__ import annotations

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import layer_count
from tinkerflow.backend.compute.models.family import Tensors
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import (
    MLP,
    Attention,
    DecoderLayer,
    Experts,
    LatentAttention,
    RMSNorm,
    SigmoidRouter,
)
from tinkerflow.backend.compute.models.layers.mlp import refuse_other_mlps

_PREDICTOR = ".eh_proj.weight"  # in the layers that predict several tokens, after the model's own layers
_DENSE, _SPARSE = "dense", "sparse"  # of `mlp_layer_types`


def routed_layers(
    fields: ConfigFields, attention: Attention | LatentAttention, norm: RMSNorm, scale: float = 1.0
) -> list[DecoderLayer]:
    """All layers. UserError: a field of `config.json` is missing or not supported.

    fields: from `config.json`. attention: of every layer. norm: normalizes hidden states. scale: multiplies the
    experts' shares, if the file sets no other factor.
    """
    refuse_other_mlps(fields)
    fields.refuse_others(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    count, width = fields.size("n_routed_experts"), fields.size("moe_intermediate_size")
    router = SigmoidRouter(
        per_token=fields.chosen_experts(count),
        groups=fields.size("n_group", 1),
        groups_per_token=fields.size("topk_group", 1),
        normalized=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", scale),
    )
    _check_groups(fields, router, count)
    shared = MLP(
        attention.hidden, fields.size("n_shared_experts", 1) * width, prefix="shared_", module="mlp.shared_experts"
    )
    experts = Experts(attention.hidden, count, width, router, shared=shared)
    dense = MLP(attention.hidden, fields.size("intermediate_size"), prefix="dense_")
    types = _mlp_types(fields, layer_count(fields))
    return [DecoderLayer(attention, dense if kind == _DENSE else experts, norm) for kind in types]


def without_predictors(_: ModelConfig, tensors: Tensors) -> Tensors:
    """The tensors without the layers that predict several tokens."""
    predictors = tuple(name.removesuffix(_PREDICTOR) + "." for name in tensors if name.endswith(_PREDICTOR))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(predictors)}


def _check_groups(fields: ConfigFields, router: SigmoidRouter, count: int) -> None:
    groups = router.groups
    if groups > 1 and (count % groups or count < 2 * groups):
        raise fields.error(f"n_group {groups} of {count} experts; must divide them into groups of at least 2")
    if router.groups_per_token > groups or router.per_token > count // groups * router.groups_per_token:
        raise fields.error(
            f"topk_group {router.groups_per_token} of n_group {groups}, {count // groups} experts each; must be "
            f"at most n_group, and these groups must have num_experts_per_tok {router.per_token} experts"
        )


def _mlp_types(fields: ConfigFields, layers: int) -> list[str]:
    """The type of every layer, as in `mlp_layer_types`."""
    first = fields.get("first_k_dense_replace", 1)
    usual = [_DENSE if isinstance(first, int) and number < first else _SPARSE for number in range(layers)]
    types = fields.types("mlp_layer_types", usual, _DENSE, _SPARSE)
    if _SPARSE not in types:
        raise fields.error(f"first_k_dense_replace {first!r} of {layers} layers; at least one must have experts")
    return types
