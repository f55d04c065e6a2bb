"""GLM-4.7-Flash: latent attention and sigmoid-routed experts, as in DeepSeek V3."""

from dataclasses import replace
from functools import partial

from tinkerflow.backend.compute.models.families.deepseek_v3 import FAMILY as DEEPSEEK_V3
from tinkerflow.backend.compute.models.families.deepseek_v3 import deepseek_v3

FAMILY = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    title="GLM-4.7-Flash",
    parse=partial(deepseek_v3, eps=1e-5, scale=1.8, defaults={"q_lora_rank": 768}),
)
