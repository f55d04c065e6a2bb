"""Merged models: sums, quantized and fused tensors, tied embeddings, shards, and other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.catalog.test_peft_import import CONFIG, EXPERTS, tensors
from tests.compute.conftest import QWEN_VISION

from tinkerflow.backend.catalog import merging
from tinkerflow.backend.compute.models.families import (
    family_of,
    layer_tensors,
    load_config,
    parse_config,
    projections,
)
from tinkerflow.backend.compute.weights.files import open_tensors
from tinkerflow.backend.compute.weights.mxfp4 import dequantized
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import AdapterState, LoraSpec

Q = "model.layers.1.self_attn.q_proj.weight"


def of_base(**changes: Any) -> tuple[Any, dict[str, Any]]:
    """A dense model's config, and random tensors with the names and shapes of its files."""
    cfg = parse_config({**CONFIG, **changes}, name="tiny")
    rng, names = np.random.default_rng(1), family_of(cfg).names
    shapes: dict[str, tuple[int, ...]] = {names.embed: (cfg.vocab, cfg.hidden), names.final_norm: (cfg.hidden,)}
    for name, matrix in projections(cfg).items():
        if name != "unembed" or not cfg.tied:
            places = np.ndindex(matrix.stack)
            shapes |= {f"{matrix.name(place)}.weight": (matrix.outputs, matrix.inputs) for place in places}
    for tensor in layer_tensors(cfg).values():
        shapes |= {tensor.tensor.format(layer): tensor.shape for layer in range(cfg.layers)}
    return cfg, {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def written(folder: Path, arrays: dict[str, Any], **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "tokenizer.json").write_text("{}")
    save_file(arrays, folder / "model.safetensors")
    return folder


def update(weights: dict[str, Any], name: str, alpha: float = 32.0) -> Any:
    A, B = (weights[f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight"] for side in "AB")
    return B @ A * (alpha / len(A))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_merged_matrix_is_the_sum_rounded_once(tmp_path: Path, dtype: Any) -> None:
    cfg, base = of_base()
    base = {name: array.astype(dtype) for name, array in base.items()}
    weights = tensors(cfg)
    merging.merge(written(tmp_path / "base", base), AdapterState(LoraSpec(4), 0, weights), tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == base.keys()
    for name, array in base.items():
        adapted = name.endswith("_proj.weight") or name == "lm_head.weight"
        wanted = (array.astype(np.float32) + update(weights, name)).astype(dtype) if adapted else array
        assert merged[name].dtype == dtype
        np.testing.assert_array_equal(merged[name], wanted)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_trained_unembedding_is_untied(tmp_path: Path) -> None:
    cfg, base = of_base(tie_word_embeddings=True)
    weights = tensors(cfg)
    folder = written(tmp_path / "base", base, tie_word_embeddings=True)
    merging.merge(folder, AdapterState(LoraSpec(4), 0, weights), tmp_path / "out")
    merged, embed = load_file(tmp_path / "out" / "model.safetensors"), base["model.embed_tokens.weight"]
    np.testing.assert_array_equal(merged["model.embed_tokens.weight"], embed)
    np.testing.assert_array_equal(merged["lm_head.weight"], embed + update(weights, "lm_head.weight"))
    assert not load_config(tmp_path / "out").tied


def test_separate_head_is_kept_although_the_config_ties_it(tmp_path: Path) -> None:
    cfg, base = of_base()
    folder, spec = written(tmp_path / "base", base, tie_word_embeddings=True), LoraSpec(4, train_unembed=False)
    merging.merge(folder, AdapterState(spec, 0, tensors(cfg, spec)), tmp_path / "out")
    assert np.array_equal(load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"], base["lm_head.weight"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and not load_config(tmp_path / "out").tied


def test_shards_have_an_index_that_transformers_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, base = of_base()
    monkeypatch.setattr(merging, "SHARD_BYTES", 6000)
    said: list[str] = []
    folder = written(tmp_path / "base", base)
    merging.merge(folder, AdapterState(LoraSpec(4), 0, tensors(cfg)), tmp_path / "out", said.append)
    found = open_tensors(tmp_path / "out", "out")
    assert found.keys() == base.keys() and len(said) == len(list((tmp_path / "out").glob("model-0*-of-0*"))) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in base.values())


@pytest.mark.parametrize("mlp", [True, False])
def test_mxfp4_is_widened_only_where_the_adapter_changes_it(tmp_path: Path, mlp: bool) -> None:
    fields = {
        "model_type": "gpt_oss", "hidden_size": 32, "intermediate_size": 32, "num_local_experts": 2,
        "num_experts_per_tok": 1, "sliding_window": 8, "attention_bias": True,
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    cfg, rng, whole = parse_config({**CONFIG, **fields}, name="tiny"), np.random.default_rng(2), {}
    base = {f"model.layers.{n}.self_attn.q_proj.weight": np.ones((16, 32), ml_dtypes.bfloat16) for n in range(2)}
    for layer in range(2):
        for part, outputs in (("gate_up_proj", 64), ("down_proj", 32)):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            blocks = rng.integers(0, 256, (2, outputs, 1, 16)).astype(np.uint8)
            scales = rng.integers(120, 130, (2, outputs, 1)).astype(np.uint8)
            base |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            whole[name] = np.stack([dequantized(*each).T for each in zip(blocks, scales, strict=True)])
    spec = LoraSpec(4, train_mlp=mlp, train_unembed=False, expert_rank=2 if mlp else None)
    weights = {name: array for name, array in tensors(cfg, spec).items() if ".experts." in name or ".q_proj." in name}
    merging.merge(written(tmp_path / "base", base, **fields), AdapterState(spec, 0, weights), tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in config) is not mlp
    if not mlp:
        assert merged.keys() == base.keys()
        return
    assert not [name for name in merged if name.endswith(("_blocks", "_scales"))]
    for name, array in whole.items():
        own = {"down_proj": {"down": slice(None)}, "gate_up_proj": {"gate": slice(0, None, 2), "up": slice(1, None, 2)}}
        for expert in range(2):
            for part, outputs in own[name.rpartition(".")[2]].items():
                module = f"{name.rpartition('.')[0]}.{expert}.{part}_proj.weight"
                # the stored B of experts is multiplied by peft_factor, 2 here
                wanted = (array[expert][:, outputs].T + update(weights, module, 16.0)).astype(ml_dtypes.bfloat16)
                np.testing.assert_array_equal(merged[name][expert][:, outputs].T, wanted)


@pytest.mark.parametrize("published", [True, False])
def test_fused_experts_keep_their_layout(tmp_path: Path, published: bool) -> None:
    """Qwen3-VL-MoE is published with inputs before outputs; transformers writes outputs before inputs."""
    text = {**CONFIG, **EXPERTS, "model_type": "qwen3_vl_moe_text"}
    sees = {**QWEN_VISION, "out_hidden_size": 16, "deepstack_visual_indexes": []}
    fields = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": sees, "image_token_id": 23}
    cfg, rng = parse_config(fields, name="tiny"), np.random.default_rng(3)
    shapes = {"gate_up_proj": (4, 24, 16), "down_proj": (4, 16, 12)}
    whole = {
        f"model.language_model.layers.{layer}.mlp.experts.{part}": rng.normal(size=shape).astype(np.float32)
        for layer in range(2)
        for part, shape in shapes.items()
    }
    base = {name: array.swapaxes(1, 2).copy() if published else array for name, array in whole.items()}
    spec = LoraSpec(4, train_attn=False, train_unembed=False, expert_rank=2)
    weights = tensors(cfg, spec)
    merging.merge(written(tmp_path / "base", base, **fields), AdapterState(spec, 0, weights), tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    own = {"down_proj": {"down": slice(None)}, "gate_up_proj": {"gate": slice(0, 12), "up": slice(12, None)}}
    for name, array in whole.items():
        found = merged[name].swapaxes(1, 2) if published else merged[name]
        for expert, matrix in enumerate(array):
            for part, outputs in own[name.rpartition(".")[2]].items():
                module = f"{name.rpartition('.')[0]}.{expert}.{part}_proj.weight"
                wanted = matrix[outputs] + update(weights, module, 16.0)
                np.testing.assert_array_equal(found[expert][outputs], wanted)


def test_merge_of_a_foreign_adapter_writes_no_files(tmp_path: Path) -> None:
    cfg, base = of_base()
    folder, weights = written(tmp_path / "base", base), tensors(cfg)
    wide = {name: np.ones((5, 4), np.float32) if "q_proj.lora_B" in name else array for name, array in weights.items()}
    with pytest.raises(UserError, match=r"has shape \(16, 16\): the adapter's is for \(5, 16\)"):
        merging.merge(folder, AdapterState(LoraSpec(4), 0, wide), tmp_path / "out")
    with pytest.raises(UserError, match="'x' belongs to no tensor of this Qwen3 model"):
        merging.merge(folder, AdapterState(LoraSpec(4), 0, {**weights, "x": np.ones(1, np.float32)}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="exists: give a new one"):
        merging.merge(folder, AdapterState(LoraSpec(4), 0, weights), folder)


def test_fp8_weights_are_widened_by_every_merge(tmp_path: Path) -> None:
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (cfg, base), rng, packed = of_base(hidden_size=160), np.random.default_rng(3), {}
    for name, array in base.items():
        if not name.endswith("_proj.weight"):
            packed[name] = array
            continue
        scales = rng.uniform(0.1, 3, [-(-size // 128) for size in array.shape]).astype(np.float32)
        packed[f"{name}_scale_inv"] = scales
        wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: len(array), : array.shape[1]]
        packed[name] = (array / wide).astype(ml_dtypes.float8_e4m3fn)
        base[name] = packed[name].astype(np.float32) * wide
    spec = LoraSpec(4, train_mlp=False, train_unembed=False)
    weights = tensors(cfg, spec)
    folder = written(tmp_path / "base", packed, hidden_size=160, **quantized)
    merging.merge(folder, AdapterState(spec, 0, weights), tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == base.keys()
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    for name, array in base.items():
        wanted = array.astype(ml_dtypes.bfloat16) if name.endswith("_proj.weight") else array
        if ".self_attn." in name and name.endswith("_proj.weight"):
            wanted = (wanted.astype(np.float32) + update(weights, name)).astype(ml_dtypes.bfloat16)
        assert merged[name].dtype == wanted.dtype
        np.testing.assert_array_equal(merged[name], wanted)


def test_quantization_of_the_text_model_leaves_its_config_too(tmp_path: Path) -> None:
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}
    text = {**CONFIG, "model_type": "gemma3_text", "sliding_window": 4}
    cfg, base = of_base(model_type="gemma3", text_config=text)
    name = "model.language_model.layers.1.self_attn.q_proj.weight"
    packed = {name: base[name].astype(ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": np.ones((), np.float32)}
    folder = written(tmp_path / "base", base | packed, model_type="gemma3", text_config=text | quantized)
    merging.merge(folder, AdapterState(LoraSpec(4), 0, tensors(cfg)), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"] == text and "quantization_config" not in config


@pytest.mark.parametrize("tied", [False, True])
def test_fully_trained_weights_replace_the_base_weights(tmp_path: Path, tied: bool) -> None:
    _, base = of_base(tie_word_embeddings=tied)
    trained = {name: array + 1 for name, array in base.items()}
    files = {name: array.astype(ml_dtypes.bfloat16) for name, array in base.items()}
    if tied:  # some files contain the head in addition to the embedding
        files["lm_head.weight"] = files["model.embed_tokens.weight"]
    folder = written(tmp_path / "base", files, tie_word_embeddings=tied)
    merging.merge(folder, AdapterState(LoraSpec(0), 3, trained), tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == files.keys()
    for name, array in merged.items():
        of = trained.get(name, trained["model.embed_tokens.weight"])
        np.testing.assert_array_equal(array, of.astype(ml_dtypes.bfloat16))
    assert load_config(tmp_path / "out").tied is tied
    for wrong, message in (
        ({Q: np.zeros((2, 2), np.float32)}, "the trained one has"),
        ({"x": trained[Q]}, "'x' belongs"),
    ):
        with pytest.raises(UserError, match=message):
            merging.merge(folder, AdapterState(LoraSpec(0), 3, trained | wrong), tmp_path / "bad")
