"""The tinker wire protocol: requests to the pool's commands, results to wire bytes.

Pure functions on bytes: no HTTP, no database, no model. Every check of a request's content is here, so that the API and
the engine word it alike. A check raises UserError, which names the field, its value and the rule.
`tinker.proto` is compiled by `python -m tinkerflow.backend.wire.generate`.
"""

from tinkerflow.backend.wire.custom_losses import (
    CreateCustomLoss,
    decode_custom_loss,
    dump_custom_loss,
    load_custom_loss,
    read_custom_loss,
)
from tinkerflow.backend.wire.decode import (
    ForwardHeader,
    ForwardRead,
    decode_forward,
    forward_backward_header,
    read_forward,
    training_tokens,
)
from tinkerflow.backend.wire.encode import (
    encode_forward,
    encode_json,
    encode_loaded,
    encode_model_created,
    encode_optim_step,
    encode_sample,
    encode_sampler_opened,
    encode_saved,
)
from tinkerflow.backend.wire.requests import (
    Body,
    CopyWeights,
    CreateModel,
    CustomLossAddress,
    LoadModel,
    LoadWeights,
    NumSamples,
    OnModel,
    OnNewModel,
    OnSampler,
    OptimStepBody,
    SampleBody,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    TargetTensor,
    TtlSeconds,
    hash_token,
    parse,
)
from tinkerflow.backend.wire.sample import sample_request, with_seed

__all__ = [
    "Body",
    "CopyWeights",
    "CreateCustomLoss",
    "CreateModel",
    "CustomLossAddress",
    "ForwardHeader",
    "ForwardRead",
    "LoadModel",
    "LoadWeights",
    "NumSamples",
    "OnModel",
    "OnNewModel",
    "OnSampler",
    "OptimStepBody",
    "SampleBody",
    "SaveExternal",
    "SaveForSampler",
    "SaveWeights",
    "TargetTensor",
    "TtlSeconds",
    "decode_custom_loss",
    "decode_forward",
    "dump_custom_loss",
    "encode_forward",
    "encode_json",
    "encode_loaded",
    "encode_model_created",
    "encode_optim_step",
    "encode_sample",
    "encode_sampler_opened",
    "encode_saved",
    "forward_backward_header",
    "hash_token",
    "load_custom_loss",
    "parse",
    "read_custom_loss",
    "read_forward",
    "sample_request",
    "training_tokens",
    "with_seed",
]
