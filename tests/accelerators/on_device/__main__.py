"""Checks and measures Tinkerflow on the GPU or TPU of this machine, in under ten minutes.

    python -m tests.accelerators.on_device [--out FOLDER] [--model 4B] [--seconds 540] [STAGE …]

    kernels   every kernel, compiled for the device: right, the same bits twice, and its share of the peak
    parity    small models in float32 and bfloat16, against float32 on the CPU
    speed     training and decoding of the model
    service   the whole service with the SDK

It writes results.jsonl, page.html, and a log of each stage. The status is 1 if a result is wrong. Each stage has its
own process, so an error ends only that stage. --tiny tries all stages on a CPU, with small shapes and interpreted
kernels.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from shutil import which

from tests.accelerators.on_device.page import page

import tinkerflow

STAGES = {
    "kernels": ("kernels",),
    "parity": ("reference", "parity_float32", "parity_bfloat16"),
    "speed": ("speed",),
    "service": ("service",),
}
_MODULES = {part: stage for stage, parts in STAGES.items() for part in parts}
_DEVICES = "import jax; print(jax.default_backend()); print(*(d.device_kind for d in jax.local_devices()), sep=', ')"
_PLATFORMS = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}  # platforms by JAX's names of backends


def main() -> int:
    """Run the stages, and write the page. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("on-device"), help="the folder of the results")
    parser.add_argument("--model", default="4B", help="the model of `speed`: a name of tests/accelerators/models.py")
    parser.add_argument("--seconds", type=float, default=540, help="the time for all stages")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of a stage, in its own process
    parser.add_argument("--platform", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"STAGE {min(unknown)!r}: must be one of {', '.join(STAGES)}")
    if args.part:
        return _run_part(args)
    found = "cpu\nCPU" if args.tiny else subprocess.check_output([sys.executable, "-c", _DEVICES], text=True)
    backend, device = found.strip().splitlines()[-2:]
    if backend == "cpu" and not args.tiny:
        parser.error("JAX finds no GPU or TPU on this machine; --tiny tries the suite on the CPU")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.jsonl").write_text("")
    began = time.monotonic()
    for part in [part for stage in args.stages or STAGES for part in STAGES[stage]]:
        on = "cpu" if part == "reference" else _PLATFORMS[backend]
        _start(part, on, args, began + args.seconds - time.monotonic())
    results = [json.loads(line) for line in (args.out / "results.jsonl").read_text().splitlines()]
    about = {
        "device": device,
        "host": f"{platform.platform()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "numpy")),
        "tinkerflow": f"{tinkerflow.__version__} {_commit()}",
        "command": " ".join(["python -m tests.accelerators.on_device", *sys.argv[1:]]),
        "seconds": f"{time.monotonic() - began:.0f}",
    }
    (args.out / "page.html").write_text(page(about, results))
    wrong = [f"{result['stage']}: {result['name']}" for result in results if result["ok"] is False]
    print(f"{len(results)} results, {len(wrong)} wrong; {args.out / 'page.html'}", *wrong, sep="\n")
    return 1 if wrong else 0


def _start(part: str, on: str, args: argparse.Namespace, seconds: float) -> None:
    """Run a part of a stage in a process. An error or a timeout is recorded as a wrong result."""
    options = ["--part", part, "--platform", on, "--out", args.out, "--model", args.model, "--seconds", f"{seconds}"]
    command = [sys.executable, "-m", "tests.accelerators.on_device", *map(str, options)]
    log = args.out / f"{part}.log"
    print(f"== {part}", flush=True)
    with log.open("w") as file:
        try:
            command += ["--tiny"] if args.tiny else []
            ended = subprocess.run(command, stderr=file, timeout=max(1.0, seconds)).returncode
            error = f"ended with status {ended}; see {log.name}" if ended else ""
        except subprocess.TimeoutExpired:
            error = f"ended after {seconds:.0f} s; --seconds gives it more time"
    if error:
        line = json.dumps({"stage": part, "name": "the stage", "ok": False, "error": error})
        with (args.out / "results.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def _run_part(args: argparse.Namespace) -> int:
    from tests.accelerators.on_device.measure import Run, open_platform

    deadline = time.monotonic() + args.seconds
    if args.part != "service":  # its worker opens the devices
        open_platform(args.platform)
    module = import_module(f"tests.accelerators.on_device.{_MODULES[args.part]}")
    module.measure(Run(args.part, args.platform, args.tiny, args.model, args.out, deadline))
    return 0


def _commit() -> str:
    """The checkout's commit, or "" in a copy without git."""
    if which("git") is None:
        return ""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
