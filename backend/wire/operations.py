"""The JSON bodies of the training operations as frozen dataclasses, with every check that needs no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import orjson

from tinkerflow.backend.commands import LoraSpec, Optimizer
from tinkerflow.backend.errors import UserError, broken
from tinkerflow.backend.ids import NAME_RULE, is_name
from tinkerflow.backend.spec.limits import MAX_RANK, MAX_SEQ
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER
from tinkerflow.backend.store import CheckpointPath
from tinkerflow.backend.store.encryption import check_recipients
from tinkerflow.backend.wire.fields import Fields
from tinkerflow.backend.wire.optimizers import optimizer_config

MIN_TTL, MAX_TTL = 3600, 10 * 365 * 24 * 3600  # seconds: the SDK's documentation says one hour to ten years
_ACCESS = "weights_access_hash"  # only ours: see hash_token
DEFAULT_RANK = 32  # the SDK's own default


@dataclass(frozen=True)
class CreateModel:
    """create_model; seed None = the server draws one."""

    base_model: str
    spec: LoraSpec
    seed: int | None
    user_metadata: dict[str, str]
    optimizer: Optimizer = DEFAULT_OPTIMIZER


@dataclass(frozen=True)
class LoadModel:
    """load_weights that makes a model (create-via-load); base_model None = the checkpoint's own.

    optimizer: restore the checkpoint's, whatever it is; fresh: the one to begin anew with, where it is not restored.
    access: the hash of the token that opens the checkpoint, if one came.
    """

    path: str
    optimizer: bool
    access: str | None
    base_model: str | None
    user_metadata: dict[str, str]
    fresh: Optimizer = DEFAULT_OPTIMIZER


@dataclass(frozen=True)
class LoadWeights:
    """load_weights into a model that exists. access: the hash of the token that opens the checkpoint, if one came."""

    path: str
    optimizer: bool
    access: str | None


@dataclass(frozen=True)
class SaveWeights:
    """save_weights; ttl_seconds None = kept for ever."""

    name: str
    ttl_seconds: int | None
    overwrite: bool
    user_metadata: dict[str, str]


@dataclass(frozen=True)
class SaveForSampler:
    """save_weights_for_sampler: either `name` or `sampling_session_seq_id` is set, never both.

    inflight: the sampler takes up what later inflight saves of the model publish; only without a name.
    """

    name: str | None
    sampling_session_seq_id: int | None
    ttl_seconds: int | None
    user_metadata: dict[str, str]
    inflight: bool = False


@dataclass(frozen=True)
class SaveExternal:
    """save_weights_external; recipients: of age encryption, none = plain files."""

    name: str
    ttl_seconds: int | None
    recipients: tuple[str, ...]


def decode_create_model(payload: bytes) -> CreateModel:
    """A create_model body; UserError names the field, its value and the rule."""
    body = Fields.parse(payload)
    optimizer = optimizer_config(body) or DEFAULT_OPTIMIZER
    lora = body.object("lora_config") or Fields({}, "lora_config.")
    rank = lora.optional_whole("rank", 1, MAX_RANK)
    spec = LoraSpec(
        rank=DEFAULT_RANK if rank is None else rank,
        train_attn=lora.flag("train_attn", True),
        train_mlp=lora.flag("train_mlp", True),
        train_unembed=lora.flag("train_unembed", True),
    )
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        raise UserError("lora_config.train_attn, train_mlp and train_unembed are all false: at least one must be true")
    # the journal keeps seeds as signed 64-bit numbers
    seed = lora.optional_whole("seed", -(2**63), 2**63 - 1)
    return CreateModel(body.text("base_model"), spec, seed, body.metadata("user_metadata"), optimizer)


def decode_load_model(payload: bytes) -> LoadModel:
    """A load_weights body with session_id; UserError names the field, its value and the rule."""
    body = Fields.parse(payload)
    config = optimizer_config(body)
    path, optimizer, access = _source(body)
    if optimizer and config is not None:
        raise UserError(
            "optimizer_config is given with optimizer true: the checkpoint's optimizer is restored as it is"
        )
    return LoadModel(
        path=path,
        optimizer=optimizer,
        access=access,
        base_model=body.optional_text("base_model"),
        user_metadata=body.metadata("user_metadata"),
        fresh=config or DEFAULT_OPTIMIZER,
    )


def decode_load_weights(payload: bytes) -> LoadWeights:
    """A load_weights body with model_id; UserError names the field, its value and the rule."""
    body = Fields.parse(payload)
    if body.has("optimizer_config"):
        raise UserError("optimizer_config is given: a model that exists keeps the optimizer it was made with")
    return LoadWeights(*_source(body))


def decode_save_weights(payload: bytes) -> SaveWeights:
    """A save_weights body; UserError names the field, its value and the rule."""
    body = Fields.parse(payload)
    return SaveWeights(_name(body), ttl_seconds(body), body.flag("overwrite", False), body.metadata("user_metadata"))


def decode_save_for_sampler(payload: bytes) -> SaveForSampler:
    """A save_weights_for_sampler body; UserError names the field, its value and the rule."""
    body = Fields.parse(payload)
    if body.get("kind") not in (None, "snapshot", "inflight"):
        raise broken("kind", body.get("kind"), "'snapshot' or 'inflight'")
    named, numbered = body.has("path"), body.has("sampling_session_seq_id")
    if named == numbered:
        both = "both given" if named else "both absent"
        raise UserError(f"path and sampling_session_seq_id are {both}: exactly one must be given")
    inflight = body.get("kind") == "inflight"
    if named and inflight:
        raise broken("kind", "inflight", "'snapshot' when path is given: what a name holds does not change")
    return SaveForSampler(
        name=_name(body) if named else None,
        sampling_session_seq_id=body.whole("sampling_session_seq_id", 0, MAX_SEQ) if numbered else None,
        ttl_seconds=ttl_seconds(body),
        user_metadata=body.metadata("user_metadata"),
        inflight=inflight,
    )


def decode_save_external(payload: bytes) -> SaveExternal:
    """A save_weights_external body; UserError names the field, its value and the rule."""
    body = Fields.parse(payload)
    recipients = body.texts("age_encryption_recipients")
    check_recipients(recipients, "age_encryption_recipients")
    return SaveExternal(_name(body), ttl_seconds(body), recipients)


def ttl_seconds(body: Fields) -> int | None:
    """How long a checkpoint is kept, None = for ever; UserError names the value and the rule."""
    return body.optional_whole("ttl_seconds", MIN_TTL, MAX_TTL)


def hash_token(payload: bytes, access_hash: Callable[[str], str]) -> bytes:
    """A load_weights body with the hash of its token in the token's place, for whoever keeps the body.

    A token that is not a string stays, for the decoders to refuse.
    """
    body = Fields.parse(payload)
    if not (body.present("weights_access_token") or body.present(_ACCESS)):
        return payload
    values = orjson.loads(payload)
    values.pop(_ACCESS, None)
    if isinstance(token := values.get("weights_access_token"), str):
        del values["weights_access_token"]
        values |= {_ACCESS: access_hash(token)} if token else {}
    return orjson.dumps(values)


def _source(body: Fields) -> tuple[str, bool, str | None]:
    path, optimizer = CheckpointPath.parse(body.text("path")), body.flag("optimizer", False)
    if path.kind == "external_weights":
        raise broken("path", str(path), "of kind weights or sampler_weights: external weights are for downloads")
    if optimizer and path.kind != "weights":
        raise broken("optimizer", True, f"false, {path.kind} hold no optimizer state")
    if body.has("weights_access_token"):
        raise broken("weights_access_token", body.get("weights_access_token"), "a string")
    return str(path), optimizer, body.optional_text(_ACCESS)


def _name(body: Fields) -> str:
    name = body.text("path")
    if not is_name(name):
        raise broken("path", name, NAME_RULE)
    return name
