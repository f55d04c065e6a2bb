"""What the benchmarks share: a running service, a step of a client, and the CPU time that the service has spent."""

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
from tests.benchmarks.small_model import make_small
from tinker import types

from tinkerflow.backend.settings import Settings

TICK = os.sysconf("SC_CLK_TCK")
_MOST_CALLS = 20
T = TypeVar("T")


@contextmanager
def server(data_dir: Path, settings: Mapping[str, str], *, model: str = "") -> Iterator[tuple[str, int]]:
    """`tinkerflow up` with these settings (TINKERFLOW_<NAME>), Prefect off; its URL and pid. model: "" = the tiny.

    By default (`settings`) no program is compiled in the background, because it would share the cores with the
    measurement.
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
    """The name of the base model that the service offers first."""
    served = tinker.RestClient(base_url=url, api_key="tml-benchmark").get_server_capabilities().result()
    return str(served.supported_models[0].model_name)


@contextmanager
def compared_services(sides: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[Path, int, dict[str, tuple[str, int]]]]:
    """Services that take turns on one model: a scratch folder, --repeat, and for each side its URL and pid.

    sides: settings as for `server`, by the name of the side, whose data dir has that name in the folder. The command
    line has --model (default: small-qwen3) and --repeat (default: 3).
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
    """What `work` gives when it is called so often that the server in `data_dir` compiles nothing for it.

    How requests arrive differs, and so may the programs that they need.
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
    """Ids that are no special token's."""
    return [random.randrange(8, 1000) for _ in range(count)]


def datum(tokens: list[int]) -> types.Datum:
    """A sequence whose tokens, except for the first, are all scored."""
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def step(client: tinker.TrainingClient, data: list[types.Datum]) -> float:
    """One forward_backward and optim_step; seconds."""
    began = time.perf_counter()
    forward = client.forward_backward(data, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    forward.result()
    return time.perf_counter() - began


def at_once(works: Iterable[Callable[[], object]]) -> None:
    """Do all of them, each in a thread of its own."""
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
    """CPU-seconds of each part of the service, by the part's name on its command line."""
    spent: dict[str, float] = {}
    for process in tree(pid):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            command = Path(f"/proc/{process}/cmdline").read_bytes().decode().replace("\0", " ")
        except OSError:
            continue
        part = next((name for name, words in _PARTS.items() if words in command), "other")
        spent[part] = spent.get(part, 0.0) + (int(fields[11]) + int(fields[12])) / TICK
    return spent
