"""The ordered commands that a pool executes, and the plain data that they carry.

Commands and replies are messages, so they can be members of unions on the wire. The data in them are dataclasses.
Senders need no JAX. Arrays are sent unchanged, so their dtypes matter. Letters: T tokens, K targets of a position.
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
from tinkerflow.backend.spec.formats import BaseWeights as BaseWeights  # noqa: PLC0414  it is imported from here
from tinkerflow.backend.spec.formats import CacheFormat as CacheFormat  # noqa: PLC0414  it is imported from here
from tinkerflow.backend.spec.formats import Dtype, PlatformName
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerParams
from tinkerflow.backend.spec.pool_message import PoolMessage
from tinkerflow.backend.spec.ranks import LoraSpec as LoraSpec  # noqa: PLC0414  it is imported from here
from tinkerflow.backend.spec.ranks import RankRule
from tinkerflow.backend.spec.supports import Supports

Int16 = npt.NDArray[np.int16]
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

LORA_ALPHA = 32.0
Optimizer = str  # a name in spec.optimizers.OPTIMIZERS
Priority = Literal["interactive", "batch"]
Loss = str  # a name in spec.losses.LOSSES
if TYPE_CHECKING:
    AnyOptimizerParams: TypeAlias = OptimizerParams
else:  # the decoder needs the union of all classes
    AnyOptimizerParams = reduce(or_, (spec.params for spec in OPTIMIZERS.values()))
NO_LOGPROB = -99999.0  # in empty cells of top-k lists, as the SDK expects


# ------------------------------------------------------------------ the data
@dataclass(frozen=True)
class ImagePixels:
    """An image in a sequence, as input for the vision tower. start: the index of its first placeholder token.

    pixels_HWC uint8: rows, columns, and RGB. Its height and width are multiples of the side of a token's square.
    """

    start: int
    pixels_HWC: npt.NDArray[np.uint8]

    def tokens(self, side: int) -> int:
        """The number of tokens of the image. side: the side of a token's square in pixels."""
        rows, columns, _ = self.pixels_HWC.shape
        return int(rows // side * (columns // side))


@dataclass(frozen=True)
class Example:
    """One training sequence: tokens_T is scored against targets_TK; a 1-D request has K = 1 and `flat` set.

    weights_TK multiply a token's loss. inputs: the other inputs of the loss, by their names on the wire. They are
    float32 [T, K] for the losses of backend/spec/losses. A traced loss declares ranks 0, 1 or 2, float32 or int32.
    images: in the order of their positions, where tokens_T contains placeholders.
    routes_Tn: the experts that a sampler chose for each token in every layer, n = L * k. -1 = the router chooses;
    None = it chooses all. supports: the targets' supports; None = the whole vocabulary.
    """

    tokens_T: Int32
    targets_TK: Int32
    weights_TK: Float32
    flat: bool = True
    inputs: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    images: tuple[ImagePixels, ...] = ()
    routes_Tn: Int16 | None = None
    supports: Supports | None = None


@dataclass(frozen=True)
class CustomLoss:
    """A loss that a client traced. inputs: the rank of each input, `logprobs` first. nodes: the graph as JSON.

    tinkerflow.backend.wire.read_custom_loss creates it, and rejects calls that are not listed.
    """

    name: str
    inputs: Mapping[str, int]
    nodes: str


@dataclass(frozen=True)
class StabilityInfo:
    """The record of a sampled sequence that off-policy losses need.

    tokens_T int32. logprobs_T float32: their log probabilities when sampled. sequence_id is `<request_id>-<i>`.
    routes_Tn, supports: as in `SampledSequence`. base_model: the model of routes and supports; "" without both.
    """

    sequence_id: str
    tokens_T: Int32
    logprobs_T: Float32
    routes_Tn: Int16 | None = None
    base_model: str = ""
    supports: Supports | None = None


@dataclass(frozen=True)
class PromptWishes:
    """Extra outputs for a prompt of T tokens, besides its logprobs. Row i is for token i + 1.

    last_n: the number of final prompt logprobs (and rows of `top`) to compute, None = all.
    top: the number of most likely tokens. alternatives: the number of draws at the request's temperature. 0 = off.
    targets_TK int32 [T - 1, K]: tokens to score at each position, -1 = none.
    """

    last_n: int | None = None
    top: int = 0
    targets_TK: Int32 | None = None
    alternatives: int = 0


@dataclass(frozen=True)
class Adjustments:
    """Changes to a request's logits before a token is drawn. Logprobs are computed from the unchanged logits.

    bias: (token, number) pairs, added to the tokens' logits. presence: subtracted from the logit of each token that was
    generated before. frequency: subtracted as often as the token was generated. repetition: for tokens of the prompt or
    the answer, positive logits are divided by it and negative logits are multiplied by it; 1 = off.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalizes(self) -> bool:
        """Whether the adjustments depend on the generated tokens."""
        return self.presence != 0 or self.frequency != 0 or self.repetition != 1


@dataclass(frozen=True)
class Constraint:
    """A rule for the text of an answer: it fits a JSON schema, matches a regular expression, or follows a grammar.

    text: the schema as JSON, the expression, or the grammar in Lark's notation. ends: tokens that end the text.
    """

    kind: ConstraintKind
    text: str
    ends: tuple[int, ...]


@dataclass(frozen=True)
class SampleRequest:
    """One prompt to continue `num_samples` times. `snapshot_id` None samples the base model.

    owner: the project. Cached pages of a prompt serve requests of the same owner only.
    seed: 64 bits. Sample i uses a key derived from (seed, i), so a result never depends on the batch.
    stop_tokens / stop_strings: generation ends after the first match, which is kept. temperature 0 is greedy.
    min_p: the least probability of a token, as a fraction of the most likely token's. priority: interactive requests
    precede the batch requests of the same owner in the queue. trace: the context of the request's span.
    images: in the order of their positions, where prompt_T contains placeholders. routes: return the experts of
    tokens, if the model has any. supports: return the tokens that each token was drawn from.
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
    stream: bool = False  # new tokens are reported after each chunk, and again in the result
    trace: str | None = None
    images: tuple[ImagePixels, ...] = ()
    routes: bool = False
    supports: bool = False


@dataclass(frozen=True)
class Candidates:
    """k tokens at each of N positions: tokens_Nk int32 and their logprobs_Nk float32, of the full untempered softmax.

    Rows that are not computed have token 0 and logprob NO_LOGPROB in every cell.
    """

    tokens_Nk: Int32
    logprobs_Nk: Float32


@dataclass(frozen=True)
class SampledSequence:
    """tokens_T int32 and their logprobs_T float32 (natural log, of the full untempered softmax).

    top: the `topk_sample` most likely tokens at each position, best first; None if it is 0.
    routes_Tn int16: the experts of the token before each token, in every layer: L * k numbers, -1 in layers without
    experts. These experts computed the token's logits. None without `SampleRequest.routes`. supports: of its tokens;
    None without `SampleRequest.supports`. weights: the first token and the steps of each part with the same weights.
    """

    tokens_T: Int32
    logprobs_T: Float32
    stop_reason: Literal["stop", "length"]
    top: Candidates | None = None
    routes_Tn: Int16 | None = None
    supports: Supports | None = None
    weights: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class NewTokens:
    """Tokens [start, start + T) of sample `index` of a streamed request, with their logprobs as in the result.

    stop_reason: None until the last tokens of the sample.
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

    The last three are None unless requested. top has a row for every prompt token (the first row is empty).
    targets_TK and alternatives have a row for every prompt token except the first. targets_TK is 0.0 in cells without a
    target.
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

    Rank 0: a copy of all weights of the base model, to train them all. All commands accept adapters of rank 0.
    """

    adapter_id: str
    spec: LoraSpec
    seed: int
    optimizer: Optimizer = DEFAULT_OPTIMIZER


class DropAdapter(PoolMessage, frozen=True):
    """Forget an adapter. Unknown ids are allowed. Reply: Done."""

    adapter_id: str


class Forward(PoolMessage, frozen=True):
    """Compute the logprobs and the summed loss of `examples`; with `backward`, add to the adapter's gradients.

    custom, loss_seconds: only for the loss `custom`. loss_seconds: the work of each example's loss, as estimated by
    `traced_work.loss_seconds`. by_micro_batch: compute only the first micro-batch, and reply Done. NextMicroBatch
    commands for the other parts follow (`in_parts` of the pool), before any other command for the adapter.
    Reply: ForwardResult.
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
    """Make an optimizer step with the accumulated gradients, then clear them. Reply: OptimResult.

    UserError: the gradient norm is not finite (weights and moments stay, gradients are cleared), or the parameters
    belong to a different optimizer than the adapter's (nothing changes).
    """

    adapter_id: str
    params: AnyOptimizerParams


class ExportAdapter(PoolMessage, frozen=True):
    """Copy an adapter to the host. Reply: AdapterState (with moments only when `optimizer`).

    keep: a folder, or "". Each process keeps its part of the copy until a WriteState with this folder, or until the
    adapter is exported again or dropped. Reply: AdapterKept.
    """

    adapter_id: str
    optimizer: bool
    keep: str = ""


class ImportAdapter(PoolMessage, frozen=True):
    """Make an adapter from a state. Without moments in the state, the optimizer starts fresh. Reply: Done.

    A StoredState must have been fetched for `adapter_id` (FetchState).
    """

    adapter_id: str
    state: AdapterState | StoredState


class PublishSnapshot(PoolMessage, frozen=True):
    """Freeze a copy of an adapter's weights for sampling. Reply: SnapshotHeld."""

    adapter_id: str
    snapshot_id: str


class LoadSnapshot(PoolMessage, frozen=True):
    """Make a sampling snapshot from saved weights. An existing snapshot stays: its weights are the same or newer.

    A StoredState must have been fetched for `snapshot_id` (FetchState). Reply: SnapshotHeld.
    """

    snapshot_id: str
    state: AdapterState | StoredState


class MoveSnapshot(PoolMessage, frozen=True):
    """Rename a snapshot to `to_id`, and replace the snapshot with that id. Reply: Done.

    Requests that sample `to_id` use the new weights from the next chunk. recompute: also for their tokens so far.
    """

    snapshot_id: str
    to_id: str
    recompute: bool = False


class DropSnapshot(PoolMessage, frozen=True):
    """Forget a snapshot. Requests that already sample it finish. Unknown ids are allowed. Reply: Done."""

    snapshot_id: str


class SampleStep(PoolMessage, frozen=True):
    """Admit requests into the decode batch, cancel others, prefill or decode a chunk. Reply: SampleProgress.

    An empty SampleStep continues the requests in the batch and in the queue. wait: reply when the devices are idle;
    otherwise they may still decode a chunk, which the next step reads. idle: the group has no other work; without
    requests, the step prefills a piece of an answer for the prefix cache.
    """

    admit: tuple[SampleRequest, ...] = ()
    cancel: tuple[str, ...] = ()
    wait: bool = False
    idle: bool = False


class Ping(PoolMessage, frozen=True):
    """Do nothing. Reply: Done."""


class ReadCompileStatus(PoolMessage, frozen=True):
    """Count the compiled programs. Reply: CompileStatus; Done from an executor that compiles nothing."""


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


# ------------------------------------------------------------------ states in the store, outside the order of commands
class StoredState(PoolMessage, frozen=True):
    """A state in the store. Processes that reach the store read the tensors that their devices need.

    folder: the key of the folder of `files`, which never change.
    """

    spec: LoraSpec
    step: int
    optimizer: Optimizer
    folder: str
    files: Mapping[str, Digest]


class FetchState(PoolMessage, frozen=True):
    """Read the tensors that this process needs into its host memory, for the adapter or the snapshot `owner`."""

    owner: str
    state: StoredState


class WriteState(PoolMessage, frozen=True):
    """Write this process's part of the adapter as one file, as copied by ExportAdapter with keep=`folder`."""

    adapter_id: str
    folder: str


# ------------------------------------------------------------------ replies
class Done(PoolMessage, frozen=True):
    """The command was executed."""


class ForwardResult(PoolMessage, frozen=True):
    """The outputs of a Forward.

    logprobs: a float32 [T] (flat) or [T, K] array per example, in order. loss_sum: the sum over all tokens.
    metrics: the metrics of a custom loss over all examples, `custom/<name>:sum|mean`; `drift.AGREEMENT` and
    `drift.FIRST_AGREEMENT` of examples with given experts.
    """

    logprobs: tuple[Float32, ...]
    loss_sum: float
    metrics: Mapping[str, float] = message_field(default_factory=dict)


class OptimResult(PoolMessage, frozen=True):
    """grad_norm: before clipping. step: the number of optimizer steps so far, including this one."""

    grad_norm: float
    step: int


class AdapterState(PoolMessage, frozen=True):
    """An adapter on the host, with PEFT's names; for rank 0, all weights with Hugging Face's names.

    weights: float32. `base_model.model....lora_A.weight` is [rank, in], `lora_B.weight` is [out, rank]. B of experts is
    multiplied by `spec.ranks.peft_factor`.
    moments: empty, or `{name}.{part}` for every weight and every part of the optimizer's state (`OptimizerSpec.state`),
    and `{name}.grad` for gradients not yet applied.

    Alternatively, all tensors are shards of arrays (`compute/training/adapter_shards.py`) in `weights`.
    """

    spec: LoraSpec
    step: int
    weights: Mapping[str, Float32]
    moments: Mapping[str, Float32] = message_field(default_factory=dict)
    optimizer: Optimizer = DEFAULT_OPTIMIZER


class AdapterKept(PoolMessage, frozen=True):
    """Each process keeps its part of a copy of the adapter, which has this shape and has made `step` steps."""

    spec: LoraSpec
    step: int
    optimizer: Optimizer


class SnapshotHeld(PoolMessage, frozen=True):
    """The group holds the snapshot.

    host_bytes: host memory of each process that the snapshot takes while it is evicted; None on CPU, where snapshots
    are never evicted. on_host: the snapshot always takes that memory, as a full-parameter snapshot does.
    """

    host_bytes: int | None
    on_host: bool = False


class SampleProgress(PoolMessage, frozen=True):
    """The outcome of a SampleStep.

    finished: results of requests that ended in this chunk. active, waiting: requests in the batch and in the queue.
    streamed: the tokens of streamed requests that were decoded in this chunk. answers: whether answers are to be
    prefilled for the prefix cache (`idle`).
    """

    finished: tuple[SampleResult, ...]
    active: int
    waiting: int
    streamed: tuple[NewTokens, ...] = ()
    answers: bool = False


class CompileStatus(PoolMessage, frozen=True):
    """Compiled programs of rank 0, and the pages of its KV cache.

    planned: programs that the warm-up compiles. ready, failed: planned programs that are compiled, or did not compile.
    needed: programs compiled for a command before the warm-up ended. late: programs compiled for a command after it.
    kv_pages: the pages of all shards. kv_pages_used: the pages of active sequences; pages of cached prompts are free.
    drafted: tokens that were drafted for samples of adapters. drafts_accepted: the accepted tokens among them.
    """

    planned: int
    ready: int
    failed: int
    needed: int
    late: int
    kv_pages: int = 0
    kv_pages_used: int = 0
    drafted: int = 0
    drafts_accepted: int = 0


Reply = Done | ForwardResult | OptimResult | AdapterState | AdapterKept | SnapshotHeld | SampleProgress | CompileStatus
DeferredReply = Callable[[], Reply]  # waits for the devices, and reads the reply from them


# ------------------------------------------------------------------ configuration of a group
@dataclass(frozen=True)
class GroupConfig:
    """The configuration that every process of a group gets at start."""

    model_path: str  # a Hugging Face folder
    dtype: Dtype
    fsdp: int  # 0 = all devices that the other axes leave
    tensor: int
    max_context: int
    microbatch_tokens: int  # padded tokens of a training micro-batch, 0 = chosen by the memory plan
    sample_slots: int  # the most sequences that are decoded together
    decode_chunk: int  # the most tokens that a SampleStep decodes
    compile_cache_dir: str  # "" = no persistent compilation cache
    base_weights: BaseWeights = "full"
    warm_up: bool = False  # compile programs before the first request needs them
    expert: int = 1  # size of the mesh axis that experts are split over
    resident_snapshots: int = 32  # on the devices, unless more are being sampled
    platform: PlatformName = "auto"
    expert_rank: RankRule = "divided"  # of the usual adapters that the warm-up compiles programs for
    device_memory: float = 0.0  # GB of each device that the group may use, 0 = the size that the device reports
    store_url: str = ""  # processes that reach this store read and write states themselves; "" = none
    store_mark: str = ""  # from `Store.mark`: on another host, the same URL may be a different folder
    kv_cache: CacheFormat = "full"
    batch_invariant: bool = False  # a sample's bits depend on no other request: dispatches of one size
    drafts: bool = False  # verify several likely tokens in one step, where the host reads each chunk first
    routing_replay: bool = False  # compile the programs of recorded experts ahead, in models with experts
    support_replay: bool = False  # compile the programs of recorded supports ahead (`spec.supports`)
    share_prefixes: bool = True  # train equal beginnings of examples once, in models that can (`spec.prefix_trees`)
    context_parallel: int = 1  # the most devices that a long row of training is split over (`spec.packing`)


@dataclass(frozen=True)
class GroupInfo:
    """The description of a group that is ready.

    fsdp: the size of the mesh axis that rows are split over. attention_tokens: see `spec.packing.layout`. context:
    the longest sequence that fits its devices, in tokens. context_rule: the rule behind `context`, for errors.
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
    memory: Mapping[str, int] = field(default_factory=dict)  # reserved bytes of each device, by use
    few_shapes: bool = False  # of micro-batches (`spec.packing.Grid`)
    branch_tokens: int = 0  # shared beginnings of examples are multiples of it (`prefix_trees`); 0 = nothing is shared
    programs: str = ""  # a digest of the inputs of its programs: groups with equal digests compute equal bits
    places: tuple[str, ...] = ()  # the ranks with their hosts, for people
