"""The vision tower of Qwen3-VL and Qwen3.5: its fields in `config.json`, its processor, its tensors. No JAX.

The families whose models have a tower share this file; `vision_tower` computes the tower.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinkerflow.backend.compute.models.config import ModelConfig, Vision
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers.matrices import LayerTensor
from tinkerflow.backend.compute.weights.files import read_object
from tinkerflow.backend.spec.images import ImageProcessor

PROCESSOR = "preprocessor_config.json"
COLORS = 3
_KINDS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_PLAIN = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3}


def read_vision(fields: ConfigFields, sections: tuple[int, int, int]) -> Vision:
    """The tower that the fields of `config.json` describe. UserError: a field is missing or not supported.

    sections: the family's default of `mrope_section`.
    """
    own = fields.inner("vision_config")
    text = fields.inner("text_config")
    own.refuse_others(hidden_act="gelu_pytorch_tanh", in_channels=COLORS)
    positions, deep = own.size("num_position_embeddings"), own.items("deepstack_visual_indexes") or []
    sections = tuple(replace(text, values=text.rope).items("mrope_section") or sections)
    vision = Vision(
        layers=own.size("depth"),
        hidden=own.size("hidden_size"),
        heads=own.size("num_heads"),
        mlp=own.size("intermediate_size"),
        patch=own.size("patch_size"),
        frames=own.size("temporal_patch_size", 2),
        merge=own.size("spatial_merge_size", 2),
        grid=math.isqrt(positions),
        deep=tuple(deep),
        token=fields.size("image_token_id"),
        sections=sections,
    )
    if vision.grid**2 != positions or vision.hidden % (4 * vision.heads):
        raise fields.error(
            f"num_position_embeddings {positions}, hidden_size {vision.hidden}, num_heads {vision.heads} in "
            "vision_config; positions must be a square, and a head's size must be a multiple of 4"
        )
    if list(deep) != sorted({one for one in deep if one in range(vision.layers)}):
        raise fields.error(f"deepstack_visual_indexes {deep}; must rise, from 0 to {vision.layers - 1}")
    if len(deep) > text.size("num_hidden_layers") or own.size("out_hidden_size") != text.size("hidden_size"):
        raise fields.error(
            f"{len(deep)} deepstack_visual_indexes, out_hidden_size {own['out_hidden_size']}; must be at most "
            f"num_hidden_layers, and hidden_size, {text['hidden_size']}"
        )
    wrong = [size for size in sections if type(size) is not int or size < 0]
    if wrong or len(sections) != COLORS or vision.token >= text.size("vocab_size"):
        raise fields.error(
            f"mrope_section {list(sections)}, image_token_id {vision.token}; must be 3 numbers, and a token"
        )
    return vision


def tower_tensors(vision: Vision, hidden: int) -> dict[str, LayerTensor]:
    """Every tensor of the tower by the name that `vision_tower` uses, each stacked over the parts that have it.

    hidden: the width of the text model.
    """
    wide = vision.hidden * vision.merge**2
    tensors: dict[str, LayerTensor] = {}

    def add(name: str, module: str, count: int, *shape: int, bias: int = 0) -> None:
        layers = tuple(range(count))
        tensors[name] = LayerTensor(f"model.visual.{module}.weight", shape, layers=layers)
        if bias:
            tensors[f"{name}_bias"] = LayerTensor(f"model.visual.{module}.bias", (bias,), layers=layers)

    own, mlp, blocks = vision.hidden, vision.mlp, vision.layers
    cell = (COLORS, vision.frames, vision.patch, vision.patch)
    add("patch", "patch_embed.proj", 1, own, *cell, bias=own)
    add("positions", "pos_embed", 1, vision.grid**2, own)
    add("norm1", "blocks.{}.norm1", blocks, own, bias=own)
    add("qkv", "blocks.{}.attn.qkv", blocks, 3 * own, own, bias=3 * own)
    add("o", "blocks.{}.attn.proj", blocks, own, own, bias=own)
    add("norm2", "blocks.{}.norm2", blocks, own, bias=own)
    add("up", "blocks.{}.mlp.linear_fc1", blocks, mlp, own, bias=mlp)
    add("down", "blocks.{}.mlp.linear_fc2", blocks, own, mlp, bias=own)
    for name, module, count, normed in (
        ("merge", "merger", 1, own),
        ("deep", "deepstack_merger_list.{}", len(vision.deep), wide),
    ):
        if count:
            add(f"{name}_norm", f"{module}.norm", count, normed, bias=normed)
            add(f"{name}_up", f"{module}.linear_fc1", count, wide, wide, bias=wide)
            add(f"{name}_down", f"{module}.linear_fc2", count, hidden, wide, bias=hidden)
    return tensors


def open_processor(cfg: ModelConfig, folder: str | Path) -> ImageProcessor | None:
    """The image processor of the model in `folder`; None if the model takes text only, or its folder has no such file.

    UserError: the file has an unsupported value.
    """
    vision, path = cfg.vision, Path(folder) / PROCESSOR
    if vision is None or not path.is_file():
        return None
    fields = ConfigFields(str(folder), read_object(path, str(folder)))
    kind = fields.get("image_processor_type", _KINDS[0])
    if kind not in _KINDS:
        raise fields.error(f"image_processor_type {kind!r} in {PROCESSOR}; supported: {', '.join(_KINDS)}")
    fields.refuse_others(**_PLAIN, patch_size=vision.patch, merge_size=vision.merge, temporal_patch_size=vision.frames)
    if not math.isclose(float(fields.get("rescale_factor") or 1 / 255), 1 / 255, rel_tol=1e-6):
        raise fields.error(f"rescale_factor {fields['rescale_factor']} in {PROCESSOR}; must be 1 / 255")
    size: Any = fields.get("size") or {}
    edges = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    bounds = replace(fields, values={edge: fields.get(old) or size.get(edge) for edge, old in edges.items()})
    return ImageProcessor(
        token=vision.token,
        side=vision.token_side,
        least=bounds.size("shortest_edge"),
        most=bounds.size("longest_edge"),
        mean=_colors(fields, "image_mean"),
        deviation=_colors(fields, "image_std"),
    )


def _colors(fields: ConfigFields, key: str) -> tuple[float, ...]:
    values = fields[key]
    numbers = isinstance(values, list) and all(isinstance(one, int | float) for one in values)
    if not numbers or len(values) != COLORS:
        raise fields.error(f"{key} is {values!r} in {PROCESSOR}; must be {COLORS} numbers")
    return tuple(map(float, values))
