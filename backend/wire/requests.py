"""The JSON bodies of operations, one typed model for each, with every check that needs no model card; and the answers.

`SaveWeights.decode(payload)` reads a body. UserError names the field, its value and the rule. The API parses a body
once (`parse`), reads its address and its content from the same values, and stores the received bytes. The engine
decodes the stored bytes.

The SDK omits nulls, but other clients send them. A null always counts as an absent field. Unknown fields are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BeforeValidator, Field, model_validator

from tinkerflow.backend.core.encryption import check_recipients
from tinkerflow.backend.core.errors import UserError, broken, shown
from tinkerflow.backend.spec.checkpoint import CheckpointPath
from tinkerflow.backend.spec.commands import LoraSpec, Optimizer, OptimResult, Priority
from tinkerflow.backend.spec.limits import ALL_PARTS, MAX_RANK, MAX_SEQ, MAX_TTL, MIN_TTL
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerParams
from tinkerflow.backend.wire.validation import (
    MAX_TEXT,
    CheckpointName,
    Metadata,
    OptionalText,
    Text,
    Texts,
    WireModel,
    parse,
)

MAX_SAMPLES = 1024  # sequences of one request
MAX_LISTED = 128  # tokens of one list at a position: top-k, given tokens, alternatives
MAX_SAMPLE_SEQ = 2**63 - 1  # copies of a sampling client count from their number times a billion
DEFAULT_RANK = 32  # the SDK's own default
_ACCESS = "weights_access_hash"  # `hash_token` stores it instead of the client's weights_access_token


def whole_number(low: int, high: int) -> Any:
    """The annotation of a whole number from `low` to `high`, both included."""
    return Field(ge=low, le=high)


def number(low: float, high: float | None = None) -> Any:
    """The annotation of a finite number from `low` to `high`, both included; None: without an upper bound."""
    return Field(ge=low, le=high, allow_inf_nan=False)


Ttl = Annotated[int | None, whole_number(MIN_TTL, MAX_TTL)]
SeqId = Annotated[int, whole_number(0, MAX_SEQ)]
AnySeed = whole_number(-(2**63), 2**63 - 1)  # the journal keeps seeds as signed 64-bit numbers


# ------------------------------------------------------------------ addresses
class OnModel(WireModel):
    """The address of an operation on a model."""

    model_id: Text
    seq_id: Annotated[int, whole_number(1, MAX_SEQ)]


class OnNewModel(WireModel):
    """The address of an operation that makes a model. base_model is not checked here."""

    session_id: Text
    model_seq_id: SeqId
    base_model: Any = None

    @property
    def base_name(self) -> str:
        """The name in base_model, or "" if it is longer than a name or has a NUL, which databases cannot store."""
        name = self.base_model
        return name if isinstance(name, str) and len(name) <= MAX_TEXT and "\0" not in name else ""


class OnSampler(WireModel):
    """The address of a sample request."""

    sampling_session_id: Text
    seq_id: Annotated[int, whole_number(0, MAX_SAMPLE_SEQ)]


class LoraConfig(WireModel):
    """The adapter of a new model. seed None: the server draws one."""

    rank: Annotated[int, whole_number(1, MAX_RANK)] = DEFAULT_RANK
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    seed: Annotated[int | None, AnySeed] = None

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise UserError(
                "lora_config.train_attn, train_mlp and train_unembed are all false: at least one must be true"
            )
        return self

    @property
    def spec(self) -> LoraSpec:
        """The adapter's shape in commands for workers."""
        return LoraSpec(self.rank, self.train_attn, self.train_mlp, self.train_unembed)


class TrainedConfig(LoraConfig):
    """The trained part of a new model: an adapter, or with rank 0 all parameters."""

    rank: Annotated[int, whole_number(0, MAX_RANK)] = DEFAULT_RANK

    @model_validator(mode="after")
    def _trains_all_or_an_adapter(self) -> Self:
        if self.spec.full and not (self.train_attn and self.train_mlp and self.train_unembed):
            raise UserError(f"lora_config.rank 0 {ALL_PARTS}")
        return self


def _optimizer(config: Any) -> Optimizer:
    """The optimizer that an `optimizer_config` names. UserError: the optimizer is unknown."""
    if not isinstance(config, dict):
        raise broken("optimizer_config", config, "a JSON object")
    kind, version = config.get("type"), config.get("version")
    if not isinstance(kind, str) or kind not in OPTIMIZERS:
        raise broken("optimizer_config.type", kind, f"one of {', '.join(OPTIMIZERS)}")
    known = OPTIMIZERS[kind].config
    if "version" in known and version not in (None, known["version"]):
        raise broken("optimizer_config.version", version, str(known["version"]))
    if unknown := sorted(name for name, value in config.items() if value is not None and name not in known):
        raise UserError(f"optimizer_config has the key {shown(unknown[0])}: {kind} takes {', '.join(sorted(known))}")
    return kind


OptimizerConfig = Annotated[Optimizer, BeforeValidator(_optimizer, json_schema_input_type=dict[str, Any])]


class CreateModel(WireModel):
    """create_model: a model with a fresh adapter, or a model whose parameters are all trained."""

    optimizer: OptimizerConfig = Field(default=DEFAULT_OPTIMIZER, alias="optimizer_config")
    lora: TrainedConfig = Field(default=TrainedConfig(), alias="lora_config")
    base_model: Text
    user_metadata: Metadata = Field(default_factory=dict)


class _Load(WireModel):
    """A checkpoint to load. optimizer: also restore its optimizer state, for any kind of optimizer.

    access: the hash of the token that gives access to the checkpoint, if one was sent.
    """

    path: Text
    optimizer: bool = False
    weights_access_token: Any = Field(default=None, exclude=True)
    access: OptionalText = Field(default=None, alias=_ACCESS)

    @model_validator(mode="after")
    def _can_be_loaded(self) -> Self:
        path = CheckpointPath.parse(self.path)
        if path.kind == "external_weights":
            raise broken("path", str(path), "of kind weights or sampler_weights: external weights are for downloads")
        if self.optimizer and path.kind != "weights":
            raise broken("optimizer", True, f"false, because {path.kind} contain no optimizer state")
        if self.weights_access_token is not None:  # a string would have been hashed before it was stored
            raise broken("weights_access_token", self.weights_access_token, "a string")
        return self


class LoadModel(_Load):
    """load_weights that makes a model. base_model None: the checkpoint's own.

    fresh: the optimizer to begin with if the checkpoint's is not restored.
    """

    base_model: OptionalText = None
    user_metadata: Metadata = Field(default_factory=dict)
    fresh: OptimizerConfig = Field(default=DEFAULT_OPTIMIZER, alias="optimizer_config")

    @model_validator(mode="after")
    def _one_optimizer(self) -> Self:
        if self.optimizer and "fresh" in self.model_fields_set:
            raise UserError(
                "optimizer_config is given with optimizer true: the checkpoint's optimizer is restored as it is"
            )
        return self


class LoadWeights(_Load):
    """load_weights into an existing model."""

    optimizer_config: Any = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _no_optimizer(self) -> Self:
        if self.optimizer_config is not None:
            raise UserError("optimizer_config is given: an existing model keeps its optimizer")
        return self


class _NamedSave(WireModel):
    """A checkpoint to save. ttl_seconds None: kept forever."""

    name: CheckpointName = Field(alias="path")
    ttl_seconds: Ttl = None


class SaveWeights(_NamedSave):
    """save_weights: a training checkpoint."""

    overwrite: bool = False
    user_metadata: Metadata = Field(default_factory=dict)


class SaveForSampler(WireModel):
    """save_weights_for_sampler: either `name` or `sampling_session_seq_id` is set, never both.

    kind: inflight samplers switch to newer inflight saves of their model as these are published; only without a name.
    kv_cache: the treatment of requests that get new weights from an inflight save (not in the SDK); None = the setting.
    """

    name: CheckpointName | None = Field(default=None, alias="path")
    sampling_session_seq_id: Annotated[int | None, whole_number(0, MAX_SEQ)] = None
    ttl_seconds: Ttl = None
    user_metadata: Metadata = Field(default_factory=dict)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    kv_cache: Literal["keep", "recompute"] | None = None

    @property
    def inflight(self) -> bool:
        """Whether the sampler switches to newer inflight saves of its model as they are published."""
        return self.kind == "inflight"

    @model_validator(mode="after")
    def _named_or_numbered(self) -> Self:
        if (self.name is None) == (self.sampling_session_seq_id is None):
            both = "both absent" if self.name is None else "both given"
            raise UserError(f"path and sampling_session_seq_id are {both}: exactly one must be given")
        if self.name is not None and self.inflight:
            raise broken("kind", "inflight", "'snapshot' when path is given: the weights of a name do not change")
        return self


class SaveExternal(_NamedSave):
    """save_weights_external: files to download. recipients: for age encryption, none = plain files."""

    recipients: Texts = Field(default=(), alias="age_encryption_recipients")

    @model_validator(mode="after")
    def _recipients_are_keys(self) -> Self:
        check_recipients(self.recipients, "age_encryption_recipients")
        return self


class OptimStepBody(WireModel):
    """optim_step. The worker checks that the model was made with this optimizer."""

    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None

    @property
    def params(self) -> OptimizerParams:
        """The parameters of the step. UserError names the field, its value and the rule."""
        adam, other = self.adam_params, self.optimizer_params
        if adam is not None and other is not None:
            raise UserError("adam_params and optimizer_params are both given: exactly one must be")
        if other is None and adam is None:
            rule = "an object of AdamW parameters, or optimizer_params one of another optimizer's"
            raise broken("adam_params", None, rule)
        if other is None:
            return OPTIMIZERS[DEFAULT_OPTIMIZER].read(adam or {})
        specs = {name: spec for name, spec in OPTIMIZERS.items() if name != DEFAULT_OPTIMIZER}
        kind = other.get("type")
        if not isinstance(kind, str) or kind not in specs:
            known = " or ".join(repr(name) for name in specs)
            raise broken("optimizer_params.type", kind, f"{known} (AdamW's parameters are adam_params)")
        return specs[kind].read(other)


class TargetTensor(WireModel):
    """target_prompt_logprobs: tokens to be scored, int64 [T - 1, K], row-major, dense or (with both indices) CSR."""

    dtype: Any = None
    shape: Any = None
    data: Any = None
    crow: Any = Field(default=None, alias="sparse_crow_indices")
    cols: Any = Field(default=None, alias="sparse_col_indices")


class ConstraintBody(WireModel):
    """A constraint on the text of an answer. value: a schema (an object), an expression or a grammar (text)."""

    type: Literal["json_schema", "json_object", "regex", "grammar"]
    value: Any = None


class SamplingParams(WireModel):
    """How tokens are chosen. stop None: the model's end-of-text tokens. max_tokens None: as many as fit the context.

    stop_token_ids: tokens that end a sequence, in addition to those of `stop`.
    min_p and all later fields are not in the SDK. Their names, bounds and formulas follow OpenAI's API and vLLM.
    `wire/sample.py` reads logit_bias and constraint, because it knows the model.
    """

    seed: Annotated[int | None, whole_number(-(2**63), 2**64 - 1)] = None
    stop: Any = None
    stop_token_ids: Any = None
    top_k: Annotated[int, whole_number(-1, 2**31 - 1)] = -1
    top_p: Annotated[float, number(0.0, 1.0)] = 1.0
    max_tokens: Annotated[int | None, whole_number(1, 2**31 - 1)] = None
    temperature: Annotated[float, number(0.0)] = 1.0
    min_p: Annotated[float, number(0.0, 1.0)] = 0.0
    presence_penalty: Annotated[float, number(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, number(-2.0, 2.0)] = 0.0
    repetition_penalty: Annotated[float, number(0.01, 100.0)] = 1.0
    logit_bias: dict[str, Any] | None = None
    constraint: ConstraintBody | None = None


class NumSamples(WireModel):
    """The number of sequences in a sample request."""

    num_samples: Annotated[int, whole_number(1, MAX_SAMPLES)] = 1


class PromptBody(WireModel):
    """The tokens of a prompt, in chunks."""

    chunks: Any = None


class SampleBody(NumSamples):
    """asample. `wire/sample.py` reads the tokens as arrays.

    stream: publish tokens to listeners as they are decoded (journal/streams.py). The SDK never requests it.
    """

    prompt: PromptBody = PromptBody()
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: Annotated[int | None, AnySeed] = None
    topk_prompt_logprobs: Annotated[int, whole_number(0, MAX_LISTED)] = 0
    topk_sample_logprobs: Annotated[int, whole_number(0, MAX_LISTED)] = 0
    prompt_alt_tokens_k: Annotated[int, whole_number(0, MAX_LISTED)] = 0
    target_prompt_logprobs: TargetTensor | None = None
    record_stability_info: bool = False
    priority: Priority = "batch"
    stream: bool = False


class TtlSeconds(WireModel):
    """A checkpoint's new time to live. Here, null differs from an absent field: null means forever."""

    ttl_seconds: Ttl = None


class CopyWeights(WireModel):
    """copy_weights: a checkpoint to copy into another project, or within the caller's own."""

    source_path: Text
    destination_project_id: OptionalText = None
    ttl_seconds: Ttl = None
    weights_access_token: OptionalText = None


class StartUpload(WireModel):
    """external_weights_upload_start: begin the upload of an adapter that was made elsewhere."""

    base_model: Text
    lora: LoraConfig = Field(default=LoraConfig(), alias="lora_config")
    destination_project_id: OptionalText = None


class FinishUpload(WireModel):
    """external_weights_upload_finish: all files are uploaded."""

    upload_id: Text


class CustomLossAddress(WireModel):
    """The address of a create_custom_loss body."""

    session_id: Text
    custom_loss_seq_id: SeqId


# ------------------------------------------------------------------ stored bodies
def hash_token(payload: bytes, access_hash: Callable[[str], str]) -> bytes:
    """A load_weights body for storage, with its access token replaced by the token's hash.

    A token that is not a string is kept, and is rejected when the body is read.
    """
    values = parse(payload)
    if "weights_access_token" not in values and _ACCESS not in values:
        return payload
    values.pop(_ACCESS, None)
    if isinstance(token := values.get("weights_access_token"), str):
        del values["weights_access_token"]
        values |= {_ACCESS: access_hash(token)} if token else {}
    return orjson.dumps(values)


# ------------------------------------------------------------------ answers
# Null keys are omitted, because the SDK treats a success with an `error` key, even null, as a failure. Numbers that are
# not finite are omitted, because the SDK cannot parse them.
def encode_optim_step(result: OptimResult) -> bytes:
    """The metrics of an optimizer step: the gradient norm before clipping, and the number of steps so far."""
    metrics = {"grad_norm": result.grad_norm, "optimizer_step": float(result.step)}
    return encode_json({"metrics": {key: value for key, value in metrics.items() if math.isfinite(value)}})


def encode_model_created(model_id: str) -> bytes:
    return encode_json({"type": "create_model", "model_id": model_id})


def encode_unloaded(model_id: str) -> bytes:
    return encode_json({"type": "unload_model", "model_id": model_id})


def encode_loaded(model_id: str, path: str) -> bytes:
    """The answer to load_weights, in both forms."""
    return encode_json({"type": "load_weights", "model_id": model_id, "path": path})


def encode_saved(path: str, *, kind: str = "save_weights", size_bytes: int | None = None) -> bytes:
    """The answer to save_weights, or by `kind` to a named save_weights_for_sampler or to save_weights_external."""
    return encode_json({"type": kind, "path": path, "size_bytes": size_bytes})


def encode_sampler_opened(sampling_session_id: str) -> bytes:
    """The answer to an unnamed save_weights_for_sampler."""
    return encode_json({"type": "save_weights_for_sampler", "sampling_session_id": sampling_session_id})


def encode_json(values: Mapping[str, object]) -> bytes:
    """`values` as JSON without its null fields."""
    return orjson.dumps({key: value for key, value in values.items() if value is not None})
