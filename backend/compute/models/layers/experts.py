"""The mixture of experts in place of a layer's MLP: each token goes to the k experts that its router names.

Tokens are sorted by expert and every projection is one grouped matmul, so no token is dropped, and how many an expert
gets changes no shape: nothing is compiled for a routing. Over the mesh's `expert` axis every device holds some of the
experts. The rest of a layer has rows split over that axis, too: here each device gets the tokens of all devices along
it, computes the rows that are its experts', and the devices' parts are summed where their tokens belong. With k experts
a token that moves no more than sending every token to its experts while the axis is not larger than k, and however
unequal a routing is, there is room: a device has as many rows as all tokens along the axis have experts.

Letters: B rows, T tokens, D hidden, E experts (of this device, inside `_local`), k experts of a token, M = B * T * k
rows to compute, F mlp of an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from tinkerflow.backend.compute.kernels.grouped import Groups
from tinkerflow.backend.compute.kernels.matmul import OfLayer, matmul, product
from tinkerflow.backend.compute.mesh import EXPERT, FSDP, ROWS, TENSOR, row_parts
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.lora import LoraApply, LoraPair
from tinkerflow.backend.compute.weights.quantized import Int8, Weight

MLP = ("gate", "up", "down")
_STEEP = 1.702
_NOT_ZERO = 1e-20  # of a sum that is divided by


def route(cfg: ModelConfig, y_BTD: jax.Array, layer_params: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The experts of every token, int32 [B, T, k], and the share of each one's result, float32 [B, T, k].

    Softmax over all experts in float32, then the k largest; with `norm_topk` these are made to sum to 1, and with an
    expert_scale multiplied by that of the expert. With `sigmoid` as `_route_by_sigmoid` says.
    """
    router_ED, bias_E = layer_params["router"], layer_params.get("router_bias")
    if cfg.sigmoid:
        return _route_by_sigmoid(cfg, y_BTD, router_ED, layer_params["router_correction"])
    scores_BTE = matmul(y_BTD, router_ED)
    if bias_E is not None:
        scores_BTE = scores_BTE + bias_E
    chances_BTE = jax.nn.softmax(scores_BTE.astype(jnp.float32), axis=-1)
    shares_BTk, chosen_BTk = jax.lax.top_k(chances_BTE, cfg.experts_per_token)
    if cfg.norm_topk:
        shares_BTk = shares_BTk / jnp.sum(shares_BTk, axis=-1, keepdims=True)
    if (scale_E := layer_params.get("expert_scale")) is not None:
        shares_BTk = shares_BTk * scale_E.astype(jnp.float32)[chosen_BTk]
    return chosen_BTk, shares_BTk


def _route_by_sigmoid(
    cfg: ModelConfig, y_BTD: jax.Array, router_ED: jax.Array, correction_E: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """DeepSeek V3's routing (arXiv 2412.19437, section 2.1.2), in float32.

    Scores plus corrections choose: first groups, by the sum of their two largest, then the k experts in these. The
    scores alone are the shares.
    """
    scores_BTE = jax.nn.sigmoid(product(y_BTD.astype(jnp.float32), router_ED.astype(jnp.float32)))
    wanted_BTE = scores_BTE + correction_E
    if cfg.router_groups > 1:
        wanted_BTgn = wanted_BTE.reshape(*wanted_BTE.shape[:2], cfg.router_groups, -1)
        _, groups_BTj = jax.lax.top_k(jnp.sum(jax.lax.top_k(wanted_BTgn, 2)[0], axis=-1), cfg.groups_per_token)
        there_BTg = jnp.any(groups_BTj[..., None] == jnp.arange(cfg.router_groups), axis=-2)
        wanted_BTE = jnp.where(there_BTg[..., None], wanted_BTgn, -jnp.inf).reshape(wanted_BTE.shape)
    _, chosen_BTk = jax.lax.top_k(wanted_BTE, cfg.experts_per_token)
    own_BTkE = chosen_BTk[..., None] == jnp.arange(cfg.experts)  # not a gather: its gradient would be a scatter
    shares_BTk = jnp.sum(jnp.where(own_BTkE, scores_BTE[..., None, :], 0), axis=-1)
    if cfg.norm_topk:
        shares_BTk = shares_BTk / (jnp.sum(shares_BTk, axis=-1, keepdims=True) + _NOT_ZERO)
    return chosen_BTk, shares_BTk * cfg.router_scale


def mixture(
    cfg: ModelConfig,
    mesh: Mesh,
    layer_params: Mapping[str, Any],
    layer_lora: Mapping[str, LoraPair],
    y_BTD: jax.Array,
    lora_apply: LoraApply,
    routed_BTD: jax.Array | None = None,
) -> jax.Array:
    """The experts' results for y_BTD, summed by share: [B, T, D] in its dtype.

    cfg: how many experts a token goes to. mesh: experts are split over its `expert` axis. layer_params: `router`
    [E, D] and what `route` takes, gate and up [E, D, F], down [E, F, D], and biases of any, as gate_bias [E, F].
    layer_lora: pairs [E, R, ...] for some or all of gate, up and down. Of the matrices of these three and of the pairs
    there may be OfLayer. y_BTD: normalised hidden states. lora_apply: computes the adapters' updates.
    routed_BTD: what the router is given; None = y_BTD.
    """
    chosen_BTk, shares_BTk = route(cfg, y_BTD if routed_BTD is None else routed_BTD, layer_params)
    weights = {name: layer_params[name] for name in MLP}
    biases = {name: layer_params[f"{name}_bias"] for name in MLP if f"{name}_bias" in layer_params}
    pairs = {name: layer_lora[name] for name in MLP if name in layer_lora}
    inner = TENSOR if cfg.mlp % mesh.shape[TENSOR] == 0 else None
    moved = mesh.shape[EXPERT] > 1 and y_BTD.shape[0] % row_parts(mesh) == 0
    rows = PartitionSpec(ROWS) if moved else PartitionSpec(FSDP if y_BTD.shape[0] % mesh.shape[FSDP] == 0 else None)
    local = jax.shard_map(
        functools.partial(_local, cfg, lora_apply, rows[0] is not None, moved, (inner,) if inner else ()),
        mesh=mesh,
        in_specs=(
            rows,
            rows,
            rows,
            {name: _weight_specs(name, weight, inner) for name, weight in weights.items()},
            {name: PartitionSpec(EXPERT, None if name == "down" else inner) for name in biases},
            {name: _pair_specs(name, pair, inner) for name, pair in pairs.items()},
        ),
        out_specs=rows,
        check_vma=False,
    )
    mixed_BTD: jax.Array = local(y_BTD, chosen_BTk, shares_BTk, weights, biases, pairs)
    return mixed_BTD


def _weight_specs(name: str, weight: Weight | OfLayer, inner: str | None) -> Any:
    """The experts split, and F over the tensor axis where that divides it; gathered over fsdp."""
    if isinstance(weight, OfLayer):
        return _of_layer(_weight_specs(name, weight.stack, inner))
    whole: Any = PartitionSpec(EXPERT, inner, None) if name == "down" else PartitionSpec(EXPERT, None, inner)
    if isinstance(weight, Int8):
        scale: Any = PartitionSpec(EXPERT, whole[2])
        return Int8(values=whole, scale=scale)
    return whole


def _of_layer(specs: Any) -> Any:
    """For a stack of all layers, of what a layer has."""
    whole: Any = PartitionSpec()
    return OfLayer(jax.tree.map(lambda spec: PartitionSpec(None, *spec), specs), whole)


def _pair_specs(name: str, pair: LoraPair | OfLayer, inner: str | None) -> Any:
    if isinstance(pair, OfLayer):
        return _of_layer(_pair_specs(name, pair.stack, inner))
    whole: Any = PartitionSpec(EXPERT)
    split: Any = PartitionSpec(EXPERT, None, inner)
    return LoraPair(A=split, B=whole) if name == "down" else LoraPair(A=whole, B=split)


def _local(
    cfg: ModelConfig,
    lora_apply: LoraApply,
    rows_are_split: bool,
    moved: bool,
    inner: tuple[str, ...],
    y_BTD: jax.Array,
    chosen_BTk: jax.Array,
    shares_BTk: jax.Array,
    weights: Mapping[str, Weight],
    biases: Mapping[str, jax.Array],
    pairs: Mapping[str, LoraPair],
) -> jax.Array:
    """The part that this device's experts, and its share of F, have in the result for its rows, then the sum of all.

    moved: rows are split over the expert axis, too, and come from all its devices.
    """
    if moved:
        everyone = functools.partial(jax.lax.all_gather, axis_name=EXPERT, tiled=True)
        y_BTD, chosen_BTk, shares_BTk = map(everyone, (y_BTD, chosen_BTk, shares_BTk))
    B, T, k = chosen_BTk.shape
    D, E = y_BTD.shape[-1], jax.tree.leaves(weights["gate"])[0].shape[-3]
    here_M = chosen_BTk.reshape(-1) - jax.lax.axis_index(EXPERT) * E
    mine_M = (here_M >= 0) & (here_M < E)
    here_M = jnp.where(mine_M, here_M, E)  # what other devices compute is sorted to the end
    order_M = jnp.argsort(here_M, stable=True)
    place_M = jnp.argsort(order_M)
    first = jax.lax.axis_index(FSDP) * B if rows_are_split else 0
    groups = Groups(
        sizes_E=jnp.sum(here_M[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32),
        expert_M=jnp.minimum(here_M[order_M], E - 1),
        batch_M=first + order_M // (T * k),
    )
    mine_M1 = mine_M[order_M][:, None]

    def project(x_Mi: jax.Array, *names: str) -> tuple[jax.Array, ...]:
        adapted = tuple(name for name in names if name in pairs)
        updates = dict(zip(adapted, lora_apply(x_Mi, tuple(pairs[name] for name in adapted), groups), strict=True))
        plain = {name: groups.dot(x_Mi, weights[name]) for name in names}
        sums = {name: plain[name] + updates[name] if name in updates else plain[name] for name in names}
        sums |= {
            name: sums[name] + biases[name][groups.expert_M] for name in names if name in biases and name != "down"
        }
        # Rows of no expert may hold anything: a grouped matmul need not write them.
        return tuple(checkpoint_name(jnp.where(mine_M1, sums[name], 0), name) for name in names)

    copies_MD = jnp.broadcast_to(y_BTD.reshape(-1, 1, D), (B * T, k, D)).reshape(-1, D)
    x_MD = jnp.where(mine_M1, _permuted(copies_MD, order_M, place_M), 0)
    gate_MF, up_MF = project(x_MD, "gate", "up")
    # A row's share is multiplied in before `down`, so that a backward pass does not need what comes out of that.
    share_M1 = _permuted(shares_BTk.reshape(-1, 1), order_M, place_M).astype(y_BTD.dtype)
    (down_MD,) = project(_gated(cfg, gate_MF, up_MF) * share_M1, "down")
    if "down" in biases:  # once, though F is split over devices whose parts are summed
        here = jnp.all(jnp.array([jax.lax.axis_index(axis) == 0 for axis in inner], bool))
        down_MD = down_MD + jnp.where(mine_M1 & here, biases["down"][groups.expert_M] * share_M1, 0)
    parts_BTkD = _permuted(down_MD, place_M, order_M).reshape(B, T, k, D)
    mixed_BTD = jnp.sum(parts_BTkD, axis=2, dtype=jnp.float32)
    if moved:
        mixed_BTD = jax.lax.psum_scatter(mixed_BTD, EXPERT, tiled=True)
        return (jax.lax.psum(mixed_BTD, inner) if inner else mixed_BTD).astype(y_BTD.dtype)
    return jax.lax.psum(mixed_BTD, (EXPERT, *inner)).astype(y_BTD.dtype)


def activated(cfg: ModelConfig, x: jax.Array) -> jax.Array:
    """What an MLP or an expert makes of its gate: SiLU, or the tanh approximation of GELU."""
    return jax.nn.gelu(x, approximate=True) if cfg.gelu else jax.nn.silu(x)


def _gated(cfg: ModelConfig, gate_MF: jax.Array, up_MF: jax.Array) -> jax.Array:
    """SwiGLU or GeGLU; with `clamped` gpt-oss's: both parts are bounded, the gate is steeper, and up is moved by 1."""
    clamped = cfg.clamped
    if not clamped:
        return activated(cfg, gate_MF) * up_MF
    gate_MF, up_MF = jnp.minimum(gate_MF, clamped), jnp.clip(up_MF, -clamped, clamped)
    return gate_MF * jax.nn.sigmoid(_STEEP * gate_MF) * (up_MF + 1)


@jax.custom_vjp
def _permuted(x_MD: jax.Array, order_M: jax.Array, inverse_M: jax.Array) -> jax.Array:
    """x_MD[order_M]. Backward it is a gather too: a scatter may add in any order, and results must come out alike."""
    return x_MD[order_M]


def _permuted_forward(
    x_MD: jax.Array, order_M: jax.Array, inverse_M: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return x_MD[order_M], (inverse_M,)


def _permuted_backward(kept: tuple[jax.Array, ...], d_MD: jax.Array) -> tuple[jax.Array, None, None]:
    return d_MD[kept[0]], None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)
