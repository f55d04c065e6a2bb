"""Merged models: a base model's Hugging Face folder with an adapter added to its weights, for tools without LoRA.

If all parameters were trained, the trained weights replace those of the base model.

The folder is read and written tensor by tensor, so that one tensor is in memory at a time. Names and dtypes are the
same as in the base model's files. Experts in MXFP4 are written in bfloat16 if the adapter changes MLPs. Matrices in FP8
are always written in bfloat16, because the sum cannot be represented in FP8.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.catalog.model_source import TEXT_FILES
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import family_of, load_config, parse_config, projections
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.peft_names import pair_names
from tinkerflow.backend.compute.weights.files import (
    DTYPES,
    INDEX,
    WEIGHTS,
    MadeTensor,
    StoredTensor,
    Tensor,
    open_tensors,
    read_object,
)
from tinkerflow.backend.core.disk import draft_of
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import LORA_ALPHA, AdapterState
from tinkerflow.backend.spec.ranks import peft_factor

SHARD_BYTES = 4 * 2**30
_WIDENED = "BF16"  # the dtype of tensors that were quantized


@dataclass(frozen=True)
class _Written:
    """A tensor of the merged model. dtype: safetensors' name of its dtype in the file."""

    name: str
    tensor: Tensor
    dtype: str

    @property
    def size(self) -> int:
        """Its bytes."""
        if isinstance(self.tensor, StoredTensor):
            return self.tensor.raw.size
        return math.prod(self.tensor.shape) * int(np.dtype(DTYPES[self.dtype]).itemsize)


def merge(
    folder: Path,
    state: AdapterState,
    to: Path,
    progress: Callable[[str], None] = lambda _: None,
    *,
    card: str = "",
) -> None:
    """Write the base model in `folder` with the adapter `state` added, or its weights, as the new folder `to`.

    Tokenizer and config are copied. The config loses its quantization if a quantized tensor was widened, and its tied
    embeddings if the adapter changes only the unembedding. progress: called with a line for each file. card: the model
    card, which becomes README.md; "": no card. UserError: the adapter does not fit this model, or `to` exists. `to` is
    created last, so it is complete if it exists. A failure leaves no files.
    """
    if to.exists():
        raise UserError(f"folder {str(to)!r} exists: give a new one")
    cfg = load_config(folder)
    merger = _Merger(cfg, state)
    tensors = merger.tensors(open_tensors(folder, str(folder)))
    merger.check(tensors)
    with draft_of(to) as draft:
        for file in {path for pattern in TEXT_FILES for path in folder.glob(pattern)}:
            shutil.copyfile(file, draft / file.name)
        (draft / INDEX).unlink(missing_ok=True)
        _write_config(draft / "config.json", merger, widened=any(isinstance(one.tensor, MadeTensor) for one in tensors))
        shards = _shards(tensors)
        count = len(shards)
        names = [WEIGHTS] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        for file_name, shard in zip(names, shards, strict=True):
            _write(draft / file_name, shard, merger)
            progress(f"written: {file_name}")
        if count > 1:
            weight_map = {one.name: file_name for file_name, shard in zip(names, shards, strict=True) for one in shard}
            index = {"metadata": {"total_size": sum(one.size for one in tensors)}, "weight_map": weight_map}
            (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        if card:
            (draft / "README.md").write_text(card, encoding="utf-8")


class _Merger:
    """Adds an adapter to tensors of its base model, or replaces them with trained weights."""

    def __init__(self, cfg: ModelConfig, state: AdapterState) -> None:
        self.cfg = cfg
        self.family: Family = family_of(cfg)
        self._state = state
        unembed = projections(cfg)["unembed"].module
        self._head = f"{unembed}.weight"
        self.unties = cfg.tied and pair_names(unembed)[0] in state.weights

    def tensors(self, stored: Mapping[str, Tensor]) -> list[_Written]:
        """All tensors of the merged model, in the order of the files."""
        plain = self.family.plain(self.cfg, stored) if self._state.spec.train_mlp else stored
        found = dict(plain)
        if self.unties:  # the embedding does not change
            found[self._head] = next(
                tensor for name, tensor in plain.items() if self.family.names.embed in self._parts(name, tensor)
            )
        return [
            _Written(name, tensor, _WIDENED if isinstance(tensor, MadeTensor) else tensor.dtype)
            for name, tensor in found.items()
        ]

    def check(self, tensors: Iterable[_Written]) -> None:
        """Raise UserError if a tensor of the adapter has no matching tensor in the base model, or another shape."""
        places = {name: part.shape for one in tensors for name, part in self._parts(one.name, one.tensor).items()}
        unused = set(self._state.weights)
        for name, shape in places.items() if self._state.spec.full else ():
            if name in unused and self._state.weights[name].shape != shape:
                found = self._state.weights[name].shape
                raise UserError(f"base model's tensor {name!r} has shape {shape}: the trained one has {found}")
            unused.discard(name)
        for name, shape in places.items():
            A, B = pair_names(name.removesuffix(".weight"))
            if A in unused and B in unused:
                found = (len(self._state.weights[B]), self._state.weights[A].shape[1])
                if found != shape:
                    raise UserError(f"base model's tensor {name!r} has shape {shape}: the adapter's is for {found}")
                unused -= {A, B}
        if unused:
            raise UserError(f"saved tensor {min(unused)!r} belongs to no tensor of this {self.family.title} model")

    def merged(self, one: _Written) -> npt.NDArray[Any] | None:
        """The merged tensor in the dtype of the file; None for an unchanged tensor."""
        changed = [name for name in self._parts(one.name, one.tensor) if self._source(name) in self._state.weights]
        if not changed and isinstance(one.tensor, StoredTensor):
            return None
        dtype = np.dtype(DTYPES[one.dtype])
        whole: npt.NDArray[Any] = np.array(one.tensor.view(np.dtype(DTYPES[one.tensor.dtype])), dtype, order="C")
        parts = self._parts(one.name, StoredTensor(whole.shape, one.dtype, whole.reshape(-1).view(np.uint8)))
        for name in changed:
            part = parts[name].view(dtype)
            assert np.shares_memory(part, whole)  # a copy would lose the sum
            if self._state.spec.full:
                part[...] = self._state.weights[self._source(name)]
            else:
                part[...] = part.astype(np.float32) + self._update(*pair_names(name.removesuffix(".weight")))
        return whole

    def _source(self, name: str) -> str:
        """The saved tensor that changes a tensor: A of its pair, or its trained replacement; None if there is none."""
        if not self._state.spec.full:
            return pair_names(name.removesuffix(".weight"))[0]
        return self.family.names.embed if self.cfg.tied and name == self._head else name

    def _update(self, A: str, B: str) -> npt.NDArray[np.float32]:
        weights, spec = self._state.weights, self._state.spec
        own = len(weights[A])
        update: npt.NDArray[np.float32] = weights[B] @ weights[A]
        return update * np.float32(LORA_ALPHA / own / peft_factor(spec.rank, own))

    def _parts(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """A tensor of the files under our names: the tensor itself, or views of the matrices that are fused into it."""
        return self.family.unpack(self.cfg, {name: tensor})


def _shards(tensors: list[_Written]) -> list[list[_Written]]:
    shards: list[list[_Written]] = [[]]
    for one in tensors:
        if shards[-1] and sum(each.size for each in shards[-1]) + one.size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(one)
    return shards


def _write(path: Path, shard: list[_Written], merger: _Merger) -> None:
    """Write a safetensors file, a header with the offsets of all tensors first, with one tensor in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in shard:
        begin, end = end, end + one.size
        header[one.name] = {"dtype": one.dtype, "shape": list(one.tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in shard:
            merged = merger.merged(one)
            if merged is None:
                assert isinstance(one.tensor, StoredTensor)
                file.write(one.tensor.raw.data)
            else:
                file.write(merged.reshape(-1).view(np.uint8).data)


def _write_config(path: Path, merger: _Merger, *, widened: bool) -> None:
    values = dict(read_object(path, path.name))
    text = dict(values["text_config"]) if isinstance(values.get("text_config"), dict) else {}
    if widened:
        values.pop("quantization_config", None)
        text.pop("quantization_config", None)
    if merger.unties or (parse_config(values, name=path.name).tied and not merger.cfg.tied):
        values["tie_word_embeddings"] = text["tie_word_embeddings"] = False
    if isinstance(values.get("text_config"), dict):
        values["text_config"] = text
    path.write_text(json.dumps(values, indent=2) + "\n")
