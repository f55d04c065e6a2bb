"""The safetensors files of a Hugging Face folder: which there are, and what is in them. No JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import safetensors

from tinkerflow.backend.compute.config import read_object
from tinkerflow.backend.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class StoredTensor(Protocol):
    """A tensor in a file, as the safetensors package hands it out: nothing is read before it is sliced."""

    def get_shape(self) -> list[int]:
        """Its shape."""

    def get_dtype(self) -> str:
        """Its dtype by safetensors' name, such as "BF16"."""

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        """A part of it, read from the file as a NumPy array."""


def open_tensors(folder: Path, name: str) -> dict[str, StoredTensor]:
    """Every tensor of the base model `name`, by Hugging Face's name; the files stay open as long as it is held.

    Errors (UserError) name the file that is missing or no safetensors file.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _files(folder, name):
        path = folder / file
        try:
            opened: Any = safetensors.safe_open(path, framework="numpy")
            tensors |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise _broken(name, f"there is no {path}; weights must be safetensors") from error
        except (OSError, safetensors.SafetensorError) as error:
            raise _broken(name, f"{path} is not a safetensors file ({error})") from error
    return tensors


def _files(folder: Path, name: str) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        return [WEIGHTS]
    weight_map = read_object(index, name).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _broken(name, f"{index} has no object 'weight_map'")
    return sorted(set(weight_map.values()))


def _broken(name: str, why: str) -> UserError:
    return UserError(f"base model {name!r}: its safetensors cannot be read: {why}")
