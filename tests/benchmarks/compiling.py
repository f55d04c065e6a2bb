"""CPU-seconds to compile the six large programs among the first twelve of a warm-up, for an H100.

No device is needed.

python -m tests.benchmarks.compiling

Autotuning needs a device, so its time is not included. The other six programs are copies, publishing and the optimizer.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile

from tests.accelerators import environment
from tests.accelerators.gate import ENVIRONMENT

# As the warm-up names them: see tests/compute/test_warming.py.
PROGRAMS = (
    ("forward_backward", (4, 1024)),
    ("forward_backward", (2, 2048)),
    ("decode", (1, 2048)),
    ("decode", (64, 2048)),
    ("prefill", (1, 128, 2048)),
    ("prefill", (1, 512, 2048)),
)


def cpu_seconds() -> float:
    """CPU-seconds of this process and of its ended children, such as the assembler `ptxas`."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure() -> None:
    """Compile every program with an empty cache, and print its CPU-seconds."""
    from tests.accelerators.model_programs import Programs  # needs the environment of the compilers
    from tests.accelerators.models import config

    programs, total = Programs(config("4B"), "h100:1"), 0.0
    with tempfile.TemporaryDirectory() as cache:
        for name, sizes in PROGRAMS:
            before = cpu_seconds()
            getattr(programs, name)(*sizes, cache=cache, unknown_trips=1)
            total += (used := cpu_seconds() - before)
            print(f"4B, H100, {name} {'x'.join(map(str, sizes))}: {used:.1f} CPU-seconds", flush=True)
    print(f"in all: {total:.1f} CPU-seconds")


if __name__ == "__main__":
    if "inside" in sys.argv:
        measure()
    else:
        command = [environment.make(), "-m", "tests.benchmarks.compiling", "inside"]
        sys.exit(subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False).returncode)
