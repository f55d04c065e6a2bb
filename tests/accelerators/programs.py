"""The programs of real models, as the server makes them, with shapes in the place of arrays.

Letters: B rows, T tokens, S slots, Q tokens of a piece of a prompt.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.commands import LoraSpec
from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.families import parse_config
from tinkerflow.backend.compute.logprobs import score_and_grads
from tinkerflow.backend.compute.lora import Lora
from tinkerflow.backend.compute.memory import budget_for, held_bytes
from tinkerflow.backend.compute.mesh import FSDP, replicated, sharding
from tinkerflow.backend.compute.optimizer import fresh_state
from tinkerflow.backend.compute.params import params_like
from tinkerflow.backend.compute.platforms import compiling_for
from tinkerflow.backend.compute.roofline import parse_topology
from tinkerflow.backend.compute.roofline_targets import Figures, compile_for, mesh_for
from tinkerflow.backend.compute.sampler.decode import Rows, decode
from tinkerflow.backend.compute.sampler.kv_cache import empty_cache
from tinkerflow.backend.compute.sampler.prefill import Piece, prefill
from tinkerflow.backend.compute.sampler.prompt_scores import PLAIN, empty_queries
from tinkerflow.backend.compute.sampler.sampling import greedy_choice
from tinkerflow.backend.compute.sampler.snapshot_cache import empty_stack
from tinkerflow.backend.compute.train import Steps, make_steps
from tinkerflow.backend.compute.train_programs import adapter_like, batch_like
from tinkerflow.backend.compute.transformer import Params
from tinkerflow.backend.compute.warming import like, result_of
from tinkerflow.backend.spec.optimizers import OPTIMIZERS

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
}


def _qwen3(hidden: int, layers: int, heads: int, mlp: int, *, tied: bool = False, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": mlp}
    return {**_QWEN3, **sizes, "tie_word_embeddings": tied, **more}


MODELS = {  # the fields of config.json that say what is computed
    "0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "8B": _qwen3(4096, 36, 32, 12288),
    "32B": _qwen3(5120, 64, 64, 25600),
    "30B-A3B": _qwen3(
        2048,
        48,
        32,
        6144,
        model_type="qwen3_moe",
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}


def config(model: str) -> ModelConfig:
    """The config of one of MODELS."""
    return parse_config(MODELS[model], name=model)


@dataclass(frozen=True)
class Programs:
    """The programs of one model on one target; each method compiles one.

    rank: of adapters. tensor, expert: axes of the mesh. memory: the share of a device's memory that JAX may take.
    """

    model: str
    target: str
    rank: int = 32
    tensor: int = 1
    expert: int = 1
    memory: float = 0.92

    @cached_property
    def cfg(self) -> ModelConfig:
        return config(self.model)

    @cached_property
    def mesh(self) -> Mesh:
        return mesh_for(self.target, tensor=self.tensor, expert=self.expert)

    @cached_property
    def params(self) -> Params:
        return params_like(self.cfg, self.mesh, "bfloat16")

    @cached_property
    def lora(self) -> Lora:
        return adapter_like(self.cfg, self.mesh, LoraSpec(self.rank))

    @cached_property
    def steps(self) -> Steps:
        free = int(self.memory * parse_topology(self.target).device.memory) - held_bytes(self.params)
        with self.compiling():
            budget = budget_for(self.cfg, self.params.embed_VD.dtype, self.mesh.shape[FSDP], max(0, free))
            return make_steps(self.cfg, self.mesh, budget.kept_bytes)

    @property
    def _plain(self) -> tuple[str, bool]:
        return self.params.embed_VD.dtype.name, self.params.apart

    def compiling(self) -> Any:
        return compiling_for(parse_topology(self.target).device.platform)

    def forward_backward(self, B: int, T: int, **more: Any) -> Figures:
        with self.compiling():
            args = (self.params, self.lora, self.lora, batch_like(self.mesh, B, T))
        return compile_for(self.target, self.steps.backward, *args, **more)

    def forward(self, B: int, T: int, **more: Any) -> Figures:
        with self.compiling():
            args = (self.params, self.lora, batch_like(self.mesh, B, T))
        return compile_for(self.target, self.steps.forward, *args, **more)

    def optim_step(self, kind: Any = "adam", **more: Any) -> Figures:
        spec, whole = OPTIMIZERS[kind], replicated(self.mesh)
        state = like(fresh_state(kind, self.lora), whole)
        hyper = like(spec.vector(spec.example), whole)
        return compile_for(self.target, self.steps.optimize, self.lora, self.lora, state, hyper, **more)

    def loss(self, B: int, T: int, **more: Any) -> Figures:
        """From hidden states to logprobs and gradients, without the layers."""
        with self.compiling():
            batch = batch_like(self.mesh, B, T)
            shape = (B, T, self.cfg.hidden)
            hidden = jax.ShapeDtypeStruct(shape, self.params.embed_VD.dtype, sharding=sharding(self.mesh, shape, FSDP))

            def scored(params: Params, lora: Lora, hidden: Any, batch: Any) -> Any:
                return score_and_grads(params, lora.unembed, hidden, batch.targets, batch.choice, batch.inputs)

            return compile_for(self.target, jax.jit(scored), self.params, self.lora, hidden, batch, **more)

    def decode(self, S: int, length: int, *, columns: int = 32, chunk: int = 8, **more: Any) -> Figures:
        with self.compiling():
            stack = result_of(empty_stack, self.cfg, self.mesh, columns, *self._plain)
            cache = result_of(empty_cache, self.cfg, self.mesh, S, length, *self._plain)
            rows = Rows(
                tokens_S=np.zeros(S, np.int32),
                positions_S=np.zeros(S, np.int32),
                columns_S2=np.zeros((S, 2), np.int32),
                uniform_CS=np.zeros((chunk, S), np.float32),
                choice=greedy_choice(S),
            )
            args = (self.cfg, self.mesh, chunk, 0, self.params, stack, cache, rows, np.int32(chunk))
        return compile_for(self.target, decode, *args, **more)

    def prefill(self, B: int, Q: int, length: int, *, columns: int = 32, **more: Any) -> Figures:
        with self.compiling():
            stack = result_of(empty_stack, self.cfg, self.mesh, columns, *self._plain)
            cache = result_of(empty_cache, self.cfg, self.mesh, B, length, *self._plain)
            piece = Piece(
                tokens_BQ=np.zeros((B, Q), np.int32),
                start=np.int32(0),
                columns_B2=np.zeros((B, 2), np.int32),
                score=np.bool_(False),
                wanted=empty_queries(PLAIN, B, Q),
            )
            args = (self.cfg, self.mesh, PLAIN, self.params, stack, cache, piece)
        return compile_for(self.target, prefill, *args, **more)


def main(model: str, target: str, name: str, *sizes: str) -> None:
    """Print the figures of one program:  programs.py 4B h100:1 forward_backward 4 1024 [tensor=8 save=/tmp/text]"""
    numbers = [int(size) for size in sizes if "=" not in size]
    named: dict[str, Any] = dict(size.split("=") for size in sizes if "=" in size)
    fields = {key: int(named.pop(key)) for key in ("rank", "tensor", "expert") if key in named}
    more = {key: int(value) if value.isdigit() else value for key, value in named.items()}
    print(getattr(Programs(model, target, **fields), name)(*numbers, **more).describe())


if __name__ == "__main__":
    main(*sys.argv[1:])
