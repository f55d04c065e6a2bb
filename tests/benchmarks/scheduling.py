"""How long clients wait for each other: the scheduling criteria of issue 4.

    python -m tests.benchmarks.scheduling [--model FOLDER] [--cases little,turns,closed,group,publish,clients | flat]
                                          [--minutes 10] [--data-dir FOLDER]

Runs one `tinkerflow up` without Prefect, on the tiny model by default. RESULTS.md keeps the output. Rounds of `little`
and `closed` do not count if a program was compiled for them.

    little   samples of 1 token while 64 samples of 64 tokens are decoded: p50 and p95, compared with a chunk's time
    turns    samples of 16 tokens, one after the other, while steps of 16x512 tokens are computed: p50 and the longest
    closed   8 users with requests of mixed lengths, who ask again when answered, compared with 8 concurrent requests
    group    8 samples of one prompt of 1,000 tokens, compared with 1 sample: the time
    publish  save_weights_and_get_sampling_client after a step of 64 short sequences (importance_sampling)
    clients  1, 4 and 16 clients train concurrently, 2 x 32 tokens a step: useful tokens per second and per CPU-second
    flat     mixed traffic for --minutes, after the warm-up: resident memory of the server's processes and programs that
             were compiled late, minute by minute; runs alone, because the other cases have no warm-up
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import httpx
import tinker
from tests.benchmarks.connection import memory
from tests.benchmarks.service import at_once, cpu_seconds, datum, random_ids, server, step, tree, warm
from tinker import types

from tinkerflow.deployments.tiny_model import make_tiny

KEY = "tml-bench"
USERS, ASKED = 8, 6
CHUNK = 8  # in tokens; decode_chunk's default
SUBMITTING = 0.5  # seconds to send 64 requests; samples in this time would measure this process


@dataclass(frozen=True)
class Bench:
    """A server, and clients of one of its models."""

    service: tinker.ServiceClient
    url: str
    pid: int
    trainer: tinker.TrainingClient
    model: str
    data_dir: Path

    async def sample(self, sampler: tinker.SamplingClient, prompt: int, most: int, count: int = 1) -> float:
        """The seconds of a request with a random prompt, which generates exactly `most` tokens."""
        params = types.SamplingParams(max_tokens=most, temperature=1.0, stop=[1])
        began = time.perf_counter()
        await sampler.sample(types.ModelInput.from_ints(random_ids(prompt)), count, params)
        return time.perf_counter() - began

    def little(self) -> None:
        sampler = self.trainer.save_weights_and_get_sampling_client().result()

        async def case() -> tuple[float, list[float]]:
            began = time.perf_counter()
            burst = [asyncio.create_task(self.sample(sampler, 20, 64)) for _ in range(64)]
            await asyncio.sleep(SUBMITTING)
            found: list[float] = []
            while not any(one.done() for one in burst):
                found.append(await self.sample(sampler, 20, 1))
            await asyncio.gather(*burst)
            return time.perf_counter() - began, found

        for _ in range(3):
            walls = [warm(lambda: asyncio.run(case()), self.data_dir) for _ in range(4)]
            found = sorted(one for _, few in walls for one in few)
            if not found:
                print("the bursts were over before a 1-token sample: take a larger model")
                continue
            alone = asyncio.run(self.alone(sampler))
            chunk = alone / (64 / CHUNK)
            p95 = found[int(0.95 * (len(found) - 1))]
            print(
                f"1-token sample beside 64 of 64 tokens: p50 {statistics.median(found):.3f} s, p95 {p95:.3f} s of "
                f"{len(found)}; a chunk of the burst alone {chunk:.3f} s: p95 is {p95 / chunk:.2f} chunks; {load()}"
            )

    async def alone(self, sampler: tinker.SamplingClient) -> float:
        """The seconds that the burst takes alone."""
        began = time.perf_counter()
        await asyncio.gather(*(self.sample(sampler, 20, 64) for _ in range(64)))
        return time.perf_counter() - began

    def turns(self) -> None:
        sampler = self.trainer.save_weights_and_get_sampling_client().result()
        data = [datum(random_ids(513)) for _ in range(16)]
        alone = [step(self.trainer, data) for _ in range(3)][-1]

        async def while_training() -> tuple[list[float], float]:
            began, found = time.perf_counter(), []
            steps = [asyncio.create_task(asyncio.to_thread(step, self.trainer, data)) for _ in range(3)]
            await asyncio.sleep(SUBMITTING)
            while not all(one.done() for one in steps):
                found.append(await self.sample(sampler, 20, 16))
            return found, (time.perf_counter() - began) / len(steps)

        asyncio.run(self.sample(sampler, 20, 16))  # compiles
        found, beside = asyncio.run(while_training())
        print(
            f"samples of 16 tokens beside training: p50 {statistics.median(found):.2f} s, longest {max(found):.2f} s "
            f"of {len(found)}; a step of 16x512 took {alone:.2f} s alone and {beside:.2f} s beside them; {load()}"
        )

    def closed(self) -> None:
        sampler = self.trainer.save_weights_and_get_sampling_client().result()
        sizes = [[(random.randrange(5, 100), random.randrange(8, 64)) for _ in range(ASKED)] for _ in range(USERS)]
        made = sum(most for user in sizes for _, most in user)

        async def user(number: int) -> None:
            for prompt, most in sizes[number]:
                await self.sample(sampler, prompt, most)

        async def users() -> None:
            await asyncio.gather(*(user(number) for number in range(USERS)))

        async def static() -> None:
            await asyncio.gather(*(self.sample(sampler, 50, 64) for _ in range(USERS)))

        for _ in range(3):
            took, together = warm(lambda: (timed(users), timed(static)), self.data_dir)
            mixed, fixed = made / took, USERS * 64 / together
            print(
                f"closed loop of {USERS} users: {mixed:.0f} tokens/s, {fixed:.0f} static: {mixed / fixed:.0%}; {load()}"
            )

    def group(self) -> None:
        sampler = self.trainer.save_weights_and_get_sampling_client().result()
        for count in (1, 8, 1, 8):
            took = asyncio.run(self.sample(sampler, 1000, 2, count))
            print(f"{count} sample(s) of a prompt of 1000 tokens: {took:.2f} s; {load()}")

    def publish(self) -> None:
        adam = types.AdamParams(learning_rate=1e-4)
        data = [rollout(24) for _ in range(64)]
        walls = []
        for _ in range(12):
            forward = self.trainer.forward_backward(data, "importance_sampling")
            self.trainer.optim_step(adam).result()
            forward.result()
            began = time.perf_counter()
            self.trainer.save_weights_and_get_sampling_client().result()
            walls.append(1e3 * (time.perf_counter() - began))
        walls = sorted(walls[2:])
        print(
            f"publish: best {walls[0]:.1f} ms, p50 {statistics.median(walls):.1f} ms, worst {walls[-1]:.1f}; {load()}"
        )

    def clients(self) -> None:
        data, rounds = [datum(random_ids(33)) for _ in range(2)], 12
        made = [self.service.create_lora_training_client(base_model=self.model, rank=32).result() for _ in range(16)]

        def train(client: tinker.TrainingClient) -> None:
            for _ in range(rounds):
                step(client, data)

        train(made[0])
        for _ in range(2):
            first = 0.0
            for count in (1, 4, 16):
                spent, began = sum(cpu_seconds(self.pid).values()), time.perf_counter()
                at_once(partial(train, client) for client in made[:count])
                tokens = count * rounds * 64
                rate = tokens / (time.perf_counter() - began)
                first = first or rate
                cpu = tokens / (sum(cpu_seconds(self.pid).values()) - spent)
                print(
                    f"{count:2d} clients of 2x32: {rate:.0f} tokens/s ({rate / first:.2f} of one's), {cpu:.0f} a "
                    f"CPU-second of the server; {load()}",
                    flush=True,
                )

    def flat(self, minutes: float) -> None:
        while (programs := self.programs())["ready"] < programs["planned"] or not programs["planned"]:
            print(f"warm-up: {programs['ready']} of {programs['planned']} programs; {load()}", flush=True)
            time.sleep(10)
        began, last, steps, samples = time.perf_counter(), -1, 0, 0
        while (passed := time.perf_counter() - began) < 60 * minutes:
            if int(passed / 60) > last:
                last = int(passed / 60)
                print(
                    f"after {last:2d} min: {resident(self.pid)}, {self.programs()['late']} programs compiled "
                    f"late, {steps} steps, {samples} samples; {load()}",
                    flush=True,
                )
            step(self.trainer, [datum(random_ids(random.randint(3, 400))) for _ in range(random.randint(1, 6))])
            sampler = self.trainer.save_weights_and_get_sampling_client().result()
            sizes = [[random.randint(*span) for span in ((1, 400), (1, 60), (1, 4))] for _ in range(4)]

            async def some(sampler: tinker.SamplingClient = sampler, sizes: list[list[int]] = sizes) -> None:
                await asyncio.gather(*(self.sample(sampler, *size) for size in sizes))

            asyncio.run(some())
            steps, samples = steps + 1, samples + sum(count for *_, count in sizes)
        print(f"at the end: {resident(self.pid)}, {self.programs()}; {load()}")

    def programs(self) -> dict[str, int]:
        """The server's metrics of its compiled programs (api/metrics.py)."""
        page = httpx.get(f"{self.url}/api/v1/metrics", headers={"X-API-Key": KEY}).raise_for_status().text
        found = re.findall(r"^tinkerflow_programs_(\w+?)(?:_total)?{.*} (\d+)$", page, re.MULTILINE)
        return {name: int(value) for name, value in found}


def rollout(length: int) -> types.Datum:
    """A sampled sequence with the inputs of the importance_sampling loss."""
    tokens = random_ids(length + 1)
    inputs = {"target_tokens": tokens[1:], "logprobs": [-3.0] * length, "advantages": [0.1] * length}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def resident(pid: int) -> str:
    """The resident MiB of a process tree, in total and by process, parents first."""
    sizes = []
    for process in tree(pid):
        try:
            sizes.append(memory(process) / 2**20)
        except OSError:  # it has ended
            continue
    return f"{sum(sizes):.1f} MiB ({' + '.join(f'{size:.0f}' for size in sizes)})"


def timed(work: Callable[[], Coroutine[Any, Any, object]]) -> float:
    began = time.perf_counter()
    asyncio.run(work())
    return time.perf_counter() - began


def load() -> str:
    """The machine's load average, as text."""
    return f"load {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--cases", default="little,turns,closed,group,publish,clients")
    parser.add_argument("--data-dir", help="the server's, kept: a second run finds its programs compiled")
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args()
    random.seed(0)
    cases: dict[str, Callable[[Bench], None]] = {
        "little": Bench.little,
        "turns": Bench.turns,
        "closed": Bench.closed,
        "group": Bench.group,
        "publish": Bench.publish,
        "clients": Bench.clients,
        "flat": partial(Bench.flat, minutes=args.minutes),
    }
    asked = args.cases.split(",")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = args.model or str(make_tiny(scratch / "tiny"))
        settings = {"WARM_UP": "true"} if asked == ["flat"] else {}
        data_dir = Path(args.data_dir or scratch / "data")
        url, pid = stack.enter_context(server(data_dir, settings, model=model))
        service = stack.enter_context(tinker.ServiceClient(base_url=url, api_key=KEY))
        trainer = service.create_lora_training_client(base_model=model, rank=32, seed=1).result()
        bench = Bench(service, url, pid, trainer, model, data_dir)
        for name in asked:
            cases[name](bench)


if __name__ == "__main__":
    main()
