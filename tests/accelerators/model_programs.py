"""The server's programs of a model, compiled for accelerators from shapes instead of arrays.

Letters: B rows, T tokens, S slots, Q tokens of a piece of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tests.accelerators.targets import Figures, compile_for, mesh_for

from tinkerflow.backend.compute.kernels.flash import flash_attention
from tinkerflow.backend.compute.mesh import FSDP, TENSOR, cache_mesh, replicated, sharding
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.lora import Lora, gathered, shardings
from tinkerflow.backend.compute.models.params import params_like
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.models.vision_tower import patches_like, see
from tinkerflow.backend.compute.planning.memory_plan import MemoryPlan, plan_memory
from tinkerflow.backend.compute.planning.topologies import parse_topology
from tinkerflow.backend.compute.platforms import compiling_for, platform
from tinkerflow.backend.compute.sampler.decode import decided, decode, empty_rows
from tinkerflow.backend.compute.sampler.kv_cache import empty_cache
from tinkerflow.backend.compute.sampler.pages import PAGE, pages_for
from tinkerflow.backend.compute.sampler.prefill import empty_piece, fill, prefill
from tinkerflow.backend.compute.sampler.prompt_scores import PLAIN
from tinkerflow.backend.compute.sampler.snapshot_cache import divisor_of, empty_stack
from tinkerflow.backend.compute.training.full_parameters import weights_like
from tinkerflow.backend.compute.training.logprobs import score_and_grads
from tinkerflow.backend.compute.training.optimizer import fresh_state
from tinkerflow.backend.compute.training.train import Steps, make_steps
from tinkerflow.backend.compute.training.train_programs import adapter_like, batch_like
from tinkerflow.backend.compute.warming import like, result_of
from tinkerflow.backend.spec.commands import BaseWeights, CacheFormat, GroupConfig, LoraSpec
from tinkerflow.backend.spec.limits import DEFAULT_MAX_CONTEXT
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from tinkerflow.backend.spec.ranks import expert_rank

_SLOTS, _CHUNK = 64, 8  # defaults of a sampler


@dataclass(frozen=True)
class Programs:
    """The programs of one model on one target. Each method compiles one program; `more` is as in `compile_for`.

    cfg: the model. target: the name of a topology. rank: the adapters' rank. tensor, expert: axes of the mesh.
    kv_cache: the number format of keys and values in pages. base_weights: as in the settings. memory: the memory budget
    of each device in GB, 0 = all its memory. filters, traced: for decode, 0 or 1: whether a row has a top-k if the host
    decides, and whether the host never decides. cublas: 0 or 1, for `compile_for`.
    """

    cfg: ModelConfig
    target: str
    rank: int = 32
    tensor: int = 1
    expert: int = 1
    kv_cache: CacheFormat = "full"
    base_weights: BaseWeights = "full"
    memory: int = 0
    filters: int = 0
    traced: int = 0
    cublas: int = 0

    @cached_property
    def mesh(self) -> Mesh:
        return mesh_for(self.target, tensor=self.tensor, expert=self.expert)

    @cached_property
    def params(self) -> Params:
        """The base model's weights, in bfloat16 unless they are quantized."""
        return params_like(self.cfg, self.mesh, "bfloat16", base_weights=self.base_weights)

    @property
    def spec(self) -> LoraSpec:
        return LoraSpec(self.rank, expert_rank=expert_rank(self.rank, self.cfg.experts_per_token, "divided"))

    @cached_property
    def lora(self) -> Lora:
        """An adapter for all matrices."""
        made = adapter_like(self.cfg, self.mesh, self.spec)
        assert isinstance(made, Lora)
        return made

    @property
    def limit(self) -> int:
        """The memory budget of each device in bytes."""
        return self.memory * 10**9 or parse_topology(self.target).device.limit

    @property
    def max_context(self) -> int:
        """The longest sequence of a worker with the default settings, in tokens, before its memory is planned."""
        return min(DEFAULT_MAX_CONTEXT, self.cfg.max_positions)

    @cached_property
    def plan(self) -> MemoryPlan:
        """The memory plan of a worker with the default settings."""
        name, sizes = self.cfg.architecture, (self.mesh.shape[FSDP], self.tensor, self.max_context, 0, _SLOTS, _CHUNK)
        config = GroupConfig(name, "bfloat16", *sizes, "", self.base_weights, expert=self.expert)
        with self.compiling():
            return plan_memory(self.cfg, config, self.limit)

    @cached_property
    def steps(self) -> Steps:
        """The jitted functions, which keep as much for the backward pass as the memory budget allows."""
        budget = self.plan.budget
        with self.compiling():
            return make_steps(self.cfg, self.mesh, budget)

    @property
    def _plain(self) -> tuple[str, bool]:
        return self.params.embed_VD.dtype.name, self.params.unstacked

    def _stack(self, columns: int) -> Any:
        widths = columns, columns // divisor_of(self.cfg, self.spec)
        return result_of(empty_stack, self.cfg, self.mesh, widths, *self._plain, False)

    def compiling(self) -> Any:
        """A context in which functions are traced for the target's platform."""
        return compiling_for(parse_topology(self.target).device.platform)

    def forward_backward(self, B: int, T: int, **more: Any) -> Figures:
        """A micro-batch of B rows of T tokens."""
        with self.compiling():
            args = (self.params, self.lora, self.lora, batch_like(self.mesh, B, T))
        return compile_for(self.target, self.steps.backward, *args, **more)

    def full_backward(self, B: int, T: int, **more: Any) -> Figures:
        """Like `forward_backward`, but of a model whose parameters are all trained."""
        weights = weights_like(self.cfg, self.mesh)
        with self.compiling():
            args = (self.params, weights, weights, batch_like(self.mesh, B, T))
        return compile_for(self.target, self.steps.backward, *args, **more)

    def forward(self, B: int, T: int, **more: Any) -> Figures:
        """A micro-batch of B rows of T tokens, without gradients."""
        with self.compiling():
            args = (self.params, self.lora, batch_like(self.mesh, B, T))
        return compile_for(self.target, self.steps.forward, *args, **more)

    def optim_step(self, kind: Any = DEFAULT_OPTIMIZER, **more: Any) -> Figures:
        spec, fresh = OPTIMIZERS[kind], fresh_state(kind, self.lora)
        state = jax.tree.map(like, fresh, shardings(self.mesh, fresh))
        hyper = like(spec.vector(spec.example), replicated(self.mesh))
        return compile_for(self.target, self.steps.optimize, self.lora, self.lora, state, hyper, **more)

    def loss(self, B: int, T: int, **more: Any) -> Figures:
        """From hidden states to logprobs and gradients, without the layers."""
        with self.compiling():
            batch = batch_like(self.mesh, B, T)
            shape = (B, T, self.cfg.hidden)
            hidden = jax.ShapeDtypeStruct(shape, self.params.embed_VD.dtype, sharding=sharding(self.mesh, shape, FSDP))

            def scored(params: Params, lora: Lora, hidden: Any, batch: Any) -> Any:
                head = jax.lax.with_sharding_constraint(params.head, sharding(self.mesh, params.head.shape, TENSOR))
                params = replace(params, unembed_VD=head)
                pair, rows = gathered(self.mesh, lora).unembed, (batch.targets, batch.choice, batch.inputs)
                return score_and_grads(params, pair, hidden, *rows, self.mesh)

            return compile_for(self.target, jax.jit(scored), self.params, self.lora, hidden, batch, **more)

    def tree_attention(self, B: int, T: int, **more: Any) -> Figures:
        """A layer's attention in B rows of trees, and its gradients."""
        one = self.cfg.attentions[0]

        def both(q: Any, k: Any, v: Any, slope: Any, ends: Any, depths: Any) -> Any:
            kernel = flash_attention(self.mesh, T, one.window, head_dim=one.head_dim, tree=True)
            assert kernel is not None
            o, pull = jax.vjp(lambda q, k, v: kernel(q, k, v, ends, None, depths), q, k, v)
            return o, pull(slope)

        def array(shape: tuple[int, ...], dtype: str) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(self.mesh, shape, FSDP))

        of_heads = (
            array((B, T, heads, one.head_dim), "bfloat16") for heads in (one.heads, *2 * (one.kv_heads,), one.heads)
        )
        return compile_for(self.target, jax.jit(both), *of_heads, *(array((B, T), "int32"),) * 2, **more)

    def image(self, patches: int, **more: Any) -> Figures:
        """The vectors of an image with this number of padded patches."""
        assert self.cfg.vision is not None and self.params.tower is not None
        whole = replicated(self.mesh)
        scale = jax.ShapeDtypeStruct((2, 3), np.float32, sharding=whole)
        image = like(patches_like(self.cfg.vision, patches), whole)
        return compile_for(self.target, see, self.cfg, self.mesh, self.params.tower, scale, image, **more)

    def decode(self, S: int, length: int, *, columns: int = 32, chunk: int = _CHUNK, **more: Any) -> Figures:
        """`chunk` tokens of each of S slots with `length` positions. columns: ranks of the adapters in the batch."""
        with self.compiling():
            stack = self._stack(columns)
            rows = empty_rows(S, pages_for(length), chunk, states=self.cfg.delta is not None)
            cache = self._cache(S, length)
            steps: Any = np.int32(chunk)
            if platform().host_decides and not self.traced:
                rows.choice.top_k_S[:] = 1 if self.filters else -1
                rows, steps = decided(rows, chunk), None
            args = (self.cfg, self.mesh, chunk, 0, self.params, stack, cache, rows, steps)
        return compile_for(self.target, decode, *args, **more)

    def prefill(self, B: int, Q: int, length: int, *, columns: int = 32, **more: Any) -> Figures:
        """Q tokens of each of B prompts, in pages for `length` positions of each."""
        with self.compiling():
            stack = self._stack(columns)
            piece = empty_piece(PLAIN, B, Q, pages_for(length), states=self.cfg.delta is not None)
            args = (self.params, stack, self._cache(B, length))
            if platform().host_decides:
                unscored = replace(piece, score=None, queries=None)
                return compile_for(self.target, fill, self.cfg, self.mesh, *args, unscored, **more)
        return compile_for(self.target, prefill, self.cfg, self.mesh, PLAIN, *args, piece, **more)

    def _cache(self, rows: int, length: int) -> Any:
        """A cache with pages for `length` positions of each of `rows`."""
        shards = cache_mesh(self.mesh, self.cfg.split_heads).shape[FSDP]
        pages = (-(-rows // shards) * pages_for(length) + 1) * shards
        states = 0 if self.cfg.delta is None else (-(-rows // shards) + 1) * shards
        return result_of(empty_cache, self.cfg, self.mesh, pages, PAGE, *self._plain, states, self.kv_cache)
