"""Shared parts of the benchmarks: a running service, a client's step, and the CPU time that the service has used."""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tests.benchmarks import connection
from tests.benchmarks.small_model import make_small
from tinker import types

from tinkerflow.backend.settings import Settings

_MOST_CALLS = 20
T = TypeVar("T")


@contextmanager
def server(data_dir: Path, settings: Mapping[str, str], *, model: str = "") -> Iterator[tuple[str, int]]:
    """Run `tinkerflow up` with these settings (TINKERFLOW_<NAME>); yield its URL and pid. model: "" is the tiny model.

    Unless `settings` changes it, Prefect is off, and no program is compiled in the background, where it would compete
    with the measurement for the cores.
    """
    settings = {"PREFECT": "off", "WARM_UP": "false", **settings}
    command = [sys.executable, "-m", "tinkerflow", "up", "--port", "0", "--data-dir", str(data_dir)]
    up = subprocess.Popen(
        command + (["--base-model", model] if model else []),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {f"TINKERFLOW_{k}": v for k, v in settings.items()},
    )
    try:
        assert up.stdout is not None
        yield next(match[1] for line in up.stdout if (match := re.match(r"ready: (\S+)", line))), up.pid
    finally:
        up.terminate()
        up.wait()


def offered_model(url: str) -> str:
    """The name of the first base model that the service offers."""
    served = tinker.RestClient(base_url=url, api_key="tml-benchmark").get_server_capabilities().result()
    return str(served.supported_models[0].model_name)


@contextmanager
def compared_services(sides: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[Path, int, dict[str, tuple[str, int]]]]:
    """Run a service for each side, on the same model; yield a scratch folder, --repeat, and each side's URL and pid.

    sides: settings for `server`, by the side's name, which is also the name of its data dir in the folder. The command
    line accepts --model (default: small-qwen3) and --repeat (default: 3).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="", help="default: small-qwen3 in a scratch folder")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model = args.model or str(make_small(folder / "small-qwen3"))
        services = {
            name: stack.enter_context(server(folder / name, settings, model=model)) for name, settings in sides.items()
        }
        yield folder, args.repeat, services


def warm(work: Callable[[], T], data_dir: Path) -> T:
    """Call `work` until the server in `data_dir` compiles nothing for it, and return the last result.

    Requests arrive differently in each call, so they may need other programs.
    """
    cache = Settings(data_dir=data_dir).compile_cache

    def programs() -> int:
        return len([*cache.rglob("*-cache")])  # a file for each

    for _ in range(_MOST_CALLS):
        before, found = programs(), work()
        if programs() == before:
            return found
    print(f"something was compiled in each of {_MOST_CALLS} rounds; the last one counts", flush=True)
    return found


def random_ids(count: int) -> list[int]:
    """Random token ids, none of them a special token."""
    return [random.randrange(8, 1000) for _ in range(count)]


def datum(tokens: list[int]) -> types.Datum:
    """A cross_entropy datum that scores all tokens of a sequence but the first."""
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def step(client: tinker.TrainingClient, data: list[types.Datum]) -> float:
    """Make a forward_backward and an optim_step, and return the seconds that they take."""
    began = time.perf_counter()
    forward = client.forward_backward(data, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    forward.result()
    return time.perf_counter() - began


def at_once(works: Iterable[Callable[[], object]]) -> None:
    """Run all of them concurrently, each in its own thread."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found


_PARTS = {
    "worker": "tinkerflow.backend.pool.worker",
    "engine": "tinkerflow engine",
    "api": "tinkerflow api",
    "prefect": "prefect.server",
}


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU-seconds of each part of the service, which its command line identifies."""
    spent: dict[str, float] = {}
    for process in tree(pid):
        try:
            seconds = connection.cpu_seconds(process)
            command = Path(f"/proc/{process}/cmdline").read_bytes().decode().replace("\0", " ")
        except OSError:
            continue
        part = next((name for name, words in _PARTS.items() if words in command), "other")
        spent[part] = spent.get(part, 0.0) + seconds
    return spent
