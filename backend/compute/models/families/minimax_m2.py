"""MiniMax-M2: norms over all heads of q and of k, partly rotated heads, and sigmoid-routed experts in every layer."""

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count, rotary_share
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import Attention, DecoderLayer, Experts, RMSNorm, SigmoidRouter
from tinkerflow.backend.compute.models.layers.mlp import refuse_other_mlps

_MODULE = "block_sparse_moe."


def _minimax_m2(fields: ConfigFields) -> ModelConfig:
    refuse_other_mlps(fields)
    fields.refuse_others(
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        shared_intermediate_size=0,
        router_jitter_noise=0,
        attn_type_list=[1] * layer_count(fields),
    )
    share = 1.0
    if fields.get("rotary_dim") is not None:
        share = fields.size("rotary_dim") / fields.size("head_dim", 128)
        fields.refuse_others(partial_rotary_factor=share)
    norm, count = RMSNorm.read(fields), fields.size("num_local_experts")
    attention = Attention.read(
        rotary_share(fields, share), partial=True, rope_theta=5_000_000.0, qk_norm="all heads", norm=norm
    )
    router = SigmoidRouter(
        fields.chosen_experts(count), module=f"{_MODULE}gate", correction=f"{_MODULE}e_score_correction_bias"
    )
    experts = Experts(
        attention.hidden,
        count,
        fields.size("intermediate_size"),
        router,
        module=f"{_MODULE}experts.{{}}.",
        names=("w1", "w3", "w2"),
    )
    return decoder(fields, norm, [DecoderLayer(attention, experts, norm)] * layer_count(fields))


FAMILY = Family(model_type="minimax_m2", title="MiniMax-M2", parse=_minimax_m2)
