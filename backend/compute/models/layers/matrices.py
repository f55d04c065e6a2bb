"""The declarations of a layer: its matrices and other tensors, with Hugging Face's names and shapes. No JAX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


def plain_name(name: str) -> str:
    """The name of a matrix or tensor inside its layer: `q` for `q@global`.

    Layers with matrices of different shapes are stacked separately, under names with a suffix.
    """
    return name.partition("@")[0]


@dataclass(frozen=True)
class Projection:
    """A matrix that multiplies activations and that LoRA can adapt. Hugging Face stores it as [outputs, inputs].

    A layer declares its own matrices; `families.projections` stacks the matrices of all layers.

    module: Hugging Face's name, with a `{}` for each axis of `stack`: the layer, then the expert. A layer's own
    declaration has no `{}` for the layer.
    switch: the field of LoraSpec that decides whether the matrix is adapted.
    stack: the sizes of the leading axes, by layer and by expert.
    per_token: how many of a layer's matrices one token goes through.
    layers: the numbers of the layers that contain it; None = all.
    sums_inputs: the mesh's tensor axis splits the inputs, and results are summed over this axis (row parallel);
    otherwise the axis splits the outputs.
    before_mixing: attention needs the result for all tokens; other matrices work on each token independently.
    kept: the result is kept for the backward pass (`Keep.RESULTS`).
    """

    module: str
    inputs: int
    outputs: int
    switch: Literal["train_attn", "train_mlp", "train_unembed"]
    stack: tuple[int, ...] = ()
    per_token: int = 1
    layers: tuple[int, ...] | None = None
    sums_inputs: bool = False
    before_mixing: bool = False
    kept: bool = True

    def name(self, place: tuple[int, ...]) -> str:
        """Hugging Face's name of the module at a place of the stack."""
        return self.module.format(*((self.layers[place[0]], *place[1:]) if self.layers else place))

    @property
    def of_experts(self) -> bool:
        """Whether each expert of a layer has its own copy of the matrix."""
        return len(self.stack) == 2

    def stacked(self, prefix: str, layers: tuple[int, ...], count: int) -> Projection:
        """The matrix stacked over `layers`, out of `count` layers. prefix: precedes Hugging Face's names in a layer."""
        numbers = None if len(layers) == count else layers
        return replace(self, module=prefix + self.module, stack=(len(layers), *self.stack), layers=numbers)


@dataclass(frozen=True)
class LayerTensor:
    """A tensor of each layer that LoRA does not adapt: a norm, a bias or a router.

    tensor: Hugging Face's name, with a `{}` for the layer; a layer's own declaration has no `{}`.
    split: the mesh's tensor axis splits its first dimension.
    layers: the numbers of the layers that contain it; None = all.
    wide: its dtype is always float32.
    frozen: full-parameter training does not change it; transformers stores it as a buffer.
    """

    tensor: str
    shape: tuple[int, ...]
    split: bool = False
    layers: tuple[int, ...] | None = None
    wide: bool = False
    frozen: bool = False

    def stacked(self, prefix: str, layers: tuple[int, ...], count: int) -> LayerTensor:
        """The tensor stacked over `layers`, out of `count` layers. prefix: precedes Hugging Face's names in a layer."""
        return replace(self, tensor=prefix + self.tensor, layers=None if len(layers) == count else layers)
