"""Decoder-only transformers as pure functions on pytrees. Flags of `ModelConfig`, set by families, decide the layers.

Training, prefill and decode share one layer, `block`. They differ in two arguments: `mixers` (which tokens one sees,
and where what later ones need is kept) and `lora_apply` (one adapter for all rows, or one for each row). `block` is
called by `forward` here and by `sampler.decode.layers`, and nowhere else.

Layers may differ (`ModelConfig.kinds`): in their window, their rotary embedding, and the mixer that they are made of.
`layers.over_layers` calls `block` with the layer's kind, which is known when it is traced. A family whose layers have
other matrices gives each `Projection` and `LayerTensor` the numbers of the layers that have it, and a layer is given
those alone. What a mixer keeps for each layer (pages of keys, states) is stacked over the layers with that mixer
(`ModelConfig.numbers`), and the layer's place in it comes with its weights.

Letters: B rows, T tokens, D hidden, H query heads, G key-value heads, d head dimension, F mlp, V vocabulary, L layers,
P width of a layer's own input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from tinkerflow.backend.compute.kernels.matmul import matmul, product
from tinkerflow.backend.compute.mesh import Array
from tinkerflow.backend.compute.models.config import LayerKind, ModelConfig
from tinkerflow.backend.compute.models.decoder import ROW_PARALLEL, plain_name
from tinkerflow.backend.compute.models.layer_loop import LayerParams, over_layers
from tinkerflow.backend.compute.models.layers.deltanet import Project, Recur, delta_net
from tinkerflow.backend.compute.models.layers.experts import activated, mixture
from tinkerflow.backend.compute.models.long_rows import gathered, in_chunks
from tinkerflow.backend.compute.models.lora import Lora, LoraApply, LoraPair
from tinkerflow.backend.compute.models.rope import Rope, YarnRope, rope_frequencies
from tinkerflow.backend.compute.platforms import TPU, platform
from tinkerflow.backend.compute.weights.quantized import Weight

Turns = tuple[jax.Array, jax.Array]  # cos and sin
RopeTables = Mapping[Rope, tuple[Turns, Turns]]  # of queries, and of keys
Shared = Mapping[str, tuple[jax.Array, jax.Array]]  # keys and values of a layer with each mixer
Each = Callable[..., Any]  # each(part, *arrays) -> part(*arrays), of all tokens at once or of a few at a time
Carry = tuple[jax.Array, Shared, jax.Array]  # from layer to layer: hidden states, what is shared, and the number


class AttentionFn(Protocol):
    """attend(q_BTHd, k_BTGd, v_BTGd, window=…, sinks_H=…) -> o_BTHd; q and k are rotated, scores are to be scaled.

    k and v: None in a layer that shares those of an earlier one. window: how many tokens a query sees, itself included;
    None = all earlier ones. sinks_H: a score of each head that takes part in the softmax and has no value; None =
    without.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        /,
        *,
        window: int | None,
        sinks_H: jax.Array | None,
    ) -> jax.Array:
        """What each query has seen, [B, T, H, d]."""


class LatentAttentionFn(Protocol):
    """absorb(q_BTHp, q_BTHr, c_BTc, k_BTr, kv_b, pair) -> o_BTHv: latent attention without keys and values of heads.

    q_BTHp and q_BTHr: the parts of queries that stay, and that are rotated. c_BTc: latents. k_BTr: what is rotated of
    keys. kv_b: the matrix that makes keys and values of latents. pair: of its adapter.
    """

    def __call__(
        self,
        plain: jax.Array,
        turned: jax.Array,
        latents: jax.Array,
        keys: jax.Array,
        kv_b: Weight,
        pair: LoraPair | None,
        /,
    ) -> jax.Array:
        """What each query has seen, [B, T, H, v]."""


@dataclass(frozen=True)
class Mixers:
    """What mixes the tokens of a batch, and keeps what later tokens need. recur: None in models without such layers.

    latent_attend: latent attention that keeps latents alone; None: keys and values of all heads are made of them.
    heads_again: where a backward pass computes a layer again, it makes queries, keys and values twice, so that they are
    not there while it differentiates the MLP; not in models whose layers share them.
    """

    attend: AttentionFn
    recur: Recur | None = None
    latent_attend: LatentAttentionFn | None = None
    heads_again: bool = False


# What a layer keeps for its backward pass: the results of matmuls (`low`: an adapter's x @ A.T; attention.py and
# flash.py name `attended` and `log_totals`). Keeping everything took twice the memory, and on CPU more time too, for
# writing it out.
_LATENT = ("q_a", "q_b", "kv_a", "kv_b")
_DELTA = ("in_qkvz", "in_ba", "in_qkv", "in_z", "in_b", "in_a", "out")
_SHARED = ("shared_gate", "shared_up", "dense_gate", "dense_up")
_FUSED = ("qkv", "gate_up")
KEPT = ("q", "k", "v", "attended", "log_totals", "o", "gate", "up", "low", *_FUSED, *_DELTA, *_SHARED, *_LATENT)
# Of these what the part of a layer behind its mixer computes, each token by itself.
TOKENWISE = ("o", "gate", "up", "gate_up", "out", *_SHARED)


class Keep(Enum):
    """What a backward pass has of the forward pass, from the most memory to the least; it computes the rest again.

    RESULTS: `KEPT` of every layer, and its input. INPUTS: every layer's input. GROUPS: the inputs of the layers of one
    group, and of every other group that of the first layer (`layers.groups`): one more forward pass.
    """

    RESULTS = 0
    INPUTS = 1
    GROUPS = 2


@flax.struct.dataclass
class Params:
    """Frozen base weights in the dtype of the activations. `unembed_VD` is None when the embedding is tied.

    layers, each stacked [L, ...]: q [H*d, D], k and v [G*d, D], o [D, H*d], gate and up [F, D], down [D, F]; with
    `fused` qkv and gate_up for five of these. [D], as the family has them: attn_norm and mlp_norm before attention and
    MLP, attn_out_norm and mlp_out_norm behind. q_norm and k_norm [d], or of all heads. Biases of any, as q_bias. With
    experts gate and up are [E, D, F], down is [E, F, D], and there is router [E, D], with sigmoid router_correction
    [E] in float32, too; with shared_mlp shared_gate, shared_up and shared_down, as in a dense MLP, and of some families
    shared_router [1, D]. Layers that are dense have dense_gate, dense_up and dense_down in place of all these. With
    gated q is [2*H*d, D]. With a latent q_a [query_rank, D] and q_b [H*d, query_rank] or q, kv_a [cell, D],
    kv_b [H*(plain + values), rank], o [D, H*values], and norms of both latents. Layers with the mixer "delta" have what
    `deltanet.delta_net` names in place of q, k, v and o. The matrices may be `quantized.Int8`. Or a tuple of layers
    (`params.by_layer`). A matrix that some layers lack is stacked over the rest.
    Matrices of other shapes in the same place have a suffix (`decoder.plain_name`). With `layer_input` input_gate
    [P, D], input_projection [D, P] and input_norm [D]; Gemma 4's layers have layer_scalar [1], and beside experts norms
    [D] of what they and the shared expert are given and give, router_norm [D] and expert_scale [E].
    tower: the tensors of `vision_config.tower_tensors`, whole on each device; None in models that take text.
    inputs: what `layer_inputs` takes: embed [V, L*P], projection [L*P, D] and norm [P]; None in most models. softcap:
    that of the config.
    """

    embed_VD: jax.Array
    layers: LayerParams | tuple[LayerParams, ...]
    final_norm_D: jax.Array
    unembed_VD: jax.Array | None
    tower: Mapping[str, jax.Array] | None = None
    inputs: Mapping[str, jax.Array] | None = None
    softcap: float = flax.struct.field(pytree_node=False, default=0.0)  # type: ignore[no-untyped-call]

    @property
    def head(self) -> jax.Array:
        """The matrix of the unembedding, [V, D]."""
        return self.embed_VD if self.unembed_VD is None else self.unembed_VD

    @property
    def unstacked(self) -> bool:
        """Whether each layer has arrays of its own."""
        return isinstance(self.layers, tuple)


@flax.struct.dataclass
class ImageFeatures:
    """Images in a batch. Each token has E vectors: one in place of its embedding, and those of DeepStack.

    here_BT bool: which tokens are an image's. positions_BT3 int32: time, row and column of every token, text as well.
    vectors_BTED: in the dtype of the weights, zeros where there is no image.
    """

    here_BT: Array
    positions_BT3: Array
    vectors_BTED: Array


def embed(cfg: ModelConfig, params: Params, tokens_BT: Array, images: ImageFeatures | None = None) -> jax.Array:
    """x_BTD, scaled, in the dtype of the weights; image features in place of the tokens of images."""
    x_BTD = params.embed_VD[tokens_BT]
    x_BTD = x_BTD if cfg.embed_scale == 1 else x_BTD * jnp.asarray(cfg.embed_scale, x_BTD.dtype)
    if images is None:
        return x_BTD
    return jnp.where(jnp.asarray(images.here_BT)[..., None], jnp.asarray(images.vectors_BTED)[:, :, 0], x_BTD)


def layer_inputs(cfg: ModelConfig, params: Params, tokens_BT: Array, x_BTD: jax.Array) -> jax.Array | None:
    """What each layer is given of each token, [L, B, T, P] in the dtype of x_BTD; None in models without (Gemma 3n).

    cfg: its `layer_input` is P. params: has the tensors. tokens_BT int32: token ids. x_BTD: their embeddings.
    """
    if params.inputs is None:
        return None
    shape = (*x_BTD.shape[:2], cfg.layers, cfg.layer_input)
    own = params.inputs["embed"][tokens_BT] * jnp.asarray(cfg.layer_input**0.5, x_BTD.dtype)
    projected = matmul(x_BTD, params.inputs["projection"]) * jnp.asarray(cfg.hidden**-0.5, x_BTD.dtype)
    projected_BTLP = rms_norm(cfg, projected.reshape(shape), params.inputs["norm"])
    return jnp.moveaxis((projected_BTLP + own.reshape(shape)) * jnp.asarray(0.5**0.5, x_BTD.dtype), 2, 0)


def unembed(params: Params, hidden_BTD: jax.Array) -> jax.Array:
    """Logits [B, T, V] in float32, without the update of an adapter, before `capped`."""
    return product(hidden_BTD, params.head, jnp.float32)


def capped(params: Params, logits_BTV: jax.Array) -> jax.Array:
    """The logits that count, of those with the update of an adapter."""
    return logits_BTV if not params.softcap else params.softcap * jnp.tanh(logits_BTV / params.softcap)


def capped_pullback(params: Params, logits_BTV: jax.Array, d_logits_BTV: jax.Array) -> jax.Array:
    """The gradient by the input of `capped`, from that by its output, logits_BTV."""
    return d_logits_BTV if not params.softcap else d_logits_BTV * (1 - (logits_BTV / params.softcap) ** 2)


def unembed_pullback(params: Params, d_logits_BTV: jax.Array) -> jax.Array:
    """The gradient by hidden_BTD of what `unembed` gives."""
    return jnp.einsum("btv,vd->btd", d_logits_BTV, params.head)


def final_hidden(cfg: ModelConfig, params: Params, x_BTD: jax.Array) -> jax.Array:
    """What the unembedding (and its adapter) is applied to: the last layer's output, normalised."""
    return rms_norm(cfg, x_BTD, params.final_norm_D)


def rms_norm(cfg: ModelConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x over its root mean square along the last axis, in float32, times weight (or 1 + weight); dtype of x."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + cfg.norm_eps)
    if cfg.norm_plus_one:
        return (wide * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return weight * wide.astype(x.dtype)


def rope_tables(cfg: ModelConfig, positions_BT: jax.Array) -> RopeTables:
    """cos and sin [B, T, dims/2] in float32 for `rotate`, by embedding; made once, outside of the loop over layers.

    positions_BT: or [B, T, 3], time, row and column, in a model that sees images.
    """

    def tables(rope: Rope) -> tuple[Turns, Turns]:
        if cfg.vision is not None and positions_BT.ndim == len("BT3"):
            turning = positions_BT[..., np.array([cfg.vision.turns_with(pair) for pair in range(rope.dims // 2)])]
        else:
            turning = positions_BT[..., None]
        angles = turning.astype(jnp.float32) * jnp.asarray(rope_frequencies(rope), jnp.float32)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        if rope.attention != 1:
            cos, sin = cos * rope.attention, sin * rope.attention
        if not (isinstance(rope.scaling, YarnRope) and rope.scaling.query_beta):
            return (cos, sin), (cos, sin)
        periods_BT = (positions_BT // rope.scaling.original_max_positions).astype(jnp.float32)
        longer = 1 + rope.scaling.query_beta * jnp.log1p(periods_BT)[..., None]
        return (cos * longer, sin * longer), (cos, sin)

    return {rope: tables(rope) for rope in dict.fromkeys(kind.rope for kind in cfg.layer_kinds) if rope}


def rotate(x_BTHd: jax.Array, tables: Turns) -> jax.Array:
    """Rotary position embedding, first half of d against second half (as in Hugging Face's weights).

    tables: for the first dimensions of d; the others stay.
    """
    cos, sin = (table[:, :, None, :] for table in tables)
    dims = 2 * cos.shape[-1]
    if dims < x_BTHd.shape[-1]:
        return jnp.concatenate([rotate(x_BTHd[..., :dims], tables), x_BTHd[..., dims:]], axis=-1)
    first, second = jnp.split(x_BTHd.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHd.dtype)


def block(
    cfg: ModelConfig,
    mesh: Mesh,
    kind: LayerKind,
    layer_params: LayerParams,
    layer_lora: Mapping[str, LoraPair],
    x_BTD: jax.Array,
    rope: RopeTables,
    mixers: Mixers,
    lora_apply: LoraApply,
    input_BTP: jax.Array | None = None,
    at_once: int = 0,
) -> jax.Array:
    """One layer: hidden states in, hidden states out, [B, T, D] in the dtype of the weights.

    cfg: its flags say what the layers are made of. mesh: for the experts, which are split over it. kind: what this
    layer has of its own. layer_params: its weights, as in `Params.layers` without L. layer_lora: the adapter pairs of
    this layer by projection; it may lack some or all. x_BTD: hidden states. rope: from `rope_tables`. mixers: what
    mixes tokens; they keep their caches themselves. lora_apply: computes the adapters' updates. input_BTP: the layer's
    of `layer_inputs`. at_once: how many tokens of each device go through what computes each token by itself, as the
    MLP; 0 = all.
    """
    layer_params = {plain_name(name): weight for name, weight in layer_params.items()}
    layer_lora = {plain_name(name): pair for name, pair in layer_lora.items()}
    if at_once:
        matrices = {name: weight for name, weight in layer_params.items() if name in (*KEPT, *ROW_PARALLEL)}
        layer_params |= gathered(mesh, matrices)

    def each(part: Callable[..., Any], *arrays: Any, of: int = 1, own_buffers: bool = False) -> Any:
        return in_chunks(mesh, of * at_once, part, *arrays, own_buffers=own_buffers) if at_once else part(*arrays)

    def project(x: jax.Array, *names: str) -> tuple[jax.Array, ...]:
        adapted = tuple(name for name in names if name in layer_lora)
        deltas = dict(zip(adapted, lora_apply(x, tuple(layer_lora[name] for name in adapted)), strict=True))
        plain = {name: matmul(x, layer_params[name]) for name in names}
        sums = {name: plain[name] + deltas[name] if name in deltas else plain[name] for name in names}
        named = {name: checkpoint_name(sums[name], name) for name in names}
        return tuple(
            x + layer_params[f"{name}_bias"] if f"{name}_bias" in layer_params else x for name, x in named.items()
        )

    def norm(x: jax.Array, name: str) -> jax.Array:
        return rms_norm(cfg, x, layer_params[name]) if name in layer_params else x

    if kind.mixer == "delta":
        assert cfg.delta is not None and mixers.recur is not None
        y_BTD = norm(x_BTD, "attn_norm")
        mixed_BTi = delta_net(cfg.delta, cfg.norm_eps, layer_params, y_BTD, project, mixers.recur)
    elif cfg.latent is not None:
        y_BTD = norm(x_BTD, "attn_norm")
        mixed_BTi = _latent_attention(cfg, kind, layer_params, layer_lora, y_BTD, rope, project, mixers)
    else:
        # Twice the tokens: these arrays are narrow. With as many as the MLP, XLA for GPUs would keep zeros for both.
        heads = partial(each, of=2, own_buffers=mixers.heads_again)
        attention: Callable[..., jax.Array] = partial(
            _attention, cfg, kind, layer_params, rope, project, norm, mixers.attend, heads
        )
        if mixers.heads_again:
            policy = jax.checkpoint_policies.save_only_these_names("attended", "log_totals")
            attention = jax.checkpoint(attention, policy=policy)
        mixed_BTi = attention(x_BTD)

    def mlp(y_BTD: jax.Array, prefix: str = "") -> jax.Array:
        """What the matrices give whose names begin so."""
        if cfg.fused:
            gate_BTF, up_BTF = jnp.split(project(y_BTD, f"{prefix}gate_up")[0], 2, axis=-1)
        else:
            gate_BTF, up_BTF = project(y_BTD, f"{prefix}gate", f"{prefix}up")
        return project(activated(cfg, gate_BTF) * up_BTF, f"{prefix}down")[0]

    def fed(x_BTD: jax.Array, mixed_BTi: jax.Array) -> jax.Array:
        """x_BTD with what the mixer gives, and then with what the MLP or the experts give."""
        (o_BTD,) = project(mixed_BTi.reshape(*x_BTD.shape[:2], -1), "out" if kind.mixer == "delta" else "o")
        x_BTD = x_BTD + norm(o_BTD, "attn_out_norm")
        y_BTD = norm(x_BTD, "mlp_norm")
        if kind.dense or not cfg.experts:
            return x_BTD + norm(mlp(y_BTD, "dense_" if kind.dense else ""), "mlp_out_norm")
        if "experts_norm" in layer_params:  # experts and shared expert have norms of their own (Gemma 4)
            shared_BTD = norm(mlp(y_BTD, "shared_"), "shared_out_norm")
            routed_BTD = rms_norm(cfg, x_BTD, layer_params["router_norm"]) * cfg.hidden**-0.5
            z_BTD = norm(x_BTD, "experts_norm")
            mixed_BTD = mixture(cfg, mesh, layer_params, layer_lora, z_BTD, lora_apply, routed_BTD)
            return x_BTD + norm(shared_BTD + norm(mixed_BTD, "experts_out_norm"), "mlp_out_norm")
        x_BTD = x_BTD + mixture(cfg, mesh, layer_params, layer_lora, y_BTD, lora_apply)
        if not cfg.shared_mlp:
            return x_BTD
        shared_BTD = mlp(y_BTD, "shared_")
        if "shared_router" not in layer_params:
            return x_BTD + shared_BTD
        return x_BTD + jax.nn.sigmoid(matmul(y_BTD, layer_params["shared_router"])) * shared_BTD

    x_BTD = each(fed, x_BTD, mixed_BTi)
    if input_BTP is not None:
        gated_BTP = activated(cfg, matmul(x_BTD, layer_params["input_gate"])) * input_BTP
        x_BTD = x_BTD + norm(matmul(gated_BTP, layer_params["input_projection"]), "input_norm")
    return x_BTD * layer_params["layer_scalar"] if "layer_scalar" in layer_params else x_BTD


def _attention(
    cfg: ModelConfig,
    kind: LayerKind,
    layer_params: LayerParams,
    rope: RopeTables,
    project: Project,
    norm: Callable[[jax.Array, str], jax.Array],
    attend: AttentionFn,
    each: Each,
    x_BTD: jax.Array,
) -> jax.Array:
    """What attention gives for the layer's input, [B, T, i]: what `o` multiplies.

    On TPUs [B, T, H, d]: all of [B, T, i] would be a copy, because the kernel gives heads first.
    """
    own = cfg.heads_of(kind.mixer)
    queries, keys = cfg.heads * own.head_dim, own.kv_heads * own.head_dim

    def heads(x_BTD: jax.Array, turns: tuple[Turns, Turns] | None) -> tuple[jax.Array | None, ...]:
        """Queries, keys and values as they are attended, and what gates the result."""
        y_BTD = norm(x_BTD, "attn_norm")
        B, T, _ = y_BTD.shape
        k: jax.Array | None
        if cfg.fused:
            q, k, v = jnp.split(project(y_BTD, "qkv")[0], (queries, queries + keys), axis=-1)
        elif kind.shares is not None:
            (q,), k, v = project(y_BTD, "q"), None, None
        elif "v" in layer_params:
            q, k, v = project(y_BTD, "q", "k", "v")
        else:
            q, k = project(y_BTD, "q", "k")
            v = k
        if cfg.qk_norm_whole:
            q, k = norm(q, "q_norm"), None if k is None else norm(k, "k_norm")
        q_BTHd, gate_BTHd = q.reshape(B, T, cfg.heads, -1), None
        if cfg.gated:
            q_BTHd, gate_BTHd = jnp.split(q_BTHd, 2, axis=-1)
        k_BTGd, v_BTGd = (None if x is None else x.reshape(B, T, own.kv_heads, own.head_dim) for x in (k, v))
        if cfg.qk_norm:
            q_BTHd, k_BTGd = norm(q_BTHd, "q_norm"), None if k_BTGd is None else norm(k_BTGd, "k_norm")
        if cfg.v_norm and v_BTGd is not None:
            v_BTGd = rms_norm(cfg, v_BTGd, jnp.ones((), v_BTGd.dtype))
        if turns is not None:
            of_queries, of_keys = turns
            q_BTHd, k_BTGd = rotate(q_BTHd, of_queries), None if k_BTGd is None else rotate(k_BTGd, of_keys)
        scale = own.head_dim**0.5 if cfg.unscaled else cfg.query_scale
        if scale != 1:
            q_BTHd = q_BTHd * jnp.asarray(scale, q_BTHd.dtype)
        return q_BTHd, k_BTGd, v_BTGd, gate_BTHd

    q_BTHd, k_BTGd, v_BTGd, gate_BTHd = each(heads, x_BTD, rope[kind.rope] if kind.rope else None)
    o_BTHd = attend(q_BTHd, k_BTGd, v_BTGd, window=kind.window, sinks_H=layer_params.get("sinks"))
    if gate_BTHd is not None:
        o_BTHd = o_BTHd * jax.nn.sigmoid(gate_BTHd)
    return o_BTHd if platform() is TPU else o_BTHd.reshape(*x_BTD.shape[:2], queries)


def _latent_attention(
    cfg: ModelConfig,
    kind: LayerKind,
    layer_params: LayerParams,
    layer_lora: Mapping[str, LoraPair],
    y_BTD: jax.Array,
    rope: RopeTables,
    project: Project,
    mixers: Mixers,
) -> jax.Array:
    """What latent attention gives, [B, T, i]: what `o` multiplies (DeepSeek V2, arXiv 2405.04434, section 2.1).

    Letters, beside those above: c a latent's width; p and r the dimensions of a head that stay and that turn, which
    together are d; v those of its values.
    """
    latent, (B, T, _) = cfg.latent, y_BTD.shape
    assert latent is not None and kind.rope is not None
    own = replace(cfg, norm_eps=latent.norm_eps)

    def turned(x_BTHr: jax.Array, tables: Turns) -> jax.Array:
        if latent.interleaved:  # pairs side by side become first halves and second halves
            pairs = x_BTHr.reshape(*x_BTHr.shape[:-1], -1, 2)
            x_BTHr = jnp.swapaxes(pairs, -1, -2).reshape(x_BTHr.shape)
        return rotate(x_BTHr, tables)

    if latent.query_rank:
        low, kv = project(y_BTD, "q_a", "kv_a")
        (q,) = project(rms_norm(own, low, layer_params["q_norm"]), "q_b")
    else:
        q, kv = project(y_BTD, "q", "kv_a")
    of_queries, of_keys = rope[kind.rope]
    q_BTHp, q_BTHr = jnp.split(q.reshape(B, T, cfg.heads, cfg.head_dim), (latent.plain,), axis=-1)
    q_BTHr = turned(q_BTHr, of_queries)
    if cfg.query_scale != 1:
        q_BTHp, q_BTHr = (x * jnp.asarray(cfg.query_scale, x.dtype) for x in (q_BTHp, q_BTHr))
    c_BTc, k_BTr = jnp.split(kv, (latent.rank,), axis=-1)
    c_BTc = rms_norm(own, c_BTc, layer_params["kv_norm"])
    k_BT1r = turned(k_BTr[:, :, None], of_keys)
    if mixers.latent_attend is not None:
        kv_b, pair = layer_params["kv_b"], layer_lora.get("kv_b")
        o_BTHv = mixers.latent_attend(q_BTHp, q_BTHr, c_BTc, k_BT1r[:, :, 0], kv_b, pair)
    else:
        (kv,) = project(c_BTc, "kv_b")
        k_BTHp, v_BTHv = jnp.split(kv.reshape(B, T, cfg.heads, -1), (latent.plain,), axis=-1)
        k_BTHd = jnp.concatenate([k_BTHp, jnp.broadcast_to(k_BT1r, q_BTHr.shape)], axis=-1)
        q_BTHd = jnp.concatenate([q_BTHp, q_BTHr], axis=-1)
        o_BTHv = mixers.attend(q_BTHd, k_BTHd, v_BTHv, window=kind.window, sinks_H=None)
    return o_BTHv.reshape(B, T, -1)


def forward(
    cfg: ModelConfig,
    mesh: Mesh,
    params: Params,
    lora: Lora,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    mixers: Mixers,
    lora_apply: LoraApply,
    *,
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
    keep: Keep = Keep.RESULTS,
    at_once: int = 0,
    images: ImageFeatures | None = None,
) -> jax.Array:
    """Final hidden states [B, T, D] for training, in the dtype of the weights: a loop over the layers.

    cfg, mesh, params: the base model and its devices. lora: one adapter, float32 A and B. tokens_BT int32: token ids.
    positions_BT int32: each token's place in its own sequence, from 0. mixers: what mixes tokens.
    lora_apply: computes the adapter's updates. constrain: pins the sharding of [B, T, D] activations between layers.
    keep: what there is for a backward pass. at_once: as of `block`; a backward pass computes these parts again. images:
    the images among the tokens, None = there are none; its positions are taken in place of positions_BT.
    """
    rope = rope_tables(cfg, positions_BT if images is None else jnp.asarray(images.positions_BT3))

    def layer(kind: LayerKind, carry: Carry, stacked: tuple[Any, LayerParams, Mapping[str, LoraPair]]) -> Carry:
        (x_BTD, shared, number), (place, layer_params, layer_lora) = carry, stacked

        def attend(
            q: jax.Array, k: jax.Array | None, v: jax.Array | None, *, window: int | None, sinks_H: jax.Array | None
        ) -> jax.Array:
            nonlocal shared
            if k is None or v is None:
                k, v = shared[kind.mixer]
            elif shared:
                shared = {**shared, kind.mixer: (k, v)}
            return mixers.attend(q, k, v, window=window, sinks_H=sinks_H)

        own = replace(mixers, attend=attend, heads_again=mixers.heads_again and not shared)
        input_BTP = of_layer(inputs_LBTP, number)
        x_BTD = block(cfg, mesh, kind, layer_params, layer_lora, x_BTD, rope, own, lora_apply, input_BTP, at_once)
        x_BTD = constrain(x_BTD)
        return x_BTD if images is None else deepened(images, place, x_BTD), shared, number + 1

    policy = jax.checkpoint_policies.save_only_these_names(*(KEPT if keep is Keep.RESULTS else ()))
    kept = partial(jax.checkpoint, policy=policy)
    x_BTD = embed(cfg, params, tokens_BT, images)
    inputs_LBTP = layer_inputs(cfg, params, tokens_BT, x_BTD)
    carry = (constrain(x_BTD), _nothing_shared(cfg, x_BTD), jnp.int32(0))
    x_BTD, _, _ = over_layers(cfg, layer, carry, params.layers, lora.layers, kept=kept, grouped=keep is Keep.GROUPS)
    return final_hidden(cfg, params, x_BTD)


def _nothing_shared(cfg: ModelConfig, x_BTD: jax.Array) -> Shared:
    """Room for the keys and values of the last layer with each mixer, in models whose later layers read them."""
    heads = {kind.mixer: cfg.heads_of(kind.mixer) for kind in cfg.layer_kinds if kind.shares is not None}
    empty = {
        name: jnp.zeros((*x_BTD.shape[:2], own.kv_heads, own.head_dim), x_BTD.dtype) for name, own in heads.items()
    }
    return {name: (zeros, zeros) for name, zeros in empty.items()}


def of_layer(inputs_LBTP: jax.Array | None, number: jax.Array) -> jax.Array | None:
    """What `layer_inputs` has for a layer."""
    return None if inputs_LBTP is None else jax.lax.dynamic_index_in_dim(inputs_LBTP, number, keepdims=False)


def deepened(images: ImageFeatures, number: Any, x_BTD: jax.Array) -> jax.Array:
    """x_BTD behind layer `number`, with the vectors that DeepStack adds there (arXiv 2406.04334)."""
    deep = images.vectors_BTED.shape[2] - 1
    if not deep:
        return x_BTD
    vectors_BTD = jax.lax.dynamic_index_in_dim(
        jnp.asarray(images.vectors_BTED), jnp.minimum(number + 1, deep), axis=2, keepdims=False
    )
    return jnp.where(number < deep, x_BTD + vectors_BTD, x_BTD)
