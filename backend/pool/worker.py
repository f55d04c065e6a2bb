"""One process of a worker group: `python -m tinkerflow.backend.pool.worker`.

Only the supervisor or a host's agent starts it.

The main thread executes commands in the order in which they come; a reader thread keeps the socket drained and answers
the driver's beats meanwhile. What the devices are still computing is waited for in a third (answers.py). The process
ends with who started it, by the kernel's parent-death signal. When that was the driver, also by the end of the
connection; when it was a host's agent (agent.py), the next driver may take the process over, with the base model in its
memory. Whatever was received from the earlier one is executed before that, on every rank: a rank alone would wait in a
collective. Whatever goes wrong outside a command ends the process at once: a Python exception that nobody catches would
wait in jax.distributed's shutdown barrier for the other processes, and they in a collective for this one.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Protocol, cast

from tinkerflow.backend.commands import Command, DeferredReply, GroupConfig, Reply
from tinkerflow.backend.pool import codec
from tinkerflow.backend.pool.answers import Answers
from tinkerflow.backend.pool.birth import Birth
from tinkerflow.backend.pool.compile_cache import CacheMender, folder_of, write_here
from tinkerflow.backend.pool.messages import Beat, Fatal, Left, Progress, Ready, Start, to_failed
from tinkerflow.backend.pool.transport import Frame, WorkerLink
from tinkerflow.backend.processes import die_with_parent, give_back_memory

log = logging.getLogger("tinkerflow.backend.pool.worker")

_KEPT_SECONDS = 300.0  # freed memory: pages wanted again are dear, and a heap from which nothing is cut grows


class Executor(Protocol):
    """What a worker runs. Every rank gets the same calls in the same order; our errors reach the client.

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

    @property
    def microbatch_tokens(self) -> int:
        """How many tokens, padding included, it trains on at once."""

    def execute(self, command: Command) -> Reply | DeferredReply:
        """Do what `command` says, or begin it: then what gives the reply, called once, from another thread, before that
        of any later command and maybe during one. DevicesError: it has failed, and the process must end.
        """

    def clear(self) -> None:
        """Forget all that commands have made, as if none had been executed; the base model stays."""


class Desk:
    """Where commands come in, from one driver after the other, and the way to the one that is there.

    What is meant for a driver that is gone is dropped.
    """

    def __init__(self) -> None:
        """Nobody is there yet."""
        self.inbox: SimpleQueue[tuple[WorkerLink, Frame]] = SimpleQueue()
        self._link: WorkerLink | None = None
        self._turn = threading.Lock()  # of those who write
        self._reader: threading.Thread | None = None
        self._received = 0  # commands, of all drivers
        self._alone = threading.Event()  # the driver is gone
        self._no_other = threading.Event()  # there will be none after it

    def receive(self, births: IO[bytes]) -> None:
        """Serve one driver after the other, as the lines say; for a thread of its own."""
        for line in births:
            try:
                self.serve(Birth.from_line(line))
            except OSError as error:
                log.warning("the driver cannot be reached: %s", error)
        self._no_other.set()
        self._end_unless_wanted()

    def serve(self, birth: Birth) -> None:
        """Leave the driver that is there, connect to that of `birth`, and read what it sends in another thread.

        OSError when it cannot be reached, or does not know the secret.
        """
        self._leave()
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=_log_format(birth), force=True)
        link = WorkerLink.connect(birth.host, birth.port, bytes.fromhex(birth.secret), birth.generation, birth.rank)
        if self._reader is not None:
            try:
                link.write(0, codec.encode(Left(self._received)))
            except OSError:
                link.close()
                raise
        with self._turn:
            self._link = link
        self._alone.clear()
        self._reader = threading.Thread(target=self._read, args=(link,), name="reader", daemon=True)
        self._reader.start()

    def send(self, index: int, body: Sequence[codec.Buffer], to: WorkerLink | None = None) -> None:
        """Send an encoded message as frame `index` (0 = it belongs to no command) to a driver; None: who is there."""
        with self._turn:
            if self._link is None or to not in (None, self._link):
                return
            try:
                self._link.write(index, body)
            except OSError as error:
                log.info("the driver does not listen any more (%s)", error)  # who reads notices it, too

    def tell(self, text: str) -> None:
        """Send a line of progress."""
        self.send(0, codec.encode(Progress(text)))

    def send_last(self, message: object) -> None:
        """Send `message` when the link is free within a second, and nothing after it: the process is about to end."""
        body = codec.encode(message)
        if self._turn.acquire(timeout=1.0) and self._link is not None:
            self._link.write(0, body)

    def _leave(self) -> None:
        if self._link is not None and self._reader is not None:
            self._link.hang_up()  # whoever reads from it, or waits to write, stops
            self._reader.join()
            with self._turn:
                self._link.close()
                self._link = None

    def _read(self, link: WorkerLink) -> None:
        beat = codec.encode(Beat())
        while True:
            try:
                frame = link.read()
            except (EOFError, OSError) as error:
                log.info("the driver is gone (%s)", error)
                break
            if frame.index == 0 and bytes(frame.body) == b"".join(beat):
                self.send(0, beat, link)
            else:
                self._received += frame.index > 0
                self.inbox.put((link, frame))
        self._alone.set()
        self._end_unless_wanted()

    def _end_unless_wanted(self) -> None:
        if self._alone.is_set() and self._no_other.is_set():
            os._exit(0)


def main() -> None:
    """Read a Birth, join the group, execute what its driver says, and then what others say; end when there is none."""
    birth = Birth.from_line(sys.stdin.buffer.readline())
    die_with_parent(birth.parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor asks for stacks before it kills a hung one
    logging.getLogger("jax").setLevel(logging.WARNING)  # it reports every platform that is not there
    desk = Desk()
    _end_on_uncaught(desk)
    desk.serve(birth)
    threading.Thread(target=desk.receive, args=(sys.stdin.buffer,), name="births", daemon=True).start()
    answers = Answers(desk.send, birth.rank)
    try:
        executor: Executor | None = None
        while True:
            driver, frame = desk.inbox.get()
            message = codec.decode(frame.body)
            if executor is not None and not isinstance(message, Start):
                answers.give(driver, frame.index, message, executor.execute)
                continue
            answers.drain()  # what the devices are computing for the earlier driver must not end them for this one
            executor = _begin(executor, message, birth, desk.tell)
            ready = Ready(tuple(executor.devices), int(executor.parameters), int(executor.microbatch_tokens))
            desk.send(0, codec.encode(ready), driver)
    except BaseException as error:  # noqa: BLE001  (SystemExit too: no barrier at exit)
        _end(desk, error)


def _begin(executor: Executor | None, start: Start, birth: Birth, progress: Callable[[str], None]) -> Executor:
    """The executor as a driver wants it that has sent nothing but `start`."""
    if executor is not None:
        progress("the base model is loaded already: an earlier driver left it")
        executor.clear()
        return executor
    if birth.compile_cache_dir:
        start = replace(start, config=replace(start.config, compile_cache_dir=birth.compile_cache_dir))
    executor = build(start, birth.rank, progress)
    threading.Thread(target=_give_back_memory, name="memory", daemon=True).start()
    return executor


def _give_back_memory() -> None:
    while True:
        give_back_memory()
        time.sleep(_KEPT_SECONDS)


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


def _log_format(birth: Birth) -> str:
    who = f"rank {birth.rank} generation {birth.generation}"
    return f"%(asctime)s %(levelname)s {who} %(name)s: %(message)s"


def _end_on_uncaught(desk: Desk) -> None:
    def main_thread(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _end(desk, error)

    def other_thread(args: threading.ExceptHookArgs) -> None:
        _end(desk, args.exc_value or args.exc_type())

    sys.excepthook = main_thread
    threading.excepthook = other_thread


def _end(desk: Desk, error: BaseException) -> None:
    """Log, tell the driver, and end without any clean-up that could wait for other processes."""
    log.critical("ending", exc_info=error)
    logging.shutdown()
    sys.stderr.flush()
    hurry = threading.Timer(2.0, os._exit, (70,))  # the driver may have stopped reading
    hurry.daemon = True
    hurry.start()
    try:
        desk.send_last(Fatal(to_failed(error)))
    finally:
        os._exit(70)


if __name__ == "__main__":
    main()
