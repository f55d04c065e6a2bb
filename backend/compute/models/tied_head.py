"""Models with a config that ties the unembedding to the embedding, but with files that contain both. No JAX.

In this case, transformers does not tie them. Files with two equal copies stay tied, because the logits are the same.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.family import Family, open_unpacked
from tinkerflow.backend.compute.weights.files import DTYPES, Tensor, modified, stored_names

HEAD = "lm_head.weight"  # Hugging Face's name, after `Family.unpack`
_ROWS = 4096  # compared at a time


def is_tied(family: Family, cfg: ModelConfig, folder: Path, name: str) -> bool:
    """Whether the model in `folder` has tied embeddings, by its config and its files.

    cfg: from its `config.json`. name: the model's name in errors. UserError: the files cannot be read.
    """
    if not cfg.tied or not any(stored.endswith(HEAD) for stored in stored_names(folder, name)):
        return cfg.tied
    return _same_head(family, cfg, folder, name, modified(folder))


@cache
def _same_head(family: Family, cfg: ModelConfig, folder: Path, name: str, _: tuple[int, ...]) -> bool:
    tensors = open_unpacked(family, cfg, folder, name)
    head, embed = tensors.get(HEAD), tensors.get(family.names.embed)
    return head is None or embed is None or _equal(head, embed)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype not in DTYPES or other.dtype not in DTYPES:
        return False  # the loader reports what is wrong with them
    first, second = (tensor.view(DTYPES[tensor.dtype]) for tensor in (one, other))
    return all(
        np.array_equal(first[row : row + _ROWS].astype(np.float32), second[row : row + _ROWS].astype(np.float32))
        for row in range(0, len(first), _ROWS)
    )
