"""Compiles programs for TPUs and NVIDIA GPUs that this machine does not have, with their own compilers.

This needs `libtpu` or `jax[cuda13]` in addition to jax, but no driver and no device. One process compiles for one kind
of device, because the compilers' plugins are loaded once. Compiled programs cannot be run.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh
from tests.accelerators.gpu_kernels import Kernel, Multiprocessors, assembled, kernels, launches
from tests.accelerators.hlo_text import Counts, count, seconds
from tests.accelerators.triton_ir import short_offsets

from tinkerflow.backend.compute.mesh import over
from tinkerflow.backend.compute.planning.topologies import Topology, parse_topology
from tinkerflow.backend.compute.platforms import CUDA, TPU, compiling_for, environment
from tinkerflow.backend.core.errors import UserError

# XLA:GPU's description of a GPU (GpuTargetConfigProto). Figures: openxla/xla, xla/backends/gpu/target_config/specs.
_GPU = """
gpu_device_info {{
  cuda_compute_capability {{ {capability} }}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared_memory} shared_memory_per_core: {core_memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: {cache}
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {version}" name: "{name}"
  device_address_bits: 64 ecc_enabled: true
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True)
class _Gpu:
    """A GPU's multiprocessors. shared_memory: the most bytes of one block. units: per core, for float32."""

    name: str
    version: str
    capability: str
    cores: int
    threads: int
    units: int
    clock: float
    shared_memory: int
    cache: int


_HOPPER = ("9.0a", "major: 9 feature_extension: ACCELERATED_FEATURES", 132, 2048, 128, 1.98, 232448, 52428800)
_GPUS = {  # GPUs that have a description
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", "8.0", "major: 8", 108, 2048, 64, 1.41, 166912, 41943040),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", *_HOPPER),
    "h200": _Gpu("NVIDIA H200 141GB HBM3e", *_HOPPER),
    "t4": _Gpu("Tesla T4", "7.5", "major: 7 minor: 5", 40, 1024, 64, 1.59, 65536, 4194304),
    "l4": _Gpu("NVIDIA L4", "8.9", "major: 8 minor: 9", 58, 1536, 128, 2.04, 101376, 50331648),
}
_TRITON = "xla_gpu_enable_triton_gemm"  # a flag of XLA
_CORE_ONLY = 1024  # bytes of a multiprocessor's shared memory that no block can use
_TPU_TYPES = {"v5e": "v5litepod-{}", "v6e": "v6e-{}", "v5p": "v5p-{}"}  # by chips; a v5p counts its two cores per chip


@dataclass(frozen=True)
class Figures:
    """The compiler's figures of a program on each device, in bytes, and the counts of its text.

    arguments, outputs, temporaries: memory. aliased: the part of the outputs that overwrites donated arguments. took:
    seconds of the compilation. short_offsets: as in `triton_ir`, for NVIDIA GPUs. triton: the number of kernels that
    Triton compiles, ours and XLA's own. kernels: as in `gpu_kernels`.
    """

    target: Topology
    took: float
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    counts: Counts
    short_offsets: Mapping[str, list[str]]
    kernels: Mapping[str, Kernel]
    triton: int = 0

    @property
    def peak(self) -> int:
        """Bytes that a device needs to run the program."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def seconds(self) -> float:
        """The roofline's time of one run; see `hlo_text.seconds`."""
        return seconds(self.counts.work, self.target.device)

    def describe(self, most: int = 8) -> str:
        """The figures as lines of text, with at most `most` entries of each list."""
        counts, device = self.counts, self.target.device
        lines = [
            f"{self.target}: compiled in {self.took:.1f} s",
            f"  memory GB: arguments {_gb(self.arguments)}, outputs {_gb(self.outputs)} (aliased {_gb(self.aliased)}), "
            f"temporaries {_gb(self.temporaries)}, peak {_gb(self.peak)} of {_gb(device.memory)}",
            f"  {counts.flops / 1e12:.3f} TFLOP, {_gb(counts.bytes)} GB accessed, roofline {self.seconds * 1e3:.2f} ms",
        ]
        for dtype in ("f32", "bf16"):
            shapes = (f"{shape} {_gb(shape.nbytes)}" for shape in counts.largest(dtype, most))
            lines.append(f"  largest {dtype} GB: {'; '.join(shapes)}")
        lines += [f"  loop {loop.trips or 'UNKNOWN'} turns: {'  ' * loop.depth}{loop.name}" for loop in counts.loops]
        lines += [
            f"  {one.kind} {one.shape} {_gb(one.bytes)} GB x {one.times}: {one.name}" for one in counts.collectives
        ]
        lines += [f"  kernel without stated flops: {name} x {times}" for name, times in counts.kernels.items()]
        flops = max(counts.flops, 1)
        lines += [
            f"  {100 * part / flops:4.1f} % of flops: {shape}" for shape, part in list(counts.matmuls().items())[:most]
        ]
        lines += [f"  {name}: {kernel}" for name, kernel in self.kernels.items()]
        lines.append("  longest by roofline, ms (TFLOP, GB, times):")
        longest = sorted(counts.work, key=lambda work: -seconds([work], device))[:most]
        lines += [
            f"    {seconds([one], device) * 1e3:8.2f} ({one.flops / 1e12:.2f}, {_gb(one.bytes)}, {one.times}) "
            f"{one.opcode} {one.name}"
            for one in longest
        ]
        return "\n".join(lines)


@cache
def devices(target: str) -> tuple[jax.Device, ...]:
    """The target's devices, for compilation only. UserError: this installation has no compiler for them."""
    topology = parse_topology(target)
    name = topology.device.name
    os.environ.update(_environment(topology) | environment(topology.device.platform.name, os.environ, 1))
    jax.config.update("jax_platforms", "cpu")
    jax.devices()  # loads the plugins
    try:
        if topology.device.platform is TPU:
            shape = "x".join(map(str, topology.shape))
            host = {"chips_per_host_bounds": (1, 1, 1)} if topology.count == 1 else {}  # instead of 2 x 2 chips
            return tuple(topologies.get_topology_desc(f"{name}:{shape}", "tpu", **host).devices)
        if name not in _GPUS:
            raise UserError(f"topology {target!r}: device {name!r} cannot be compiled for; GPUs: {', '.join(_GPUS)}")
        hosts, each = (1, *topology.shape)[-2:]
        own, bandwidth = _GPUS[name], int(topology.device.bandwidth)
        core_memory = own.shared_memory + _CORE_ONLY
        text = _GPU.format(**vars(own), core_memory=core_memory, memory=topology.device.memory, bandwidth=bandwidth)
        found = topologies.get_topology_desc(platform="cuda", target_config=text, topology=f"1x{hosts}x{each}")
        return tuple(found.devices)
    except (RuntimeError, NotImplementedError) as error:
        need = "libtpu" if topology.device.platform is TPU else "jax[cuda13]"
        raise UserError(f"topology {target!r}: no compiler for it here; it needs {need} ({error})") from error


def mesh_for(target: str, *, tensor: int = 1, expert: int = 1) -> Mesh:
    """Our mesh over the devices of `target`. fsdp is the number of devices divided by tensor x expert."""
    found = devices(target)
    if len(found) % (tensor * expert):
        raise UserError(
            f"topology {target!r}: {len(found)} devices; tensor {tensor} x expert {expert} must divide them"
        )
    return over(found, len(found) // (tensor * expert), tensor, expert)


def compile_for(
    target: str,
    function: Any,
    *args: Any,
    unknown_trips: int = 1,
    save: str = "",
    cache: str = "",
    cublas: bool = False,
) -> Figures:
    """Compile a jitted function for `target`, and return the compiler's figures.

    function: from `jax.jit`. args: arrays or `jax.ShapeDtypeStruct`s with shardings on `mesh_for(target)`, and static
    arguments. unknown_trips: the assumed iterations of a loop with an unknown trip count. save: a file for the compiled
    text. cache: a folder of compiled programs, which are not compiled again. cublas: whether cuBLAS computes XLA's
    matmuls, as autotuning may choose on a GPU; by default, Triton computes them.
    """
    topology = parse_topology(target)
    devices(target)
    with compiling_for(topology.device.platform):
        lowered = function.lower(*args)
    compiled = _compiled(lowered, target, Path(cache) if cache else None, {_TRITON: False} if cublas else {})
    if save:
        Path(save).write_text(compiled.text)
    on_chip = topology.device.platform is TPU
    counts = count(compiled.text, on_chip, unknown_trips)
    short = {} if on_chip else short_offsets(lowered)
    triton = len(re.findall(r"(?:__|xla\.gpu\.)triton", compiled.text))
    found: Mapping[str, Kernel] = {}
    if not on_chip:
        gpu = _GPUS[topology.device.name]
        each = Multiprocessors(gpu.cores, gpu.threads, gpu.shared_memory + _CORE_ONLY)
        found = kernels(counts.work, topology.device, each, compiled.launches, compiled.assembled)
    more = {"counts": counts, "short_offsets": short, "kernels": found, "triton": triton}
    return Figures(topology, compiled.took, **compiled.memory, **more)


@dataclass(frozen=True)
class _Compiled:
    took: float
    memory: dict[str, int]  # see `Figures`
    text: str
    launches: dict[str, Any] = field(default_factory=dict)  # this and the next as in `gpu_kernels`, for NVIDIA GPUs
    assembled: dict[str, Any] = field(default_factory=dict)


def _compiled(lowered: Any, target: str, cache: Path | None, options: dict[str, bool]) -> _Compiled:
    if cache is None:
        return _compile(lowered, target, options)
    flags = [os.environ.get(platform.flags_variable) for platform in (CUDA, TPU)]
    on_tpu = parse_topology(target).device.platform is TPU
    form = [version("libtpu")] if on_tpu else [one.name for one in fields(_Compiled)]
    made_of = (lowered.as_text(), target, jax.__version__, flags, *options, *form)
    place = cache / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()}.json.gz"
    if place.exists():
        return _Compiled(**json.loads(gzip.decompress(place.read_bytes())))
    compiled = _compile(lowered, target, options)
    place.parent.mkdir(parents=True, exist_ok=True)
    written = place.with_suffix(f".{os.getpid()}")
    written.write_bytes(gzip.compress(json.dumps(asdict(compiled)).encode()))
    written.replace(place)
    return compiled


def _compile(lowered: Any, target: str, options: dict[str, bool]) -> _Compiled:
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        on_tpu = parse_topology(target).device.platform is TPU
        compiled = lowered.compile(compiler_options=dump | options)
        took, memory = time.monotonic() - began, compiled.memory_analysis()
        starts: dict[str, Any] = {}
        code: dict[str, Any] = {}
        if on_tpu:  # jaxlib cannot read every program of a newer libtpu, for example one with async updates
            (text,) = [path.read_text() for path in Path(folder).glob("*.after_optimizations.txt")]
        else:
            text = compiled.as_text()
            starts, code = launches(Path(folder)), assembled(Path(folder), _ptxas())
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }
    return _Compiled(took, sizes, text, starts, code)


def _ptxas() -> Path:
    """The assembler that comes with the compiler for NVIDIA GPUs."""
    (packages,) = import_module("nvidia").__path__
    return next(Path(packages).glob("*/bin/ptxas"))


def _environment(topology: Topology) -> dict[str, str]:
    if topology.device.platform is TPU:
        number = topology.count * (2 if topology.device.name == "v5p" else 1)
        return {
            "TPU_SKIP_MDS_QUERY": "1",  # do not query a cloud machine's metadata
            "TPU_ACCELERATOR_TYPE": _TPU_TYPES[topology.device.name].format(number),
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
    return {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "CUDA_VISIBLE_DEVICES": "-1"}


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g}"
