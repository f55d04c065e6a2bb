"""Tiny random models made with Hugging Face transformers, and executors for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from tinkerflow.backend.compute.executor import Executor
from tinkerflow.backend.compute.models.families import registered
from tinkerflow.backend.compute.sampler import Sampler
from tinkerflow.backend.spec.commands import (
    CreateAdapter,
    Example,
    ExportAdapter,
    Forward,
    GroupConfig,
    ImagePixels,
    ImportAdapter,
    LoraSpec,
    SampleRequest,
    SampleResult,
    SampleStep,
)

try:
    import torch
except ModuleNotFoundError:  # Python 3.13 has only CUDA builds: tests that compare with torch are skipped
    torch = None  # type: ignore[assignment]

VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.1,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 6.0],
}
ALTERNATING = {"num_hidden_layers": 5, "sliding_window": 12}
ROUTED = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
LATENT = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "partial_rotary_factor": 0.5,
}
SHARED = {
    **LINEAR,
    **EXPERTS,
    "shared_expert_intermediate_size": 20,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


# Additional settings of the vision towers of some families. DeepStack adds vectors to some of their layers.
TOWER: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"depth": 2, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {"deepstack_visual_indexes": [0]},
    "qwen3_5": {},
    "qwen3_5_moe": {},
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": QWEN_VISION["patch_size"],
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4 * 64, "longest_edge": 24 * 64},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
IMAGE_TOKEN = VOCAB - 1

# Families that take images, and the families of their text models.
SEEING = {
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "gemma3": "gemma3_text",
    "mistral3": "ministral3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma4": "gemma4_text",
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
GEMMA4_VISION = {**VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 4}
SLIDING, FULL = "sliding_attention", "full_attention"

# Settings of the tiny model of a family, in addition to SHAPE. Other families keep the defaults.
FAMILY_SHAPE: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3},
    "qwen3_moe": EXPERTS,
    "mistral": {"sliding_window": 12},
    "ministral3": {"rope_parameters": YARN},
    "smollm3": {"no_rope_layer_interval": 2, "num_hidden_layers": 4, "pad_token_id": None},
    "olmo2": {"pad_token_id": None},
    "olmo3": {**ALTERNATING, "pad_token_id": None},
    "phi3": {
        "rope_parameters": {**LONG, "partial_rotary_factor": 0.5},
        "original_max_position_embeddings": 512,
        "pad_token_id": None,
        "head_dim": 8,
    },
    "gemma3_text": {
        **ALTERNATING,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 12,
        "pad_token_id": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL] * 2,
        "sliding_window": 12,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 6,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
        "pad_token_id": None,
    },
    "gemma4": {
        "num_hidden_layers": 3,
        "layer_types": [SLIDING, SLIDING, FULL],
        "sliding_window": 12,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "pad_token_id": 0,
        "moe_intermediate_size": 24,
    },
    "gpt_oss": {
        "sliding_window": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "glm4_moe": {**ROUTED, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": {
        **ROUTED,
        **LATENT,
        "num_hidden_layers": 3,
        "q_lora_rank": 16,
        "rope_parameters": {key: value for key, value in YARN.items() if key != "llama_4_scaling_beta"},
    },
    "glm4_moe_lite": {**ROUTED, **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": HALF},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "qwen3_vl_text": {"rope_parameters": MROPE},
    "qwen3_vl_moe": {**EXPERTS, "rope_parameters": MROPE},
    "qwen3_next": SHARED,
    "qwen3_5": LINEAR,
    "qwen3_5_moe": SHARED,
}


@dataclass(frozen=True)
class Reference:
    """A random model on disk and in torch."""

    folder: Path
    model: Any

    def executor(self, **changes: Any) -> Executor:
        plain = {"dtype": "float32", "fsdp": 1, "tensor": 1, "max_context": 512, "microbatch_tokens": 256}
        sampler = {"sample_slots": 4, "decode_chunk": 4, "compile_cache_dir": ""}
        return Executor(GroupConfig(str(self.folder), **(plain | sampler | changes)), lambda line: None, 1, 0)

    def logprobs(self, example: Example) -> np.ndarray:
        """Logprobs [T, K] of the example's targets, computed by torch."""
        with torch.no_grad():
            logits = self.model(**inputs_of(example)).logits[0].float()
        scored = torch.log_softmax(logits, -1).numpy()
        return np.take_along_axis(scored, example.targets_TK.astype(np.int64), axis=1)


def image_processor() -> Any:
    """Transformers' image processor with the settings `PROCESSOR`. Its import takes seconds."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**PROCESSOR)


def inputs_of(example: Example) -> dict[str, torch.Tensor]:
    """The inputs of a transformers model for the example."""
    tokens = torch.tensor(example.tokens_T[None].astype(np.int64))
    if not example.images:
        return {"input_ids": tokens}
    pixels = image_processor()([image.pixels_HWC for image in example.images], do_resize=False, return_tensors="pt")
    return {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE_TOKEN).int(), **pixels}


def build(folder: Path, architecture: str, *, tied: bool) -> Reference:
    pytest.importorskip("torch").manual_seed(3)
    shape = {**SHAPE, "tie_word_embeddings": tied, **FAMILY_SHAPE.get(architecture, {})}
    model = random_model(architecture, shape)
    model.eval().save_pretrained(folder)
    if architecture in TOWER:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return Reference(folder, model)


def random_model(architecture: str, shape: dict[str, Any]) -> Any:
    """A random model of the family in torch. shape: the settings of its text model."""
    kind = transformers.AutoModelForCausalLM
    if architecture in SEEING:
        rows = FAMILY_SHAPE.get(SEEING[architecture], {}), FAMILY_SHAPE.get(architecture, {})
        text = {**shape, **rows[0], **rows[1], "model_type": SEEING[architecture]}
        sees, token = (
            GEMMA4_VISION if architecture == "gemma4" else VISION,
            {"image_token_id": IMAGE_TOKEN} if architecture in TOWER else {},
        )
        if "qwen" in architecture:
            sees = {**QWEN_VISION, "out_hidden_size": shape["hidden_size"], **TOWER.get(architecture, {})}
        tied = shape.get("tie_word_embeddings", False)
        shape, kind = (
            {"text_config": text, "vision_config": sees, "tie_word_embeddings": tied, **token},
            transformers.AutoModelForImageTextToText,
        )
    model = kind.from_config(transformers.AutoConfig.for_model(architecture, **shape))
    fill_zero_parameters(model)
    return model


def fill_zero_parameters(model: Any) -> None:
    """Initialize parameters that transformers sets to zero, and decays that forget everything, so that they matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".dt_bias"):
                parameter.normal_(mean=-4.0)
            elif name.endswith((".bias", "_bias", ".sinks")):
                parameter.normal_(std=0.5)
            elif "norm" in name and not parameter.any():
                parameter.normal_(std=0.2)
            elif parameter.ndim == 1 and "Gemma4" in type(model).__name__:  # norms and scales
                parameter.uniform_(0.3, 0.9)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # above zero: transformers scores other groups' experts 0
                buffer.uniform_(0, 0.5)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.0)


@pytest.fixture(scope="session", params=[f"{family}-{head}" for head in ("untied", "tied") for family in registered()])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A model of each family, with and without tied embeddings."""
    family, head = request.param.split("-")
    return build(tmp_path_factory.mktemp(request.param), family, tied=head == "tied")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return build(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True)


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return build(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=False)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return build(tmp_path_factory.mktemp("moe"), "qwen3_moe", tied=False)


@pytest.fixture(scope="session")
def executor(qwen3: Reference) -> Executor:
    """One executor for many tests, because compilation is slow. Each test creates its own adapters."""
    return qwen3.executor()


def random_example(rng: np.random.Generator, length: int, targets: int = 1) -> Example:
    return Example(
        tokens_T=rng.integers(0, VOCAB, length).astype(np.int32),
        targets_TK=rng.integers(0, VOCAB, (length, targets)).astype(np.int32),
        weights_TK=rng.uniform(-1, 2, (length, targets)).astype(np.float32),
        flat=targets == 1,
        inputs={
            "logprobs": rng.uniform(-6, -2, (length, targets)).astype(np.float32),
            "advantages": rng.normal(size=(length, targets)).astype(np.float32),
        },
    )


def seeing(example: Example, *images: tuple[int, int, int]) -> Example:
    """The example with images instead of some tokens. Each image is (first token, rows, columns), counted in tokens."""
    rng, side = np.random.default_rng(len(images)), 2 * PROCESSOR["patch_size"]
    tokens_T = example.tokens_T % IMAGE_TOKEN
    made = []
    for start, rows, columns in images:
        tokens_T[start : start + rows * columns] = IMAGE_TOKEN
        pixels = rng.integers(0, 256, (rows * side, columns * side, 3)).astype(np.uint8)
        made.append(ImagePixels(start, pixels))
    return replace(example, tokens_T=tokens_T, images=tuple(made))


def examples(lengths: Sequence[int], targets: int = 1, seed: int = 0) -> tuple[Example, ...]:
    """Random data with all loss inputs."""
    rng = np.random.default_rng(seed)
    return tuple(random_example(rng, length, targets) for length in lengths)


def add_adapter(executor: Executor, adapter_id: str, rank: int = 4, seed: int = 0, **parts: Any) -> None:
    """Create an adapter with random B, so that it changes the model."""
    executor.execute(CreateAdapter(adapter_id, LoraSpec(rank, **parts), seed))
    state = executor.execute(ExportAdapter(adapter_id, optimizer=False))
    rng = np.random.default_rng(seed + 1)
    weights = {
        name: rng.normal(size=w.shape, scale=0.1).astype(np.float32) if "lora_B" in name else w
        for name, w in sorted(state.weights.items())
    }
    executor.execute(ImportAdapter(adapter_id, type(state)(state.spec, 0, weights)))


def ask(request_id: str, prompt: Sequence[int], max_tokens: int = 8, **changes: Any) -> SampleRequest:
    """A request, by default greedy and without stops."""
    plain = {"owner": "owner", "snapshot_id": None, "num_samples": 1, "temperature": 0.0, "top_k": -1, "top_p": 1.0}
    prompt_T = np.asarray(prompt, np.int32)
    return SampleRequest(request_id, prompt_T=prompt_T, max_tokens=max_tokens, **({"seed": 0} | plain | changes))


def run_all(sampler: Sampler | Executor, *requests: SampleRequest, most_steps: int = 500) -> dict[str, SampleResult]:
    """Step until all requests are finished, and return their results by id."""
    step = sampler.execute if isinstance(sampler, Executor) else sampler.step
    results: dict[str, SampleResult] = {}
    progress = step(SampleStep(admit=requests))
    for _ in range(most_steps):
        results |= {result.request_id: result for result in progress.finished}
        if not (progress.active or progress.waiting):
            return results
        progress = step(SampleStep())
    raise AssertionError(f"{progress} after {most_steps} steps")


def result_of(sampler: Sampler | Executor, request: SampleRequest) -> SampleResult:
    """The result of a request that runs alone."""
    return run_all(sampler, request)[request.request_id]


def gradients(executor: Executor, adapter_id: str) -> dict[str, np.ndarray]:
    """The accumulated gradients that are not yet applied, by PEFT's names."""
    state = executor.execute(ExportAdapter(adapter_id, optimizer=True))
    return {name.removesuffix(".grad"): a for name, a in state.moments.items() if name.endswith(".grad")}


def forward(
    executor: Executor,
    adapter_id: str,
    data: tuple[Example, ...],
    loss: Any = "cross_entropy",
    *,
    backward: bool = False,
    **config: float,
) -> Any:
    """The result of a forward pass, and of the backward pass if `backward`."""
    return executor.execute(Forward(adapter_id, data, loss, config, backward))
