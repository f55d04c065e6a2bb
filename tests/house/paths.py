"""Trace the files that run for one request in a live service, from the HTTP edge to the worker and back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from tests.house.source import ROOMS

WINDOWS = 6  # files that run in each round belong to the request; sweeps and heartbeats run in some rounds
SETTLE_SECONDS = 0.05
LEAVES = {"backend/core/errors.py", "backend/core/ids.py", "backend/core/clock.py", "backend/core/retry.py"}


def trace(tree: Path) -> dict[str, list[str]]:
    """The files of `tree` that run for each request of three operations, without compute and a few leaves."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        process, url = _start(tree, folder)
        try:
            return {name: _files(tree, folder, name, call) for name, call in _operations(url).items()}
        finally:
            process.terminate()
            process.wait()


def _start(tree: Path, folder: Path) -> tuple[subprocess.Popen[str], str]:
    packaged = (tree / ".package").is_dir()
    path = (str(Path(__file__).parent / "tracer"), str(tree / ".package" if packaged else tree))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "HOUSE_TRACE": str(folder),
        "TINKERFLOW_PREFECT": "off",
        "TINKERFLOW_WARM_UP": "false",
    }
    module = "tinkerflow" if packaged else "deployments.cli"
    command = [sys.executable, "-m", module, "up", "--port", "0", "--data-dir", str(folder / "data")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)
    assert process.stdout is not None
    for line in process.stdout:
        if ready := re.match(r"ready: (\S+)", line):
            return process, ready[1]
    raise RuntimeError(f"the service of {tree} ended with {process.wait()} before it was ready")


def _operations(url: str) -> dict[str, Callable[[], object]]:
    warnings.simplefilter("ignore")
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key="tml-house")
    base_model = service.get_server_capabilities().supported_models[0].model_name
    trainer = service.create_lora_training_client(base_model=str(base_model), rank=4).result()
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    inputs = {"target_tokens": [2, 3, 4, 5], "weights": [1.0] * 4}
    data = [types.Datum(model_input=prompt, loss_fn_inputs=inputs)]
    sampler = service.create_sampling_client(base_model=str(base_model)).result()
    few = types.SamplingParams(max_tokens=4)
    return {
        "forward_backward": lambda: trainer.forward_backward(data, "cross_entropy").result(),
        "sample": lambda: sampler.sample(prompt=prompt, num_samples=1, sampling_params=few).result(),
        "save_weights_for_sampler": lambda: trainer.save_weights_for_sampler(name=f"s{time.monotonic_ns()}").result(),
    }


def _files(tree: Path, folder: Path, name: str, call: Callable[[], object]) -> list[str]:
    call()  # compiles, opens connections and wakes sleeping processes
    windows = []
    for number in range(WINDOWS):
        switch = folder / f"on-{name}-{number}"
        switch.touch()
        _of_all(folder, f"began-{switch.name}")
        call()
        time.sleep(SETTLE_SECONDS)
        switch.unlink()
        written = [json.loads(file.read_text()) for file in _of_all(folder, f"ran-{switch.name}")]
        windows.append({_relative(tree, file) for files in written for file in files})
    return sorted(file for file in set.intersection(*windows) if file and file not in LEAVES)


def _of_all(folder: Path, what: str) -> list[Path]:
    """The files `what` of all live processes, once they exist: on a busy machine, a process may write its file late."""
    while True:
        living = [
            pid for pid in (file.suffix[1:] for file in folder.glob("process.*")) if Path(f"/proc/{pid}").exists()
        ]
        if all((folder / f"{what}.{pid}").exists() for pid in living):
            return [folder / f"{what}.{pid}" for pid in living]
        time.sleep(SETTLE_SECONDS)


def _relative(tree: Path, file: str) -> str:
    """The file's path in the tree, or "" if it is not ours or belongs to `compute`."""
    resolved = Path(file).resolve()
    if not resolved.is_relative_to(tree):
        return ""
    relative = resolved.relative_to(tree)
    ours = relative.parts[0] in ROOMS and relative.parts[:2] != ("backend", "compute")
    return relative.as_posix() if ours else ""
