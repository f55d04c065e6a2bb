"""One process of a worker group: `python -m backend.pool.worker`, started by the supervisor or a host's agent only.

The main thread executes commands in the order in which they come; a reader thread keeps the socket drained and answers
the driver's beats meanwhile. The process ends with its driver: by the kernel's parent-death signal (of the driver, or
of its host's agent, which watches the driver), and by the end of the connection. Whatever goes wrong outside a command
ends the process at once: a Python exception that nobody catches would wait in jax.distributed's shutdown barrier for
the other processes, and they in a collective for this one.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, cast

from backend.commands import Command, GroupConfig, Reply
from backend.errors import UserError
from backend.pool import codec
from backend.pool.compile_cache import CacheMender, folder_of, write_here
from backend.pool.messages import Ack, Beat, Fatal, Progress, Ready, Start, to_failed
from backend.pool.transport import Frame, WorkerLink
from backend.processes import die_with_parent

log = logging.getLogger("backend.pool.worker")

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how XLA says it


class Executor(Protocol):
    """What a worker runs. Every rank gets the same calls in the same order; errors of backend.errors reach the client.

    A class with `uses_jax = False` is run without JAX being set up.
    """

    def __init__(self, config: GroupConfig, progress: Callable[[str], None], processes: int, rank: int) -> None:
        """Make ready; `progress` tells people what takes long, at any time."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of all devices of the group."""

    @property
    def parameters(self) -> int:
        """How many parameters the base model has."""

    def execute(self, command: Command) -> Reply:
        """Do what `command` says."""


@dataclass(frozen=True)
class Birth:
    """What the supervisor writes to the worker's standard input: never in argv, where everybody could read it.

    compile_cache_dir: this host's, in place of the one that the driver names; "" = the driver's.
    """

    host: str  # of the driver
    port: int
    secret: str  # hex
    generation: int
    rank: int
    parent: int  # process id of who started it
    compile_cache_dir: str


class Channel:
    """The link, with turns for those who write."""

    def __init__(self, link: WorkerLink) -> None:
        """Write to `link`."""
        self._link = link
        self._turn = threading.Lock()

    def send(self, index: int, body: Sequence[codec.Buffer]) -> None:
        """Send an encoded message as frame `index` (0 = it belongs to no command)."""
        with self._turn:
            self._link.write(index, body)

    def tell(self, text: str) -> None:
        """Send a line of progress."""
        self.send(0, codec.encode(Progress(text)))

    def send_last(self, message: object) -> None:
        """Send `message` when the link is free within a second; the process is about to end."""
        body = codec.encode(message)
        if self._turn.acquire(timeout=1.0):
            self._link.write(0, body)


def main() -> None:
    """Read a Birth, join the group, execute commands until the driver ends."""
    birth = Birth(**json.load(sys.stdin))
    die_with_parent(birth.parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor asks for stacks before it kills a hung one
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s rank {birth.rank} generation {birth.generation} %(name)s: %(message)s",
    )
    logging.getLogger("jax").setLevel(logging.WARNING)  # it reports every platform that is not there
    link = WorkerLink.connect(birth.host, birth.port, bytes.fromhex(birth.secret), birth.generation, birth.rank)
    channel = Channel(link)
    _end_on_uncaught(channel)
    start: Start = codec.decode(link.read().body)
    if birth.compile_cache_dir:
        start = replace(start, config=replace(start.config, compile_cache_dir=birth.compile_cache_dir))
    frames: SimpleQueue[Frame] = SimpleQueue()
    threading.Thread(target=_drain, args=(link, channel, frames), name="reader", daemon=True).start()
    try:
        executor = build(start, birth.rank, channel.tell)
        channel.send(0, codec.encode(Ready(tuple(executor.devices), int(executor.parameters))))
        while True:
            frame = frames.get()
            channel.send(frame.index, _answer(executor, codec.decode(frame.body), birth.rank))
    except BaseException as error:  # noqa: BLE001  (SystemExit too: no barrier at exit)
        _end(channel, error)


def build(start: Start, rank: int, progress: Callable[[str], None]) -> Executor:
    """The executor that `start` names, in a process set up for it."""
    module, _, name = start.executor.partition(":")
    progress(f"importing {module}")
    kind = getattr(importlib.import_module(module), name)
    if getattr(kind, "uses_jax", True):
        join_jax(start, rank, progress)
    return cast(Executor, kind(start.config, progress, start.processes, rank))


def join_jax(start: Start, rank: int, progress: Callable[[str], None]) -> None:
    """Set JAX up for this process: its share of the mesh's devices, the compilation cache, and the group."""
    import jax
    from jax._src import compilation_cache, compiler

    config = start.config
    update: Callable[[str, object], None] = jax.config.update
    update("jax_num_cpu_devices", config.devices // start.processes)
    update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    if config.compile_cache_dir:
        cache = folder_of(config.compile_cache_dir, rank)
        update("jax_compilation_cache_dir", str(cache))
        update("jax_persistent_cache_min_compile_time_secs", 0.0)
        update("jax_persistent_cache_min_entry_size_bytes", -1)
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").addHandler(CacheMender(cache))
        if rank:
            write_here(compiler, compilation_cache)
    if start.processes > 1:
        progress(f"joining {start.processes} processes")
        jax.distributed.initialize(
            start.coordinator,
            start.processes,
            rank,
            cluster_detection_method="deactivate",
            coordinator_bind_address=start.coordinator,  # the default binds every interface
            initialization_timeout=60,
            # longer than the driver waits: it names who was silent, and JAX only aborts, as if that process had crashed
            heartbeat_timeout_seconds=max(30, math.ceil(2 * start.silence)),
            shutdown_timeout_seconds=10,
        )


def _answer(executor: Executor, command: Command, rank: int) -> list[codec.Buffer]:
    try:
        reply = executor.execute(command)
        return codec.encode(reply if rank == 0 else Ack(None))
    except UserError as error:
        log.info("%s: %s: %s", type(command).__name__, type(error).__name__, error)
        failed = to_failed(error)
    except Exception as error:
        if OUT_OF_MEMORY in str(error):
            raise  # nobody knows what is left on the devices: a fresh group does
        log.exception("%s failed", type(command).__name__)
        failed = to_failed(error)
    return codec.encode(failed if rank == 0 else Ack(failed))


def _drain(link: WorkerLink, channel: Channel, frames: SimpleQueue[Frame]) -> None:
    beat = codec.encode(Beat())
    while True:
        try:
            frame = link.read()
        except (EOFError, OSError) as error:
            log.info("the driver is gone (%s)", error)
            os._exit(0)
        if frame.index == 0 and bytes(frame.body) == b"".join(beat):
            channel.send(0, beat)
        else:
            frames.put(frame)


def _end_on_uncaught(channel: Channel) -> None:
    def main_thread(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _end(channel, error)

    def other_thread(args: threading.ExceptHookArgs) -> None:
        _end(channel, args.exc_value or args.exc_type())

    sys.excepthook = main_thread
    threading.excepthook = other_thread


def _end(channel: Channel, error: BaseException) -> None:
    """Log, tell the driver, and end without any clean-up that could wait for other processes."""
    log.critical("ending", exc_info=error)
    logging.shutdown()
    sys.stderr.flush()
    hurry = threading.Timer(2.0, os._exit, (70,))  # the driver may have stopped reading
    hurry.daemon = True
    hurry.start()
    try:
        channel.send_last(Fatal(to_failed(error)))
    finally:
        os._exit(70)


if __name__ == "__main__":
    main()
