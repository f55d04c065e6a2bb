"""Finds this host's accelerators without JAX, because a process that opens a device with JAX takes it from workers."""

from __future__ import annotations

import logging
import os
import re
import shutil
import urllib.request
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean

log = logging.getLogger(__name__)

Name = Literal["cpu", "cuda", "tpu"]
NAMES: dict[str, Name] = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}  # by JAX's name
_GOOGLE = "0x1ae0"  # the PCI vendor id of TPUs and of other Google devices
_TPUS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}  # v2 to v7, as in jax.hardware_utils
_METADATA = "http://{host}/computeMetadata/v1/instance/attributes/agent-worker-number"  # of a GCE virtual machine
_METADATA_SECONDS = 5.0


def accelerator(root: Path = Path("/")) -> Name:
    """The kind of devices that this host has, even if JAX cannot use them. "cpu": the host has no accelerator."""
    if nvidia_devices(root):
        return "cuda"
    return "tpu" if tpu_chips(root) else "cpu"


def expected(asked: str, environ: Mapping[str, str]) -> Name:
    """The kind of devices that JAX will open: the setting `asked`, else JAX_PLATFORMS, else the host's best.

    UserError: JAX_PLATFORMS contains a name that JAX does not know.
    """
    if asked != "auto":
        return NAMES.get(asked) or accelerator()
    names = [name for name in environ.get("JAX_PLATFORMS", "").split(",") if name]
    known = [*NAMES, "rocm", *(plugin.name for plugin in entry_points(group="jax_plugins"))] if names else []
    for name in names:
        if name not in known:
            listed = ", ".join(sorted(known))
            raise UserError(f"JAX_PLATFORMS: {name!r}: must be names of {listed}{did_you_mean(name, known)}")
    return NAMES.get(names[0] if names else "") or accelerator()


def seen(root: Path = Path("/")) -> str:
    """The accelerator of this host, for people, such as "an NVIDIA device (/dev/nvidia0)"; "": none."""
    if found := nvidia_devices(root):
        return f"an NVIDIA device ({found[0]})"
    return f"{chips} TPU chip(s)" if (chips := tpu_chips(root)) else ""


def nvidia_devices(root: Path = Path("/")) -> list[str]:
    """The device files of NVIDIA GPUs. If there are none, the path of the program nvidia-smi, if it exists."""
    files = sorted((f for f in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", f.name)), key=_natural)
    if not files and root == Path("/") and (program := shutil.which("nvidia-smi")):
        return [program]
    return [str(file) for file in files]


def gpu_count(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """How many NVIDIA GPUs a process with these environment variables can use; 0: unknown."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() and not one.startswith("-")])
    return sum("nvidia-smi" not in file for file in nvidia_devices(root))


def tpu_chips(root: Path = Path("/")) -> int:
    """The number of TPU chips on this host's bus."""
    count = 0
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        if vendor.read_text().strip() == _GOOGLE:
            count += (vendor.parent / "device").read_text().strip() in _TPUS
    return count


def place_in_pod(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[int, ...]:
    """(slice, worker) of a TPU host, which determine the order of ranks; () on any other host.

    The values come from the variables that GKE sets, or else from the metadata server of the virtual machine.
    """
    if not tpu_chips(root):
        return ()
    worker = environ.get("TPU_WORKER_ID") or _worker_number(environ)
    return (int(environ.get("MEGASCALE_SLICE_ID") or 0), int(worker)) if worker else ()


def share(mine: int, processes: int, gpus: int) -> list[int]:
    """The ordinals of the GPUs of process `mine`, one of `processes` processes that share `gpus` GPUs.

    UserError: the GPUs cannot be shared equally.
    """
    if gpus % processes:
        raise UserError(
            f"{processes} processes of the group on this host share {gpus} GPU(s): their number must divide the GPUs'"
        )
    each = gpus // processes
    return list(range(mine * each, (mine + 1) * each))


def _worker_number(environ: Mapping[str, str]) -> str:
    url = _METADATA.format(host=environ.get("GCE_METADATA_IP") or "metadata.google.internal")
    try:
        asked = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(asked, timeout=_METADATA_SECONDS) as answer:
            return str(answer.read().decode().strip())
    except OSError as error:
        log.warning("this host's worker id in the TPU pod is unknown (%s): set TPU_WORKER_ID", error)
        return ""


def _natural(file: Path) -> tuple[int, str]:
    return len(file.name), file.name
