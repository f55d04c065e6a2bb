"""Executors for the pool's tests. Real worker processes run them instead of tinkerflow.backend.compute.

Ordinary commands control their behavior. The adapter_id of DropAdapter contains an order, such as "hang:1" for rank 1.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tinkerflow.backend.core.errors import (
    AllocationError,
    ConflictError,
    DevicesError,
    NotFoundError,
    StateLostError,
    StoreError,
    UserError,
)
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.frames import header
from tinkerflow.backend.pool.protocol.messages import Ack
from tinkerflow.backend.spec.commands import (
    AdapterKept,
    AdapterState,
    Command,
    CreateAdapter,
    DeferredReply,
    Done,
    DropAdapter,
    ExportAdapter,
    FetchState,
    Forward,
    ForwardResult,
    GroupConfig,
    ImportAdapter,
    LoraSpec,
    NextMicroBatch,
    OptimResult,
    OptimStep,
    Reply,
    SampleProgress,
    SampleStep,
    StoredState,
    WriteState,
)


class Echo:
    """Returns the values of its commands, and misbehaves on request."""

    uses_jax = False

    def __init__(self, config: GroupConfig, progress: Callable[[str], None], processes: int, rank: int) -> None:
        self.devices = tuple(f"fake:{i}" for i in range(config.fsdp * config.tensor))
        self.parameters = 7
        self.microbatch_tokens = config.microbatch_tokens
        self.fsdp = config.fsdp
        self.attention_tokens = 1024
        self.few_shapes = False
        self.branch_tokens = 0
        self.context, self.context_rule = config.max_context, "the model's context"
        self.memory: dict[str, int] = {}
        self.programs = "NumPy"
        self.rank = rank
        self.progress = progress
        self.steps = 0
        self.state = AdapterState(LoraSpec(1), 0, {})
        for part in range(3):
            progress(f"loading weights {part + 1}/3")

    def execute(self, command: Command) -> Reply:
        match command:
            case OptimStep():
                self.steps += 1
                return OptimResult(command.params.learning_rate, self.steps)
            case Forward():
                return ForwardResult(tuple(e.weights_TK for e in command.examples), float(len(command.examples)))
            case ImportAdapter():
                self.state = command.state
            case ExportAdapter():
                return self.state
            case CreateAdapter():
                self.progress("busy")
                time.sleep(command.seed / 1000)
            case DropAdapter():
                return self.obey(*command.adapter_id.split(":"))
            case _:
                pass
        return Done()

    def clear(self) -> None:
        self.steps = 0
        self.state = AdapterState(LoraSpec(1), 0, {})

    def obey(self, order: str, *words: str) -> Reply:
        only = int(words[0]) if words else self.rank
        if order == "progress":
            self.progress("compiling a step")
        elif self.rank == only:
            self.misbehave(order)
        elif order == "full":  # waits like a collective that the other rank has left
            threading.Event().wait()
        return Done()

    def misbehave(self, order: str) -> None:
        match order:
            case "user":
                raise UserError("rank 0 is too small for adapter 'a': it must be 1 or more")
            case "missing":
                raise NotFoundError("no adapter 'a'")
            case "conflict":
                raise ConflictError("id 'a' was used before")
            case "lost":
                raise StateLostError("adapter 'a' went with generation 1")
            case "crash":
                raise ZeroDivisionError(f"on rank {self.rank}")
            case "full":
                raise AllocationError("data of 1 examples: the devices had no memory left for them")
            case "memory":
                raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes")
            case "reply":
                self.execute = lambda command: object()  # type: ignore[method-assign,assignment,return-value]
            case "exit":
                sys.exit(3)
            case "die":
                os._exit(9)
            case "hang":
                threading.Event().wait()
            case "thread":
                threading.Thread(target=self.fail_in_thread).start()
                threading.Event().wait()
            case "garbage":
                os.write(self.connection(), b"\x00" * 64)
            case "cut":  # simulates a network that cuts the connection to the driver
                with socket.socket(fileno=self.connection()) as kept:
                    kept.shutdown(socket.SHUT_RDWR)
                threading.Event().wait()
            case "unasked":
                self.send_frame(generation=1)
            case "generation":
                self.send_frame(generation=77)

    def fail_in_thread(self) -> None:
        raise ZeroDivisionError("in a thread")

    def send_frame(self, generation: int) -> None:
        body = codec.encode(Done() if self.rank == 0 else Ack(None))
        os.write(self.connection(), header(generation, 999, body) + b"".join(body))

    def connection(self) -> int:
        """The file descriptor of this process's only TCP connection."""
        for entry in Path("/proc/self/fd").iterdir():
            try:
                kept = socket.socket(fileno=os.dup(int(entry.name)))
                peer = kept.getpeername()
            except OSError:
                continue
            if peer:
                return kept.detach()
        raise AssertionError("no connection")


class ByMicroBatch(Echo):
    """Reports the commands that it executes. A Forward has a micro-batch for each example.

    The loss determines the outcome of the second micro-batch: ppo fails, cispo ends the process.
    """

    def execute(self, command: Command) -> Reply:
        self.progress(f"executes {type(command).__name__}")
        match command:
            case SampleStep():
                return SampleProgress((), active=0, waiting=0)
            case Forward(by_micro_batch=True):
                self.begun = [*command.examples]
                self.fate = command.loss
            case NextMicroBatch():
                self.begun.pop()
                if self.fate == "ppo":
                    self.fate = "cross_entropy"
                    raise UserError("the second one is wrong")
                if self.fate == "cispo":
                    os._exit(9)
                if len(self.begun) == 1:
                    return ForwardResult((), 7.0)
            case Forward():
                return ForwardResult((), 1.0)
        return Done()


class Ahead(Echo):
    """Starts an OptimStep, and completes it when the next command is executed or has failed, or after two seconds.

    The reply's grad_norm is the number of commands that have started meanwhile. A learning_rate of 1 is an error of the
    user, 2 is an error of the devices. A SampleStep with wait has one active request, any other SampleStep has none.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun = 0
        self.another = threading.Condition()

    def execute(self, command: Command) -> Reply | DeferredReply:
        if isinstance(command, SampleStep):
            return SampleProgress((), active=int(command.wait), waiting=0)
        try:
            if not isinstance(command, OptimStep):
                return super().execute(command)
            self.steps += 1
            return partial(self.finish, command.params.learning_rate, self.steps, self.begun + 1)
        finally:
            with self.another:
                self.begun += 1
                self.another.notify_all()

    def finish(self, fate: float, step: int, begun: int) -> Reply:
        with self.another:
            self.another.wait_for(lambda: self.begun > begun, 2.0)
        if fate == 1:
            raise UserError("the norm is not finite")
        if fate == 2:
            raise DevicesError("OptimStep failed on the devices")
        return OptimResult(float(self.begun), step)


class Uneven(Echo):
    """Rank 1 fails on the devices in its second micro-batch, while rank 0 is still busy with the first micro-batch."""

    def execute(self, command: Command) -> Reply:
        if isinstance(command, Forward | NextMicroBatch):
            self.steps += 1
            if self.steps == 1 and self.rank == 0:
                time.sleep(1.0)
            if self.steps == 2 and self.rank == 1:
                raise DevicesError("NextMicroBatch failed on the devices")
        return Done()


class Bystander(Echo):
    """A thread of rank 1 fails a second after the rank completes a CreateAdapter. Rank 0 takes longer."""

    def execute(self, command: Command) -> Reply:
        if isinstance(command, CreateAdapter):
            if self.rank == 1:
                threading.Timer(1.0, self.fail_in_thread).start()
            else:
                time.sleep(30.0)
        return super().execute(command) if isinstance(command, DropAdapter) else Done()


class Refusing(Echo):
    """Cannot be created, because the configuration is wrong."""

    def __init__(self, config: GroupConfig, *_: Any) -> None:
        raise UserError(f"model_path {config.model_path!r}: there is no config.json in it")


class Broken(Echo):
    """Cannot be created, because it has a bug."""

    def __init__(self, *_: Any) -> None:
        raise ZeroDivisionError("while loading")


class Sleepy(Echo):
    """Never becomes ready."""

    def __init__(self, *_: Any) -> None:
        time.sleep(600)


class Lagging(Echo):
    """Rank 1 takes a second for an OptimStep, which is longer than the test's agreement_seconds."""

    def execute(self, command: Command) -> Reply:
        if isinstance(command, OptimStep):
            time.sleep(float(self.rank))
            return OptimResult(0.0, 1)
        return super().execute(command)


class Taken(Echo):
    """Gets SIGTERM during its first start. model_path names a file that marks the first start."""

    def __init__(self, config: GroupConfig, *args: Any) -> None:
        path = Path(config.model_path)
        if not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
        super().__init__(config, *args)


class Flaky(Echo):
    """Dies at its second and third start. The file at model_path has a line for each start."""

    def __init__(self, config: GroupConfig, *args: Any) -> None:
        path = Path(config.model_path)
        starts = path.read_text().count("\n") if path.exists() else 0
        with path.open("a") as file:
            file.write("start\n")
        if starts in (1, 2):
            os._exit(5)
        super().__init__(config, *args)


class Collective(Echo):
    """Uses JAX: Forward sums weights over all devices of the group."""

    uses_jax = True

    def __init__(self, config: GroupConfig, progress: Callable[[str], None], processes: int, rank: int) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        spec: Callable[..., PartitionSpec] = PartitionSpec
        super().__init__(config, progress, processes, rank)
        mesh = Mesh(np.array(jax.devices()), ("fsdp",))
        self.devices = tuple(str(d) for d in jax.devices())
        self.parameters = jax.process_count()
        self.fsdp = len(self.devices)
        self.sharded = NamedSharding(mesh, spec("fsdp"))
        self.total = jax.jit(lambda x_D: x_D.sum(), out_shardings=NamedSharding(mesh, spec()))

    def execute(self, command: Command) -> Reply:
        import jax

        if not isinstance(command, Forward):
            return Done()
        values_D = command.examples[0].weights_TK[:, 0]
        x_D = jax.make_array_from_callback(values_D.shape, self.sharded, lambda index: values_D[index])
        return ForwardResult((), float(self.total(x_D)))


class Counting(Collective):
    """Writes "HITS of REQUESTS" of JAX's compilation cache to a file after each command."""

    def __init__(self, config: GroupConfig, progress: Callable[[str], None], processes: int, rank: int) -> None:
        import jax.monitoring

        self.events: Counter[str] = Counter()
        self.told = Path(config.model_path) / f"rank-{rank}"
        jax.monitoring.register_event_listener(lambda event, **kwargs: self.events.update([event.rpartition("/")[2]]))
        super().__init__(config, progress, processes, rank)

    def execute(self, command: Command) -> Reply:
        reply = super().execute(command)
        self.told.write_text(f"{self.events['cache_hits']} of {self.events['compile_requests_use_cache']}")
        return reply


class Keeper(Echo):
    """Keeps one tensor for each adapter and rank, and none on rank 3. Rank 1 loses its part of the adapter "fail"."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: dict[str, dict[str, np.ndarray]] = {}
        self.held: dict[str, Mapping[str, np.ndarray]] = {}

    def execute(self, command: Command) -> Reply:
        match command:
            case ExportAdapter(adapter_id, _, folder) if folder:
                size = 16 if self.rank else 32  # ranks hold parts of different sizes
                part = np.full((size, 1024), self.rank, np.float32)
                self.kept[folder] = {} if self.rank == 3 else {f"weights/{adapter_id}@{self.rank}": part}
                return AdapterKept(LoraSpec(1), 5, "adamw")
            case ImportAdapter(adapter_id):
                mine = self.held.pop(adapter_id)
                ok = all((array == self.rank).all() for array in mine.values()) and len(mine) == (self.rank != 3)
                if not ok:
                    raise ConflictError(f"{adapter_id}: {sorted(mine)} is not what rank {self.rank} wrote")
                return Done()
            case _:
                return super().execute(command)

    def take_kept(self, write: WriteState) -> Mapping[str, np.ndarray]:
        if write.adapter_id == "fail" and self.rank == 1:
            raise StoreError("rank 1 has lost it")
        return self.kept.pop(write.folder)

    def needed_tensors(self, state: StoredState, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        return [name for name in shapes if name.endswith(f"@{self.rank}")]

    def keep_fetched(self, fetch: FetchState, tensors: Mapping[str, np.ndarray]) -> None:
        self.held[fetch.owner] = tensors
