"""The ordered commands that a pool executes, and the plain data they carry.

Commands and replies are messages, so they can stand in unions on the wire. The data in them are dataclasses. Senders of
commands need no JAX. Letters: T tokens of a sequence, K targets a position.
Every array crosses as it is, so dtypes are part of the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import field as message_field

from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.constraints import Kind as ConstraintKind
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerParams
from tinkerflow.backend.spec.pool_message import PoolMessage
from tinkerflow.backend.spec.ranks import LoraSpec as LoraSpec  # noqa: PLC0414  it is imported from here
from tinkerflow.backend.spec.ranks import RankRule

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

LORA_ALPHA = 32.0
Optimizer = str  # a name in spec.optimizers.OPTIMIZERS
Priority = Literal["interactive", "batch"]
Loss = str  # a name in spec.losses.LOSSES
if TYPE_CHECKING:
    AnyOptimizerParams: TypeAlias = OptimizerParams
else:  # what is decoded is one of these classes
    AnyOptimizerParams = reduce(or_, (spec.params for spec in OPTIMIZERS.values()))
NO_LOGPROB = -99999.0  # fills empty cells of top-k lists: what the SDK takes for an empty cell


# ------------------------------------------------------------------ what the data looks like
@dataclass(frozen=True)
class ImagePixels:
    """An image in a sequence, as the model's tower takes it. start: the number of its first placeholder token.

    pixels_HWC uint8: rows, columns, and red, green and blue. Its sides are multiples of those of a token.
    """

    start: int
    pixels_HWC: npt.NDArray[np.uint8]

    def tokens(self, side: int) -> int:
        """How many tokens it has; side: of a token, in pixels."""
        rows, columns, _ = self.pixels_HWC.shape
        return int(rows // side * (columns // side))


@dataclass(frozen=True)
class Example:
    """One training sequence: tokens_T is scored against targets_TK; a 1-D request has K = 1 and `flat` set.

    weights_TK multiply a token's loss. inputs: what else the loss reads, by its name on the wire: float32 [T, K] for
    the losses of backend/spec/losses; float32 or int32 of rank 0, 1 or 2 for a traced loss, as it declares them.
    images: in the order of their places; tokens_T has placeholders there.
    """

    tokens_T: Int32
    targets_TK: Int32
    weights_TK: Float32
    flat: bool = True
    inputs: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    images: tuple[ImagePixels, ...] = ()


@dataclass(frozen=True)
class CustomLoss:
    """A loss that a client traced: rank of each input by name, `logprobs` first, and its nodes as JSON text.

    tinkerflow.backend.wire.read_custom_loss makes it, and refuses calls that are not listed.
    """

    name: str
    inputs: Mapping[str, int]
    nodes: str


@dataclass(frozen=True)
class StabilityInfo:
    """The record of a sampled sequence that off-policy losses need.

    tokens_T int32; logprobs_T float32: what the sampling policy gave them. sequence_id is `<request_id>-<i>`.
    """

    sequence_id: str
    tokens_T: Int32
    logprobs_T: Float32


@dataclass(frozen=True)
class PromptWishes:
    """What a request asks about its prompt of T tokens beside their logprobs. Rows stand for tokens 1 to T - 1.

    last_n: how many of the last prompt logprobs (and rows of `top`) are computed, None = all.
    top: how many of the most likely tokens. alternatives: how many draws at the request's temperature. 0 = off.
    targets_TK int32 [T - 1, K]: tokens to score at each place, -1 = none.
    """

    last_n: int | None = None
    top: int = 0
    targets_TK: Int32 | None = None
    alternatives: int = 0


@dataclass(frozen=True)
class Adjustments:
    """How a request's logits are changed before a token is drawn; logprobs are those of the logits before.

    bias: what is added to a token's logit, by token. presence, frequency: taken from the logit of a token that was
    generated before, once and for each time. repetition: the positive logits of tokens in the prompt or generated are
    divided by it, the negative ones multiplied; 1 = off.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalises(self) -> bool:
        """Whether what was generated counts."""
        return self.presence != 0 or self.frequency != 0 or self.repetition != 1


@dataclass(frozen=True)
class Constraint:
    """What the text of an answer must be: JSON of a schema, a match of an expression, or a sentence of a grammar.

    text: the schema as JSON, the expression, or the grammar in Lark's notation. ends: the tokens that end a text.
    """

    kind: ConstraintKind
    text: str
    ends: tuple[int, ...]


@dataclass(frozen=True)
class SampleRequest:
    """One prompt to continue `num_samples` times. `snapshot_id` None samples the base model.

    owner: the project. Cached pages of a prompt serve requests of the same owner only.
    seed: 64 bits; sample i of a request uses a key derived from (seed, i), so a result never depends on the batch.
    stop_tokens / stop_strings: generation ends after the first, which stays in the output. temperature 0 is greedy.
    min_p: the least probability a token may have, as a share of the most likely token's. adjustments, constraint:
    None = none. priority: an interactive request goes before its owner's batch requests that wait. trace: the context
    of the span that it belongs to. images: in the order of their places; prompt_T has placeholders there.
    """

    request_id: str
    owner: str
    snapshot_id: str | None
    prompt_T: Int32
    num_samples: int
    max_tokens: int
    temperature: float
    top_k: int  # -1 = off
    top_p: float  # 1.0 = off
    seed: int
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    prompt: PromptWishes | None = None
    topk_sample: int = 0  # candidates listed for each sampled token, 0 = off
    min_p: float = 0.0  # 0 = off
    adjustments: Adjustments | None = None
    constraint: Constraint | None = None
    priority: Priority = "interactive"
    stream: bool = False  # tokens are told as they are decoded, and again in the result
    trace: str | None = None
    images: tuple[ImagePixels, ...] = ()


@dataclass(frozen=True)
class Candidates:
    """k tokens at each of N positions: tokens_Nk int32 and their logprobs_Nk float32, of the full untempered softmax.

    A row of a top-k list that is not computed has token 0 and logprob NO_LOGPROB in every cell.
    """

    tokens_Nk: Int32
    logprobs_Nk: Float32


@dataclass(frozen=True)
class SampledSequence:
    """tokens_T int32 and their logprobs_T float32 (natural log, of the full untempered softmax).

    top: the most likely tokens at each of the T, best first, when `topk_sample` asks for them.
    """

    tokens_T: Int32
    logprobs_T: Float32
    stop_reason: Literal["stop", "length"]
    top: Candidates | None = None


@dataclass(frozen=True)
class NewTokens:
    """Tokens [start, start + T) of sample `index` of a request that streams, with their logprobs as in its result.

    stop_reason: None while the sample goes on; then these are its last tokens.
    """

    request_id: str
    index: int
    start: int
    tokens_T: Int32
    logprobs_T: Float32
    top: Candidates | None = None
    stop_reason: Literal["stop", "length"] | None = None


@dataclass(frozen=True)
class SampleResult:
    """The result of one SampleRequest: its sequences, or an `error` of this request alone, with its category.

    The last three are given only when asked for. top has a row for every prompt token (the first row is empty).
    targets_TK and alternatives have a row for every prompt token but the first; targets_TK is 0.0 where no token was
    named.
    """

    request_id: str
    sequences: tuple[SampledSequence, ...] = ()
    prompt_logprobs_T: Float32 | None = None  # NaN first
    prompt_cache_hit_tokens: int = 0
    error: str | None = None
    category: Literal["user", "server"] = "user"
    top: Candidates | None = None
    targets_TK: Float32 | None = None
    alternatives: Candidates | None = None


# ------------------------------------------------------------------ commands, each with its reply
class CreateAdapter(PoolMessage, frozen=True):
    """Make a fresh adapter: A seeded normal/uniform, B zero, gradients and moments zero. Reply: Done.

    Of rank 0, which all commands take as they take others: the base model's own weights, to train them all.
    """

    adapter_id: str
    spec: LoraSpec
    seed: int
    optimizer: Optimizer = DEFAULT_OPTIMIZER


class DropAdapter(PoolMessage, frozen=True):
    """Forget an adapter; unknown ids are fine. Reply: Done."""

    adapter_id: str


class Forward(PoolMessage, frozen=True):
    """Logprobs and summed loss of `examples`; with `backward`, add the loss's gradient to the adapter's.

    custom, loss_seconds: given when the loss is `custom`; the latter is the work of each example's loss, as
    `traced_work.loss_seconds` estimates it. by_micro_batch: compute only the first micro-batch, and reply Done. As many
    NextMicroBatch follow as `in_parts` of the pool gives. No other command about the adapter comes before the last of
    them. Reply: ForwardResult.
    """

    adapter_id: str
    examples: tuple[Example, ...]
    loss: Loss
    config: Mapping[str, float] = message_field(default_factory=dict)
    backward: bool = True
    custom: CustomLoss | None = None
    by_micro_batch: bool = False
    loss_seconds: tuple[float, ...] = ()


class NextMicroBatch(PoolMessage, frozen=True):
    """Compute the next part of the adapter's Forward. Reply: Done; after the last part the ForwardResult.

    of_loss: the part is a step of a custom loss (`traced_work.STEP_SECONDS`), not a micro-batch.
    """

    adapter_id: str
    of_loss: bool = False


class OptimStep(PoolMessage, frozen=True):
    """One optimizer step with the accumulated gradients, then clear them. Reply: OptimResult.

    A gradient norm that is not finite is a UserError: weights and moments stay, gradients are cleared. Parameters of
    another optimizer than the adapter's are a UserError that changes nothing.
    """

    adapter_id: str
    params: AnyOptimizerParams


class ExportAdapter(PoolMessage, frozen=True):
    """Copy an adapter to the host. Reply: AdapterState (with moments only when `optimizer`).

    keep: not "": each process keeps its part of the copy until WriteState names this folder, or until the adapter is
    exported again or dropped. Reply: AdapterKept.
    """

    adapter_id: str
    optimizer: bool
    keep: str = ""


class ImportAdapter(PoolMessage, frozen=True):
    """Make an adapter from a state; without moments in it, the optimizer starts fresh. Reply: Done.

    A StoredState must have been fetched for `adapter_id` (FetchState).
    """

    adapter_id: str
    state: AdapterState | StoredState


class PublishSnapshot(PoolMessage, frozen=True):
    """Freeze a copy of an adapter's weights for sampling. Reply: SnapshotHeld."""

    adapter_id: str
    snapshot_id: str


class LoadSnapshot(PoolMessage, frozen=True):
    """Make a sampling snapshot from saved weights. A snapshot that is held stays: its weights are these or newer.

    A StoredState must have been fetched for `snapshot_id` (FetchState). Reply: SnapshotHeld.
    """

    snapshot_id: str
    state: AdapterState | StoredState


class MoveSnapshot(PoolMessage, frozen=True):
    """Rename a snapshot to `to_id`, in place of the snapshot of that id. Reply: Done.

    Requests that sample `to_id` use the new weights from the next chunk, and keep their cache.
    """

    snapshot_id: str
    to_id: str


class DropSnapshot(PoolMessage, frozen=True):
    """Forget a snapshot. Requests that were admitted with it finish. Unknown ids are fine. Reply: Done."""

    snapshot_id: str


class SampleStep(PoolMessage, frozen=True):
    """Admit requests into the decode batch, cancel others, prefill or decode a chunk. Reply: SampleProgress.

    An empty SampleStep continues the requests that are in the batch or wait for it. wait: the reply comes when the
    devices have done all that they were asked for; else they may still decode a chunk, which the next step reads.
    """

    admit: tuple[SampleRequest, ...] = ()
    cancel: tuple[str, ...] = ()
    wait: bool = False


class Ping(PoolMessage, frozen=True):
    """Do nothing. Reply: Done."""


class ReadCompileStatus(PoolMessage, frozen=True):
    """Count the programs that are compiled. Reply: CompileStatus; Done from an executor that compiles nothing."""


Command = (
    CreateAdapter
    | DropAdapter
    | Forward
    | NextMicroBatch
    | OptimStep
    | ExportAdapter
    | ImportAdapter
    | PublishSnapshot
    | LoadSnapshot
    | MoveSnapshot
    | DropSnapshot
    | SampleStep
    | Ping
    | ReadCompileStatus
)


# ------------------------------------------------------------------ beside the commands: states from and to the store
class StoredState(PoolMessage, frozen=True):
    """A state that lies in the store. Processes that reach the store read from it what their devices need.

    folder: the key of the folder that holds `files`, which never change.
    """

    spec: LoraSpec
    step: int
    optimizer: Optimizer
    folder: str
    files: Mapping[str, Digest]


class FetchState(PoolMessage, frozen=True):
    """Read what this process needs of a state into its host memory, for the adapter or the snapshot `owner`."""

    owner: str
    state: StoredState


class WriteState(PoolMessage, frozen=True):
    """Write this process's part of the adapter that an ExportAdapter with keep=`folder` has copied, as one file."""

    adapter_id: str
    folder: str


# ------------------------------------------------------------------ replies
class Done(PoolMessage, frozen=True):
    """The command was executed."""


class ForwardResult(PoolMessage, frozen=True):
    """logprobs: one float32 [T] (flat) or [T, K] per example, in order; loss_sum: the sum over all tokens.

    metrics: of a custom loss, `custom/<name>:sum|mean`, over all examples.
    """

    logprobs: tuple[Float32, ...]
    loss_sum: float
    metrics: Mapping[str, float] = message_field(default_factory=dict)


class OptimResult(PoolMessage, frozen=True):
    """grad_norm: before clipping; step: optimizer steps made so far, this one included."""

    grad_norm: float
    step: int


class AdapterState(PoolMessage, frozen=True):
    """An adapter on the host, by PEFT name; of rank 0, all weights by Hugging Face's names.

    weights: float32, `base_model.model....lora_A.weight` is [rank, in], `lora_B.weight` is [out, rank]; B of experts
    times `spec.ranks.peft_factor`.
    moments: empty, or `{name}.{part}` for every weight and every part of the optimizer's state (`OptimizerSpec.state`),
    and `{name}.grad` for gradients not yet applied.

    Or the tensors are shards of arrays (`compute/training/adapter_shards.py`), all in `weights`.
    """

    spec: LoraSpec
    step: int
    weights: Mapping[str, Float32]
    moments: Mapping[str, Float32] = message_field(default_factory=dict)
    optimizer: Optimizer = DEFAULT_OPTIMIZER


class AdapterKept(PoolMessage, frozen=True):
    """Each process holds its part of a copy of the adapter, of this shape and after so many steps."""

    spec: LoraSpec
    step: int
    optimizer: Optimizer


class SnapshotHeld(PoolMessage, frozen=True):
    """The group holds the snapshot.

    host_bytes: host memory that the snapshot takes in each process while it is evicted; None on CPU, where snapshots
    are never evicted. on_host: it takes that always, as weights of a whole model do.
    """

    host_bytes: int | None
    on_host: bool = False


class SampleProgress(PoolMessage, frozen=True):
    """finished: results of requests that ended in this chunk; active/waiting: requests still in the batch / in line.

    streamed: what was decoded in this chunk for requests that stream.
    """

    finished: tuple[SampleResult, ...]
    active: int
    waiting: int
    streamed: tuple[NewTokens, ...] = ()


class CompileStatus(PoolMessage, frozen=True):
    """Compiled programs of rank 0, and the pages of its KV cache.

    planned: programs that the warm-up compiles. ready: planned programs that are compiled, or `failed` to. needed:
    programs compiled for a command before the warm-up had ended. late: programs compiled for a command after that.
    kv_pages: of all shards. kv_pages_used: those of sequences; what is kept of prompts that may come again is free.
    """

    planned: int
    ready: int
    failed: int
    needed: int
    late: int
    kv_pages: int = 0
    kv_pages_used: int = 0


Reply = Done | ForwardResult | OptimResult | AdapterState | AdapterKept | SnapshotHeld | SampleProgress | CompileStatus
DeferredReply = Callable[[], Reply]  # waits for the devices, and reads the reply from them


# ------------------------------------------------------------------ how a group is set up
CacheFormat = Literal["full", "float8"]


@dataclass(frozen=True)
class GroupConfig:
    """The configuration that every process of a group gets at start."""

    model_path: str  # a Hugging Face folder
    dtype: Literal["auto", "float32", "bfloat16"]  # auto = as the platform has it
    fsdp: int  # 0 = all devices that the tensor and expert axes leave
    tensor: int
    max_context: int
    microbatch_tokens: int  # padded tokens of one training micro-batch, 0 = the processes choose
    sample_slots: int  # sequences decoded together at most
    decode_chunk: int  # tokens decoded per SampleStep, at most
    compile_cache_dir: str  # "" = no persistent compilation cache
    base_weights: Literal["full", "int8"] = "full"  # full = as dtype
    warm_up: bool = False  # compile what may be needed before it is
    expert: int = 1  # size of the mesh's axis that experts are split over
    resident_snapshots: int = 32  # on the devices, unless more are being sampled
    platform: Literal["auto", "cpu", "cuda", "tpu"] = "auto"  # auto = the one that JAX chooses
    expert_rank: RankRule = "divided"  # of usual adapters, for which programs are compiled early
    device_memory: float = 0.0  # GB of each device that the group may use, 0 = what the devices say
    store_url: str = ""  # where processes read and write states themselves, if they reach it; "" = nowhere
    store_mark: str = ""  # what `Store.mark` says there: the same URL may be another folder on another host
    kv_cache: CacheFormat = "full"  # full = as dtype


@dataclass(frozen=True)
class GroupInfo:
    """The description of a group that is ready.

    fsdp: the size of the mesh axis that rows are split over. attention_tokens: as in `spec.packing.layout`. context:
    the longest sequence that fits its devices, in tokens. context_rule: what that follows from, as an error says it.
    """

    devices: tuple[str, ...]
    parameters: int
    microbatch_tokens: int
    fsdp: int
    attention_tokens: int
    context: int
    context_rule: str
    generation: int
    reaches_store: bool = False  # every process reads and writes states itself
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes of each device that are set aside, by use
    programs: str = ""  # a digest of what its programs are compiled from: groups with the same give the same bits
