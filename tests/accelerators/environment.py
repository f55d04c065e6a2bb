"""Makes an environment that compiles for TPUs and NVIDIA GPUs without a device, and prints the path of its Python.

    python tests/accelerators/environment.py

It contains the packages of the Python that runs this file, and the compilers in requirements.txt (4 GB, so not part of
the ordinary environment). Its folder is ~/.cache/tinkerflow/accelerators-<hash of its contents>. It is made once, and
shared by all checkouts that use the same folder of packages.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE.parent.parent / "constraints.txt"
REQUIREMENTS = HERE / "requirements.txt"


def packages() -> Path:
    """The folder of installed packages that contains this Python's jax."""
    found = find_spec("jax")
    if found is None or found.origin is None:
        raise SystemExit("jax is not installed: run .ci/install first")
    return Path(found.origin).parent.parent


def place() -> Path:
    """The folder of the environment, which may not exist yet."""
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith(("jax", "numpy", "protobuf"))]
    made_of = "\n".join((REQUIREMENTS.read_text(), *pins, str(packages()), sys.version))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "tinkerflow" / f"accelerators-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"


def python() -> Path:
    """The environment's Python, which exists only when the environment is complete."""
    return place() / "bin" / "python"


def compiled() -> Path:
    """The folder of compiled programs, which are named by their contents. It can be deleted at any time."""
    return place().with_name("accelerators-programs")


def make() -> Path:
    """Make the environment unless it exists, and return its Python. Raises CalledProcessError if pip fails."""
    folder = place()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python().exists():
            partial = folder.with_suffix(".partial")
            venv.create(partial, symlinks=True, clear=True)
            site = partial / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
            (site / "project.pth").write_text(f"{packages()}\n")
            pip = [partial / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "-c", CONSTRAINTS, "-r", REQUIREMENTS], check=True)
            partial.rename(folder)
    return python()


if __name__ == "__main__":
    print(make())
