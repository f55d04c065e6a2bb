"""The loop over the layers of a model, for equal and for different layers.

Layers of one kind are computed by one loop. If kinds alternate (three layers with a window, one without), the loop goes
over the repeated periods, and computes the layers of a period one after the other. A matrix is stacked over the layers
that have it (`families.layers_with`), so layers without this matrix take no memory in the stack.

Letters: L layers that have a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from tinkerflow.backend.compute.kernels.matmul import OfLayer
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import layers_with
from tinkerflow.backend.compute.models.layers import DecoderLayer
from tinkerflow.backend.compute.models.layers.matrices import plain_name
from tinkerflow.backend.compute.models.lora import LoraPair
from tinkerflow.backend.compute.platforms import may_be_unrolled

LayerParams = Mapping[str, Any]  # arrays, and Weights where a matrix is multiplied
LayerPairs = Mapping[str, Any]  # LoraPair, and OfLayer of them
Carry = TypeVar("Carry")
# layer(kind, carry, (place, weights, adapter pairs)) -> the next carry
Layer = Callable[[DecoderLayer, Carry, tuple[Any, LayerParams, LayerPairs]], Carry]
Step = Callable[[Carry, Any], Carry]
# kept(step, prevent_cse=...) -> the step, wrapped in `jax.checkpoint`. With prevent_cse, barriers separate a step's
# recomputation from other computations. XLA could otherwise merge it with the forward pass, or recompute all layers of
# a period at the same time. In a loop over single layers, XLA can do neither, and barriers would only prevent fusions.
Kept = Callable[..., Step[Carry]]


def over_layers(
    cfg: ModelConfig,
    layer: Layer[Carry],
    carry: Carry,
    params: LayerParams | tuple[LayerParams, ...],
    lora: LayerPairs,
    in_place: frozenset[str] = frozenset(),
    pairs_in_place: frozenset[str] = frozenset(),
    kept: Kept[Carry] = lambda step, **_: step,
    grouped: bool = False,
) -> Carry:
    """The carry after `layer` has computed every layer.

    cfg: the decoder's layers. layer: takes the layer's kind, the carry, and (place, weights, adapter pairs). The place
    follows `ModelConfig.place`. The kind is static. The place is static only if the weights are separate for each
    layer. carry: the input of the first layer. params: a loop goes over stacked weights; separate layers are computed
    one after the other. lora: stacked or by layer, like `params`. in_place, pairs_in_place: names of stacked matrices,
    and of pairs, that `layer` gets as `OfLayer`. With pairs, the program can have no backward pass. kept: wraps a step
    in `jax.checkpoint` with a policy. The step itself takes a layer's weights out of their stack: if they were its
    arguments, copies of all weights would be saved.
    grouped: a backward pass saves the values that `kept` selects for one group of layers at a time (`groups`). For
    every other group, the pass saves only the input carry, and computes the group again. It needs stacked weights.
    """
    kinds = cfg.decoder_layers
    if isinstance(params, tuple):
        homes = layers_with(cfg)
        for number, (kind, weights) in enumerate(zip(kinds, params, strict=True)):
            places = {name: homes[name].index(number) for name in lora if number in homes[name]}
            pairs = {name: _changed(lora[name], itemgetter(place)) for name, place in places.items()}
            own = cfg.place(number), _plain(weights), _plain(pairs)
            carry = kept(partial(layer, kind), prevent_cse=True)(carry, own)
        return carry
    if grouped:
        for start, period, repeats, size in groups(kinds):
            run = partial(_run, start=start, period=period, repeats=repeats, group=size)
            carry = run(cfg, layer, carry, params, lora, in_place, pairs_in_place, kept)
        return carry
    wholes = (params, in_place), (lora, pairs_in_place)
    for start, period, repeats in runs(kinds):
        if period == 1 and repeats == cfg.layers:
            sliced, pairs = (
                {name: stack for name, stack in stacks.items() if name not in names} for stacks, names in wholes
            )

            def once(carry: Carry, stacked: tuple[Any, LayerParams, LayerPairs]) -> Carry:
                number, weights, pairs = stacked
                whole, adapted = (
                    {name: OfLayer(stacks[name], number) for name in names if name in stacks}
                    for stacks, names in wholes
                )
                return kept(partial(layer, kinds[0]), prevent_cse=may_be_unrolled(cfg.layers))(
                    carry, (number, _plain({**weights, **whole}), _plain({**pairs, **adapted}))
                )

            return _loop(once, carry, repeats, (sliced, pairs), counter=bool(pairs_in_place))
        run = partial(_run, start=start, period=period, repeats=repeats)
        carry = run(cfg, layer, carry, params, lora, in_place, pairs_in_place, kept)
    return carry


def runs(kinds: tuple[DecoderLayer, ...]) -> Iterator[tuple[int, int, int]]:
    """(start, period, repeats) of each run, in order: the `period` layers from `start` on occur `repeats` times.

    From the first layer on, each run has as many layers as possible, with the shortest period that allows this.
    """
    start = 0
    while start < len(kinds):
        period, repeats = 1, 1
        for length in range(1, (len(kinds) - start) // 2 + 1):
            times = 1
            while kinds[start + times * length :][:length] == kinds[start:][:length]:
                times += 1
            if times > 1 and times * length > period * repeats:
                period, repeats = length, times
        yield start, period, repeats
        start += period * repeats


def groups(kinds: tuple[DecoderLayer, ...]) -> Iterator[tuple[int, int, int, int]]:
    """(start, period, repeats, size), as in `runs`, in order. A group has `size` repeats, which divide `repeats`.

    The chosen sizes keep the fewest carries. A carry is kept before each group, and before each layer of one group. The
    remaining repeats of a run form a group.
    """
    for start, period, repeats in runs(kinds):
        size = min(range(1, repeats + 1), key=lambda size: (-(-repeats // size) + size * period, repeats % size))
        rest = repeats % size
        yield start, period, repeats - rest, size
        if rest:
            yield start + (repeats - rest) * period, period, rest, rest


def kept_carries(kinds: tuple[DecoderLayer, ...]) -> int:
    """The most carries that a backward pass by `groups` keeps at the same time."""
    found = list(groups(kinds))
    return sum(repeats // size for _, _, repeats, size in found) + max(size * period for _, period, _, size in found)


def _run(
    cfg: ModelConfig,
    layer: Layer[Carry],
    carry: Carry,
    params: LayerParams,
    lora: LayerPairs,
    in_place: frozenset[str],
    pairs_in_place: frozenset[str],
    kept: Kept[Carry],
    *,
    start: int,
    period: int,
    repeats: int,
    group: int = 0,
) -> Carry:
    """The carry after one of `runs`, or of `groups`."""
    homes, kinds = layers_with(cfg), cfg.decoder_layers
    numbers = range(start, start + period)

    def each(of: tuple[int, ...]) -> int:
        """How many of a period's layers are in `of`."""
        return sum(number in of for number in numbers)

    def own(name: str) -> slice:
        first = sum(number < start for number in homes[name])
        return slice(first, first + repeats * each(homes[name]))

    def one(number: int, carry: Carry, stacked: tuple[Any, LayerPairs]) -> Carry:
        step, pairs = stacked
        kind = kinds[number]
        home: Any = cfg.place(number)
        if kind.shares is None:
            home = home + step * each(cfg.numbers(kind.pool))
        # Each weight is taken out of the whole stack, because a part of a stack would be a copy.
        own_places = {
            name: homes[name].index(number) + step * each(homes[name]) for name in params if number in homes[name]
        }
        weights = {
            name: OfLayer(params[name], place)
            if name in in_place
            else jax.tree.map(partial(_at, place=place), params[name])
            for name, place in own_places.items()
        }
        places = {name: homes[name].index(number) - own(name).start for name in pairs if number in homes[name]}
        here = {name: _changed(pairs[name], itemgetter(place)) for name, place in places.items()}
        whole = {
            name: OfLayer(lora[name], place)
            for name, place in own_places.items()
            if name in pairs_in_place and name in lora
        }
        return layer(kind, carry, (home, _plain(weights), _plain({**here, **whole})))

    def once(carry: Carry, stacked: tuple[Any, LayerPairs]) -> Carry:
        for number in numbers:
            carry = kept(partial(one, number), prevent_cse=period > 1 or may_be_unrolled(group or repeats))(
                carry, stacked
            )
        return carry

    def split(name: str, stack: Any) -> jax.Array:
        return stack[own(name)].reshape(repeats, each(homes[name]), *stack.shape[1:])

    names = [name for name in lora if each(homes[name]) and name not in pairs_in_place]
    pairs = {name: _changed(lora[name], partial(split, name)) for name in names}
    return _loop(once, carry, repeats, (pairs,), group, counter=bool(pairs_in_place))


def _changed(pair: LoraPair, change: Callable[[Any], jax.Array]) -> LoraPair:
    """The pair with changed matrices and the same blocks."""
    return replace(pair, A=change(pair.A), B=change(pair.B))


def _plain(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {plain_name(name): part for name, part in parts.items()}


def _at(stack: jax.Array, *, place: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, place, keepdims=False)


def _loop(
    once: Step[Carry], carry: Carry, repeats: int, stacks: tuple[Any, ...], group: int = 0, *, counter: bool
) -> Carry:
    """The carry after once(carry, (number, *parts)) for each number of `repeats`; `parts` are that part of each stack.

    group: as in `_run`. counter: the numbers are the loop's own counter. On a GPU, a kernel would take each number out
    of a scanned array. Only for programs without a backward pass.
    """
    if not counter:
        return _scanned(once, carry, (jnp.arange(repeats, dtype=jnp.int32), *stacks), group)

    def one(number: jax.Array, carry: Carry) -> Carry:
        return once(carry, (number, *jax.tree.map(partial(_at, place=number), stacks)))

    return jax.lax.fori_loop(0, repeats, one, carry)


def _scanned(once: Callable[[Carry, Any], Carry], carry: Carry, stacked: Any, group: int = 0) -> Carry:
    if group:
        stacked = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), stacked)
        count = len(jax.tree.leaves(stacked)[0])
        return _scanned(jax.checkpoint(partial(_scanned, once), prevent_cse=may_be_unrolled(count)), carry, stacked)
    return jax.lax.scan(lambda carry, one: (once(carry, one), None), carry, stacked)[0]
