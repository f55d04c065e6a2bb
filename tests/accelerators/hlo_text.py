"""Counts flops, bytes of device memory and collectives of a compiled program, from the text of its optimized HLO.

XLA's own `cost_analysis()` counts the body of a loop once on TPUs and returns nothing on GPUs. This module counts every
iteration of a loop, in the same way for both. Its assumptions:
- only matmuls, convolutions, and Pallas kernels that are known or state their cost have flops, not elementwise work.
- an operation outside of a fusion reads its operands from device memory and writes its result to it, once. If it only
  slices an operand, it reads the slice. An update in place writes the update.
- attention over pages reads every page of its tables with every query, or only the pages of its window (not on TPUs).
- on TPUs, arrays in on-chip memory (`S(1)` and above in their layout) cost nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from tests.accelerators.hlo_kernels import KERNELS, LOGITS, READ, Shape

from tinkerflow.backend.compute.planning.topologies import Device

Known = TypeVar("Known")

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-~]+) \(.*\) -> .* \{")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-~]+) = ")
_NAME = re.compile(r"%([\w.\-~]+)")
_LINES_OF_A_KERNEL = re.compile(r"(kernel_metadata=\{)\n(.*)\n(\}\})")  # the only text of an operation with line breaks
_MOVE_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain", "opt-barrier")
_NUMBERS = ("partition-id", "replica-id", "add-dependency")
_COUNTED_AT_START = ("async-done", "async-update", "copy-done", "slice-done", "dynamic-slice-done", "all-gather-done")
_AND_THESE = ("all-reduce-done", "collective-permute-done", "send-done", "recv-done")
_FREE = frozenset((*_MOVE_NOTHING, *_NUMBERS, *_COUNTED_AT_START, *_AND_THESE))
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_NO_WORK = frozenset(
    ("AllocateBuffer", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AssumeGatherIndicesInBound")
)
PALLAS = "/pallas_call"  # the end of the paths of Pallas kernels
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # with the index of the update among the operands


@dataclass(frozen=True)
class Work:
    """The work of one operation in the whole program. times: how often it runs. flops, bytes: sums over all runs.

    name: JAX's name for the operation in our code. matmuls: their shapes, with the flops of all runs. operation: its
    name in the text.
    """

    name: str
    opcode: str
    times: int
    flops: int
    bytes: int
    matmuls: tuple[tuple[str, int], ...] = ()
    operation: str = ""


@dataclass(frozen=True)
class Collective:
    """A transfer between devices. bytes: size of its result on one device, for one run. times: how often it runs."""

    kind: str
    name: str
    shape: str
    bytes: int
    times: int


@dataclass(frozen=True)
class Loop:
    """A loop. trips: its iterations, or None if the compiler does not know them. depth: the loops around it."""

    name: str
    trips: int | None
    depth: int


@dataclass
class Counts:
    """The counts of a program on one device."""

    work: list[Work] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    branches: list[str] = field(default_factory=list)  # names of conditionals
    collectives: list[Collective] = field(default_factory=list)
    arrays: dict[str, Shape] = field(default_factory=dict)  # results of operations, by their name and shape
    kernels: dict[str, int] = field(default_factory=dict)  # calls that state no flops, by the path of a Pallas kernel
    longest_sort: int = 0  # elements of the longest list that is sorted

    @property
    def flops(self) -> int:
        """Flops of all operations."""
        return sum(work.flops for work in self.work)

    @property
    def bytes(self) -> int:
        """Bytes that are read from and written to device memory."""
        return sum(work.bytes for work in self.work)

    def largest(self, dtype: str | None = None, count: int | None = 5) -> list[Shape]:
        """The largest distinct results. dtype: only results of this dtype. count: None = all."""
        found = {shape for shape in self.arrays.values() if dtype in (None, shape.dtype)}
        return sorted(found, key=lambda shape: -shape.nbytes)[:count]

    def matmuls(self) -> dict[str, int]:
        """Flops by the shapes of matmuls, largest first."""
        found: dict[str, int] = {}
        for work in self.work:
            for shape, flops in work.matmuls:
                found[shape] = found.get(shape, 0) + flops
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def seconds(work: Iterable[Work], device: Device) -> float:
    """The time of operations that run one after the other, each limited by the peak of flops or of bandwidth.

    This is a lower bound: no kernel reaches either peak, and launches and transfers between devices are not counted
    (Williams, Waterman and Patterson, "Roofline", 2009).
    """
    return sum(max(_computing(each, device), each.bytes / device.bandwidth) for each in work)


def _computing(work: Work, device: Device) -> float:
    wide = sum(flops for shapes, flops in work.matmuls if shapes.startswith("f32")) if device.float32_flops else 0
    return (work.flops - wide) / device.flops + (wide and wide / device.float32_flops)


def count(text: str, on_chip_spaces: bool, unknown_trips: int = 1) -> Counts:
    """Count the program in `text`, which is `compiled.as_text()`.

    on_chip_spaces: whether memory spaces other than 0 are on the chip (TPU). unknown_trips: the assumed iterations of a
    loop with an unknown trip count.
    """
    program = _parse(text)
    counts = _Counter(program, on_chip_spaces, unknown_trips).run()
    sorts = (op for ops in program.computations.values() for op in ops.values() if op.opcode == "sort")
    counts.longest_sort = max((op.shapes[0].dims[op.dims("dimensions")[0]] for op in sorts), default=0)
    return counts


@dataclass(frozen=True)
class _Op:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of its result; several in a tuple
    operands: tuple[str, ...]
    inner: str  # the text between the parentheses, for constants and parameters
    attributes: str
    root: bool

    def attribute(self, name: str) -> str | None:
        found = re.search(rf"\b{name}=%?([\w.\-~]+)", self.attributes)
        return found[1] if found else None

    def dims(self, name: str) -> tuple[int, ...]:
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        return _numbers(found[1]) if found else ()

    @cached_property
    def backend(self) -> dict[str, Any]:
        place = self.attributes.find("backend_config=")
        if place < 0:
            return {}
        try:
            value, _ = json.JSONDecoder().raw_decode(self.attributes, place + len("backend_config="))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def called(self) -> str | None:
        """The computation that a custom call executes, such as a gather on a TPU's SparseCore, or None."""
        found = re.search(r"\bcalled_computations=\{%?([\w.\-~]+)\}", self.attributes)
        return found[1] if found else None

    @property
    def cost(self) -> dict[str, Any]:
        found: dict[str, Any] = self.backend.get("custom_call_config", {}).get("cost_estimate") or {}
        return found

    @property
    def target(self) -> str:
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def aliased(self) -> dict[str, int]:
        """The operand that each aliased result overwrites, by the result's index; "" = the whole result."""
        found = re.search(r"output_to_operand_aliasing=\{(.*?)\)\}", self.attributes)
        pairs = re.findall(r"\{(\d*)\}: \((\d+)", found[0]) if found else []
        return {place: int(operand) for place, operand in pairs}

    @property
    def own_results(self) -> list[Shape]:
        """The results that overwrite no operand."""
        aliased = self.aliased
        return [shape for place, shape in enumerate(self.shapes) if str(place) not in aliased and "" not in aliased]

    @property
    def label(self) -> str:
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else self.name


_Computation = dict[str, _Op]


@dataclass(frozen=True)
class _Program:
    entry: str
    computations: dict[str, _Computation]


def _parse(text: str) -> _Program:
    computations: dict[str, _Computation] = {}
    entry, current = "", None
    for line in _LINES_OF_A_KERNEL.sub(r"\1\2\3", text).splitlines():
        if current is None:
            if head := _HEAD.match(line):
                current = computations[head[1]] = {}
                entry = head[1] if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            current = None
        elif op := _parse_op(line):
            current[op.name] = op
    if not entry:
        raise ValueError("the text has no ENTRY computation, so it is not HLO")
    return _Program(entry, computations)


def _parse_op(line: str) -> _Op | None:
    start = _LINE.match(line)
    if not start:
        return None
    end = _closing(line, start.end()) if line[start.end()] == "(" else line.index(" ", start.end())
    shapes = tuple(
        Shape(dtype, _numbers(dims), int((re.search(r"S\((\d+)\)", layout or "") or [0, 0])[1]))
        for dtype, dims, layout in _ARRAY.findall(line[start.end() : end])
    )
    rest = line[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inner = rest[opening + 1 : closing - 1]
    return _Op(
        start[2], rest[:opening], shapes, tuple(_NAME.findall(inner)), inner, rest[closing:], start[1] is not None
    )


def _closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        if text[place] == "(":
            depth += 1
        elif text[place] == ")":
            depth -= 1
            if depth == 0:
                return place + 1
    raise ValueError(f"no closing parenthesis in {text[start : start + 80]!r}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


class _Counter:
    def __init__(self, program: _Program, on_chip_spaces: bool, unknown_trips: int) -> None:
        self._program, self._on_chip, self._unknown = program, on_chip_spaces, unknown_trips
        self._counts = Counts()

    def run(self) -> Counts:
        self._computation(self._program.entry, 1, 0)
        return self._counts

    def _computation(self, name: str, times: int, depth: int) -> None:
        computation = self._program.computations[name]
        for op in computation.values():
            self._operation(computation, op, times, depth)

    def _operation(self, computation: _Computation, op: _Op, times: int, depth: int) -> None:
        kind = op.opcode
        if kind == "while":
            trips = self._trips(computation, op)
            self._counts.loops.append(Loop(op.label, trips, depth))
            turns = times * (self._unknown if trips is None else trips)
            self._computation(_required(op, "body"), turns, depth + 1)
            return
        if kind == "conditional":
            self._branch(op, times, depth)
            return
        if kind in ("call", "async-start"):
            self._computation(op.attribute("to_apply") or _required(op, "calls"), times, depth)
            return
        if kind == "custom-call" and (called := op.called):
            self._computation(called, times, depth)
            return
        if kind in _FREE:
            return
        for shape in op.shapes:
            if not self._free(shape):
                self._counts.arrays.setdefault(f"{op.label} {shape}", shape)
        base = kind.removesuffix("-start")
        if base in _COLLECTIVES:
            result = op.shapes[-1] if kind == "all-gather-start" else max(op.shapes, key=lambda shape: shape.nbytes)
            self._counts.collectives.append(Collective(base, op.label, str(result), result.nbytes, times))
        matmuls, moved = [*self._matmuls(computation, op)], self._bytes(computation, op)
        flops = sum(flops for _, flops in matmuls) + self._stated(computation, op, times)
        if flops or moved:
            each = tuple((shape, one * times) for shape, one in matmuls)
            self._counts.work.append(Work(op.label, kind, times, flops * times, moved * times, each, op.name))

    def _branch(self, op: _Op, times: int, depth: int) -> None:
        """Count the branch of a conditional that moves the most bytes."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", op.attributes)
        both = ("true_computation", "false_computation")
        names = _NAME.findall(listed[1]) if listed else [_required(op, name) for name in both]
        counted: list[Counts] = []
        for name in names:
            branch = _Counter(self._program, self._on_chip, self._unknown)
            branch._computation(name, times, depth)
            counted.append(branch._counts)
        most = max(counted, key=lambda counts: (counts.bytes, counts.flops))
        mine = self._counts
        mine.branches += [op.label, *(name for counts in counted for name in counts.branches)]
        mine.work += most.work
        mine.loops += [loop for counts in counted for loop in counts.loops]
        mine.collectives += [collective for counts in counted for collective in counts.collectives]
        for counts in counted:
            mine.arrays |= counts.arrays
            mine.kernels |= counts.kernels

    # Trip counts of loops

    def _trips(self, computation: _Computation, op: _Op) -> int | None:
        of_loop = op.backend.get("while_loop_backend_config", {})
        if known := op.backend.get("known_trip_count") or of_loop.get("known_trip_count"):
            return int(known["n"])
        if not self._on_chip:  # XLA:GPU states the trip counts that it knows
            return None
        condition = self._program.computations[_required(op, "condition")]
        compare = _root(condition)
        if compare.opcode != "compare" or compare.attribute("direction") != "LT":
            return None
        state = computation[op.operands[0]]
        index, limit = (self._in_condition(condition, state, computation, name) for name in compare.operands)
        return None if index is None or limit is None else max(0, limit - index)

    def _in_condition(self, condition: _Computation, state: _Op, outside: _Computation, name: str) -> int | None:
        """The value of the integer `name` in a loop's condition before the first iteration."""
        op = condition[name]
        if op.opcode == "get-tuple-element" and state.opcode == "tuple":
            return _integer(outside, state.operands[int(op.attribute("index") or 0)])
        return _integer(condition, name)

    # Bytes

    def _free(self, shape: Shape) -> bool:
        return self._on_chip and shape.space > 0

    def _moved(self, shape: Shape) -> int:
        return 0 if self._free(shape) else shape.nbytes

    def _all(self, op: _Op) -> int:
        return sum(map(self._moved, op.shapes))

    def _bytes(self, computation: _Computation, op: _Op) -> int:
        kind, operands = op.opcode, [computation[name] for name in op.operands if name in computation]
        if kind == "fusion":
            return self._fusion_bytes(operands, op)
        if kind in _SLICES:
            return self._all(op) + min(self._all(op), self._all(operands[0]))
        if kind == "dynamic-update-slice":
            return 2 * self._all(operands[1])
        if kind == "scatter":
            return sum(self._all(operand) for operand in operands[1:]) + self._all(operands[-1])
        if kind in ("copy-start", "slice-start", "dynamic-slice-start"):
            into, source, *_ = op.shapes
            return self._moved(into) + min(self._moved(source) or into.nbytes, into.nbytes)
        if kind.endswith("-start"):
            return self._all(op)
        if kind == "custom-call" and op.target in _NO_WORK:
            return 0
        if kind == "custom-call" and _known(LOGITS, op) and (cost := op.cost):
            return int(cost["bytes_accessed"])
        if kind == "custom-call" and (read := _known(READ, op)):
            return read([each.shapes[0] for each in operands], op.label) + sum(map(self._moved, op.own_results))
        return self._all(op) + sum(map(self._all, operands))

    def _fusion_bytes(self, operands: list[_Op], op: _Op) -> int:
        inner = self._program.computations[_required(op, "calls")]
        parameters = _parameters(inner)
        read = 0
        for place, operand in enumerate(operands):
            if place in parameters and not all(map(self._free, operand.shapes)):
                read += self._read(inner, parameters[place])
        return read + self._written(inner, op)

    def _read(self, inner: _Computation, value: _Op) -> int:
        """Bytes of `value` that the fused computation reads, at most its size."""
        whole, total = sum(shape.nbytes for shape in value.shapes), 0
        if value.root:
            return whole
        for user in inner.values():
            if value.name not in user.operands:
                continue
            if user.opcode in ("bitcast", "get-tuple-element"):
                total += self._read(inner, user)
            elif user.opcode in _SLICES and user.operands[0] == value.name:
                total += sum(shape.nbytes for shape in user.shapes)
            elif user.opcode in _IN_PLACE and user.operands[0] == value.name:
                continue
            elif user.opcode == "fusion":
                nested = self._program.computations[_required(user, "calls")]
                parameters = _parameters(nested)
                for place, name in enumerate(user.operands):
                    if name == value.name:
                        handed_on = user.aliased.get("") == place or _source(nested) is parameters[place]
                        total += self._read(inner, user) if handed_on else self._read(nested, parameters[place])
            else:
                return whole
        return min(whole, total)

    def _written(self, inner: _Computation, op: _Op) -> int:
        root = _root(inner)
        results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
        if len(results) != len(op.shapes):
            return self._all(op)
        return sum(
            0 if self._free(shape) else min(shape.nbytes, self._update(inner, result))
            for shape, result in zip(op.shapes, results, strict=True)
        )

    def _update(self, inner: _Computation, result: _Op) -> int:
        """Bytes of the update if a fusion's result is an update in place, otherwise bytes of the whole result."""
        while result.opcode in ("bitcast", "copy") and result.operands:
            result = inner[result.operands[0]]
        if result.opcode in _IN_PLACE:
            return sum(shape.nbytes for shape in inner[result.operands[_IN_PLACE[result.opcode]]].shapes)
        if result.opcode == "fusion":
            nested = self._program.computations[_required(result, "calls")]
            return self._update(nested, _root(nested))
        return sum(shape.nbytes for shape in result.shapes)

    # Flops

    def _matmuls(self, computation: _Computation, op: _Op) -> Iterator[tuple[str, int]]:
        """The shapes and flops of an operation's matmuls, including those inside of a fusion."""
        if op.opcode == "fusion":
            inner = self._program.computations[_required(op, "calls")]
            for one in inner.values():
                yield from self._matmuls(inner, one)
            return
        operands = [computation[name] for name in op.operands[:2] if name in computation]
        if len(operands) < 2:
            return
        (left, *_), (right, *_) = operands[0].shapes, operands[1].shapes
        if op.opcode == "dot":
            contracted = op.dims("lhs_contracting_dims")
        elif op.opcode == "convolution":
            yield _named(left, right, op.shapes[0]), _convolution_flops(op, left, right)
            return
        elif op.opcode == "custom-call" and "gemm_backend_config" in op.backend:
            numbers = op.backend["gemm_backend_config"]["dot_dimension_numbers"]
            contracted = tuple(int(dim) for dim in numbers["lhs_contracting_dimensions"])
        elif op.opcode == "custom-call" and _known(LOGITS, op):
            yield _named(left, right, Shape("f32", (left.dims[0], right.dims[0]))), 2 * left.size * right.dims[0]
            return
        else:
            return
        yield _named(left, right, op.shapes[0]), 2 * op.shapes[0].size * math.prod(left.dims[dim] for dim in contracted)

    def _stated(self, computation: _Computation, op: _Op, times: int) -> int:
        """The flops of a kernel that states its cost or is known. Other kernels are added to `Counts.kernels`."""
        if op.opcode != "custom-call":
            return 0
        if op.target in _NO_WORK or "gemm_backend_config" in op.backend or _known(LOGITS, op):
            return 0
        if op.cost:
            return int(op.cost.get("flops", 0))
        if known := _known(KERNELS, op):
            return known([computation[name].shapes[0] for name in op.operands], op.shapes[0])
        name = op.label if op.label.endswith(PALLAS) else op.target
        self._counts.kernels[name] = self._counts.kernels.get(name, 0) + times
        return 0


def _known(kernels: dict[str, Known], op: _Op) -> Known | None:
    """The value of the first key that is a part of the name of the kernel that `op` calls."""
    return next((known for name, known in kernels.items() if name in f"{op.label} {op.name}"), None)


def _root(computation: _Computation) -> _Op:
    return next(op for op in computation.values() if op.root)


def _parameters(computation: _Computation) -> dict[int, _Op]:
    """A computation's parameters, by their index among the operands."""
    return {int(op.inner): op for op in computation.values() if op.opcode == "parameter"}


def _source(computation: _Computation) -> _Op:
    """The root of a computation, without bitcasts around it."""
    op = _root(computation)
    while op.opcode == "bitcast":
        op = computation[op.operands[0]]
    return op


def _required(op: _Op, name: str) -> str:
    found = op.attribute(name)
    if found is None:
        raise ValueError(f"operation {op.name} ({op.opcode}) has no {name}")
    return found


def _integer(computation: _Computation, name: str) -> int | None:
    op = computation[name]
    while op.opcode in ("copy", "bitcast", "convert") and op.operands:
        op = computation[op.operands[0]]
    return int(op.inner) if op.opcode == "constant" and re.fullmatch(r"-?\d+", op.inner) else None


def _named(left: Shape, right: Shape, result: Shape) -> str:
    return f"{left} x {right} -> {result}"


def _convolution_flops(op: _Op, left: Shape, right: Shape) -> int:
    """2 x summed products. TPUs compute every matmul as a convolution, in which batches become spatial dimensions."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    if not labels:
        raise ValueError(f"convolution {op.name} has no dim_labels")
    inputs, kernel, outputs = labels[1], labels[2], labels[3]
    window = re.search(r"window=\{([^}]*)\}", op.attributes)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    spatial = [label for label in kernel if label.isdigit()]
    valid = 1
    for label in spatial:
        place = int(label)

        def field_of(name: str, default: int, place: int = place) -> int:
            return int(fields[name].split("x")[place]) if name in fields else default

        pad = int(fields["pad"].split("x")[place].split("_")[0]) if "pad" in fields else 0
        valid *= _valid_positions(
            left.dims[inputs.index(label)],
            right.dims[kernel.index(label)],
            op.shapes[0].dims[outputs.index(label)],
            (field_of("stride", 1), pad, field_of("lhs_dilate", 1), field_of("rhs_dilate", 1)),
        )
    batch_groups = int(op.attribute("batch_group_count") or 1)
    products = right.dims[kernel.index("i")] * right.dims[kernel.index("o")]
    return 2 * products * left.dims[inputs.index("b")] // batch_groups * valid


def _valid_positions(size: int, kernel: int, outputs: int, geometry: tuple[int, int, int, int]) -> int:
    """In one dimension, pairs of output and kernel elements that meet an input element instead of padding or a gap."""
    stride, pad, input_dilation, kernel_dilation = geometry
    if kernel * outputs > 2**22:  # far more than a batch of heads or experts
        return kernel * outputs
    reach = (size - 1) * input_dilation
    met = 0
    for tap in range(kernel):
        offset = tap * kernel_dilation - pad
        for output in range(outputs):
            place = output * stride + offset
            met += 0 <= place <= reach and place % input_dilation == 0
    return met
