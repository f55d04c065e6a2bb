"""Qwen3-MoE: Qwen3 with a mixture of experts in place of every layer's MLP."""

from dataclasses import replace

from tinkerflow.backend.compute.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.decoder import decoder_config
from tinkerflow.backend.compute.families import Family


def _parse(fields: ConfigFields) -> ModelConfig:
    # transformers 5 writes num_local_experts; earlier releases, and most of the hub, num_experts.
    number = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    config = replace(
        decoder_config(fields, mlp="moe_intermediate_size", qk_norm=True),
        experts=fields.size(number),
        experts_per_token=fields.size("num_experts_per_tok"),
        norm_topk=bool(fields.get("norm_topk_prob", False)),
    )
    fields.refuse_others(decoder_sparse_step=1, mlp_only_layers=[])  # every layer has experts
    if not 1 <= config.experts_per_token <= config.experts:
        raise fields.error(
            f"num_experts_per_tok {config.experts_per_token} of {config.experts} experts; "
            "must be from 1 to their number"
        )
    return config


FAMILY = Family(model_type="qwen3_moe", title="Qwen3-MoE", parse=_parse)
