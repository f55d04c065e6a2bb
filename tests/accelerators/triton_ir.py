"""Reads the width of Triton kernels' offsets from a lowered program. It needs no compiler and no device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.triton import dialect
from tests.accelerators.hlo_kernels import Shape

_REACH = 2**31  # elements that 32-bit offsets reach
_TARGET = "__gpu$xla.gpu.triton"
_SAME_POINTER = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.addptr")


def short_offsets(lowered: Any) -> dict[str, list[str]]:
    """The arrays of each Triton kernel, by its name, that have more elements than its offsets reach.

    lowered: from `jax.jit(...).lower`, for NVIDIA GPUs.
    """
    found: dict[str, list[str]] = {}
    for call in _operations(lowered.compiler_ir("stablehlo").operation):
        if call.name != "stablehlo.custom_call" or ir.StringAttr(call.attributes["call_target_name"]).value != _TARGET:
            continue
        config = ir.DictAttr(call.attributes["mhlo.backend_config"])
        short = found.setdefault(ir.StringAttr(config["name"]).value, [])
        arrays = [_shape(value.type) for value in (*call.operands, *call.results)]
        for place in sorted(_short_arguments(ir.StringAttr(config["ir"]).value_bytes)):
            if arrays[place].size > _REACH and str(arrays[place]) not in short:
                short.append(str(arrays[place]))
    return found


def _short_arguments(bytecode: bytes) -> set[int]:
    """The indices of a kernel's arguments with offsets of less than 64 bits."""
    context = mlir.JaxIrContext()
    dialect.register_dialect(context)
    with context:
        module = ir.Module.parse(bytecode)
        added = [op for op in _operations(module.operation) if op.name == "tt.addptr"]
        return {_argument(op.operands[0]) for op in added if "i64" not in str(op.operands[1].type)}


def _argument(pointer: Any) -> int:
    if isinstance(pointer.owner, ir.Block):
        place, within = ir.BlockArgument(pointer).arg_number, pointer.owner.owner
        # A loop is given its pointers, and passes them on in their order.
        return _argument(within.operands[place]) if within.name == "scf.while" else int(place)
    if pointer.owner.name not in _SAME_POINTER:
        raise ValueError(f"a pointer comes from {pointer.owner.name}, which is none of {', '.join(_SAME_POINTER)}")
    return _argument(pointer.owner.operands[0])


def _operations(operation: Any) -> Iterator[Any]:
    """All operations inside an operation."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _shape(kind: Any) -> Shape:
    array = ir.RankedTensorType(kind)
    return Shape(str(array.element_type), tuple(array.shape))
