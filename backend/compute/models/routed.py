"""The mixture of experts of DeepSeek V3, GLM-4.5 and their kin: its fields in `config.json`, matrices and tensors.

The first layers have an MLP; the others a sigmoid router with corrections, experts, and experts that every token goes
to, which are one MLP. No JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import (
    TEXT,
    LayerTensor,
    Projection,
    decoder_projections,
    decoder_tensors,
)
from tinkerflow.backend.compute.weights.files import Tensor

_PREDICTOR = ".eh_proj.weight"  # of the layers that predict several tokens, behind the model's own
_DENSE, _SPARSE = "dense", "sparse"  # of `mlp_layer_types`


def routed_config(fields: ConfigFields, config: ModelConfig) -> ModelConfig:
    """The config with this mixture. UserError names a field of `config.json` that is missing or not supported.

    fields: of `config.json`. config: of the decoder; its `mlp` is the width of one expert.
    """
    fields.refuse_others(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    experts, groups = fields.size("n_routed_experts"), fields.size("n_group", 1)
    config = by_sigmoid(fields, config, experts)
    config = replace(
        config,
        norm_topk=bool(fields.get("norm_topk_prob", True)),
        shared_mlp=fields.size("n_shared_experts", 1) * config.mlp,
        router_groups=groups,
        groups_per_token=fields.size("topk_group", 1),
        router_scale=float(fields.get("routed_scaling_factor") or 1.0),
        dense_mlp=fields.size("intermediate_size"),
    )
    if groups > 1 and (experts % groups or experts < 2 * groups):
        raise fields.error(f"n_group {groups} of {experts} experts; it must divide them into groups of at least 2")
    if config.groups_per_token > groups or config.experts_per_token > experts // groups * config.groups_per_token:
        raise fields.error(
            f"topk_group {config.groups_per_token} of n_group {groups}, {experts // groups} experts each; it must be "
            f"at most n_group, and these groups must have num_experts_per_tok {config.experts_per_token} experts"
        )
    kinds = zip(config.layer_kinds, _mlps(fields, config.layers), strict=True)
    return replace(config, kinds=tuple(replace(kind, dense=mlp == _DENSE) for kind, mlp in kinds))


def by_sigmoid(fields: ConfigFields, config: ModelConfig, experts: int) -> ModelConfig:
    """The config with so many experts, scored by sigmoids. UserError: num_experts_per_tok is not 1 to their number."""
    chosen = fields.chosen_experts(experts)
    return replace(config, experts=experts, experts_per_token=chosen, norm_topk=True, sigmoid=True)


def routed_projections(cfg: ModelConfig) -> dict[str, Projection]:
    """Every matrix by the name that `transformer` uses."""
    sparse, dense = _numbers(cfg)
    plain = decoder_projections(cfg)
    experts = {
        name: replace(plain.pop(name), stack=(len(sparse), cfg.experts), layers=sparse)
        for name in ("gate", "up", "down")
    }

    def mlp(prefix: str, module: str, width: int, layers: tuple[int, ...]) -> dict[str, Projection]:
        sizes = {"gate": (cfg.hidden, width), "up": (cfg.hidden, width), "down": (width, cfg.hidden)}
        return {
            f"{prefix}_{name}": Projection(
                f"{TEXT}{module}.{name}_proj", inputs, outputs, "train_mlp", (len(layers),), layers=layers
            )
            for name, (inputs, outputs) in sizes.items()
        }

    shared = mlp("shared", "mlp.shared_experts", cfg.shared_mlp, sparse)
    return {**plain, **(mlp("dense", "mlp", cfg.dense_mlp, dense) if dense else {}), **shared, **experts}


def routed_tensors(cfg: ModelConfig) -> dict[str, LayerTensor]:
    """Norms, biases and routers by the name that `transformer` uses."""
    sparse, _ = _numbers(cfg)
    tensors = decoder_tensors(cfg)
    name = f"{TEXT}mlp.gate.e_score_correction_bias"
    correction = LayerTensor(name, (cfg.experts,), layers=sparse, wide=True, frozen=True)
    return {**tensors, "router": replace(tensors["router"], layers=sparse), "router_correction": correction}


def without_predictors(_: ModelConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors but those of layers that predict several tokens."""
    predictors = tuple(name.removesuffix(_PREDICTOR) + "." for name in tensors if name.endswith(_PREDICTOR))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(predictors)}


def _numbers(cfg: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the layers with experts, and of those with an MLP."""
    dense = tuple(number for number, kind in enumerate(cfg.layer_kinds) if kind.dense)
    return tuple(number for number in range(cfg.layers) if number not in dense), dense


def _mlps(fields: ConfigFields, layers: int) -> list[str]:
    """What each layer has, as in `mlp_layer_types`."""
    first = fields.get("first_k_dense_replace", 1)
    usual = [_DENSE if isinstance(first, int) and number < first else _SPARSE for number in range(layers)]
    types = fields.get("mlp_layer_types") or usual
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {_DENSE, _SPARSE}:
        raise fields.error(f"mlp_layer_types {types!r}; must be {layers} of {_DENSE}, {_SPARSE}")
    if _SPARSE not in types:
        raise fields.error(f"first_k_dense_replace {first!r} of {layers} layers; at least one must have experts")
    return types
