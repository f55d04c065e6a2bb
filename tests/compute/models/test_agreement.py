"""A checkpoint whose config and tensors disagree is refused. The error names the tensor or the field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file
from tests.compute.conftest import SEEING, TOWER, Reference, build, examples, forward

from tinkerflow.backend.compute.models.checkpoints import check_tensors, expected_tensors
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import family_of, load_config, parse_config, registered
from tinkerflow.backend.compute.models.family import Tensors, open_unpacked
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.weights.files import StoredTensor, open_tensors
from tinkerflow.backend.core.errors import UserError

# Fields of transformers' configs without an effect on the computation: ids, training, labels, and extra outputs.
WITHOUT_EFFECT = {
    *("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache", "return_dict", "problem_type"),
    *(
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "id2label",
        "label2id",
        "initializer_range",
        "is_encoder_decoder",
    ),
    *("attention_dropout", "embd_pdrop", "resid_pdrop", "residual_dropout", "router_aux_loss_coef"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "chunk_size_feed_forward"),
    "pretraining_tp",  # transformers 5 does not read it
    "num_nextn_predict_layers",  # of layers that predict further tokens, which are not loaded
    "max_window_layers",  # only with use_sliding_window, which is refused
    "sliding_window",  # only with use_sliding_window, or layer_types
    "_sliding_window_pattern",  # transformers writes the layer_types that follow from it
    *("intermediate_size", "moe_intermediate_size", "num_experts", "top_k_experts"),  # in models without that part
    *("num_global_key_value_heads", "vocab_size_per_layer_input"),
}
# Fields that another field overrides, as in transformers.
OTHERS_COUNT = {
    "head_dim": ("deepseek_v3",),  # qk_rope_head_dim
    "num_key_value_heads": ("deepseek_v3", "glm4_moe_lite"),  # latent attention makes keys and values of all heads
    "first_k_dense_replace": ("glm4_moe_lite",),  # mlp_layer_types
    "no_rope_layer_interval": ("smollm3",),  # no_rope_layers
    "use_sliding_window": ("smollm3",),  # layer_types
    "sliding_window_pattern": ("gemma3", "gemma3_text"),  # layer_types
    "tie_word_embeddings": tuple(SEEING),  # read from the outer object, not from text_config
    "vision_config.model_type": tuple(TOWER),  # model_type of the outer object
}
# Parts of the names of tensors that are not loaded.
UNUSED = ("vision_tower", "multi_modal_projector", "embed_vision", "audio_tower", "embed_audio")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folder_of(family): the folder of a tiny model with tied embeddings, saved by transformers."""
    return cache(lambda family: build(tmp_path_factory.mktemp(family), family, tied=True).folder)


def fields_of(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return fields


def check(cfg: ModelConfig, tensors: Tensors) -> None:
    family = family_of(cfg)
    check_tensors(cfg, family.unpack(cfg, tensors), "m")


def like(tensor: StoredTensor, **changes: Any) -> StoredTensor:
    """The tensor with some changes, and zeros as its values."""
    made = replace(tensor, **changes)
    return replace(made, raw=np.zeros(8 * int(np.prod(made.shape)), np.uint8))


def kinds(names: Any) -> dict[str, str]:
    """The last name of each kind, by kind. Names that differ only in numbers are of one kind."""
    return {re.sub(r"\d+", "#", name): name for name in sorted(names)}


@pytest.mark.parametrize("family", sorted(registered()))
def test_each_tensor_is_used_or_refused(family: str, folder_of: Callable[[str], Path]) -> None:
    cfg, tensors = load_config(folder_of(family)), open_tensors(folder_of(family), family)
    check(cfg, tensors)
    unused = {
        f"layers.{number}.self_attn.{part}"
        for number, layer in enumerate(cfg.decoder_layers)
        if layer.shares is not None  # this layer reads the keys and values of other layers
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    for name in kinds(name for name in tensors if not any(part in name for part in (*UNUSED, *unused))).values():
        tensor = tensors[name]
        assert isinstance(tensor, StoredTensor)
        rest = {key: value for key, value in tensors.items() if key != name}
        longer = (tensor.shape[0] + 1, *tensor.shape[1:])
        changed = {
            "missing": rest,
            "shape": {**rest, name: like(tensor, shape=longer)},
            "dtype": {**rest, name: like(tensor, dtype="I8")},
        }
        stem = name.removesuffix(".weight")
        for end in (".bias", ".weight_scale", ".weight_scale_inv", ".input_scale", "_blocks", "_scales", ".qweight"):
            if f"{stem}{end}" not in tensors:
                changed[end] = {**tensors, f"{stem}{end}": tensor}
        if ".layers." in name and "visual" not in name:
            later = re.sub(r"\.layers\.\d+\.", f".layers.{cfg.layers}.", name)
            changed["another layer"] = {**tensors, later: tensor}
        for kind, other in changed.items():
            with pytest.raises(UserError, match=r"tensor '|supported"):
                check(cfg, other)
                pytest.fail(f"{name}: {kind} is ignored")


def alternative_values(value: Any) -> Iterator[Any]:
    """Other values of the same kind, and a value of another kind."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value * 2, 0, -value - 1)
    elif isinstance(value, str):
        yield "another"
    elif isinstance(value, list) and value:
        yield from (value[:-1], ["another", *value[1:]])
    if value is not None:
        yield {"another": "kind"}


@pytest.mark.parametrize("family", sorted(registered()))
def test_config_field_that_is_read_has_an_effect(family: str, folder_of: Callable[[str], Path]) -> None:
    """Another value gives another config, or is refused by the parser or because it does not fit the tensors."""
    fields, tensors = fields_of(folder_of(family)), open_tensors(folder_of(family), family)
    parts: list[tuple[str, ...]] = [("text_config",)] if "text_config" in fields else [()]
    parts += [(*part, "rope_parameters") for part in parts]
    cfg, ignored = parse_config(fields, name=family), []
    others_count = {key for key, families in OTHERS_COUNT.items() if family in families}
    if cfg.vision is not None:
        parts.append(("vision_config",))
    for part in parts:
        owner = fields
        for key in part:
            owner = owner.get(key) or {}
        for key, value in owner.items():
            if key in WITHOUT_EFFECT - {"num_experts", "sliding_window"} or isinstance(value, dict):
                continue
            for other in alternative_values(value):
                if other == value:
                    continue
                changed = json.loads(json.dumps(fields))
                inner = changed
                for name in part:
                    inner = inner[name]
                inner[key] = other
                try:
                    parsed = parse_config(changed, name=family)
                    check(parsed, tensors)
                except UserError:
                    continue
                if parsed == cfg and not {key, ".".join((*part, key))} & others_count:
                    ignored.append(f"{key}: {other!r}")
    assert not ignored


@pytest.mark.parametrize("family", sorted(registered()))
def test_transformers_config_fields_are_read(
    family: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, known = fields_of(folder_of(family)), transformers.AutoConfig.for_model(family).to_dict()
    if "text_config" in saved:
        known = transformers.AutoConfig.for_model(saved["text_config"]["model_type"]).to_dict()
    read: set[str] = set()
    get, item = ConfigFields.get, ConfigFields.__getitem__

    def recorded_get(fields: ConfigFields, key: str, default: Any = None) -> Any:
        read.add(key)
        return get(fields, key, default)

    def recorded_item(fields: ConfigFields, key: str) -> Any:
        read.add(key)
        return item(fields, key)

    monkeypatch.setattr(ConfigFields, "get", recorded_get)
    monkeypatch.setattr(ConfigFields, "__getitem__", recorded_item)
    parse_config(saved, name=family)
    assert known.keys() - read <= WITHOUT_EFFECT


@pytest.mark.parametrize("family", sorted(registered()))
def test_separate_head_unties_a_checkpoint(family: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """As in transformers. An equal copy of the embedding does not untie it."""
    source = folder_of(family)
    arrays = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    cfg = load_config(source)
    assert cfg.tied
    (embed,) = (name for name in arrays if name.endswith("embed_tokens.weight"))
    head = "language_model.lm_head.weight" if embed.startswith("language_model.") else "lm_head.weight"
    for changed, tied in ((arrays[embed], True), (arrays[embed] + np.float32(0.5), False)):
        save_file({**arrays, head: changed}, tmp_path / "model.safetensors")
        found = load_config(tmp_path)
        assert found == replace(cfg, tied=tied)
        tensors = open_unpacked(family_of(found), found, tmp_path, family)
        check_tensors(found, tensors, family)
        assert ("lm_head.weight" in expected_tensors(found)) is not tied


def test_separate_head_gives_the_logits_of_transformers(tmp_path: Path, qwen3: Reference) -> None:
    from tests.compute.closeness import close_logprobs

    from tinkerflow.backend.spec.commands import CreateAdapter, LoraSpec

    arrays = load_file(qwen3.folder / "model.safetensors")
    head = np.random.default_rng(0).normal(size=arrays["model.embed_tokens.weight"].shape, scale=0.3)
    save_file({**arrays, "lm_head.weight": head.astype(np.float32)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((qwen3.folder / "config.json").read_text())
    reference = Reference(tmp_path, type(qwen3.model).from_pretrained(tmp_path).eval())
    executor, data = reference.executor(), examples((7, 30))
    executor.execute(CreateAdapter("a", LoraSpec(4), 0))
    for example, found in zip(data, forward(executor, "a", data).logprobs, strict=True):
        close_logprobs(found, reference.logprobs(example)[:, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method 'gptq' is not supported"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method 'mxfp4' is not supported"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"weight_block_size \[64, 64\] is not supported; must be \[128, 128\]",
        ),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8' in config.json; must be an object"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "contradict each other",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e6},
            "rope_theta is 1000000.0 in config.json, but 10000",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
            "must be the same for all layers",
        ),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\] in config.json; must be an object"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .* is not supported; must be"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false' in config.json; must be true or false"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny' in config.json; must be a positive number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
    ],
)
def test_misreadable_values_are_refused(
    changes: dict[str, Any], message: str, folder_of: Callable[[str], Path]
) -> None:
    fields = {**fields_of(folder_of("qwen3")), "rope_parameters": None, **changes}
    with pytest.raises(UserError, match=message):
        parse_config(fields, name="m")


@pytest.mark.parametrize("family", registered())
def test_rope_parameters_must_be_an_object(family: str, folder_of: Callable[[str], Path]) -> None:
    fields = fields_of(folder_of(family))
    text = fields.get("text_config", fields)
    text.update(rope_parameters=[1], rope_scaling=None)
    with pytest.raises(UserError, match=r"rope_parameters is \[1\] in config.json; must be an object"):
        parse_config(fields, name="m")


@pytest.mark.parametrize(
    ("inner", "value", "message"),
    [
        ("vision_config", {"deepstack_visual_indexes": 5}, "deepstack_visual_indexes is 5 in config.json; must be a"),
        ("text_config", {"rope_parameters": {"mrope_section": 5}}, "mrope_section is 5 in config.json; must be a list"),
        ("text_config", {"rope_parameters": {"mrope_section": ["a", 1, 2]}}, "mrope_section .*; must be 3 numbers"),
    ],
)
def test_malformed_vision_lists_are_refused(
    inner: str, value: dict[str, Any], message: str, folder_of: Callable[[str], Path]
) -> None:
    fields = fields_of(folder_of("qwen3_vl"))
    (changed,) = value.items()
    key, given = changed
    fields[inner][key] = {**fields[inner][key], **given} if isinstance(given, dict) else given
    with pytest.raises(UserError, match=message):
        parse_config(fields, name="m")


def test_fused_experts_beside_separate_ones_are_refused(folder_of: Callable[[str], Path]) -> None:
    for family, fused in (("qwen3_vl_moe", "gate_up_proj"), ("gpt_oss", "down_proj")):
        folder = folder_of(family)
        cfg, tensors = load_config(folder), open_tensors(folder, family)
        key = next(name for name in tensors if name.endswith(f"experts.{fused}"))
        alone = f"{key.removesuffix(fused)}0.{fused.replace('gate_up', 'up')}.weight"
        with pytest.raises(UserError, match=f"{re.escape(alone)}' is in the files twice"):
            check(cfg, {**tensors, alone: tensors[key]})


def test_tensor_under_two_names_is_refused(folder_of: Callable[[str], Path]) -> None:
    cfg, tensors = load_config(folder_of("mistral3")), open_tensors(folder_of("mistral3"), "m")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    other = name.replace("language_model.model.", "model.language_model.").replace("model.model.", "model.")
    other = other if other != name else name.replace("model.language_model.", "language_model.model.")
    with pytest.raises(UserError, match="is in the files twice, also under another name"):
        check(cfg, {**tensors, other: like(tensors[name])})  # type: ignore[arg-type]
