"""Import of PEFT adapters: the same results as in PEFT, and errors that name unsupported parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tinkerflow.backend.catalog import peft_config
from tinkerflow.backend.catalog.peft_config import _of
from tinkerflow.backend.catalog.peft_import import import_adapter, largest_size
from tinkerflow.backend.compute.models.families import parse_config
from tinkerflow.backend.compute.models.peft_names import matrix_rank, modules, pair_names
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import LoraSpec
from tinkerflow.backend.store.peft import adapter_config

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"model_type": "qwen3_moe", "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {**EXPERTS, "model_type": "glm4_moe", "n_routed_experts": 4}
MINIMAX = {"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2}
DENSE = parse_config(CONFIG, name="tiny")
SPEC = LoraSpec(4)
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def tensors(cfg: Any = DENSE, spec: LoraSpec = SPEC) -> dict[str, Any]:
    rng, found = np.random.default_rng(0), {}
    for module, projection in modules(cfg, spec).items():
        rank = matrix_rank(spec, projection)
        for name, shape in zip(
            pair_names(module), ((rank, projection.inputs), (projection.outputs, rank)), strict=True
        ):
            found[name] = rng.normal(size=shape).astype(np.float32)
    return found


def taken(arrays: dict[str, Any], asked: LoraSpec | None = SPEC, cfg: Any = DENSE, **fields: Any) -> Any:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, **fields}
    return import_adapter(cfg, json.dumps(config).encode(), safetensors.numpy.save(arrays), asked)


def test_an_adapter_with_our_alpha_keeps_its_bits() -> None:
    arrays = tensors()
    state = taken(arrays)
    assert (state.spec, state.step) == (SPEC, 0) and state.weights.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(state.weights[name], array)


def test_different_alpha_is_folded_into_lora_b() -> None:
    arrays = tensors()
    state = taken(arrays, lora_alpha=8, alpha_pattern={"self_attn.k_proj": 64, "^model.layers.1.mlp.up_proj": 3.5})
    for name, array in arrays.items():
        alpha = 64 if "self_attn.k_proj" in name else 3.5 if "layers.1.mlp.up_proj" in name else 8
        wanted = array * np.float32(alpha / 32) if "lora_B" in name else array
        np.testing.assert_array_equal(state.weights[name], wanted)


def test_first_matching_pattern_wins() -> None:
    arrays = tensors()
    first = taken(arrays, alpha_pattern={"k_proj": 64, "self_attn.k_proj": 8}).weights
    second = taken(arrays, alpha_pattern={"self_attn.k_proj": 8, "k_proj": 64}).weights
    other = taken(arrays, alpha_pattern={"roj": 64}).weights
    B = Q.format("B").replace("q_proj", "k_proj")
    for weights, factor in ((first, 2), (second, 0.25), (other, 1)):
        np.testing.assert_array_equal(weights[B], arrays[B] * np.float32(factor))


def test_patterns_with_many_keys_do_not_slow_down_modules() -> None:
    asked: list[str] = []

    class Counting(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            asked.append(str(key))
            return super().__contains__(key)

        def items(self) -> Any:
            pytest.fail("looked through")

    assert _of(Counting(), "a.b.c", 1) == 1 and asked == ["^a.b.c", "a.b.c", "b.c", "c"]


def test_alpha_beyond_float32_is_refused() -> None:
    with pytest.raises(UserError, match=r"lora_B\.weight', times 3\.125e\+298 for its alpha, contains a number that"):
        taken(tensors(), lora_alpha=1e300)


def test_half_precision_is_widened() -> None:
    arrays = tensors()
    for dtype in (ml_dtypes.bfloat16, np.float16):
        state = taken({name: array.astype(dtype) for name, array in arrays.items()})
        for name, array in arrays.items():
            np.testing.assert_array_equal(state.weights[name], array.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("parts", [("train_attn",), ("train_mlp", "train_unembed")])
def test_peft_import_finds_the_adapted_modules(parts: tuple[str, ...]) -> None:
    switches = ("train_attn", "train_mlp", "train_unembed")
    spec = LoraSpec(4, **{switch: switch in parts for switch in switches})
    assert taken(tensors(spec=spec), None).spec == spec


def test_the_copy_of_the_unembedding_that_peft_saves_is_left_out() -> None:
    head = {"base_model.model.lm_head.base_layer.weight": np.ones((24, 16), np.float32)}
    assert taken(tensors() | head).weights.keys() == tensors().keys()
    attention = LoraSpec(4, train_mlp=False, train_unembed=False)
    with pytest.raises(UserError, match=r"tensor 'base_model\.model\.lm_head\.base_layer\.weight' is not part of"):
        taken(tensors(spec=attention) | head, attention)


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_that_is_not_the_base_model_s_unembedding_is_refused(tmp_path: Path, tied: bool) -> None:
    """PEFT would compute with the unembedding of the file."""
    head, cfg = np.random.default_rng(3).normal(size=(24, 16)).astype(np.float32), replace(DENSE, tied=tied)
    weights = {"model.embed_tokens.weight" if tied else "lm_head.weight": head}
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    config, name = b'{"r": 4, "lora_alpha": 32}', "base_model.model.lm_head.base_layer.weight"
    for copy in (head, head.astype(ml_dtypes.bfloat16), head.astype(np.float16)):
        import_adapter(cfg, config, safetensors.numpy.save(tensors() | {name: copy}), SPEC, tmp_path)
    head[23, 15] += 0.1
    for copy in (head, head[:-1]):
        with pytest.raises(UserError, match=r"lm_head\.base_layer\.weight' differs from the base model's unembedding"):
            import_adapter(cfg, config, safetensors.numpy.save(tensors() | {name: copy}), SPEC, tmp_path)


def test_pairs_of_other_modules_without_effect_are_left_out() -> None:
    A, B = pair_names("model.visual.blocks.0.attn.qkv")
    pair = {A: np.ones((4, 8), np.float32), B: np.zeros((24, 4), np.float32)}
    assert taken(tensors() | pair).weights.keys() == tensors().keys()
    pair[B][23, 3] = 1e-30
    with pytest.raises(UserError, match=r"tensor 'base_model\.model\.model\.visual.* is not part of"):
        taken(tensors() | pair)


def test_an_adapter_of_the_text_model_alone_fits_the_whole_model() -> None:
    text = CONFIG | {"model_type": "gemma3_text", "sliding_window": 4}
    cfg = parse_config({"model_type": "gemma3", "text_config": text}, name="sees")
    own = tensors(cfg)
    alone = {name.replace("model.language_model.", "model."): array for name, array in own.items()}
    assert Q.format("A") in alone and Q.format("A") not in own
    patterns = {"alpha_pattern": {"^model.layers.1.mlp.up_proj": 64}, "target_modules": r"model\.layers\..*|lm_head"}
    for asked in (SPEC, None):
        state = taken(alone, asked, cfg, **patterns)
        assert state.spec == SPEC and state.weights.keys() == own.keys()
        for name, array in own.items():
            factor = 2 if "layers.1.mlp.up_proj.lora_B" in name else 1
            np.testing.assert_array_equal(state.weights[name], factor * array)
    with pytest.raises(UserError, match=f"tensor '{Q.format('A')}' is missing: must exist"):
        taken({name: array for name, array in alone.items() if name != Q.format("A")}, cfg=cfg)


@pytest.mark.parametrize("experts", [EXPERTS, ROUTED, MINIMAX])
@pytest.mark.parametrize("own", [1, 2, None])
def test_experts_have_the_rank_of_their_tensors(own: int | None, experts: dict[str, Any]) -> None:
    """Shared experts and dense layers have the rank of the adapter."""
    cfg, spec = parse_config({**CONFIG, **experts}, name="tiny"), LoraSpec(4, expert_rank=own)
    arrays = tensors(cfg, spec)
    config = adapter_config("tiny", spec, arrays)
    state = import_adapter(cfg, config, safetensors.numpy.save(arrays), LoraSpec(4))
    assert state.spec == spec
    for name, array in arrays.items():
        np.testing.assert_array_equal(state.weights[name], array)


def test_experts_without_a_rank_are_refused() -> None:
    cfg = parse_config({**CONFIG, **EXPERTS}, name="tiny")
    arrays = {name: np.zeros((), np.float32) if ".experts." in name else array for name, array in tensors(cfg).items()}
    with pytest.raises(UserError, match=r"0\.gate_proj\.lora_A\.weight' has shape \(\): must exist with"):
        taken(arrays, cfg=cfg)


def test_experts_of_different_ranks_are_filled_with_zeros() -> None:
    cfg = parse_config({**CONFIG, **EXPERTS}, name="tiny")
    arrays, ranks = {}, {"experts.0.up_proj": 3, "experts.1.up_proj": 1}
    for name, array in tensors(cfg, LoraSpec(4, train_unembed=False)).items():
        rank = next((rank for end, rank in ranks.items() if end in name), 2 if ".experts." in name else 4)
        if ".layers.1." in name and ".experts.3." not in name:
            arrays[name] = array[:rank] if "lora_A" in name else np.ascontiguousarray(array[:, :rank])
    ends = sorted({name.split(".")[-3] for name in arrays})
    fields = {"target_modules": ends, "exclude_modules": r".*\.experts\.3\..*", "layers_to_transform": [1]}
    patterns = {"rank_pattern": {**ranks, **{rf"experts.\d+.{end}_proj": 2 for end in ("gate", "up", "down")}}}
    state = taken(arrays, None, cfg, use_rslora=True, **fields, **patterns)
    assert state.spec == LoraSpec(4, train_unembed=False, expert_rank=3)
    for module in modules(cfg, state.spec):
        A, B = pair_names(module)
        own = arrays[B] @ arrays[A] * np.float32(32 / np.sqrt(len(arrays[A]))) if A in arrays else np.float32(0)
        scale = 32 / (3 if ".experts." in A else 4)
        update = state.weights[B] @ state.weights[A] * np.float32(scale)
        np.testing.assert_allclose(update, own + np.zeros_like(update), rtol=1e-5, atol=1e-5)


def test_size_bound_is_at_least_the_file_size() -> None:
    copy = {"base_model.model.lm_head.base_layer.weight": np.ones((24, 16), np.float32)}
    size = len(safetensors.numpy.save(tensors() | copy))
    assert size <= largest_size(DENSE, SPEC) < 2 * size + 2**15


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA': must be 'LORA'"),
        ({"bias": "all"}, "bias is 'all': must be 'none'"),
        ({"use_dora": True}, "use_dora is True: must be left out"),
        ({"use_rslora": 1}, "use_rslora is 1: must be true or false"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern of '.*q_proj' is 0: must be a whole number from 1 to"),
        ({"rank_pattern": {"q_proj": 8}}, r"the largest rank in rank_pattern is 8: must be 4, lora_config\.rank"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]: must be left out"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True: must be left out"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters is"),
        ({"something_new": 1}, "something_new is 1: must be left out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa': must not change the base model"),
        ({"r": 8}, r"r is 8: must be 4, lora_config\.rank"),
        ({"r": 4.0}, r"r is 4\.0: must be a whole number from 1 to"),
        ({"lora_alpha": 0}, "lora_alpha is 0: must be a number above 0"),
        ({"lora_alpha": True}, "lora_alpha is True: must be a number above 0"),
        ({"alpha_pattern": {"q_proj": "x"}}, r"alpha_pattern of 'model\.layers\.0\.self_attn\.q_proj' is 'x'"),
        ({"alpha_pattern": {"(a+)+$": 1}}, r"alpha_pattern has the key '\(a\+\)\+\$': must be a module's name"),
        ({"rank_pattern": {"q_proj": 2}}, r"the rank of 'model\.layers\.0\.self_attn\.q_proj' is 2: must be 4"),
        ({"rank_pattern": [1]}, r"rank_pattern is \[1\]: must be an object"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"adapter_config\.json: " + message):
        taken(tensors(), **fields)


@pytest.mark.parametrize(
    "config",
    [
        *(b"{", b"[]", b"\xff", b'{"\\ud800": 1}'),
        pytest.param(b'{"lora_alpha": 1%s}' % (400 * b"0"), id="huge"),
        pytest.param(b'{"x":' + b"[" * 1000 + b"]" * 1000 + b"}", id="nested"),
        pytest.param(b"[" * 100_000, id="more nested"),
    ],
)
def test_malformed_adapter_configs_are_refused(config: bytes) -> None:
    with pytest.raises(UserError, match=r"adapter_config\.json: it"):
        import_adapter(DENSE, config, safetensors.numpy.save(tensors()), SPEC)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda all_: all_.pop(Q.format("B")), r"tensor '.*q_proj\.lora_B\.weight' is missing: must exist with"),
        (lambda all_: all_.update(x=np.zeros(1, np.float32)), "tensor 'x' is not part of an adapter of rank 4"),
        (lambda all_: all_.update({Q.format("A"): np.zeros((4, 3), np.float32)}), r"has shape \(4, 3\): must exist"),
        (lambda all_: all_[Q.format("A")].__setitem__((0, 0), np.nan), "contains a number that is not finite"),
        (lambda all_: all_.update({Q.format("A"): np.zeros((4, 16), np.int8)}), "is I8; it must be F32, F16 or BF16"),
        (lambda all_: all_.update({Q.format("A"): np.zeros((), np.float32)}), r"has shape \(\): must exist"),
        (dict.clear, "is missing"),
    ],
)
def test_tensors_that_are_refused(change: Any, message: str) -> None:
    arrays = tensors()
    change(arrays)
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: .*" + message):
        taken(arrays)


def test_tensors_that_the_config_names_or_a_requested_part_needs_are_not_filled_with_zeros() -> None:
    some = {name: array for name, array in tensors().items() if "q_proj" in name}
    attention = LoraSpec(4, train_mlp=False, train_unembed=False)
    assert taken(some, attention, target_modules=["q_proj"]).spec == attention
    with pytest.raises(UserError, match=r"k_proj\.lora_A\.weight' is missing: must exist with shape"):
        taken(some, attention, target_modules=["q_proj", "k_proj"])
    with pytest.raises(UserError, match=r"gate_proj\.lora_A\.weight' is missing: must exist with shape"):
        taken(some, SPEC, target_modules=["q_proj"])


def test_files_without_an_adapter_of_this_model_are_refused() -> None:
    with pytest.raises(UserError, match="no tensor belongs to a matrix of this base model"):
        taken({"x": np.zeros(1, np.float32)}, None)
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: it is not a safetensors file"):
        import_adapter(DENSE, b'{"r": 4}', b"12345", SPEC)


ALL = [name.rpartition(".")[2] for name in modules(DENSE, SPEC)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"target_modules": None},
        {"target_modules": sorted(set(ALL))},
        {"target_modules": r".*(_proj|lm_head)"},
        {"target_modules": sorted(set(ALL)), "exclude_modules": "vision.*"},
        {"target_modules": sorted(set(ALL)), "exclude_modules": [], "layers_to_transform": []},
        {"target_modules": [*modules(DENSE, SPEC)], "layers_to_transform": 0},  # with full names, layers do not matter
    ],
)
def test_a_config_that_targets_its_tensors_is_taken(fields: dict[str, Any]) -> None:
    assert taken(tensors(), **fields).weights.keys() == tensors().keys()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"target_modules": ["q_proj"]},
            r"target_modules is \['q_proj'\], which excludes 'model.layers.0.self_attn.k_pro",
        ),
        ({"target_modules": "all-linear"}, r"target_modules is 'all-linear', which excludes 'lm_head'"),
        ({"target_modules": r".*q_proj"}, r"which excludes 'model.layers.0.self_attn.k_proj'"),
        ({"target_modules": r"(a+)+$" + "a" * 40 + "(b|"}, "must be a pattern that can be used"),
        ({"target_modules": "(" * 3000 + "a" + ")" * 3000}, "must be a pattern that can be used"),
        ({"target_modules": "(?R)"}, r"must be a pattern that can be used \(unknown extension"),
        ({"target_modules": "a{" + "9" * 30 + "}"}, "must be a pattern that can be used"),
        ({"target_modules": 5}, "target_modules is 5: must be text or a list of texts"),
        ({"exclude_modules": ["lm_head"]}, r"exclude_modules is \['lm_head'\], which excludes 'lm_head'"),
        ({"exclude_modules": ".*up_proj"}, "which excludes 'model.layers.0.mlp.up_proj'"),
        (
            {"target_modules": ALL, "layers_to_transform": [0]},
            r"layers_to_transform is \[0\], which excludes 'model.la",
        ),
        (
            {"target_modules": ALL, "layers_to_transform": 1, "layers_pattern": "layers"},
            "which excludes 'model.layers.0",
        ),
        ({"layers_to_transform": "all"}, "layers_to_transform is 'all': must be a whole number"),
        ({"layers_to_transform": [True]}, "layers_to_transform is .True.: must be a whole number"),
    ],
)
def test_config_without_tensors_of_the_file_is_refused(fields: dict[str, Any], said: str) -> None:
    """PEFT would ignore these tensors without an error, and compute other results."""
    with pytest.raises(UserError, match=said):
        taken(tensors(), **fields)


def test_catastrophic_pattern_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_config, "_PATTERN_SECONDS", 0.2)
    with pytest.raises(UserError, match="must be a pattern that can be used"):
        taken(tensors(), target_modules=r"([a-z]|[a-z.]|[a-z_0-9.])*[!?]")
