"""How large the key-value cache and the prefix cache may grow: a share of device memory, the same on every process."""

from __future__ import annotations

from jax.sharding import Mesh

from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.memory import device_bytes, least
from tinkerflow.backend.compute.mesh import FSDP, TENSOR
from tinkerflow.backend.compute.sampler.shapes import BLOCK

_SHARE = 0.2  # a cache that grows exists twice for a moment, and training wants its part
_PAGES_A_SLOT = 16  # 2,048 tokens of prompt for every sequence that may decode
_PREFIXES = 0.25  # of the cells that the batch may have, in addition to these


def most_cells(cfg: ModelConfig, mesh: Mesh, itemsize: int) -> int:
    """Slots times positions that fit into a fifth of the devices' memory. Called on every process, all agree."""
    spread = mesh.shape[FSDP] * (mesh.shape[TENSOR] if cfg.kv_heads % mesh.shape[TENSOR] == 0 else 1)
    cell = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * itemsize / spread
    return least(max(1, int(device_bytes() * _SHARE / cell)))


def most_pages(cells: int, *, rows: int, slots: int) -> int:
    """How many pages of prompts to keep.

    cells: slots times positions of the largest batch. rows: rows of cache that a page has. slots: of the batch; they
    bound the number however much memory there is, so that the process soon stops growing.
    """
    return min(int(cells * _PREFIXES) // (rows * BLOCK), slots * _PAGES_A_SLOT)
