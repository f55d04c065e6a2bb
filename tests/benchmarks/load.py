"""Hundreds of tenants on several API replicas, one engine and Postgres: the latency and the cost of a request.

    python -m tests.benchmarks.load [--tenants 200] [--seconds 600] [--apis 2] [--rate 0.05]

Each tenant is a project with a key. Tenants arrive as a Poisson process in the first fifth of the time. Two thirds
train on data (SFT); the others sample from published weights and train on a sample (RL). Their pauses are exponential,
`--rate` of them per second. After nine of ten pauses, a tenant sends a step (or a sample); after the tenth, eight
concurrent ones. Tenants use the protocol over plain sockets, because the SDK would need more CPU time than the service.
Tenants and balancer share the cores with the service, so latencies include their delays. Prints latencies, CPU time by
part and operation, and memory over time. RESULTS.md keeps the output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.benchmarks.connection import Connection, cpu_seconds, memory, shown
from tests.benchmarks.replicas import Replicas, replicas
from tests.benchmarks.service import tree

from tinkerflow.backend.journal import Journal
from tinkerflow.backend.supervise.processes import allow_open_files
from tinkerflow.backend.wire import tinker_pb2 as pb

_BURST = 8
_TOKENS = 24
_LOOK_SECONDS = 5.0


@dataclass
class Figures:
    """Measurements: milliseconds by kind of call, operations, failures, and memory by part every few seconds."""

    took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    operations: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


class Tenant:
    """One client: a session, a model, and steps until the end."""

    def __init__(self, port: int, key: str, base_model: str, number: int, figures: Figures) -> None:
        """Send nothing before `run`. port: the service's. key: the project's. number: seeds the data and pauses."""
        self._port, self._key, self._base_model, self._number, self._figures = port, key, base_model, number, figures
        self._submits = Connection(port, key)
        self._random = random.Random(number)
        self._seq = 0
        self._publications = 0

    async def run(self, until: float, rate: float) -> None:
        """Work until this monotonic time, with `rate` pauses per second."""
        try:
            opened = await self._submits.post("create_session", {"sdk_version": "0.38.0"})
            self._session = opened["session_id"]
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(self._beat())
                await self._work(until, rate)
                beating.cancel()
        except* Exception as failed:  # noqa: BLE001  counted, and shown at the end
            self._figures.errors += [f"tenant {self._number}: {error!r}" for error in failed.exceptions]

    async def _work(self, until: float, rate: float) -> None:
        new = {
            "session_id": self._session,
            "model_seq_id": 0,
            "base_model": self._base_model,
            "lora_config": {"rank": 4, "seed": 7},
        }
        self._model = await self._operation("create_model", new)
        while time.monotonic() + (pause := self._random.expovariate(rate)) < until:
            await asyncio.sleep(pause)
            steps = _BURST if self._random.random() < 0.1 else 1
            if self._number % 3:
                await self._train(steps)
            else:
                await self._reinforce(steps)

    async def _beat(self) -> None:
        connection = Connection(self._port, self._key)
        while True:
            await asyncio.sleep(10)
            await connection.post("session_heartbeat", {"session_id": self._session})

    async def _train(self, steps: int, tokens: list[int] | None = None) -> None:
        """Submit steps concurrently, on `tokens` or on random data."""
        waiting = []
        for _ in range(steps):
            batch = tokens or [self._random.randrange(8, 1000) for _ in range(_TOKENS)]
            waiting.append(await self._submit("forward_backward", self._forward_backward(batch)))
            waiting.append(await self._submit("optim_step", self._on_model(adam_params={"learning_rate": 1e-4})))
        await asyncio.gather(*(self._result(*one) for one in waiting))

    async def _reinforce(self, samples: int) -> None:
        """Publish the weights, sample from them, and train on a sample."""
        self._publications += 1
        saving = self._on_model(sampling_session_seq_id=self._publications)
        await self._operation("save_weights_for_sampler", saving)
        sampler = f"{self._session}:sample:{self._publications}"
        prompt = [self._random.randrange(8, 1000) for _ in range(8)]
        waiting = []
        for number in range(samples):
            asked = {
                "sampling_session_id": sampler,
                "seq_id": number,
                "num_samples": 1,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
                "sampling_params": {"max_tokens": 8, "seed": number, "temperature": 1.0},
            }
            waiting.append(await self._submit("asample", asked))
        answers = await asyncio.gather(*(self._result(*one) for one in waiting))
        sequence = pb.SampleResponse.FromString(answers[0]).sequences[0]
        await self._train(1, prompt + np.frombuffer(sequence.tokens, np.int32).tolist())

    def _on_model(self, **more: Any) -> dict[str, Any]:
        self._seq += 1
        return {"model_id": self._model, "seq_id": self._seq, **more}

    def _forward_backward(self, tokens: list[int]) -> bytes:
        self._seq += 1
        message = pb.ForwardBackwardRequest(model_id=self._model, seq_id=self._seq, loss_fn="cross_entropy")
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens[:-1], np.int32).tobytes()
        for name, values, dtype in (
            ("target_tokens", np.asarray(tokens[1:], np.int64), pb.DTYPE_INT64),
            ("weights", np.ones(len(tokens) - 1, np.float32), pb.DTYPE_FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.tobytes(), dtype
            tensor.shape.append(len(tokens) - 1)
        return message.SerializeToString()

    async def _operation(self, kind: str, body: dict[str, Any]) -> str:
        """Submit a request, wait for its answer, and return the id of its model."""
        began, request, model = await self._submitted(kind, json.dumps(body).encode())
        await self._result(kind, began, request)
        return model

    async def _submit(self, kind: str, body: dict[str, Any] | bytes) -> tuple[str, float, str]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        began, request, _ = await self._submitted(kind, content)
        return kind, began, request

    async def _submitted(self, kind: str, content: bytes) -> tuple[float, str, str]:
        began = time.perf_counter()
        answer = json.loads(await self._submits.send(kind, content))
        self._figures.took["submit"].append((time.perf_counter() - began) * 1e3)
        return began, answer["request_id"], answer.get("model_id", "")

    async def _result(self, kind: str, began: float, request: str) -> bytes:
        connection = Connection(self._port, self._key)
        try:
            while True:
                answer = await connection.send("retrieve_future", json.dumps({"request_id": request}).encode())
                said = json.loads(answer) if answer.startswith(b"{") else {}  # other answers are protobuf
                if said.get("type") != "try_again":
                    break
        finally:
            connection.close()
        self._figures.took[kind].append((time.perf_counter() - began) * 1e3)
        self._figures.operations[kind] += 1
        if "error" in said:
            raise RuntimeError(f"{kind} failed: {said}")
        return answer


def spent(found: Replicas, postgres: int) -> dict[str, float]:
    """CPU-seconds that each part has used until now."""
    roots = {"api": found.apis, "engine": found.engines, "workers": found.workers}
    parts = {name: sum(_cpu(pid) for one in of for pid in tree(one.process.pid)) for name, of in roots.items()}
    return parts | {"postgres": sum(_cpu(pid) for pid in tree(postgres))}


def _cpu(pid: int) -> float:
    try:
        return cpu_seconds(pid)
    except OSError:  # it has ended
        return 0.0


async def drive(found: Replicas, base_model: str, keys: list[str], seconds: float, rate: float) -> Figures:
    """Run a tenant for each key for this many seconds, with `rate` pauses per second."""
    figures, port = Figures(), int(found.url.rsplit(":", 1)[1])
    until = time.monotonic() + seconds

    async def watch() -> None:
        while True:
            figures.memory["engine"].append(memory(found.engines[0].process.pid))
            figures.memory["api"].append(sum(memory(one.process.pid) for one in found.apis))
            figures.memory["worker"].append(sum(memory(pid) for pid in tree(found.workers[0].process.pid)))
            await asyncio.sleep(_LOOK_SECONDS)

    async with asyncio.TaskGroup() as group:
        watching, tasks = group.create_task(watch()), []
        for number, key in enumerate(keys):
            tasks.append(group.create_task(Tenant(port, key, base_model, number, figures).run(until, rate)))
            await asyncio.sleep(random.expovariate(len(keys) / (seconds / 5)))
        await asyncio.wait(tasks)
        watching.cancel()
    return figures


def make_keys(database_url: str, count: int) -> list[str]:
    """Create a key for each of `count` new projects."""
    journal = Journal.open(database_url)
    try:
        return [journal.keys.create(f"tenant {number}", f"tenant-{number}")[1] for number in range(count)]
    finally:
        journal.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--apis", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.05, help="pauses a second of each tenant")
    args = parser.parse_args()
    allow_open_files()
    import pgserver
    from tinker import RestClient

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as database:
        postgres = pgserver.get_server(database)
        main_pid = int((Path(database) / "postmaster.pid").read_text().split()[0])
        try:
            with replicas(Path(folder), postgres.get_uri(), {}, apis=args.apis, engines=1) as found:
                rest = RestClient(base_url=found.url, api_key="tml-bench")
                base_model = str(rest.get_server_capabilities().result().supported_models[0].model_name)
                keys = make_keys(postgres.get_uri(), args.tenants)
                asyncio.run(drive(found, base_model, keys[:6], 20.0, 1.0))  # compiles
                before, began = spent(found, main_pid), time.monotonic()
                figures = asyncio.run(drive(found, base_model, keys, args.seconds, args.rate))
                after, took = spent(found, main_pid), time.monotonic() - began
        finally:
            postgres.cleanup()
    tell(figures, {name: after[name] - before[name] for name in after}, took, args.tenants)
    os._exit(bool(figures.errors))  # the SDK's threads would keep this process alive


def tell(figures: Figures, cpu: dict[str, float], took: float, tenants: int) -> None:
    count = figures.operations.total()
    print(f"{tenants} tenants, {count} operations in {took:.0f} s: {count / took:.1f}/s, load {os.getloadavg()[0]:.1f}")
    print(f"failures: {len(figures.errors)}", *figures.errors[:5], sep="\n    ")
    for kind, milliseconds in sorted(figures.took.items()):
        print(f"{kind:26s} {len(milliseconds):7d}  {shown(milliseconds)}")
    for part, seconds in sorted(cpu.items()):
        print(f"{part:10s} {seconds / count * 1e3:6.2f} CPU-ms an operation, {seconds / took * 100:5.1f} % of a core")
    for part, sizes in figures.memory.items():
        fourth = max(1, len(sizes) // 4)
        means = [statistics.mean(sizes[at : at + fourth]) / 2**20 for at in range(0, fourth * 4, fourth)]
        print(f"memory of {part}: {', '.join(f'{one:.0f}' for one in means)} MiB in each fourth", flush=True)


if __name__ == "__main__":
    main()
