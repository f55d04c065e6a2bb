"""Setup of JAX in a worker process: its platform and devices, the compilation cache, and the group."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.pool.autotuning import keep_results
from tinkerflow.backend.pool.compile_cache import copy_entries_of_rank_0, delete_cut_entries, folder_of, has_common_keys
from tinkerflow.backend.pool.host import devices
from tinkerflow.backend.pool.protocol.messages import Start
from tinkerflow.backend.spec.commands import GroupConfig

log = logging.getLogger(__name__)

_GATHER_SECONDS = 60
_LEAST_CAPABILITY = 7.5  # of NVIDIA GPUs: Turing, the oldest that CUDA 13 supports
_FORCED = "xla_force_host_platform_device_count"


Environment = Callable[[str, Mapping[str, str], int], dict[str, str]]


def join_jax(
    start: Start,
    rank: int,
    progress: Callable[[str], None],
    environment: Environment = lambda *_: {},
    compiled_for: Callable[[], str] = str,
) -> None:
    """Set JAX up for this process: its share of the host's devices, the compilation cache, and the group.

    start: the driver's first message. rank: this process's rank. progress: called with lines for people.
    environment: (name of the platform, current variables, number of groups that share a device) -> variables to set.
    compiled_for: returns a text that identifies the device, its compiler, and the compiler's flags.
    UserError: the configured platform is missing, or its devices cannot be shared.
    """
    import jax

    config = start.config
    expected = devices.expected(config.platform, os.environ)
    if expected == "tpu" and start.groups > 1:
        raise UserError(
            f"{start.groups} base models are on one TPU host, where one process uses all chips: serve one base model, "
            "or give each its own hosts"
        )
    os.environ.update(environment(expected, os.environ, start.groups))
    update: Callable[[str, object], None] = jax.config.update
    if config.platform != "auto":
        update("jax_platforms", config.platform)
    if _FORCED not in os.environ.get("XLA_FLAGS", ""):
        wanted = max(1, config.fsdp) * config.expert * config.tensor
        update("jax_num_cpu_devices", -(-wanted // start.processes))
    choose_partitioner(config.context_parallel)
    update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    cache = None
    if config.compile_cache_dir:
        cache = folder_of(config.compile_cache_dir, config.model_path, start.processes, rank)
        delete_cut_entries(cache)
        update("jax_compilation_cache_dir", str(cache))
        update("jax_persistent_cache_min_compile_time_secs", 0.0)
        update("jax_persistent_cache_min_entry_size_bytes", -1)
    if start.processes > 1:
        progress(f"joining {start.processes} processes")
        jax.distributed.initialize(
            start.coordinator,
            start.processes,
            rank,
            local_device_ids=share_of_host(start, rank),
            cluster_detection_method="deactivate",
            coordinator_bind_address=start.coordinator,  # the default binds every interface
            initialization_timeout=60,
            # Longer than the driver waits. The driver names the silent rank, but JAX only aborts, as after a crash.
            heartbeat_timeout_seconds=max(30, math.ceil(2 * start.silence)),
            shutdown_timeout_seconds=10,
        )
    check_platform(jax, config, progress)
    if jax.process_index() != rank:
        raise UserError(
            f"rank {rank} of the group is process {jax.process_index()} of its TPU pod: set TPU_WORKER_ID on every host"
        )
    if cache is not None and start.processes > 1:
        _keep_programs_of_all(cache, rank, start.processes)
    elif cache is not None and jax.default_backend() == "gpu":
        keep_results(config, compiled_for())


def choose_partitioner(context_parallel: int) -> None:
    """Use GSPMD to partition programs on which Shardy, JAX's default, crashes.

    context_parallel: as in `GroupConfig`. Shardy of JAX 0.11.2 gets SIGSEGV if rows are split over devices.
    """
    import jax

    if context_parallel > 1 and jax.__version_info__ >= (0, 11):
        jax.config.update("jax_use_shardy_partitioner", False)


def _keep_programs_of_all(cache: Path, rank: int, processes: int) -> None:
    """Make every rank of a multi-process group find its programs in its `cache` at the next start.

    Rank 0 compiles for all ranks if they have the same keys. XLA chooses kernels for NVIDIA GPUs by measuring, so ranks
    that compile separately may compute different bits. On CPUs the result of compilation depends only on the program.
    """
    import jax
    from jax._src import distributed
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # their folders would be part of an entry's key
    client = distributed.global_state.client
    assert client is not None  # jax.distributed.initialize created the client
    over_all = NamedSharding(Mesh(jax.devices(), ("all",)), PartitionSpec("all"))

    def compile_probe() -> None:
        def probe() -> jax.Array:
            return jax.numpy.zeros(jax.device_count())

        jax.jit(probe, out_shardings=over_all).lower().compile()

    def gather(name: str, text: str) -> list[str]:
        client.key_value_set(f"tinkerflow/{name}/{rank}", text)
        wait = _GATHER_SECONDS * 1000
        return [client.blocking_key_value_get(f"tinkerflow/{name}/{other}", wait) for other in range(processes)]

    distributed.global_state.process_id = 0  # JAX writes entries only in process 0, and uses the id for nothing else
    if has_common_keys(cache, compile_probe, partial(gather, "probe")):
        distributed.global_state.process_id = rank
        copy_entries_of_rank_0(
            cache,
            rank,
            partial(gather, "entries"),
            lambda name, entry: client.key_value_set_bytes(f"tinkerflow/entry/{name}", entry),
            lambda name: client.blocking_key_value_get_bytes(f"tinkerflow/entry/{name}", _GATHER_SECONDS * 1000),
        )
        jax.config.update("jax_share_binary_between_hosts", True)
        log.info("rank 0 compiles for all ranks")
    else:
        log.info("each rank compiles for itself")


def share_of_host(start: Start, rank: int) -> list[int] | None:
    """The ordinals of this process's GPUs if processes of the group share its host; None: all visible GPUs."""
    sharing = [other for other, host in enumerate(start.hosts) if host == start.hosts[rank]]
    found = devices.expected(start.config.platform, os.environ)
    if len(sharing) < 2 or found == "cpu":
        return None
    if found == "tpu":
        raise UserError(
            f"{len(sharing)} processes of the group are on one TPU host: run one process there, which uses all chips"
        )
    if not (gpus := devices.gpu_count(os.environ)):
        return None
    return devices.share(sharing.index(rank), len(sharing), gpus)


def check_platform(jax: Any, config: GroupConfig, progress: Callable[[str], None]) -> None:
    """Open the devices. UserError: they are not of the configured platform, or are too old.

    Triton supports float8 only on Ada and newer. `progress` is called with a warning if CPUs serve although the host
    has an accelerator.
    """
    extra = {"cuda": "; install the extra `gpu`", "tpu": "; install the extra `tpu`"}.get(config.platform, "")
    try:
        found = devices.NAMES.get(jax.default_backend(), jax.default_backend())
    except Exception as error:
        named = f"platform is {config.platform!r}"
        if config.platform == "auto":
            if not (first := os.environ.get("JAX_PLATFORMS")):
                raise
            named = f"JAX_PLATFORMS is {first!r}"
        why = f": {error}" if str(error) else ""
        raise UserError(f"{named}, and JAX finds no such device here{why}{extra}") from error
    if config.platform not in ("auto", found):
        raise UserError(f"platform is {config.platform!r}, but the devices that JAX finds here are {found!r}{extra}")
    for device in jax.local_devices() if found == "cuda" else ():
        capability = str(getattr(device, "compute_capability", ""))
        if re.fullmatch(r"\d+\.\d+", capability) and float(capability) < _LEAST_CAPABILITY:
            raise UserError(
                f"{device.device_kind} has compute capability {capability}: must be {_LEAST_CAPABILITY} (Turing) or "
                "higher; set TINKERFLOW_PLATFORM=cpu to compute on CPUs"
            )
        if config.kv_cache == "float8" and re.fullmatch(r"7\.\d|8\.[0-8]", capability):
            raise UserError(
                f"kv_cache is 'float8', which needs compute capability 8.9 (Ada) or higher, and "
                f"{device.device_kind} has {capability}"
            )
    if found == "cpu" and config.platform == "auto" and not jax.config.jax_platforms and (unused := devices.seen()):
        text = (
            f"WARNING: this host has {unused}, but JAX finds only CPUs, so computations run on CPUs. Install the extra "
            "`gpu` or `tpu`, or set TINKERFLOW_PLATFORM=cpu to use CPUs without this warning"
        )
        log.warning(text)
        progress(text)
