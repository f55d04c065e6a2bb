"""The cost of a request apart from its computation: round trips through the SDK on the tiny model.

    python -m tests.benchmarks.control_plane [--base-url URL --server-pid PID] [--repeat 50]

Without --base-url it starts `tinkerflow up` in a scratch folder. Prints wall p50/p95 per call, CPU-milliseconds of
the server's processes and of this client per call, and how many programs JAX compiled after the warm-up. RESULTS.md
keeps the output.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tests.benchmarks.service import cpu_seconds, datum
from tinker import types


def measure(name: str, call: Callable[[], object], repeat: int, pid: int, per_call: int = 1) -> None:
    """Time `repeat` calls after two unmeasured ones and print a line."""
    call(), call()
    before, own, walls = cpu_seconds(pid), time.process_time(), []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        walls.append((time.perf_counter() - start) * 1e3 / per_call)
    count = repeat * per_call
    after = cpu_seconds(pid)
    parts = ", ".join(f"{p} {(s - before.get(p, 0)) * 1e3 / count:.1f}" for p, s in sorted(after.items()))
    client = (time.process_time() - own) * 1e3 / count
    p95 = statistics.quantiles(walls, n=20)[-1]
    print(
        f"{name:28s} p50 {statistics.median(walls):7.1f} ms  p95 {p95:7.1f} ms | "
        f"CPU-ms per call: {parts}, client {client:.1f}",
        flush=True,
    )


def run(base_url: str, pid: int, repeat: int, compiles: Callable[[], int]) -> None:
    """Measure all cases on one server."""
    service = tinker.ServiceClient(base_url=base_url, api_key="tml-bench")
    rest = tinker.RestClient(base_url=base_url, api_key="tml-bench")
    models = rest.get_server_capabilities().result().supported_models
    start = time.perf_counter()
    client = service.create_lora_training_client(base_model=str(models[0].model_name), rank=32).result()
    data = [datum(list(range(10, 19)))]
    adam = types.AdamParams(learning_rate=0.0)

    def optim() -> None:
        client.optim_step(adam).result()

    def step() -> None:
        forward = client.forward_backward(data, "cross_entropy")
        client.optim_step(adam).result()
        forward.result()

    def pipelined(depth: int = 20) -> None:
        futures: list[object] = []
        for _ in range(depth):
            futures += [client.forward_backward(data, "cross_entropy"), client.optim_step(adam)]
        for future in futures:
            future.result()  # type: ignore[attr-defined]

    step()
    print(f"first step, with the client's creation and all compilation: {time.perf_counter() - start:.1f} s")
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt, one = types.ModelInput.from_ints([10, 11, 12]), types.SamplingParams(max_tokens=1, temperature=1.0)

    def sample() -> None:
        sampler.sample(prompt, 1, one).result()

    def forward() -> None:
        client.forward(data, "cross_entropy").result()

    for warm in (step, pipelined, forward, sample):
        warm()
    warm_compiles = compiles()
    print(f"load {os.getloadavg()[0]:.2f}, programs compiled in the warm-up: {warm_compiles}")
    measure("optim_step", optim, repeat, pid)
    measure("forward 1x8", forward, repeat, pid)
    measure("step 1x8", step, repeat, pid)
    measure("step 1x8, 20 pipelined", pipelined, max(3, repeat // 10), pid, per_call=20)
    measure("sample 1 token", sample, repeat, pid)
    measure("publish sampler weights", lambda: client.save_weights_and_get_sampling_client().result(), repeat, pid)
    print(f"programs compiled after the warm-up: {compiles() - warm_compiles}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url")
    parser.add_argument("--server-pid", type=int)
    parser.add_argument("--repeat", type=int, default=50)
    args = parser.parse_args()
    if args.base_url:
        run(args.base_url, args.server_pid, args.repeat, lambda: 0)
        return
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "tinkerflow", "up", "--port", "0", "--data-dir", scratch]
        start = time.perf_counter()
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TINKERFLOW_PREFECT_PORT": "0"}
        )
        try:
            assert server.stdout is not None
            ready = next(match for line in server.stdout if (match := re.match(r"ready: (\S+)", line)))
            print(f"cold start to ready: {time.perf_counter() - start:.1f} s")
            said: list[str] = []
            threading.Thread(target=said.extend, args=(server.stdout,), daemon=True).start()
            run(ready[1], server.pid, args.repeat, lambda: compiled(said))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    sys.stdout.flush()
    os._exit(0)  # the SDK's heartbeat threads would keep this process alive


def compiled(said: list[str]) -> int:
    """The number of programs that the pool has compiled since it was ready, from the server's output."""
    return sum(int(match[1]) for line in tuple(said) if (match := re.search(r"compiled (\d+) program", line)))


if __name__ == "__main__":
    main()
