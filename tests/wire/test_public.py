"""The room's public names."""

from __future__ import annotations

from tinkerflow.backend import wire


def test_the_public_names() -> None:
    assert set(wire.__all__) == {
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
        "ttl_seconds",
        "training_tokens",
        "with_seed",
    }
    assert all(hasattr(wire, name) for name in wire.__all__)
