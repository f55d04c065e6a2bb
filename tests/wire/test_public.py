"""The room's public names."""

from __future__ import annotations

from types import ModuleType

from tinkerflow.backend import wire


def test_the_public_names() -> None:
    public = {name: thing for name, thing in vars(wire).items() if not name.startswith("_")}
    assert {name for name, thing in public.items() if not isinstance(thing, ModuleType)} == {
        "Body",
        "CopyWeights",
        "CreateCustomLoss",
        "CreateModel",
        "CustomLossAddress",
        "FinishUpload",
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
        "StartUpload",
        "TargetTensor",
        "TtlSeconds",
        "decode_forward",
        "decode_sample",
        "dump_custom_loss",
        "drift_metrics",
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
        "with_files",
        "with_files_to_train",
        "with_seed",
    }
