"""MiniMax-M2: norms over all heads of q and of k, a partial rotary embedding, and sigmoid-routed experts alone."""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import (
    LayerTensor,
    Projection,
    decoder_config,
    decoder_projections,
    decoder_tensors,
    rotary_share,
)
from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.models.routed import by_sigmoid

_MLP, _MOE = ".mlp.", ".block_sparse_moe."
_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}


def _parse(fields: ConfigFields) -> ModelConfig:
    fields.refuse_others(
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        shared_intermediate_size=0,
        attn_type_list=[1] * fields.size("num_hidden_layers"),
    )
    turned, head_dim = fields.get("rotary_dim"), fields.size("head_dim", 128)
    whole = rotary_share(fields, 1.0 if turned is None else fields.size("rotary_dim") / head_dim)
    config = replace(decoder_config(whole, rope_theta=5_000_000.0), qk_norm_whole=True)
    return by_sigmoid(fields, config, fields.size("num_local_experts"))


def _projections(cfg: ModelConfig) -> dict[str, Projection]:
    plain = decoder_projections(cfg)
    experts = {
        name: replace(plain[name], module=plain[name].module.replace(_MLP, _MOE).replace(f"{name}_proj", own))
        for name, own in _EXPERT.items()
    }
    return {**plain, **experts}


def _tensors(cfg: ModelConfig) -> dict[str, LayerTensor]:
    tensors = decoder_tensors(cfg)
    router = tensors["router"].tensor.replace(_MLP, _MOE)
    correction = router.replace("gate.weight", "e_score_correction_bias")
    return {
        **tensors,
        "router": replace(tensors["router"], tensor=router),
        "router_correction": LayerTensor(correction, (cfg.experts,), wide=True, frozen=True),
    }


FAMILY = Family(model_type="minimax_m2", title="MiniMax-M2", parse=_parse, projections=_projections, tensors=_tensors)
