"""Profiles of the platforms: CPUs, NVIDIA GPUs (also with little shared memory, or too old for our kernels), TPUs."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import jax

from tinkerflow.backend.spec.formats import Dtype
from tinkerflow.backend.spec.packing import ATTENTION_TOKENS

MEMORY_SHARE = 0.92  # of a GPU's memory, for all groups on it; CUDA itself, NCCL and the libraries take the rest
_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second is the old name
SCORED_ROWS = 4096  # rows of each GPU or TPU that are multiplied by the unembedding at a time
RANK_COLUMNS = 32  # the stack of the sampler's adapters grows by blocks of this many columns


@dataclass(frozen=True)
class Platform:
    """The profile of a platform.

    name: as in `jit(...).lower(lowering_platforms=...)`.
    dtype: the dtype of base weights and activations for the setting auto.
    precision: the setting for float32 matmuls, on platforms that otherwise round their inputs; None = no rounding.
    flags_variable: the environment variable with the compiler's `flags`.
    kernels: the compiler of our Pallas kernels; None = programs consist of XLA's operations alone.
    compilers: the shared libraries that parse the flags, as "package/file". They end the process when a flag is
    unknown.
    shares_memory: whether a process takes only a part of a device's memory.
    little_shared_memory: whether a block can take only 99 KiB of a multiprocessor's shared memory. On an A100 it can
    take 163 KiB, and on an H100 227.
    host_decides: whether the host chooses branches and the number of iterations of loops. On GPUs, the thread that
    starts a program would otherwise wait at each branch and iteration until the device has decided. On other devices
    the host does not wait.
    few_shapes: whether training has few shapes of micro-batches, because programs are slow to compile and to tune.
    attention_tokens: the length of a row whose attention costs as much as everything else. With the kernels of `flash`
    and 4B parameters this is about 7,000, if attention runs at half the speed of other operations.
    prefill_tokens: the sizes of the pieces in which the sampler computes a prompt, ascending. On CPUs small sizes waste
    little padding; elsewhere large sizes read the weights less often. The largest size is used only after enough tokens
    in smaller pieces.
    """

    name: str
    dtype: Dtype = "bfloat16"
    precision: str | None = "highest"
    flags_variable: str = "XLA_FLAGS"
    flags: tuple[str, ...] = ()
    kernels: Literal["triton", "mosaic"] | None = None
    compilers: tuple[str, ...] = ()
    shares_memory: bool = False
    little_shared_memory: bool = False
    host_decides: bool = False
    few_shapes: bool = True
    attention_tokens: int = 8192
    prefill_tokens: tuple[int, ...] = (128, 512, 2048)


CPU = Platform(
    "cpu",
    dtype="float32",
    precision=None,
    few_shapes=False,
    attention_tokens=ATTENTION_TOKENS,
    prefill_tokens=(32, 64, 128, 512),
)
CUDA = Platform(
    "cuda",
    flags=(
        "--xla_gpu_dot_merger_threshold_mb=0",  # otherwise decode copies each base matrix to append an adapter's
        "--xla_gpu_enable_latency_hiding_scheduler=true",  # this and the next four: gathers overlap with matmuls
        "--xla_gpu_enable_pipelined_all_gather=true",
        "--xla_gpu_enable_pipelined_all_reduce=true",
        "--xla_gpu_enable_pipelined_reduce_scatter=true",
        "--xla_gpu_enable_while_loop_double_buffering=true",
        "--xla_gpu_exclude_nondeterministic_ops=true",  # a replay gives the same bits
        "--xla_gpu_shard_autotuning=false",  # otherwise a rank waits for ranks that had the program in their cache
    ),
    kernels="triton",
    compilers=(
        "jaxlib/libjax_common.so",
        "jax_plugins.xla_cuda13/xla_cuda_plugin.so",
        "jax_plugins.xla_cuda12/xla_cuda_plugin.so",
    ),
    shares_memory=True,
    host_decides=True,
)
SMALL_CUDA = replace(CUDA, little_shared_memory=True)
_SMALL = ("8.6", "8.9", "12.0", "12.1")  # their compute capabilities: A10, L4, L40S, RTX 30, 40 and 50, for example
# XLA compiles Triton's kernels only for Ampere and newer (jax-ml/jax, issue 26799). Turing's tensor cores support
# float16 but not bfloat16, so XLA would widen the operands of each product to float32. Weights and activations stay in
# bfloat16, because the activations of models trained in bfloat16 exceed the range of float16. `matmul.product` scales
# the operands instead.
TURING = replace(CUDA, kernels=None)
_AMPERE = 8  # major number of the compute capability
TPU = Platform(
    "tpu",
    flags_variable="LIBTPU_INIT_ARGS",
    flags=(  # gathers overlap with matmuls; only v5e supports async collective fusion
        "--xla_enable_async_all_gather=true",
        "--xla_tpu_overlap_compute_collective_tc=true",
    ),
    kernels="mosaic",
    compilers=("libtpu/libtpu.so",),
)

_BY_BACKEND = {"cpu": CPU, "gpu": CUDA, "cuda": CUDA, "tpu": TPU}  # by JAX's names of backends
_target: ContextVar[Platform | None] = ContextVar("target platform", default=None)


def platform() -> Platform:
    """The target platform of programs: the one set by `compiling_for`, or else the platform of JAX's devices."""
    return _target.get() or _of_devices()


def _of_devices() -> Platform:
    profile = _BY_BACKEND[jax.default_backend()]
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))  # of NVIDIA GPUs
    major = capability.partition(".")[0]
    if profile is CUDA and major.isdigit() and int(major) < _AMPERE:
        return TURING
    return SMALL_CUDA if profile is CUDA and capability in _SMALL else profile


def on_cpu() -> bool:
    """Whether programs are compiled for CPUs. XLA compiles some operations differently for them."""
    return platform() is CPU


def on_nvidia() -> bool:
    """Whether programs are compiled for NVIDIA GPUs of any kind."""
    return platform().name == CUDA.name


def may_be_unrolled(iterations: int) -> bool:
    """Whether XLA may replace a loop with its body, because double buffering merges two iterations into one."""
    return iterations <= 2


def settle_dtype(dtype: Dtype) -> Dtype:
    """The dtype for the setting `dtype`. For float32, set JAX's matmuls to the platform's `precision`."""
    chosen = platform().dtype if dtype == "auto" else dtype
    if chosen == "float32" and platform().precision:
        jax.config.update("jax_default_matmul_precision", platform().precision)
    return chosen


def environment(name: str, environ: Mapping[str, str], groups: int) -> dict[str, str]:
    """The variables to set before JAX opens devices of the platform `name`. Settings in `environ` take precedence.

    groups: the number of groups that share a device's memory. Flags unknown to an installed compiler are left out,
    because they would end the process.
    """
    profile, added = _BY_BACKEND[name], {}
    given = environ.get(profile.flags_variable, "")
    set_already = {flag.partition("=")[0] for flag in given.split()}
    wanted = [flag for flag in profile.flags if flag.partition("=")[0] not in set_already]
    if given.strip() and not given.strip().startswith("-"):  # a file of flags, which XLA reads only without other flags
        wanted = []
    if ours := [flag for flag, known in zip(wanted, known_flags(wanted, profile.compilers), strict=True) if known]:
        added[profile.flags_variable] = " ".join([*ours, *given.split()])
    if profile.shares_memory and not any(environ.get(variable) for variable in _MEMORY_VARIABLES):
        added[_MEMORY_VARIABLES[0]] = f"{MEMORY_SHARE / groups:.3f}"
    return added


def compiled_for() -> str:
    """The inputs of compilation besides the program, as text: the devices, their compiler, and its flags."""
    device = jax.local_devices()[0]
    flags = [f"{name}={os.environ.get(name, '')}" for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    kind = _processor() if on_cpu() else device.device_kind
    return "; ".join([kind, str(device.client.platform_version), *flags])


def _processor() -> str:
    """The name of the host's processor. Programs for CPUs are compiled for it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine


def known_flags(flags: list[str], compilers: tuple[str, ...]) -> list[bool]:
    """For each XLA flag, whether every installed library of `compilers` defines it; False if none is installed.

    compilers: as in `Platform`. XLA aborts the process when a flag is unknown.
    """
    paths = [
        folder / file
        for package, _, file in (compiler.partition("/") for compiler in compilers)
        for folder in _folders(package)
        if (folder / file).exists()
    ]
    known = [bool(paths)] * len(flags)
    # In the libraries, the name of a flag ends with a NUL. Removed flags survive as fields of a message, without the
    # NUL.
    names = [flag.removeprefix("--").partition("=")[0].encode() + b"\0" for flag in flags]
    for path in paths:
        with path.open("rb") as code, mmap.mmap(code.fileno(), 0, access=mmap.ACCESS_READ) as text:
            known = [so_far and text.find(name) >= 0 for so_far, name in zip(known, names, strict=True)]
    return known


def _folders(package: str) -> list[Path]:
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # the parent package is missing
        spec = None
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


@contextmanager
def compiling_for(target: Platform) -> Iterator[None]:
    """Compile programs for `target` instead of JAX's devices."""
    other = target is not _target.get()
    token = _target.set(target)
    try:
        if other:
            jax.clear_caches()  # the cache's keys of traced programs do not contain the platform
        yield
    finally:
        _target.reset(token)
        if other:
            jax.clear_caches()
