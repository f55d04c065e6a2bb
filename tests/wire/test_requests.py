"""Decoding of the JSON operations, and errors that name invalid content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pyrage
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker._compat import model_dump
from tinker.types.optim_step_request import OptimStepRequest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import LoraSpec
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.backend.spec.optimizers.dimuon import DimuonParams
from tinkerflow.backend.wire import (
    CreateModel,
    LoadModel,
    LoadWeights,
    OptimStepBody,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    StartUpload,
    hash_token,
)


def decode_optim_step(payload: bytes) -> object:
    return OptimStepBody.decode(payload).params


SESSION = "sess-0123456789abcdef"
PATH = "tinker://sess-1:train:0/weights/a"


def of(**values: Any) -> bytes:
    return json.dumps(values).encode()


def sdk_step(params: types.AdamParams) -> bytes:
    request = OptimStepRequest(model_id="m", seq_id=1, optim_params=params)
    return json.dumps(model_dump(request, exclude_unset=False, exclude_none=True, mode="json")).encode()


def test_adam_defaults_equal_the_sdk() -> None:
    assert decode_optim_step(sdk_step(types.AdamParams())) == AdamParams()
    assert decode_optim_step(of(adam_params={})) == AdamParams()


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "grad_clip_norm", "eps", "beta1"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_from_the_sdk_is_refused_and_not_replaced(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"adam_params.{name} is None: must be a finite number"):
        decode_optim_step(sdk_step(types.AdamParams(**{name: value})))


@given(st.floats(0, 10), st.floats(0, 0.999), st.floats(1e-12, 1))
def test_adam_values_pass(rate: float, beta: float, eps: float) -> None:
    params = decode_optim_step(sdk_step(types.AdamParams(learning_rate=rate, beta1=beta, eps=eps)))
    assert (params.learning_rate, params.beta1, params.eps) == (rate, beta, eps)


def test_create_model() -> None:
    lora = {"rank": 8, "seed": 3, "train_mlp": False}
    body = of(base_model="m", lora_config=lora, optimizer_config={"type": "adamw"}, user_metadata={"a": "b"})
    assert CreateModel.decode(body) == CreateModel(base_model="m", lora_config=lora, user_metadata={"a": "b"})
    made = CreateModel.decode(body)
    assert (made.lora.spec, made.lora.seed, made.optimizer) == (LoraSpec(8, train_mlp=False), 3, "adamw")
    assert CreateModel.decode(of(base_model="m")) == CreateModel(base_model="m")
    plain = CreateModel(base_model="m")
    assert (plain.lora.spec, plain.lora.seed, plain.user_metadata) == (LoraSpec(32), None, {})


def test_loads_and_saves() -> None:
    assert LoadModel.decode(of(path=PATH, optimizer=True)) == LoadModel(path=PATH, optimizer=True)
    assert LoadWeights.decode(of(path=PATH, optimizer=False)) == LoadWeights(path=PATH)
    saved = SaveWeights.decode(of(path="a.b-1", ttl_seconds=3600, overwrite=True, user_metadata={"k": "v"}))
    assert saved == SaveWeights(path="a.b-1", ttl_seconds=3600, overwrite=True, user_metadata={"k": "v"})
    assert SaveWeights.decode(of(path="a", ttl_seconds=None)) == SaveWeights(path="a")
    assert SaveForSampler.decode(of(path="a", kind="snapshot")) == SaveForSampler(path="a")
    numbered = SaveForSampler(sampling_session_seq_id=0)
    assert SaveForSampler.decode(of(sampling_session_seq_id=0, kind="snapshot")) == numbered
    shared = SaveForSampler(sampling_session_seq_id=0, kind="inflight")
    assert SaveForSampler.decode(of(sampling_session_seq_id=0, kind="inflight")) == shared
    assert SaveForSampler.decode(of(sampling_session_seq_id=0, kv_cache="keep")).kv_cache == "keep"


def test_exports() -> None:
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    body = of(path="a", ttl_seconds=3600, age_encryption_recipients=[recipient])
    assert SaveExternal.decode(body) == SaveExternal(path="a", ttl_seconds=3600, age_encryption_recipients=[recipient])
    assert SaveExternal.decode(of(path="a")) == SaveExternal(path="a")


def test_token_hashes_cannot_be_sent_by_clients() -> None:
    plain = of(path=PATH, optimizer=True)
    assert hash_token(plain, str.upper) == plain
    with_token = hash_token(of(path=PATH, weights_access_token="tfw-secret"), str.upper)
    assert b"tfw-secret" not in with_token
    assert LoadWeights.decode(with_token).access == LoadModel.decode(with_token).access == "TFW-SECRET"
    assert LoadWeights.decode(hash_token(of(path=PATH, weights_access_hash="TFW"), str.upper)).access is None
    assert LoadWeights.decode(hash_token(of(path=PATH, weights_access_token=""), str.upper)).access is None
    for body in (LoadWeights, LoadModel):
        assert body.decode(hash_token(of(path=PATH, access="TFW"), str.upper)).access is None


def test_a_field_is_read_by_its_name_on_the_wire_alone() -> None:
    unread = {"lora": {"rank": 8}, "optimizer": {"type": "dimuon"}}
    assert CreateModel.decode(of(base_model="m", **unread)) == CreateModel(base_model="m")
    assert LoadModel.decode(of(path=PATH, fresh={"type": "dimuon"})).fresh == "adamw"
    assert not SaveForSampler.decode(of(sampling_session_seq_id=1, name="a", inflight="inflight")).inflight
    assert SaveExternal.decode(of(path="a", recipients=["x"])).recipients == ()
    for body in (SaveWeights, SaveExternal):
        with pytest.raises(UserError, match="path is missing: must be a non-empty string"):
            body.decode(of(name="a"))


DIMUON = {"type": "dimuon", "learning_rate": 0.1}


def test_dimuon_is_read() -> None:
    assert decode_optim_step(of(optimizer_params=DIMUON)) == DimuonParams(0.1, 0.9, 0.0)
    given = DIMUON | {"beta1": 0.5, "grad_clip_norm": -1.0}
    assert decode_optim_step(of(optimizer_params=given)) == DimuonParams(0.1, 0.5, -1.0)
    config = {"type": "dimuon", "version": 1}
    assert CreateModel.decode(of(base_model="m", optimizer_config=config)).optimizer == "dimuon"
    assert CreateModel.decode(of(base_model="m")).optimizer == "adamw"
    assert LoadModel.decode(of(path=PATH, optimizer_config=config)).fresh == "dimuon"
    assert LoadModel.decode(of(path=PATH)).fresh == "adamw"


Wrong = tuple[Callable[[bytes], object], bytes, str]
WRONG: list[Wrong] = [
    (decode_optim_step, of(), "adam_params is None: must be an object"),
    (decode_optim_step, of(optimizer_params={"type": "dimuon"}), "optimizer_params.learning_rate is None: must be"),
    (decode_optim_step, of(optimizer_params={"type": "sgd"}), "optimizer_params.type is 'sgd': must be 'dimuon'"),
    (decode_optim_step, of(adam_params={}, optimizer_params={}), "are both given: exactly one must be"),
    (decode_optim_step, of(optimizer_params=DIMUON | {"eps": 1}), "optimizer_params has the key 'eps': dimuon takes"),
    (decode_optim_step, of(optimizer_params=DIMUON | {"beta1": 1}), "beta1 is 1: must be a finite number >= 0 and < 1"),
    (decode_optim_step, of(optimizer_params=DIMUON | {"learning_rate": -1}), "optimizer_params.learning_rate is -1"),
    (
        decode_optim_step,
        of(optimizer_params=DIMUON | {"grad_clip_norm": None}),
        "grad_clip_norm is None: must be a finite",
    ),
    (LoadWeights.decode, of(path=PATH, optimizer_config={"type": "adamw"}), "an existing model keeps its optimizer"),
    (LoadModel.decode, of(path=PATH, optimizer=True, optimizer_config={"type": "adamw"}), "with optimizer true"),
    (
        CreateModel.decode,
        of(base_model="m", optimizer_config={"type": "dimuon", "version": 2}),
        "version is 2: must be 1",
    ),
    (CreateModel.decode, of(base_model="m", optimizer_config={"type": "adamw", "x": 1}), "has the key 'x'"),
    (
        decode_optim_step,
        of(adam_params={"beta1": 1.0}),
        "adam_params.beta1 is 1.0: must be a finite number >= 0 and < 1",
    ),
    (decode_optim_step, of(adam_params={"learning_rate": -1}), "adam_params.learning_rate is -1: must be"),
    (decode_optim_step, of(adam_params={"eps": 0}), "adam_params.eps is 0: must be a finite number > 0"),
    (decode_optim_step, of(adam_params={"weight_decay": "a"}), "adam_params.weight_decay is 'a': must be"),
    (CreateModel.decode, of(lora_config={}), "base_model is missing: must be a non-empty string"),
    (
        CreateModel.decode,
        of(base_model="m", lora_config={"rank": -1}),
        "lora_config.rank is -1: must be a whole number",
    ),
    (CreateModel.decode, of(base_model="m", lora_config={"rank": 1025}), "from 0 to 1024"),
    (
        CreateModel.decode,
        of(base_model="m", lora_config={"rank": 0, "train_mlp": False}),
        "rank 0 trains all parameters:",
    ),
    (
        StartUpload.decode,
        of(base_model="m", lora_config={"rank": 0}),
        "lora_config.rank is 0: must be a whole number from 1",
    ),
    (CreateModel.decode, of(base_model="m", optimizer_config={"type": "sgd"}), "must be one of adamw, dimuon"),
    (
        CreateModel.decode,
        of(base_model="m", lora_config={"train_attn": False, "train_mlp": False, "train_unembed": False}),
        "at least one must be true",
    ),
    (CreateModel.decode, of(base_model="m", user_metadata={"a": 1}), "user_metadata['a'] is 1: must be a string"),
    (CreateModel.decode, of(base_model="m", user_metadata=[1]), "user_metadata is [1]: must be"),
    (CreateModel.decode, of(base_model="m\0"), "base_model is 'm\\x00': must be a string without NUL"),
    (LoadModel.decode, of(path="/etc/passwd"), "checkpoint path '/etc/passwd': must be tinker://"),
    (
        LoadModel.decode,
        of(path=SESSION),
        f"is the id of a session: a training run of it is '{SESSION}:train:0', a check",
    ),
    (LoadModel.decode, of(path=f"tinker://{SESSION}:train:2/"), f"checkpoint is 'tinker://{SESSION}:train:2/sampler_w"),
    (
        LoadModel.decode,
        of(path=f"{SESSION}:sample:2"),
        f"a sampler: a training run of its session is '{SESSION}:train:0",
    ),
    (LoadModel.decode, of(path="req-0123456789abcdef"), "<name> (this is the id of a request)"),
    (LoadModel.decode, of(path="tinker://a/other/b"), "checkpoint kind 'other': must be one of weights"),
    (
        LoadModel.decode,
        of(path="tinker://a/sampler_weights/b", optimizer=True),
        "optimizer is True: must be false, because sampler_weights contain no optimizer state",
    ),
    (LoadWeights.decode, of(path="tinker://a/weights/b/c"), "must be tinker://"),
    (LoadWeights.decode, of(path=PATH, optimizer=1), "optimizer is 1: must be true or false"),
    (SaveWeights.decode, of(path="../a"), "path is '../a': must be 1 to 128 letters"),
    (
        SaveWeights.decode,
        of(path="a", ttl_seconds=3599),
        "ttl_seconds is 3599: must be a whole number from 3600 to 315360000",
    ),
    (
        SaveExternal.decode,
        of(path="a", age_encryption_recipients="age1"),
        "age_encryption_recipients is 'age1': must be a list",
    ),
    (
        SaveExternal.decode,
        of(path="a", age_encryption_recipients=["x"]),
        "age_encryption_recipients[0] is 'x'",
    ),
    (LoadModel.decode, of(path="tinker://a/external_weights/b"), "external weights are for downloads"),
    (
        LoadWeights.decode,
        hash_token(of(path=PATH, weights_access_token=3), str.upper),
        "weights_access_token is 3",
    ),
    (SaveForSampler.decode, of(), "are both absent: exactly one must be given"),
    (SaveForSampler.decode, of(path="a", sampling_session_seq_id=1), "are both given"),
    (SaveForSampler.decode, of(path="a", kind="inflight"), "kind is 'inflight': must be 'snapshot' when path is"),
    (SaveForSampler.decode, of(path="a", kind="live"), "kind is 'live': must be 'snapshot' or 'inflight'"),
    (SaveForSampler.decode, of(path="a", kv_cache="drop"), "kv_cache is 'drop': must be 'keep' or 'recompute'"),
]


@pytest.mark.parametrize(("decode", "payload", "text"), WRONG, ids=[w[2][:50] for w in WRONG])
def test_invalid_content_is_named(decode: Callable[[bytes], object], payload: bytes, text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        decode(payload)
