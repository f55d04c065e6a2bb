"""Tiny random models in Hugging Face folders, samplers for them, and random adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.compute.conftest import FAMILY_SHAPE, random_model
from tests.compute.sampler.device_model import modeled_sampler

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.lora_weights import init_lora
from tinkerflow.backend.compute.models.params import load_params
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.planning.memory_plan import plan_group
from tinkerflow.backend.compute.sampler import Sampler
from tinkerflow.backend.compute.sampler.model import SamplerModel
from tinkerflow.backend.compute.sampler.pages import PAGE
from tinkerflow.backend.compute.sampler.prefill_jobs import PrefillGroup
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.compute.training.packing import pack
from tinkerflow.backend.compute.training.token_losses import choose
from tinkerflow.backend.compute.training.train import make_steps, to_devices
from tinkerflow.backend.spec.commands import BaseWeights, Example, GroupConfig, LoraSpec

VOCAB = 320
CONTEXT = 600


@dataclass(frozen=True)
class Tiny:
    """A base model on one device, and its folder."""

    folder: Path
    cfg: ModelConfig
    params: Params
    mesh: Any

    def config(self, **changes: Any) -> GroupConfig:
        return replace(
            GroupConfig(
                model_path=str(self.folder),
                dtype="float32",
                fsdp=1,
                tensor=1,
                max_context=CONTEXT,
                microbatch_tokens=1024,
                sample_slots=16,
                decode_chunk=8,
                compile_cache_dir="",
            ),
            **changes,
        )

    def sampler(
        self,
        *,
        pages: int | None = None,
        page: int = PAGE,
        free_pages: int | None = None,
        prefill_budget: int = 1024,
        **changes: Any,
    ) -> Sampler:
        """free_pages: all other pages stay unused. Fewer `pages` would change the shapes of all programs."""
        config = self.config(**changes)
        plan = plan_group(self.cfg, config)
        made = Sampler(
            self.cfg,
            self.params,
            self.mesh,
            config,
            pages=pages or plan.pages,
            states=plan.states,
            snapshot_bytes=plan.snapshot_bytes,
            page=page,
            prefill_budget=prefill_budget,
        )
        while free_pages is not None and made.pages.free(0) > free_pages:
            made.pages._free[0].popitem()
        return made


def save_tiny(folder: Path, architecture: str) -> None:
    import torch

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,  # otherwise Hugging Face stops there
    }
    own: dict[str, dict[str, Any]] = {
        "llama": {
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        # The context is in the range of the short factors, so that transformers uses them, too.
        "phi3": {"hidden_size": 32, **FAMILY_SHAPE["phi3"], "max_position_embeddings": 512},
        "gemma4_text": {**FAMILY_SHAPE["gemma4_text"], "vocab_size_per_layer_input": VOCAB},
        "qwen2": {"tie_word_embeddings": False},
        "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
        "qwen3_moe": {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    }
    torch.manual_seed(0)
    model = random_model(
        architecture, shape | own.get(architecture, {"hidden_size": 32, **FAMILY_SHAPE.get(architecture, {})})
    )
    model.save_pretrained(folder)


def make_tiny(folder: Path, architecture: str, base_weights: BaseWeights = "full") -> Tiny:
    save_tiny(folder, architecture)
    cfg = load_config(folder)
    mesh = make_mesh(1, 1)
    return Tiny(folder, cfg, load_params(cfg, folder, mesh, "float32", base_weights=base_weights), mesh)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A random Qwen3 with tied embeddings."""
    return make_tiny(tmp_path_factory.mktemp("qwen"), "qwen3")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A random Llama 3 with rope scaling and a separate unembedding."""
    return make_tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A random Qwen3.5, with a layer of linear attention and a layer of full attention."""
    return make_tiny(tmp_path_factory.mktemp("hybrid"), "qwen3_5")


@pytest.fixture(scope="session", params=["qwen", "llama"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    """Each of the models `qwen` and `llama`."""
    model = request.getfixturevalue(request.param)
    assert isinstance(model, Tiny)
    return model


@pytest.fixture
def modeled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sampler]:
    """modeled(…): a sampler on simulated devices, with the arguments of `modeled_sampler`."""
    return partial(modeled_sampler, monkeypatch)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and tokens of each computed piece of a prompt, in order."""
    computed: list[tuple[int, int]] = []
    real = SamplerModel.prefill_piece

    def watched(model: SamplerModel, group: PrefillGroup) -> int:
        computed.append((group.rows, group.piece))
        return real(model, group)

    monkeypatch.setattr(SamplerModel, "prefill_piece", watched)
    return computed


@pytest.fixture
def computed_sizes(pieces: list[tuple[int, int]]) -> Callable[[], tuple[int, ...]]:
    """computed_sizes(): the sizes of the pieces of prompts that were computed since the last call."""

    def read() -> tuple[int, ...]:
        sizes = tuple(size for _, size in pieces)
        pieces.clear()
        return sizes

    return read


def random_lora(cfg: ModelConfig, spec: LoraSpec, seed: int) -> Lora:
    """An adapter on the host whose B is not zero, strong enough to change every token."""
    lora = init_lora(cfg, spec, seed)
    generator = np.random.default_rng(seed)
    for pair in [*lora.layers.values(), *([lora.unembed] if lora.unembed else [])]:
        pair.B[...] = generator.normal(size=pair.B.shape, scale=0.1 / np.sqrt(spec.rank)).astype(np.float32)
    return lora


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return [int(token) for token in np.random.default_rng([length, seed]).integers(0, VOCAB, length)]


def training_logprobs(tiny: Tiny, lora: Lora | None, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """The training logprobs of tokens[1:], float32 [T - 1]."""
    lora = lora or init_lora(tiny.cfg, LoraSpec(rank=1), 0)
    whole = np.asarray(tokens, np.int32)
    size = len(whole) - 1
    example = Example(whole[:-1], whole[1:, None], np.ones((size, 1), np.float32))
    (batch,) = pack([example], microbatch_tokens=1024)
    steps = make_steps(tiny.cfg, tiny.mesh, Budget(1024, 2**30))
    arrays = to_devices(batch, choose("cross_entropy", {}), tiny.mesh)
    scored = steps.forward(tiny.params, jax.device_put(lora), arrays)
    (place,) = batch.places
    return np.asarray(scored.logprobs_BTK)[place.row, place.columns, 0]
