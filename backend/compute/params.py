"""Base weights: from the safetensors of a Hugging Face folder, stacked by layer, straight to their places on the mesh.

A device's part is read when that device asks for it, so no process holds more of the model than its devices do.
Letters: D hidden, V vocabulary, L layers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.lora import ATTENTION, MLP, projection_sizes
from tinkerflow.backend.compute.mesh import EXPERT, FSDP, TENSOR, from_callback, on_cpu, sharding
from tinkerflow.backend.compute.quantized import Int8, Weight, rounded, scales
from tinkerflow.backend.compute.transformer import Params
from tinkerflow.backend.errors import UserError

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F64": np.float64}
Loaded = TypeVar("Loaded", bound=Weight)
Part = Callable[..., npt.NDArray[Any]]  # (tensor, slices...) -> that part of a matrix [out, in], or of its scale [out]
_ROW_PARALLEL = ("o", "down")  # their inputs are what the tensor axis splits, so their outputs are summed over it


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a file, read by slices through a memory map."""

    data: npt.NDArray[Any]

    def read(self, index: tuple[slice, ...], dtype: Any) -> npt.NDArray[Any]:
        return np.asarray(self.data[index], dtype=dtype)


def load_params(
    cfg: ModelConfig,
    folder: str | Path,
    mesh: Mesh,
    dtype: str,
    progress: Callable[[str], None] = lambda _: None,
    *,
    base_weights: Literal["full", "int8"] = "full",
) -> Params:
    """The model in `folder` as `dtype` on `mesh`; UserError names a tensor that is missing or of another shape.

    `progress` is told now and then what is being loaded, e.g. "loading weights 3/12". With base_weights "int8" the
    layers' matrices are rounded (`quantized`), all but the embedding and the unembedding, whose errors logprobs show.
    """
    _check_expert_axis(cfg, folder, mesh)
    tensors = _open(Path(folder))
    kind = jnp.dtype(dtype)
    sizes = projection_sizes(cfg)
    stacked = {name: _layer_tensor(name) for name in (*ATTENTION, *MLP)}
    vectors = _layer_vectors(cfg)
    total, done = len(stacked) + len(vectors) + (4 if cfg.experts else 3), 0

    def check(name: str, shape: tuple[int, ...]) -> _Tensor:
        tensor = tensors.get(name)
        if tensor is None or tensor.data.shape != shape:
            found = "is missing" if tensor is None else f"has shape {tensor.data.shape}"
            raise UserError(f"base model {str(folder)!r}: tensor {name!r} {found}; config.json asks for shape {shape}")
        return tensor

    def told(weight: Loaded) -> Loaded:
        nonlocal done
        done += 1
        progress(f"loading weights {done}/{total}")
        return weight

    def plain(name: str, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
        tensor = check(name, shape)
        return told(from_callback(shape, sharding(mesh, shape, *axes), lambda index: tensor.read(index, kind)))

    def stack(
        shape: tuple[int, ...], axes: tuple[str | None, ...], read_layer: Callable[..., npt.NDArray[Any]]
    ) -> jax.Array:
        """[L, *shape] of read_layer(layer, *slices of shape)."""

        def read(index: tuple[slice, ...]) -> npt.NDArray[Any]:
            return np.stack([read_layer(layer, *index[1:]) for layer in range(cfg.layers)[index[0]]])

        whole = (cfg.layers, *shape)
        return from_callback(whole, sharding(mesh, whole, None, *axes), read)

    def layers_of(pattern: str, shape: tuple[int, ...]) -> list[_Tensor]:
        return [check(f"model.layers.{i}.{pattern}", shape) for i in range(cfg.layers)]

    def plain_part(tensor: _Tensor, o: slice, i: slice) -> npt.NDArray[Any]:
        return tensor.read((o, i), kind)

    def values_part(tensor: _Tensor, o: slice, i: slice) -> npt.NDArray[Any]:
        whole = tensor.read((o, slice(None)), np.float32)  # a scale is of all that a row holds
        return rounded(whole[:, i], scales(whole, kind))

    def scale_part(tensor: _Tensor, o: slice) -> npt.NDArray[Any]:
        return scales(tensor.read((o, slice(None)), np.float32), kind)

    def matrices(name: str, pattern: str) -> Weight:
        (fan_in, fan_out), axes = sizes[name], (FSDP, TENSOR) if name in _ROW_PARALLEL else (TENSOR, FSDP)
        if cfg.experts and name in MLP:
            by_expert = [layers_of(_expert_tensor(e, name), (fan_out, fan_in)) for e in range(cfg.experts)]

            def whole(part: Part, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> jax.Array:
                # Turned around: [in, out] is what grouped matmuls take.
                def read(layer: int, experts: slice, *where: slice) -> npt.NDArray[Any]:
                    return np.stack([part(each[layer], *where[::-1]).T for each in by_expert[experts]])

                return stack((cfg.experts, *shape[::-1]), (EXPERT, *axes[::-1]), read)

        else:
            each = layers_of(pattern, (fan_out, fan_in))

            def whole(part: Part, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> jax.Array:
                return stack(shape, axes, lambda layer, *where: part(each[layer], *where))

        if base_weights == "full":
            return whole(plain_part, (fan_out, fan_in), axes)
        return Int8(whole(values_part, (fan_out, fan_in), axes), whole(scale_part, (fan_out,), axes[:1]))

    def vector(pattern: str, size: int, axis: str | None) -> jax.Array:
        each = layers_of(pattern, (size,))
        return stack((size,), (axis,), lambda layer, part: each[layer].read((part,), kind))

    layers = {name: told(matrices(name, pattern)) for name, pattern in stacked.items()}
    layers |= {name: told(vector(*described)) for name, described in vectors.items()}
    if cfg.experts:
        routers = layers_of("mlp.gate.weight", (cfg.experts, cfg.hidden))
        shape = (cfg.experts, cfg.hidden)
        layers["router"] = told(stack(shape, (None, None), lambda layer, o, i: plain_part(routers[layer], o, i)))
    return Params(
        embed_VD=plain("model.embed_tokens.weight", (cfg.vocab, cfg.hidden), TENSOR, FSDP),
        layers=layers,
        final_norm_D=plain("model.norm.weight", (cfg.hidden,), None),
        unembed_VD=None if cfg.tied else plain("lm_head.weight", (cfg.vocab, cfg.hidden), TENSOR, FSDP),
    )


def by_layer(params: Params) -> Params:
    """The same weights with an array for each layer. On CPU devices these are views of the stacked ones: no copies.

    XLA:CPU copies a layer out of the stack before it multiplies by it, which is most of the time of a decode step
    (81.8M parameters, one row: 98 ms against 35). Other platforms read it in place, and want the shorter program.
    Int8 matrices stay in their stack: of layers written out, XLA:CPU makes the floats of all before it decodes, and
    holds them through the chunk (of a model with 3.15 MB of matrices 3.3 MB, against 0.9 for a loop over the layers).
    """
    if not on_cpu() or isinstance(params.layers, tuple) or isinstance(params.layers["q"], Int8):
        return params
    stacked = params.layers

    def one(array: jax.Array, layer: int) -> jax.Array:
        where = array.sharding
        assert isinstance(where, NamedSharding)
        parts = [
            jax.device_put(np.asarray(shard.data)[layer], shard.device, may_alias=True)
            for shard in array.addressable_shards
        ]
        inner = NamedSharding(where.mesh, PartitionSpec(*where.spec[1:]))
        return jax.make_array_from_single_device_arrays(array.shape[1:], inner, parts)

    number = stacked["attn_norm"].shape[0]
    layers = tuple({name: one(array, layer) for name, array in stacked.items()} for layer in range(number))
    return replace(params, layers=layers)


def count(params: Params) -> int:
    """The number of base parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Int8)))


def _layer_tensor(name: str) -> str:
    return f"self_attn.{name}_proj.weight" if name in ATTENTION else f"mlp.{name}_proj.weight"


def _expert_tensor(expert: int, name: str) -> str:
    return f"mlp.experts.{expert}.{name}_proj.weight"


def _check_expert_axis(cfg: ModelConfig, folder: str | Path, mesh: Mesh) -> None:
    size = mesh.shape[EXPERT]
    if size > 1 and (not cfg.experts or cfg.experts % size):
        raise UserError(
            f"base model {str(folder)!r}: {cfg.experts} experts, expert_parallel {size}; it must divide their number"
        )


def _layer_vectors(cfg: ModelConfig) -> dict[str, tuple[str, int, str | None]]:
    """Norms and biases of a layer by our name: Hugging Face's, the size, and the mesh axis that splits it."""
    found: dict[str, tuple[str, int, str | None]] = {
        "attn_norm": ("input_layernorm.weight", cfg.hidden, None),
        "mlp_norm": ("post_attention_layernorm.weight", cfg.hidden, None),
    }
    if cfg.qk_norm:
        found |= {f"{name}_norm": (f"self_attn.{name}_norm.weight", cfg.head_dim, None) for name in "qk"}
    if cfg.qkv_bias:
        sizes = projection_sizes(cfg)
        found |= {f"{name}_bias": (f"self_attn.{name}_proj.bias", sizes[name][1], TENSOR) for name in "qkv"}
    return found


def _open(folder: Path) -> dict[str, _Tensor]:
    """Every tensor of the folder by name: from model.safetensors.index.json, or from model.safetensors."""
    index = folder / "model.safetensors.index.json"
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []
        tensors: dict[str, _Tensor] = {}
        for name in names or ["model.safetensors"]:
            tensors |= _open_file(folder / name)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"base model {str(folder)!r}: its safetensors cannot be read ({error!r})") from error
    return tensors


def _open_file(path: Path) -> dict[str, _Tensor]:
    # The format is a length, a JSON header and raw bytes. A memory map of it, unlike the safetensors package with
    # NumPy, reads any slice of a bfloat16 tensor without going through torch.
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
    return {name: _view(path, name, entry, data) for name, entry in header.items()}


def _view(path: Path, name: str, entry: dict[str, Any], data: npt.NDArray[np.uint8]) -> _Tensor:
    if entry["dtype"] not in _DTYPES:
        raise UserError(f"{path}: tensor {name!r} is {entry['dtype']}; supported: {', '.join(_DTYPES)}")
    begin, end = entry["data_offsets"]
    return _Tensor(data[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"]))
