"""Kernels of a program for NVIDIA GPUs: their blocks from XLA's dump, and their registers and spills from `ptxas`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.accelerators.hlo_text import PALLAS, Work, seconds

from tinkerflow.backend.compute.planning.topologies import Device

_THUNK = re.compile(
    r"^\s*(\d+): kCustomKernel.*\] (\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]"
    r"\s+shared_memory: (\d+)",
    re.M,
)
_NAMED = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
_REGISTERS, _BLOCKS, _WARP, _AT_ONCE = 65536, 32, 32, 256  # limits of a multiprocessor; _AT_ONCE: unit of allocation
_OWN_SHARED = 1024  # bytes of shared memory that CUDA reserves in each block
_LAUNCH = 2e-6  # seconds of the shortest launch


@dataclass(frozen=True)
class Launch:
    """An operation's launch of its kernel. shared: bytes of shared memory of a block."""

    kernel: str
    blocks: int
    threads: int
    shared: int


@dataclass(frozen=True)
class Assembled:
    """The machine code of a kernel. registers: per thread. spilled: bytes that a thread stores for lack of registers.

    serialized: whether its matmuls wait for each other, because `ptxas` could not keep them asynchronous.
    """

    registers: int
    spilled: int
    serialized: bool


@dataclass(frozen=True)
class Multiprocessors:
    """The multiprocessors of a GPU: their number, and the threads and the bytes of shared memory of each."""

    count: int
    threads: int
    shared: int


@dataclass(frozen=True)
class Kernel:
    """A kernel of a program: the worst figures over all its launches and its variants for other shapes.

    blocks: per launch. resident: blocks that run on a multiprocessor at the same time. idle: the microseconds of the
    slowest launch that leaves multiprocessors idle, if the other launches run at their peaks; 0 if the launch ends
    before a next one could start.
    """

    blocks: int
    resident: int
    registers: int
    shared: int
    spilled: int
    serialized: bool
    idle: float


def launches(folder: Path) -> dict[str, dict[str, Any]]:
    """The launch of each operation in XLA's dump, as the fields of a `Launch`."""
    (sequence,), (metadata,) = folder.glob("*.thunk_sequence.txt"), folder.glob("*.thunk_metadata.txt")
    operations = {number: name for name, number in _NAMED.findall(metadata.read_text())}
    found = {}
    for number, kernel, *sizes in _THUNK.findall(sequence.read_text()):
        x, y, z, *threads, shared = map(int, sizes)
        launch = Launch(kernel, x * y * z, threads[0] * threads[1] * threads[2], shared)
        found[operations[str(int(number))]] = asdict(launch)
    return found


def assembled(folder: Path, ptxas: Path) -> dict[str, dict[str, Any]]:
    """The report of `ptxas` on each kernel whose PTX is in XLA's dump, as the fields of an `Assembled`."""
    found: dict[str, dict[str, Any]] = {}
    for path in folder.glob("*.ptx"):
        if target := re.search(r"^\.target (\w+)", path.read_text(), re.M):
            command = [ptxas, "-v", f"-arch={target[1]}", "-o", "/dev/null", path]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found |= reported(done.stderr + done.stdout)
    return found


def reported(text: str) -> dict[str, dict[str, Any]]:
    """The fields of an `Assembled` for each kernel in the output of `ptxas -v`."""
    serialized = set(re.findall(r"instructions are serialized.* in (?:the )?function '([^']+)'", text))
    found = {}
    for part in text.split("Compiling entry function ")[1:]:
        name, registers, spilled = (
            re.search(pattern, part) for pattern in (r"'([^']+)'", r"Used (\d+) registers", r"(\d+) bytes spill stores")
        )
        if name and registers and spilled:
            found[name[1]] = asdict(Assembled(int(registers[1]), int(spilled[1]), name[1] in serialized))
    return found


def kernels(
    work: Iterable[Work],
    device: Device,
    each: Multiprocessors,
    launched: Mapping[str, Mapping[str, Any]],
    code: Mapping[str, Mapping[str, Any]],
) -> dict[str, Kernel]:
    """Our kernels, which are XLA's custom calls, and faulty kernels of XLA, by name.

    device: the program's device. each: its multiprocessors. launched, code: from `launches` and `assembled`.
    Outside of the loop over layers, XLA's kernels may have few blocks, for example to choose a token for each row.
    KeyError: `launched` lacks the operation of a Pallas kernel, or `code` lacks a kernel: a dump's format has changed.
    """
    found: dict[str, list[Kernel]] = {}
    operations = [one for one in work if one.operation in launched or one.name.endswith(PALLAS)]
    most = max((one.times for one in operations), default=0)
    for one in operations:
        launch = Launch(**launched[one.operation])
        kernel = _kernel(one, device, each, launch, Assembled(**code[launch.kernel]))
        idle = kernel.idle and one.times == most
        if one.opcode == "custom-call" or kernel.spilled or kernel.serialized or idle:
            found.setdefault(re.sub(r"__\d+$", "", launch.kernel), []).append(kernel)
    return {name: _worst(variants) for name, variants in sorted(found.items())}


def _kernel(one: Work, device: Device, each: Multiprocessors, launch: Launch, code: Assembled) -> Kernel:
    warps = -(-launch.threads // _WARP)
    registers = warps * -(-code.registers * _WARP // _AT_ONCE) * _AT_ONCE
    shared = each.shared // (launch.shared + _OWN_SHARED)
    resident = min(_REGISTERS // registers, shared, each.threads // launch.threads, _BLOCKS)
    busy = seconds([one], device) / one.times * each.count / launch.blocks
    idle = busy * 1e6 if launch.blocks < each.count and busy > _LAUNCH else 0.0
    return Kernel(launch.blocks, resident, code.registers, launch.shared, code.spilled, code.serialized, round(idle, 2))


def _worst(variants: list[Kernel]) -> Kernel:
    return Kernel(
        min(one.blocks for one in variants),
        min(one.resident for one in variants),
        max(one.registers for one in variants),
        max(one.shared for one in variants),
        max(one.spilled for one in variants),
        any(one.serialized for one in variants),
        max(one.idle for one in variants),
    )
