"""Trees of examples with equal beginnings, so that training computes each shared beginning once.

The samples of one prompt, the turns of a conversation and the two answers of a preference begin with the same tokens.
Sorted by their tokens, such examples follow each other, and each shares its first tokens with the example before it.

A token is shared if the inputs of the model (including given experts), the scored targets and their supports are equal.
It is scored once, so all examples that train it need equal inputs of the loss. Their weights are added. An example that
does not train the token (its weight or advantage is 0) can share it with any other example.

The trees depend only on the examples, so the pool and the workers find the same ones. Letters: T tokens, K targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.spec.commands import Example, Float32
from tinkerflow.backend.spec.losses import LossSpec
from tinkerflow.backend.spec.supports import equal_supports, restricted_inputs

LEAST_SHARED = 16  # tokens; fewer would save less than the padding of a row


class Branch(NamedTuple):
    """An example in a tree. shared: how many of its first tokens it shares with the branch before it."""

    example: int
    shared: int


Tree = tuple[Branch, ...]  # depth first; the first branch shares nothing


def prefix_trees(examples: Sequence[Example], loss: LossSpec, branch_tokens: int = 1) -> list[Tree]:
    """All examples as trees, in the order of the first example of each tree.

    loss: a loss per token. branch_tokens: lengths of shared beginnings are multiples of it. If it is more than 1, a
    branch begins with the state of its beginning, and only one state is kept at a time.
    """
    trees: list[list[Branch]] = []
    alike: dict[bytes, list[int]] = {}
    for number, example in enumerate(examples):
        alike.setdefault(_columns(example, LEAST_SHARED), []).append(number)
    for numbers in alike.values():
        trees += _trees_of({number: examples[number] for number in numbers}, loss)
    if branch_tokens > 1:
        trees = [part for tree in trees for part in _with_one_state(tree, branch_tokens)]
    return sorted((tuple(tree) for tree in trees), key=min)


def _trees_of(examples: Mapping[int, Example], loss: LossSpec) -> list[list[Branch]]:
    """The trees of examples that may begin alike."""
    if len(examples) == 1:
        return [[Branch(number, 0)] for number in examples]
    trees: list[list[Branch]] = []
    before: _Path | None = None
    for number, example in sorted(examples.items(), key=lambda item: (_columns(item[1]), item[0])):
        path = _Path.of(example, loss)
        shared = 0 if before is None else before.shared_with(path)
        if before is None or shared < LEAST_SHARED:
            shared = 0
            trees.append([])
        else:
            path = before.merged(path, shared)
        trees[-1].append(Branch(number, shared))
        before = path
    return trees


def _with_one_state(tree: Sequence[Branch], branch_tokens: int) -> Iterator[list[Branch]]:
    """Divide the tree into trees whose branches begin at multiples of `branch_tokens`, and at one kept state.

    A later state of the previous branch replaces the kept state, so no branch may share less than the branch before it.
    """
    shared = [branch.shared // branch_tokens * branch_tokens for branch in tree]
    for number in reversed(range(1, len(tree) - 1)):
        after = shared[number + 1]
        if after < shared[number] < 2 * after:  # sharing less costs less than another tree
            shared[number] = after
    part = [tree[0]]
    for number in range(1, len(tree)):
        if shared[number] < max(LEAST_SHARED, part[-1].shared):
            yield part
            part = []
        part.append(Branch(tree[number].example, shared[number] if part else 0))
    yield part


def _columns(example: Example, most: int | None = None) -> bytes:
    """The tokens and targets of an example by position, as bytes that sort in the same order. most: positions."""
    columns = np.concatenate([example.tokens_T[:most, None], example.targets_TK[:most]], axis=1)
    return columns.astype(">u4").tobytes()


@dataclass(frozen=True)
class _Path:
    """An example, and the loss of its tokens in all branches that share them.

    trained_TK: the cells with a loss. inputs_TK: the inputs of the loss except weights, by name; NaN if the example
    lacks an optional one.
    """

    example: Example
    trained_TK: npt.NDArray[np.bool_]
    inputs_TK: Mapping[str, Float32]

    @classmethod
    def of(cls, example: Example, loss: LossSpec) -> _Path:
        """The path of a single example."""
        absent = np.full(example.targets_TK.shape, np.nan, np.float32)
        given = restricted_inputs(example.inputs, example.supports)
        inputs_TK = {name: given.get(name, absent) for name in loss.names if name != "weights"}
        return cls(example, trained_cells(example, loss), inputs_TK)

    def shared_with(self, other: _Path) -> int:
        """How many first tokens `other` can share."""
        mine, its = self.example, other.example
        if mine.targets_TK.shape[1] != its.targets_TK.shape[1]:
            return 0
        most = equal_supports(mine.supports, its.supports, min(len(mine.tokens_T), len(its.tokens_T)))
        differs_TK = mine.targets_TK[:most] != its.targets_TK[:most]
        differs_TK |= (mine.tokens_T[:most] != its.tokens_T[:most])[:, None]
        differs_TK |= _routes_differ(mine, its, most)[:, None]
        both_TK = self.trained_TK[:most] & other.trained_TK[:most]
        for name, cells_TK in self.inputs_TK.items():
            here_TK, there_TK = cells_TK[:most], other.inputs_TK[name][:most]
            differs_TK |= both_TK & (here_TK != there_TK) & ~(np.isnan(here_TK) & np.isnan(there_TK))
        differing = np.flatnonzero(differs_TK.any(axis=1))
        return _with_equal_images(mine, its, int(differing[0]) if len(differing) else most)

    def merged(self, other: _Path, shared: int) -> _Path:
        """`other`, with our losses for the tokens among the first `shared` that `other` does not train."""
        only_TK = self.trained_TK[:shared] & ~other.trained_TK[:shared]
        if not only_TK.any():
            return other
        trained_TK = other.trained_TK.copy()
        trained_TK[:shared] |= only_TK
        inputs_TK = {name: cells_TK.copy() for name, cells_TK in other.inputs_TK.items()}
        for name, cells_TK in inputs_TK.items():
            cells_TK[:shared][only_TK] = self.inputs_TK[name][:shared][only_TK]
        return _Path(other.example, trained_TK, inputs_TK)


def trained_cells(example: Example, loss: LossSpec) -> npt.NDArray[np.bool_]:
    """The cells [T, K] of an example that have a loss; see `LossSpec.masks`."""
    given = {**example.inputs, "weights": example.weights_TK}
    trained_TK = np.ones(example.targets_TK.shape, bool)
    for name in loss.masks:
        trained_TK &= given[name] != 0
    return trained_TK


def _routes_differ(one: Example, other: Example, most: int) -> npt.NDArray[np.bool_]:
    """Whether each of the first `most` tokens has different given experts in the other example, [most]."""
    mine_Tn, its_Tn = one.routes_Tn, other.routes_Tn
    if mine_Tn is None and its_Tn is None:
        return np.zeros(most, bool)
    if mine_Tn is not None and its_Tn is not None:
        return np.asarray((mine_Tn[:most] != its_Tn[:most]).any(axis=1))
    (only_Tn,) = (routes_Tn for routes_Tn in (mine_Tn, its_Tn) if routes_Tn is not None)
    return np.asarray((only_Tn[:most] >= 0).any(axis=1))


def _with_equal_images(one: Example, other: Example, most: int) -> int:
    """How many of the first `most` tokens have equal images. The tokens of different images are equal placeholders."""
    places = {image.start: image for image in one.images}, {image.start: image for image in other.images}
    for start in sorted({*places[0], *places[1]}):
        if start >= most:
            break
        mine, its = (images.get(start) for images in places)
        if mine is None or its is None or not np.array_equal(mine.pixels_HWC, its.pixels_HWC):
            return start
    return most
