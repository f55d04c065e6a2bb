"""The executor of a worker process. It executes commands on one base model, its adapters and its sampler.

Every process of the group executes the same commands in the same order, so nothing here may depend on rank or time.

Training does not wait for the devices: a command starts the computation, and its reply is read from the devices while
the next command starts (`DeferredReply`). On CPUs the reply is read immediately, because the devices are the host
itself: deferring it would only keep two micro-batches in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar, assert_never

import jax

from tinkerflow.backend.compute.adapter_programs import AdapterPrograms
from tinkerflow.backend.compute.compiles import CompileCounter
from tinkerflow.backend.compute.mesh import FSDP, make_mesh, row_parts
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.layers.delta_rule import chunk_tokens
from tinkerflow.backend.compute.models.params import count, load_params
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.models.vision_tower import open_vision_tower
from tinkerflow.backend.compute.planning.adapter_quota import AdapterQuota
from tinkerflow.backend.compute.planning.memory_plan import plan_group
from tinkerflow.backend.compute.platforms import compiled_for, environment, on_cpu, platform, settle_dtype
from tinkerflow.backend.compute.sampler import FullModelSampler, GroupSampler, Sampler
from tinkerflow.backend.compute.sampler.snapshot_cache import usual_spec
from tinkerflow.backend.compute.training.adapter_trainer import AdapterTrainer
from tinkerflow.backend.compute.training.adapters import AdapterStore
from tinkerflow.backend.compute.training.fetched_states import FetchedStates
from tinkerflow.backend.compute.training.forward_backward import Training
from tinkerflow.backend.compute.training.train import needs_tree_program
from tinkerflow.backend.compute.warming import WarmUp
from tinkerflow.backend.core.errors import OUT_OF_MEMORY, AllocationError, DevicesError, UserError
from tinkerflow.backend.spec.commands import (
    Command,
    CompileStatus,
    CreateAdapter,
    DeferredReply,
    Done,
    DropAdapter,
    DropSnapshot,
    ExportAdapter,
    FetchState,
    Float32,
    Forward,
    GroupConfig,
    ImportAdapter,
    LoadSnapshot,
    LoraSpec,
    MoveSnapshot,
    NextMicroBatch,
    Optimizer,
    OptimStep,
    Ping,
    PublishSnapshot,
    ReadCompileStatus,
    Reply,
    SampleStep,
    StoredState,
    WriteState,
)
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER
from tinkerflow.backend.supervise.processes import memory_maps_used

R = TypeVar("R", bound=Reply)

log = logging.getLogger(__name__)

# Commands that change nothing if they fail.
_COPYING = (CreateAdapter, ImportAdapter, ExportAdapter, PublishSnapshot, LoadSnapshot)


class Executor:
    """One base model on the mesh. Errors of `backend/core/errors.py` leave it unchanged unless they state otherwise."""

    environment = staticmethod(environment)
    compiled_for = staticmethod(compiled_for)

    def __init__(self, config: GroupConfig, progress: Callable[[str], None], processes: int, rank: int) -> None:
        """Load the model of `config`.

        progress: called with a line of text before slow work, such as loading or compiling. jax.distributed must be
        initialized if `processes` > 1. UserError: the model cannot be run.
        """
        self._progress = progress
        self._compiles = CompileCounter()
        progress(f"rank {rank} of {processes}: opening the model")
        self._cfg = load_config(config.model_path).for_context(config.max_context)
        self._mesh = make_mesh(config.fsdp, config.tensor, config.expert)
        config = replace(config, fsdp=self._mesh.shape[FSDP], dtype=settle_dtype(config.dtype))
        self.plan = plan_group(self._cfg, config)  # planned before the weights are read, which may take minutes
        self._config = replace(config, max_context=self.plan.context)
        if self.plan.uses is not None:
            progress(f"memory of each device: {self.plan.describe()}")
        self._params = load_params(
            self._cfg, config.model_path, self._mesh, config.dtype, progress, base_weights=config.base_weights
        )
        self._adapters = AdapterStore(self._cfg, self._mesh, config.model_path)
        self._quota = AdapterQuota(self._cfg, self._config, self.plan)
        self._tower = open_vision_tower(self._cfg, config.model_path, self._mesh, self._params)
        memory, new_full_sampler = self.plan.full_model, None
        if memory is not None:
            new_full_sampler = partial(self._new_sampler, pages=memory.pages, weights="the trained model")
        self._sampler = GroupSampler(
            self._new_sampler(self._params, pages=self.plan.pages, weights="the base model"),
            FullModelSampler(self._cfg, self._mesh, self._params, new_full_sampler),
        )
        self._fetched = FetchedStates(self._cfg, self._mesh)
        self._warm_up = WarmUp(on=config.warm_up, maps_used=memory_maps_used)
        trees, context = needs_tree_program(self._cfg), self.plan.context
        self._programs = AdapterPrograms(
            self._cfg,
            self._mesh,
            self._params,
            self.plan.budget,
            self._sampler,
            self._tower,
            self._warm_up,
            progress,
            max_context=context,
            trees=bool(self.branch_tokens) and trees,
            config=config,
        )
        self._trainer = AdapterTrainer(
            Training(
                params=self._params,
                steps=self._programs.steps_of,
                mesh=self._mesh,
                adapters=self._adapters,
                budget=self.plan.budget,
                branch_tokens=self.branch_tokens,
                tree_programs=trees,
                announce=self._programs.announce,
                read=self._read,
                tower=self._tower,
            )
        )
        self.attention_tokens = platform().attention_tokens  # row length at which attention costs as much as the rest
        self.few_shapes = platform().few_shapes  # of micro-batches (`spec.packing.Grid`)
        self.ahead = not on_cpu()  # whether a command starts before the devices have finished the previous one
        self._warm_up.want(self._sampler.adapters.programs())
        self._warm_up.want(() if self._tower is None else self._tower.programs(context))
        self._programs.warm_up_for(usual_spec(self._cfg, config.expert_rank), DEFAULT_OPTIMIZER)

    def _new_sampler(self, params: Params, *, pages: int, weights: str) -> Sampler:
        return Sampler(
            self._cfg,
            params,
            self._mesh,
            self._config,
            pages=pages,
            states=self.plan.states,
            snapshot_bytes=self.plan.snapshot_bytes,
            tower=self._tower,
            weights=weights,
        )

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(str(device) for device in jax.devices())

    @property
    def parameters(self) -> int:
        return count(self._params)

    @property
    def microbatch_tokens(self) -> int:
        return self.plan.budget.microbatch_tokens

    @property
    def branch_tokens(self) -> int:
        """Examples share prefixes whose length is a multiple of this number of tokens; 0 = nothing is shared.

        Linear attention has a state only at the borders of chunks.
        """
        if not self._config.share_prefixes:
            return 0
        return 1 if self._cfg.delta is None else chunk_tokens()

    @property
    def fsdp(self) -> int:
        return row_parts(self._mesh)

    @property
    def context(self) -> int:
        return self.plan.context

    @property
    def context_rule(self) -> str:
        return self.plan.rule

    @property
    def programs(self) -> str:
        """All inputs of the compiled programs as text, except the code and the versions of JAX."""
        config = replace(self._config, model_path="", compile_cache_dir="", store_url="", store_mark="", warm_up=False)
        return f"{self._cfg}; {config}; {self.plan.budget}; {dict(self._mesh.shape)}; {compiled_for()}"

    @property
    def memory(self) -> dict[str, int]:
        return self.plan.by_use(self._cfg, self._config)

    @property
    def compiles(self) -> int:
        """The number of executables that this process has created."""
        return self._compiles.count

    def execute(self, command: Command) -> Reply | DeferredReply:
        """Execute a command. NotFoundError: the adapter is unknown.

        A DeferredReply may be called from another thread while the next commands are executed. It may raise a
        UserError, or a DevicesError, after which the executor is unusable.
        """
        if isinstance(command, ReadCompileStatus):
            return _with_sampler(self._warm_up.warmth, self._sampler.adapters)
        before = self._compiles.here
        try:
            with self._warm_up.pause(lambda: self._compiles.here):
                reply = self._execute(command)
                if not callable(reply):
                    return reply
                later = partial(self._read, reply)
                return later if self.ahead else later()
        except Exception as error:
            if OUT_OF_MEMORY in str(error) and isinstance(command, _COPYING):
                raise _no_memory(command, error) from error
            raise
        finally:
            made = self._compiles.here - before
            if made or isinstance(command, DropAdapter):
                self._programs.trim(self._adapters.shapes)
            if made:
                self._progress(f"compiled {made} program(s) for {type(command).__name__}, {self.compiles} in all")

    def take_kept(self, write: WriteState) -> Mapping[str, Float32]:
        """The named tensors that this process writes. ServerError if it kept none for `write`. Thread-safe."""
        return self._adapters.take_kept(write.adapter_id, write.folder)

    def needed_tensors(self, state: StoredState, shapes: Mapping[str, tuple[int, ...]]) -> Collection[str]:
        return self._fetched.needed_tensors(state, shapes)

    def keep_fetched(self, fetch: FetchState, tensors: Mapping[str, Float32]) -> None:
        """Keep the tensors read from a state until the state is imported, or loaded as a snapshot. Thread-safe."""
        self._fetched.keep(fetch, tensors)

    def clear(self) -> None:
        """Forget all adapters, snapshots and requests. The base model and compiled programs remain."""
        self._fetched.clear()
        self._adapters.clear()
        self._quota.clear()
        self._trainer.clear()
        self._sampler.clear()

    def _read(self, later: Callable[[], R]) -> R:
        try:
            with self._warm_up.pause(lambda: 0):
                return later()
        except UserError:
            raise
        except Exception as error:
            raise DevicesError(f"computing failed on the devices ({type(error).__name__}: {error})") from error

    def _execute(self, command: Command) -> Reply | DeferredReply:
        match command:
            case Forward():
                return self._trainer.forward(command)
            case NextMicroBatch(adapter_id):
                return self._trainer.next_part(adapter_id)
            case OptimStep():
                return self._trainer.optimize(command)
            case SampleStep():
                return self._sampler.step(command)
            case ExportAdapter(adapter_id, _, folder) if folder:
                return self._adapters.keep(adapter_id, folder)
            case ExportAdapter(adapter_id, optimizer):
                return self._adapters.export(adapter_id, optimizer=optimizer)
            case CreateAdapter(adapter_id, spec, seed, optimizer):
                self._quota.check(adapter_id, spec, optimizer)
                self._adapters.create(adapter_id, spec, seed, optimizer)
                self._made(adapter_id, spec, optimizer)
            case ImportAdapter(adapter_id, state):
                self._quota.check(adapter_id, state.spec, state.optimizer)
                self._adapters.restore(adapter_id, self._fetched.take(adapter_id, state))
                self._made(adapter_id, state.spec, state.optimizer)
            case DropAdapter(adapter_id):
                self._fetched.forget(adapter_id)
                self._adapters.drop(adapter_id)
                self._quota.release(adapter_id)
                self._trainer.forget(adapter_id)
            case PublishSnapshot(adapter_id, snapshot_id):
                adapter = self._adapters.get(adapter_id)
                self._sampler.publish(snapshot_id, adapter.lora, adapter.spec, adapter.step)
                return self._sampler.snapshot_memory(snapshot_id)
            case LoadSnapshot(snapshot_id, state):
                brought = self._fetched.take(snapshot_id, state)
                if not self._sampler.has_snapshot(snapshot_id):
                    weights = self._adapters.weights_of(brought)
                    self._sampler.publish(snapshot_id, weights, state.spec, state.step)
                return self._sampler.snapshot_memory(snapshot_id)
            case MoveSnapshot(snapshot_id, to_id, recompute):
                self._sampler.rename_snapshot(snapshot_id, to_id, recompute=recompute)
            case DropSnapshot(snapshot_id):  # keep fetched tensors: the next snapshot of this id may need them
                self._sampler.drop_snapshot(snapshot_id)
            case ReadCompileStatus():
                return _with_sampler(self._warm_up.warmth, self._sampler.adapters)
            case Ping():
                pass
            case _:
                assert_never(command)
        return Done()

    def _made(self, adapter_id: str, spec: LoraSpec, optimizer: Optimizer) -> None:
        self._quota.count(adapter_id, spec, optimizer)
        self._programs.warm_up_for(spec, optimizer)


def _no_memory(command: Command, error: Exception) -> AllocationError:
    log.error("no memory was left on the devices for %s", type(command).__name__, exc_info=error)
    return AllocationError(
        f"{type(command).__name__}: the devices had no memory left for an adapter. Nothing was changed. The same "
        "command may succeed when there are fewer models or samplers"
    )


def _with_sampler(status: CompileStatus, sampler: Sampler) -> CompileStatus:
    pages, drafts = sampler.pages, sampler.drafts
    total = (pages.pages - 1) * pages.shards  # the first page of each shard is the page of zeros
    free = sum(pages.free(shard) for shard in range(pages.shards))
    drafted, accepted = (drafts.drafted, drafts.accepted) if drafts else (0, 0)
    return status.copy_with(kv_pages=total, kv_pages_used=total - free, drafted=drafted, drafts_accepted=accepted)
