"""A saved attempt is a folder that `peft` loads. Its logits are those of base weights with our update added by hand.

Tensors keep their values for every layout in memory.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import save
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.spec.commands import LORA_ALPHA, AdapterState, LoraSpec
from tinkerflow.backend.store import CheckpointMeta, Store
from tinkerflow.backend.store.peft import ADAPTER_CONFIG, adapter_config, decode, encode

ATTENTION = {f"self_attn.{p}_proj" for p in "qkvo"}
MLP = {f"mlp.{p}_proj" for p in ("gate", "up", "down")}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def base_model(family: str, *, tied: bool) -> PreTrainedModel:
    torch.manual_seed(1)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied)).eval()
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).eval()


def random_adapter(model: PreTrainedModel, spec: LoraSpec) -> AdapterState:
    """A random adapter with nonzero B. Its arrays are not contiguous, because the store must not depend on that."""
    rng = np.random.default_rng(2)
    weights = {}
    for name, module in model.named_modules():
        part = name.split(".", 3)[-1]
        if (
            (spec.train_attn and part in ATTENTION)
            or (spec.train_mlp and part in MLP)
            or (spec.train_unembed and name == "lm_head")
        ):
            out_features, in_features = module.weight.shape
            base = f"base_model.model.{name}"
            weights[f"{base}.lora_A.weight"] = rng.standard_normal((in_features, spec.rank), dtype=np.float32).T * 0.2
            weights[f"{base}.lora_B.weight"] = rng.standard_normal((spec.rank, out_features), dtype=np.float32).T * 0.2
    return AdapterState(spec=spec, step=1, weights=weights)


def merged_by_hand(model: PreTrainedModel, state: AdapterState) -> PreTrainedModel:
    merged = copy.deepcopy(model)
    # The unembedding gets its own matrix: our lm_head adapter never changes the embedding, tied or not.
    merged.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for name in [n for n in state.weights if n.endswith("lora_A.weight")]:
        module = merged.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        update = state.weights[name.replace("lora_A", "lora_B")].astype(np.float64) @ state.weights[name]
        with torch.no_grad():
            module.weight += torch.from_numpy(update).to(module.weight) * (LORA_ALPHA / state.spec.rank)
    return merged


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "spec",
    [
        LoraSpec(rank=4),
        LoraSpec(rank=3, train_unembed=False),
        LoraSpec(rank=5, train_attn=False, train_mlp=False),
        LoraSpec(rank=1, train_mlp=False),
    ],
)
def test_peft_gives_the_logits_of_merged_weights(tmp_path: Path, family: str, tied: bool, spec: LoraSpec) -> None:
    import peft  # here, because the import takes seconds in each process that collects tests

    model = base_model(family, tied=tied)
    state = random_adapter(model, spec)
    store = Store.open(f"file://{tmp_path}")
    saved = store.save("sess-1:train:0", "sampler_weights", "x", state, CheckpointMeta("org/base", "local"))
    folder = tmp_path / "runs" / "sess-1:train:0" / "sampler_weights" / "x" / saved.attempt
    tokens = torch.arange(24).reshape(2, 12) % SHAPE["vocab_size"]
    with torch.no_grad():
        # In float64, so that a remaining difference is an error and not rounding.
        wanted = merged_by_hand(model.double(), state)(tokens).logits
        plain = model(tokens).logits
        with warnings.catch_warnings():
            # PEFT warns about merging a tied lm_head; nothing is merged here.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`", category=UserWarning)
            adapted = peft.PeftModel.from_pretrained(model, folder)
        found = adapted.double()(tokens).logits
    assert (wanted - plain).abs().max() > 0.1
    assert (found - wanted).abs().max() < 1e-9


def test_peft_reports_no_missing_or_unexpected_keys(tmp_path: Path) -> None:
    import peft

    model = base_model("qwen3", tied=False)
    state = random_adapter(model, LoraSpec(rank=4))
    saved = Store.open(f"file://{tmp_path}").save("run", "weights", "x", state, CheckpointMeta("org/base", "local"))
    folder = tmp_path / "runs" / "run" / "weights" / "x" / saved.attempt
    adapted = peft.PeftModel(model, peft.LoraConfig.from_pretrained(folder))
    report = adapted.load_adapter(folder, "default")
    assert not [key for key in report.missing_keys if "lora" in key]
    assert not report.unexpected_keys


def test_peft_config_lists_the_adapted_modules() -> None:
    names = [
        f"base_model.model.model.layers.{i}.self_attn.{p}_proj.lora_{m}.weight"
        for i in (0, 1)
        for p in "qv"
        for m in "AB"
    ]
    config = json.loads(adapter_config("org/base", LoraSpec(rank=8), names))
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (8, LORA_ALPHA, "org/base")
    assert "revision" not in config


def test_base_model_revision_has_a_separate_field(tmp_path: Path) -> None:
    import peft

    names = [f"base_model.model.lm_head.lora_{m}.weight" for m in "AB"]
    (tmp_path / ADAPTER_CONFIG).write_bytes(adapter_config("org/base@refs/pr/1", LoraSpec(rank=8), names))
    config = peft.LoraConfig.from_pretrained(tmp_path)
    assert (config.base_model_name_or_path, config.revision) == ("org/base", "refs/pr/1")


@pytest.mark.parametrize(
    ("module", "parts"), [("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))]
)
def test_patterns_match_experts_only(module: str, parts: tuple[str, str, str]) -> None:
    """Uses PEFT's lookup, for modules and for the fused parameters of transformers 5."""
    from peft.utils.other import get_pattern_key

    layer = "model.layers.1"
    shared = [f"{layer}.mlp.shared_experts.{part}" for part in ("gate_proj", "down_proj")]
    experts = [f"{layer}.{module}.experts.{number}.{part}" for number in (0, 12) for part in parts]
    names = [f"base_model.model.{name}.lora_A.weight" for name in (*shared, *experts)]
    config = json.loads(adapter_config("base", LoraSpec(8, expert_rank=2), names))
    fused = {f"{layer}.mlp.experts.gate_up_proj": 4, f"{layer}.mlp.experts.down_proj": 2}
    for field, whole, of in (("rank_pattern", 8, 1), ("alpha_pattern", LORA_ALPHA, 4)):
        pattern = config[field]
        wanted = dict.fromkeys(shared, whole) | {name: rank * of for name, rank in fused.items()}
        for name, value in (wanted | dict.fromkeys(experts, 2 * of)).items():
            assert pattern.get(get_pattern_key(pattern, name), whole) == value, (field, name)


# ------------------------------------------------------------------ tensors
FLOATS = arrays(np.float32, array_shapes(max_dims=3, max_side=5), elements=st.floats(width=32))


@given(st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), FLOATS, max_size=4))
def test_tensors_come_back_bit_for_bit(tensors: dict[str, np.ndarray]) -> None:
    tensors.pop("__metadata__", None)
    back = decode(encode(tensors))
    assert {k: (a.shape, a.tobytes()) for k, a in back.items()} == {
        k: (a.shape, a.tobytes()) for k, a in tensors.items()
    }


@given(FLOATS, st.sampled_from(["T", "reversed", "step", "fortran", "broadcast"]))
def test_layout_in_memory_does_not_matter(array: np.ndarray, layout: str) -> None:
    view = {
        "T": lambda: array.T,
        "reversed": lambda: array[::-1],
        "step": lambda: array[..., ::2],
        "fortran": lambda: np.asfortranarray(array),
        "broadcast": lambda: np.broadcast_to(array, (3, *array.shape)),
    }[layout]()
    np.testing.assert_array_equal(decode(encode({"x": view}))["x"], view)


def test_equal_tensors_give_equal_bytes() -> None:
    a, b = np.ones((2, 3), np.float32), np.zeros(4, np.float32)
    assert encode({"a": a, "b": b}) == encode({"b": b, "a": a})


def test_unsupported_dtypes_are_refused() -> None:
    with pytest.raises(StoreError, match="tensor 'x' is float16"):
        encode({"x": np.zeros(2, np.float16)})
    with pytest.raises(StoreError, match="tensor 'x' is int32"):
        decode(save({"x": np.zeros(2, np.int32)}))


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 64, encode({"x": np.ones(4, np.float32)})[:-1]])
def test_bytes_of_another_format_are_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="not a safetensors file"):
        decode(data)
