"""Multi-head latent attention of DeepSeek V3 and its kin: its fields in `config.json`, its matrices and its norms.

Keys and values of all heads are made of one small vector of a token, its latent; a key has a part that turns beside it,
which all heads share (DeepSeek V2, arXiv 2405.04434, section 2.1). `transformer` computes it. No JAX.
"""

from __future__ import annotations

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ConfigFields, Latent, ModelConfig
from tinkerflow.backend.compute.models.decoder import TEXT, LayerTensor, Projection, decoder_config
from tinkerflow.backend.compute.models.rope import YarnRope, yarn_scale
from tinkerflow.backend.compute.models.routed import routed_config, routed_projections, routed_tensors

_ATTENTION = f"{TEXT}self_attn."


def latent_config(fields: ConfigFields, norm_eps: float) -> ModelConfig:
    """The config of a decoder with latent attention and routed experts.

    fields: of `config.json`. norm_eps: where the file has none. UserError names a field that is missing, or the value
    of one that asks for something this decoder does not compute.
    """
    latent = Latent(
        rank=fields.size("kv_lora_rank"),
        query_rank=fields.size("q_lora_rank") if fields.get("q_lora_rank") is not None else 0,
        plain=fields.size("qk_nope_head_dim"),
        rotary=fields.size("qk_rope_head_dim"),
        values=fields.size("v_head_dim"),
        interleaved=bool(fields.get("rope_interleave", True)),
    )
    # Some files have head_dim, or fewer key-value heads than heads: neither means anything here.
    own = {"head_dim": latent.rotary, "num_key_value_heads": None, "rms_norm_eps": fields.get("rms_norm_eps", norm_eps)}
    config = decoder_config(replace(fields, values={**fields.values, **own}), mlp="moe_intermediate_size")
    if config.rope.dims != latent.rotary:
        raise fields.error(
            f"partial_rotary_factor makes {config.rope.dims} of qk_rope_head_dim {latent.rotary}; must be 1"
        )
    scale = 1.0
    if isinstance(config.rope_scaling, YarnRope):
        scale = yarn_scale(config.rope_scaling.factor, float(fields.rope.get("mscale_all_dim") or 0.0)) ** 2
    config = replace(
        config,
        head_dim=latent.plain + latent.rotary,
        rotary_dims=latent.rotary,
        query_scale=scale,
        latent=latent,
    )
    return routed_config(fields, config)


def latent_projections(cfg: ModelConfig) -> dict[str, Projection]:
    """Every matrix by the name that `transformer` uses."""
    latent, queries = _latent(cfg), cfg.heads * cfg.head_dim

    def attention(name: str, inputs: int, outputs: int) -> Projection:
        return Projection(f"{_ATTENTION}{name}", inputs, outputs, "train_attn", (cfg.layers,))

    if latent.query_rank:
        of_queries = {
            "q_a": attention("q_a_proj", cfg.hidden, latent.query_rank),
            "q_b": attention("q_b_proj", latent.query_rank, queries),
        }
    else:
        of_queries = {"q": attention("q_proj", cfg.hidden, queries)}
    plain = {name: matrix for name, matrix in routed_projections(cfg).items() if name not in ("q", "k", "v", "o")}
    return {
        **of_queries,
        "kv_a": attention("kv_a_proj_with_mqa", cfg.hidden, latent.cell),
        "kv_b": attention("kv_b_proj", latent.rank, cfg.heads * (latent.plain + latent.values)),
        "o": attention("o_proj", cfg.heads * latent.values, cfg.hidden),
        **plain,
    }


def latent_tensors(cfg: ModelConfig) -> dict[str, LayerTensor]:
    """Norms and routers by the name that `transformer` uses."""
    latent = _latent(cfg)
    norms = {"kv_norm": LayerTensor(f"{_ATTENTION}kv_a_layernorm.weight", (latent.rank,))}
    if latent.query_rank:
        norms["q_norm"] = LayerTensor(f"{_ATTENTION}q_a_layernorm.weight", (latent.query_rank,))
    return {**routed_tensors(cfg), **norms}


def _latent(cfg: ModelConfig) -> Latent:
    assert cfg.latent is not None
    return cfg.latent
