"""The tinker wire protocol: requests to the pool's commands, results to wire bytes.

Pure functions on bytes: no HTTP, no database, no model. All checks of a request's content are here, so that every
caller words them alike; they raise UserError, which names the field, its value and the rule.
`tinker.proto` is compiled by `python -m tinkerflow.backend.wire.generate`.
"""

from tinkerflow.backend.wire.custom_losses import (
    custom_loss_header,
    decode_custom_loss,
    dump_custom_loss,
    load_custom_loss,
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
from tinkerflow.backend.wire.fields import Fields
from tinkerflow.backend.wire.operations import (
    CreateModel,
    LoadModel,
    LoadWeights,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    decode_create_model,
    decode_load_model,
    decode_load_weights,
    decode_save_external,
    decode_save_for_sampler,
    decode_save_weights,
    hash_token,
    ttl_seconds,
)
from tinkerflow.backend.wire.optimizers import decode_optim_step
from tinkerflow.backend.wire.sample import decode_sample, num_samples, records_stability, with_seed

__all__ = [
    "CreateModel",
    "Fields",
    "ForwardHeader",
    "ForwardRead",
    "LoadModel",
    "LoadWeights",
    "SaveExternal",
    "SaveForSampler",
    "SaveWeights",
    "custom_loss_header",
    "decode_create_model",
    "decode_custom_loss",
    "decode_forward",
    "decode_load_model",
    "decode_load_weights",
    "decode_optim_step",
    "decode_sample",
    "decode_save_external",
    "decode_save_for_sampler",
    "decode_save_weights",
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
    "num_samples",
    "read_forward",
    "records_stability",
    "training_tokens",
    "ttl_seconds",
    "with_seed",
]
