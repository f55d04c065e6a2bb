"""One process of a worker group: `python -m tinkerflow.backend.pool.worker`.

Only the driver or a host's agent starts it. Commands pass through three of its threads:

- The main thread executes commands in the order of arrival.
- A reader thread drains the socket and answers the driver's heartbeats, even while the main thread is busy.
- The thread of ReplyCollector waits for the devices if an executor has only started a command.

The kernel's parent-death signal ends the process together with the process that started it. A worker that the driver
started also ends when its connection ends. A worker that a host's agent started (host/agent.py) may be taken over by
the next driver, with the base model in its memory. Every rank first executes all commands of the earlier driver,
because a single rank would wait in a collective.

An exception outside a command ends the process immediately. An uncaught Python exception would wait in
jax.distributed's shutdown barrier for the other processes, while they wait for this process in a collective.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import IO, Protocol, cast

from tinkerflow.backend.core import tracing
from tinkerflow.backend.core.errors import OUT_OF_MEMORY, DevicesError, UserError
from tinkerflow.backend.pool.jax_setup import join_jax
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.frames import Frame, WorkerLink
from tinkerflow.backend.pool.protocol.handshake import LaunchSpec, connect
from tinkerflow.backend.pool.protocol.messages import (
    Ack,
    Fatal,
    KeepAlive,
    Progress,
    Ready,
    Rejoined,
    Start,
    TerminationNotice,
    Traced,
    Transfer,
    to_failed,
)
from tinkerflow.backend.pool.protocol.software import code_version
from tinkerflow.backend.pool.spans import CommandSpans
from tinkerflow.backend.pool.transfers import Transfers
from tinkerflow.backend.spec.commands import Command, DeferredReply, GroupConfig, Reply
from tinkerflow.backend.spec.pool_message import PoolMessage
from tinkerflow.backend.supervise.processes import die_with_parent, give_back_memory

log = logging.getLogger("tinkerflow.backend.pool.worker")

_KEPT_SECONDS = 300.0  # between two returns of freed memory; new pages are expensive, but an untrimmed heap grows


class CommandExecutor(Protocol):
    """Executes the commands of a worker. Every rank gets the same calls in the same order.

    Errors of backend/core/errors.py reach the client. The worker sets JAX up unless the class has `uses_jax = False`.
    """

    def __init__(self, config: GroupConfig, progress: Callable[[str], None], processes: int, rank: int) -> None:
        """Load the base model.

        config: the configuration shared by all ranks.
        progress: shows people a line about long work; may be called at any time.
        processes: the number of processes in the group. rank: the number of this process, from 0.
        """

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of all devices of the group."""

    @property
    def parameters(self) -> int:
        """The number of parameters of the base model."""

    @property
    def microbatch_tokens(self) -> int:
        """The number of tokens in a micro-batch, including padding."""

    @property
    def attention_tokens(self) -> int:
        """The row length, in tokens, at which attention costs as much as everything else."""

    @property
    def few_shapes(self) -> bool:
        """Whether micro-batches have few shapes (`spec.packing.Grid`)."""

    @property
    def branch_tokens(self) -> int:
        """Shared prefixes of examples are multiples of this number of tokens; 0: each example is trained alone."""

    @property
    def fsdp(self) -> int:
        """The size of the mesh axis over which a micro-batch's rows are split."""

    @property
    def context(self) -> int:
        """The longest sequence that fits the devices, in tokens."""

    @property
    def context_rule(self) -> str:
        """The reason for `context`, as part of an error message."""

    @property
    def memory(self) -> Mapping[str, int]:
        """Reserved bytes per device, by use."""

    @property
    def programs(self) -> str:
        """All settings that compiled programs depend on, as text, except our code and the version of JAX."""

    def execute(self, command: Command) -> Reply | DeferredReply:
        """Execute `command` and return its reply, or start it and return a function that waits for the reply.

        The function is called once, from another thread, before the functions of later commands. It may run while a
        later command is executed. DevicesError: the devices failed, and the process must end.
        """

    def clear(self) -> None:
        """Delete all state that commands have created. The base model is kept."""


class Inbox:
    """Receives the commands of successive drivers, and sends messages to the current driver.

    Messages to a driver that is gone are dropped.
    """

    def __init__(self) -> None:
        self.frames: SimpleQueue[tuple[WorkerLink, Frame]] = SimpleQueue()
        self.transfers: Transfers | None = None  # set before this process sends Ready
        self._link: WorkerLink | None = None
        self._turn = threading.Lock()  # held while a thread is writing
        self._reader: threading.Thread | None = None
        self._received = 0  # commands received from all drivers
        self._alone = threading.Event()  # set while no driver is connected
        self._no_other = threading.Event()  # set when no other driver will come

    @property
    def alone(self) -> bool:
        """Whether no driver is connected."""
        return self._alone.is_set()

    def receive(self, specs: IO[bytes]) -> None:
        """Serve one driver after another. Each line of `specs` is a LaunchSpec. Runs in its own thread."""
        for line in specs:
            try:
                self.serve(LaunchSpec.from_line(line))
            except OSError as error:
                log.warning("the driver cannot be reached: %s", error)
        self._no_other.set()
        self._end_unless_wanted()

    def serve(self, spec: LaunchSpec) -> None:
        """Leave the current driver, connect to the driver of `spec`, and read its frames in another thread.

        OSError: the new driver cannot be reached or lacks the secret.
        """
        self._leave()
        who = f"rank {spec.rank} generation {spec.generation}"
        line = f"%(asctime)s %(levelname)s {who} %(name)s: %(message)s"
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=line, force=True)
        link = connect(spec.host, spec.port, bytes.fromhex(spec.secret), spec.generation, spec.rank)
        if self._reader is not None:
            try:
                link.write(0, codec.encode(Rejoined(self._received)))
            except OSError:
                link.close()
                raise
        with self._turn:
            self._link = link
        self._alone.clear()
        self._reader = threading.Thread(target=self._read, args=(link,), name="reader", daemon=True)
        self._reader.start()

    def send(self, index: int, body: Sequence[codec.Buffer], to: WorkerLink | None = None) -> None:
        """Send an encoded message as a frame.

        index: the number of the answered command; 0: no command. to: the driver; None: the current driver.
        """
        with self._turn:
            if self._link is None or to not in (None, self._link):
                return
            try:
                self._link.write(index, body)
            except OSError as error:
                log.info("the driver no longer listens (%s)", error)  # the reader thread handles this

    def send_progress(self, text: str) -> None:
        self.send(0, codec.encode(Progress(text)))

    def send_last(self, message: PoolMessage) -> None:
        """Send the last message before the process ends, unless another thread is writing for over a second."""
        body = codec.encode(message)
        if self._turn.acquire(timeout=1.0) and self._link is not None:
            self._link.write(0, body)

    def _leave(self) -> None:
        if self._link is not None and self._reader is not None:
            self._link.hang_up()  # stops the threads that read or write
            self._reader.join()
            with self._turn:
                self._link.close()
                self._link = None

    def _read(self, link: WorkerLink) -> None:
        beat = codec.encode(KeepAlive())
        while True:
            try:
                frame = link.read()
            except (EOFError, OSError) as error:
                log.info("the connection to the driver ended (%s)", error)
                break
            if frame.index == 0 and bytes(frame.body) == b"".join(beat):
                self.send(0, beat, link)
            elif frame.index == 0 and isinstance(message := codec.decode(frame.body), Transfer):
                assert self.transfers is not None, "the driver transfers nothing before this process is ready"
                self.transfers.start(message, lambda answer: self.send(0, codec.encode(answer), link))
            else:
                self._received += frame.index > 0
                self.frames.put((link, frame))
        self._alone.set()
        self._end_unless_wanted()

    def _end_unless_wanted(self) -> None:
        if self._alone.is_set() and self._no_other.is_set():
            os._exit(0)


class ReplyCollector:
    """Sends replies in the order of their commands, even while the devices are still computing.

    When an executor starts a command without waiting for its devices, a thread of this object waits. The devices can
    then compute the next command while the last results are copied to the host and sent.
    """

    def __init__(self, send: Callable[[int, Sequence[codec.Buffer], WorkerLink | None], None], rank: int) -> None:
        """send: sends an encoded message as a frame to a driver. rank: this process's rank."""
        self._send = send
        self._rank = rank
        self._begun: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._unanswered = 0
        self._changed = threading.Condition()  # notified when `_unanswered` falls
        self._waiter: threading.Thread | None = None

    def give(
        self, driver: WorkerLink, index: int, command: Command, execute: Callable[[Command], Reply | DeferredReply]
    ) -> None:
        """Execute `command`, and answer it immediately or when the devices are done. Call this from one thread only.

        driver: the driver that sent the command. index: the number of the command's frame. execute:
        CommandExecutor.execute. Raises only errors that must end the process. All earlier commands are answered first,
        so that the driver blames this command.
        """
        name = type(command).__name__
        try:
            body = self._attempt(name, partial(execute, command))
        except Exception:
            self.drain()
            raise
        if not callable(body) and not self._unanswered:
            self._send(index, body, driver)
            return
        with self._changed:
            self._unanswered += 1
        self._begun.put(partial(self._finish, driver, index, name, body))
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._work, name="answers", daemon=True)
            self._waiter.start()

    def drain(self) -> None:
        """Wait until every command is answered."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered)

    def _work(self) -> None:
        while True:
            self._begun.get()()

    def _finish(self, driver: WorkerLink, index: int, name: str, body: list[codec.Buffer] | DeferredReply) -> None:
        while callable(body):
            body = self._attempt(name, body)
        self._send(index, body, driver)
        with self._changed:
            self._unanswered -= 1
            self._changed.notify()

    def _attempt(self, name: str, execute: Callable[[], Reply | DeferredReply]) -> list[codec.Buffer] | DeferredReply:
        try:
            reply = execute()
            return reply if callable(reply) else codec.encode(reply if self._rank == 0 else Ack(None))
        except UserError as error:
            log.info("%s: %s: %s", name, type(error).__name__, error)
            failed = to_failed(error)
        except Exception as error:
            if OUT_OF_MEMORY in str(error) or isinstance(error, DevicesError):
                raise  # the state of the devices is unknown, so a new group must start
            log.exception("%s failed", name)
            failed = to_failed(error)
        return codec.encode(failed if self._rank == 0 else Ack(failed))


def main() -> None:
    """Read a LaunchSpec, join the group, and execute the commands of successive drivers until the last one ends."""
    spec = LaunchSpec.from_line(sys.stdin.buffer.readline())
    die_with_parent(spec.parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the driver requests stacks before it kills a hung process
    logging.getLogger("jax").setLevel(logging.WARNING)  # lower levels report every missing platform
    inbox = Inbox()
    sys.excepthook = lambda _kind, error, _trace: _end(inbox, error)
    threading.excepthook = lambda args: _end(inbox, args.exc_value or args.exc_type())
    inbox.serve(spec)
    threading.Thread(target=inbox.receive, args=(sys.stdin.buffer,), name="specs", daemon=True).start()
    notices, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)  # Python runs handlers only in the main thread, which may be busy for a long time
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=_await_notice, args=(inbox, notices), name="notice", daemon=True).start()
    answers = ReplyCollector(inbox.send, spec.rank)
    spans = CommandSpans() if spec.rank == 0 and tracing.export("worker") else None
    try:
        executor: CommandExecutor | None = None
        while True:
            driver, frame = inbox.frames.get()
            message = codec.decode(frame.body)
            if executor is not None and not isinstance(message, Start):
                traced = message if isinstance(message, Traced) else Traced(None, cast(Command, message))
                command, parent = traced.command, traced.parent
                execute = executor.execute if spans is None else spans.around(executor.execute, parent)
                answers.give(driver, frame.index, command, execute)
                continue
            answers.drain()  # so that a device failure in an earlier driver's command ends the process before Ready
            assert isinstance(message, Start), "a driver begins with Start"
            executor = _begin(executor, message, spec, inbox.send_progress)
            inbox.transfers = Transfers(executor, message.config, spec.rank)
            inbox.send(0, codec.encode(_ready(executor, inbox.transfers)), driver)
    except BaseException as error:  # noqa: BLE001  (also SystemExit: no barrier at exit)
        _end(inbox, error)


def _await_notice(inbox: Inbox, notices: int) -> None:
    """Notify the driver of SIGTERM, so that it saves the models and ends the group. Without a driver, end the process.

    notices: a pipe that contains a byte for each signal.
    """
    while os.read(notices, 1):
        if inbox.alone:
            os._exit(0)
        log.warning("received SIGTERM; notifying the driver")
        inbox.send(0, codec.encode(TerminationNotice()))


def _begin(
    executor: CommandExecutor | None, start: Start, spec: LaunchSpec, progress: Callable[[str], None]
) -> CommandExecutor:
    """Prepare an executor with no state but the base model, for a driver that has just sent `start`."""
    if executor is not None:
        progress("the base model is still loaded from an earlier driver")
        executor.clear()
        return executor
    if spec.compile_cache_dir:
        start = start.copy_with(config=replace(start.config, compile_cache_dir=spec.compile_cache_dir))
    executor = build(start, spec.rank, progress)
    threading.Thread(target=_give_back_memory, name="memory", daemon=True).start()
    return executor


def _ready(executor: CommandExecutor, transfers: Transfers) -> Ready:
    fields = {name: getattr(executor, name) for name in Ready.__struct_fields__ if name != "reaches_store"}
    fields["programs"] = hashlib.sha256(f"{code_version()}; {fields['programs']}".encode()).hexdigest()[:16]
    return Ready(**fields, reaches_store=transfers.reach_store)


def _give_back_memory() -> None:
    while True:
        give_back_memory()
        time.sleep(_KEPT_SECONDS)


def build(start: Start, rank: int, progress: Callable[[str], None]) -> CommandExecutor:
    """Set up the process, and create the executor that `start` names."""
    module, _, name = start.executor.partition(":")
    progress(f"importing {module}")
    kind = getattr(importlib.import_module(module), name)
    if getattr(kind, "uses_jax", True):
        given = {name: getattr(kind, name) for name in ("environment", "compiled_for") if hasattr(kind, name)}
        join_jax(start, rank, progress, **given)
    return cast(CommandExecutor, kind(start.config, progress, start.processes, rank))


def _end(inbox: Inbox, error: BaseException) -> None:
    """Log the error, report it to the driver, and end without any cleanup that could wait for other processes."""
    log.critical("ending", exc_info=error)
    logging.shutdown()
    sys.stderr.flush()
    hurry = threading.Timer(2.0, os._exit, (70,))  # the driver may have stopped reading
    hurry.daemon = True
    hurry.start()
    try:
        inbox.send_last(Fatal(to_failed(error)))
    finally:
        os._exit(70)


if __name__ == "__main__":
    main()
