"""Loads base weights from the safetensors of a Hugging Face folder, stacked by layer, onto the mesh.

Each process reads only the parts of its own devices, so it never holds more of the model than they do. Threads read the
layers of a part, convert them, and write them to their final place, without a second copy.
Letters: D hidden, V vocabulary, L layers, E experts; i inputs and o outputs of a matrix.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count as counter
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tinkerflow.backend.compute.mesh import EXPERT, FSDP, TENSOR, WEIGHTS, expert_axes, from_callback, sharding
from tinkerflow.backend.compute.models.checkpoints import check_tensors
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import (
    family_of,
    layer_input_tensors,
    layer_tensors,
    layers_with,
    projections,
)
from tinkerflow.backend.compute.models.family import MXFP4, open_unpacked
from tinkerflow.backend.compute.models.layer_loop import LayerParams
from tinkerflow.backend.compute.models.layers.matrices import LayerTensor, Projection
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.models.vision_config import tower_tensors
from tinkerflow.backend.compute.platforms import on_cpu
from tinkerflow.backend.compute.weights import mxfp4
from tinkerflow.backend.compute.weights.files import DTYPES, MadeTensor, StoredTensor, Tensor
from tinkerflow.backend.compute.weights.quantized import (
    FourBit,
    Int8,
    Weight,
    block_of,
    block_scales,
    packed,
    rounded,
    scales,
)
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import BaseWeights

Loaded = TypeVar("Loaded", bound=Weight)
Array = npt.NDArray[Any]
Axis = str | tuple[str, ...] | None  # mesh axes that split a dimension
Part = Callable[..., None]  # (out, stored tensor or layer, slices...): write that part into `out`
_THREADS = 8  # or the number of processors, if smaller
_ROWS = 4096  # rows of a whole tensor that a thread copies at a time
_BLOCK = 32  # rows that a transposition copies at a time
_ALIGN = 64


def load_params(
    cfg: ModelConfig,
    folder: str | Path,
    mesh: Mesh,
    dtype: str,
    progress: Callable[[str], None] = lambda _: None,
    *,
    base_weights: BaseWeights = "full",
) -> Params:
    """Load the model in `folder` onto `mesh`. UserError: a tensor is missing, or has the wrong shape or dtype.

    cfg: parsed from the folder's `config.json`. folder: contains the safetensors files. mesh: how arrays are split over
    devices. dtype: the dtype on the devices, "float32" or "bfloat16". progress: called with a line of text after each
    tensor of all layers, e.g. "loading weights 3/12". base_weights: with "int8" and "nf4" the layers' matrices are
    rounded (`quantized`). The embedding and the unembedding are not rounded, because their errors show in logprobs.
    With "mxfp4" the experts' matrices stay as the files store them. UserError: the files do not contain MXFP4.
    """
    _check_expert_axis(cfg, folder, mesh)
    _check_mxfp4(cfg, folder, base_weights)
    stored = open_unpacked(family_of(cfg), cfg, Path(folder), str(folder))
    check_tensors(cfg, stored, str(folder))
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="weights") as threads:
        return _params(_Loader(cfg, mesh, jnp.dtype(dtype), stored, base_weights, threads), progress)


def params_like(cfg: ModelConfig, mesh: Mesh, dtype: str, *, base_weights: BaseWeights = "full") -> Params:
    """The shapes, dtypes and shardings of the weights that `load_params` returns for such a model."""
    _check_expert_axis(cfg, cfg.architecture, mesh)
    _check_mxfp4(cfg, cfg.architecture, base_weights)
    return _params(_Loader(cfg, mesh, jnp.dtype(dtype), None, base_weights))


def _params(load: _Loader, progress: Callable[[str], None] = lambda _: None) -> Params:
    cfg = load.cfg
    names, matrices = family_of(cfg).names, dict(projections(cfg))
    tensors, inputs = layer_tensors(cfg), layer_input_tensors(cfg)
    unembed = matrices.pop("unembed")
    vision = {} if cfg.vision is None else tower_tensors(cfg.vision, cfg.hidden)
    ends = 2 if cfg.tied else 3
    numbers, total = counter(1), ends + len(matrices) + len(tensors) + len(vision) + len(inputs)

    def reported(weight: Loaded) -> Loaded:
        progress(f"loading weights {next(numbers)}/{total}")
        return weight

    layers = {name: reported(load.matrices(matrix)) for name, matrix in matrices.items()}
    layers |= {name: reported(load.layer_tensors(tensor)) for name, tensor in tensors.items()}
    return Params(
        embed_VD=reported(load.whole(names.embed, (cfg.vocab, cfg.hidden), *load.axes(cfg.vocab))),
        layers=layers,
        final_norm_D=reported(load.whole(names.final_norm, (cfg.hidden,), None)),
        unembed_VD=None
        if cfg.tied
        else reported(load.whole(f"{unembed.module}.weight", (unembed.outputs, unembed.inputs), *load.axes(cfg.vocab))),
        tower={name: reported(load.layer_tensors(tensor)) for name, tensor in vision.items()} or None,
        inputs={
            name: reported(load.whole(*tensor, *(TENSOR, FSDP)[: len(tensor[1])])) for name, tensor in inputs.items()
        }
        or None,
        softcap=cfg.softcap,
    )


@dataclass(frozen=True)
class _Loader:
    """Reads tensors of one folder and puts them on the mesh.

    dtype: the dtype on the mesh. stored: the folder's tensors; None = make only shapes and shardings. threads: read and
    convert tensors; None = there is nothing to read.
    """

    cfg: ModelConfig
    mesh: Mesh
    dtype: np.dtype[Any]
    stored: Mapping[str, Tensor] | None
    base_weights: BaseWeights
    threads: ThreadPoolExecutor | None = None

    def whole(self, name: str, shape: tuple[int, ...], *axes: Axis) -> jax.Array:
        """One tensor of the checkpoint; `axes` split its dimensions."""
        tensor = self._tensor(name, shape)

        def fill(out: Array, rows: slice, *where: slice) -> None:
            numbers = range(shape[0])[rows]

            def some(first: int) -> None:
                part = out[first : first + _ROWS]
                _copy(part, tensor, slice(numbers[first], numbers[first] + len(part)), *where)

            self._all(some, range(0, len(out), _ROWS))

        return self._place(shape, axes, self.dtype, fill)

    def layer_tensors(self, tensor: LayerTensor) -> jax.Array:
        """A norm, a bias or a router of every layer, stacked [L, ...]."""
        numbers = range(self.cfg.layers) if tensor.layers is None else tensor.layers
        each = [self._tensor(tensor.tensor.format(number), tensor.shape) for number in numbers]
        axes = (TENSOR if tensor.split else None, *(None for _ in tensor.shape[1:]))
        shape = (len(each), *tensor.shape)
        dtype = np.dtype(np.float32) if tensor.wide else self.dtype
        return self._stack(shape, axes, dtype, lambda out, layer, *where: _copy(out, each[layer], *where))

    def matrices(self, matrix: Projection) -> Weight:
        """A matrix of every layer, stacked [L, o, i], or of every layer and expert, [L, E, i, o]."""
        shape = (matrix.outputs, matrix.inputs)
        experts = expert_axes(self.mesh, matrix.stack[1]) if matrix.of_experts else ()
        axes = self.axes(matrix.inputs if matrix.sums_inputs else matrix.outputs, experts)
        axes = axes[::-1] if matrix.sums_inputs else axes
        each = np.empty(matrix.stack, object)
        for place in () if self.stored is None else np.ndindex(matrix.stack):  # naming 10,000 experts takes a second
            each[place] = self._tensor(f"{matrix.name(place)}.weight", shape)

        def stacked(part: Part, shape: tuple[int, ...], axes: tuple[Axis, ...], dtype: Any) -> jax.Array:
            if len(matrix.stack) == 1:
                place = (len(each), *shape)
                return self._stack(place, axes, dtype, lambda out, layer, *where: part(out, each[layer], *where))

            # Grouped matmuls take [i, o], so an expert's matrix is transposed.
            def fill(out: Array, layer: int, experts: slice, *where: slice) -> None:
                for own, tensor in zip(out, each[layer, experts], strict=True):
                    part(own.T, tensor, *where[::-1])

            return self._stack((*matrix.stack, *shape[::-1]), (experts, *axes[::-1]), dtype, fill)

        if self.base_weights == "mxfp4" and matrix.of_experts:
            outputs, inputs = shape
            for tensor in each.flat if self.stored is not None else ():
                if not isinstance(tensor, MadeTensor) or tensor.packed is None:
                    rule = "'mxfp4' is for files that have experts in MXFP4"
                    raise UserError(f"base_weights is 'mxfp4': {matrix.module} is not in MXFP4 in the files; {rule}")
            numbers, exponents = partial(_stored_part, 0), partial(_stored_part, 1)
            halves = stacked(numbers, (outputs, inputs // 2), axes, np.uint8)
            return FourBit(halves, stacked(exponents, (outputs, inputs // mxfp4.BLOCK), axes, np.uint8), "mxfp4")
        if self.base_weights == "nf4":
            outputs, inputs, block = *shape, block_of(matrix.inputs)
            if inputs % 2:
                raise UserError(f"base_weights is 'nf4': {matrix.module} has {inputs} inputs; must be an even number")
            halves = stacked(partial(self._packed, block), (outputs, inputs // 2), axes, np.uint8)
            return FourBit(
                halves, stacked(partial(self._block_scales, block), (outputs, inputs // block), axes, self.dtype)
            )
        if self.base_weights == "int8":
            values = stacked(self._values, shape, axes, jnp.int8)
            return Int8(values, stacked(self._scales, shape[:1], axes[:1], self.dtype))
        return stacked(_copy, shape, axes, self.dtype)

    def axes(self, long: int, experts: tuple[str, ...] = ()) -> tuple[Any, Any]:
        """The mesh axes that split a matrix: WEIGHTS split the first dimension, if they divide its size `long`.

        Otherwise, one axis splits each dimension. Each device computes its part of the first dimension alone: in
        training along the tensor axis, in sampling along all of WEIGHTS (`mesh.sampling_mesh`). Training gathers the
        parts over fsdp. experts: the axes that split the experts, if each expert has its own matrix. If these axes
        include fsdp, only the tensor axis splits the matrix.
        """
        if FSDP in experts:
            return TENSOR, None
        devices = math.prod(self.mesh.shape[axis] for axis in WEIGHTS)
        return (TENSOR, FSDP) if long % devices else (WEIGHTS, None)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return StoredTensor(shape, "", np.empty(0, np.uint8)) if self.stored is None else self.stored[name]

    def _stack(self, shape: tuple[int, ...], axes: tuple[Axis, ...], dtype: Any, part: Part) -> jax.Array:
        """An array of `shape`, L first; part(out, layer, *slices) writes a device's part of a layer into `out`.

        axes: split the dimensions after L.
        """

        def fill(out: Array, layers: slice, *where: slice) -> None:
            numbers = range(shape[0])[layers]
            self._all(lambda place: part(out[place], numbers[place], *where), range(len(numbers)))

        return self._place(shape, (None, *axes), dtype, fill)

    def _all(self, do: Callable[[int], None], numbers: range) -> None:
        """Call `do` with each number, in threads: copies of large arrays do not hold the interpreter's lock."""
        assert self.threads is not None
        for _ in self.threads.map(do, numbers):
            pass

    def _place(self, shape: tuple[int, ...], axes: tuple[Axis, ...], dtype: Any, fill: Part) -> jax.Array:
        """An array of `shape`; fill(out, *slices of shape) writes each device's part into `out`."""
        where = sharding(self.mesh, shape, *axes)
        if self.stored is None:
            return cast(jax.Array, jax.ShapeDtypeStruct(shape, dtype, sharding=where))

        def read(index: tuple[slice, ...]) -> Array:
            out = _empty([len(range(size)[one]) for size, one in zip(shape, index, strict=True)], np.dtype(dtype))
            fill(out, *index)
            return out

        return from_callback(shape, where, read)

    def _values(self, out: Array, tensor: Tensor, o: slice, i: slice) -> None:
        whole = _floats(tensor, o)  # the scale of a row is that of the whole row
        out[...] = rounded(whole[:, i], scales(whole, self.dtype))

    def _scales(self, out: Array, tensor: Tensor, o: slice) -> None:
        out[...] = scales(_floats(tensor, o), self.dtype)

    def _packed(self, block: int, out: Array, tensor: Tensor, o: slice, pairs: slice) -> None:
        start, stop, _ = pairs.indices(tensor.shape[1] // 2)
        first = 2 * start // block * block  # a device's part may end inside a block
        rows = _floats(tensor, o, slice(first, -(-2 * stop // block) * block))
        out[...] = packed(rows, block, self.dtype)[:, start - first // 2 : stop - first // 2]

    def _block_scales(self, block: int, out: Array, tensor: Tensor, o: slice, blocks: slice) -> None:
        start, stop, _ = blocks.indices(tensor.shape[1] // block)
        out[...] = block_scales(_floats(tensor, o, slice(start * block, stop * block)), block, self.dtype)


def _stored_part(number: int, out: Array, tensor: MadeTensor, *where: slice) -> None:
    """Copy a part of the packed numbers (0) or the scales (1) of a matrix in MXFP4."""
    assert tensor.packed is not None
    out[...] = tensor.packed()[number][where]


def _floats(tensor: Tensor, *where: slice) -> Array:
    return np.asarray(tensor.view(DTYPES[tensor.dtype])[where], dtype=np.float32)


def _empty(shape: list[int], dtype: np.dtype[Any]) -> Array:
    """An array without values, aligned so that a CPU device uses this memory instead of a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + size].view(dtype).reshape(shape)


def _copy(out: Array, tensor: Tensor, *where: slice) -> None:
    """Copy a part of a stored tensor into `out`, in its dtype. Equal dtypes are copied as bits, which is faster."""
    source = tensor.view(DTYPES[tensor.dtype])[where]
    if out.flags.c_contiguous:
        _convert(out, source)
    else:  # transposed: in blocks that fit the processor's cache
        for row in range(0, len(out), _BLOCK):
            _convert(out[row : row + _BLOCK], source[row : row + _BLOCK])


def _convert(out: Array, source: Array) -> None:
    if source.dtype == out.dtype:
        bits = f"u{source.itemsize}"
        out.view(bits)[...] = source.view(bits)
    elif source.dtype == jnp.bfloat16 and out.dtype == np.float32:  # its first half
        np.left_shift(source.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = source


def by_layer(cfg: ModelConfig, params: Params) -> Params:
    """The same weights with separate arrays for each layer. On CPU devices they are views of the stacked arrays.

    XLA:CPU copies a layer out of the stack before it multiplies by it, which takes most of a decode step's time
    (81.8M parameters, one row: 98 ms against 35). Other platforms read the stack in place and prefer the shorter
    program of a loop. Quantized matrices stay stacked. In a program without a loop, XLA:CPU converts the matrices of
    all layers to floats before it decodes. It keeps the floats through the chunk: 3.3 MB for 3.15 MB of int8 matrices,
    against 0.9 MB in a loop.
    """
    if not on_cpu() or isinstance(params.layers, tuple) or _is_quantized(params.layers):
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

    places = [
        {name: numbers.index(layer) for name, numbers in layers_with(cfg).items() if layer in numbers}
        for layer in range(cfg.layers)
    ]
    layers = tuple({name: one(stacked[name], place) for name, place in layer.items()} for layer in places)
    return replace(params, layers=layers)


def count(params: Params) -> int:
    """The number of base parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Int8 | FourBit)))


def _is_quantized(layers: LayerParams) -> bool:
    return any(isinstance(weight, Int8 | FourBit) for weight in layers.values())


def _check_mxfp4(cfg: ModelConfig, folder: str | Path, base_weights: BaseWeights) -> None:
    if base_weights == "mxfp4" and MXFP4 not in family_of(cfg).quantizations:
        rule = "must be 'full', 'int8' or 'nf4' for models whose files have no MXFP4"
        raise UserError(f"base model {str(folder)!r}: base_weights is 'mxfp4'; {rule}")


def _check_expert_axis(cfg: ModelConfig, folder: str | Path, mesh: Mesh) -> None:
    size = mesh.shape[EXPERT]
    if size > 1 and (not cfg.experts or cfg.experts % size):
        raise UserError(
            f"base model {str(folder)!r}: {cfg.experts} experts, expert_parallel {size}; must divide their number"
        )
