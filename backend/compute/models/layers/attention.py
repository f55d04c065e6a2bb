"""Grouped-query attention (arXiv 2305.13245), with the variants of the served families.

Letters: B rows, T tokens, D hidden, H query heads, G key-value heads, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers.matrices import LayerTensor, Projection
from tinkerflow.backend.compute.models.layers.norms import RMSNorm
from tinkerflow.backend.compute.models.rope import FULL, Rope, read_ropes

if TYPE_CHECKING:
    import jax

    from tinkerflow.backend.compute.models.layers.step import LayerStep, Linear
    from tinkerflow.backend.compute.models.rotary import CosSin

ATTENTION, GLOBAL = "attention", "global"  # pools of the KV cache; GLOBAL is for layers with different heads


class AttentionWeights(NamedTuple):
    """Weights of one layer. k, v: None in layers that read an earlier layer's cache; v: also if keys are values."""

    q: Linear  # [H * d, D], or [2 * H * d, D] with gates
    k: Linear | None  # [G * d, D]
    v: Linear | None  # [G * d, D]
    o: Linear  # [D, H * d]
    q_norm: jax.Array | None  # [d], or [H * d] over all heads
    k_norm: jax.Array | None  # [d], or [G * d]
    sinks: jax.Array | None  # [H]


class FusedAttentionWeights(NamedTuple):
    """qkv [(H + 2 * G) * d, D]: queries, keys and values in one matrix; o [D, H * d]."""

    qkv: Linear
    o: Linear


@dataclass(frozen=True)
class Attention:
    """Attention of some layers of a model.

    hidden, heads, kv_heads, head_dim: D, H, G and d; `heads * head_dim` need not equal `hidden`.
    rope: the rotary embedding; None = positions are not encoded (NoPE).
    window: how many tokens a query sees, including its own; None = all earlier tokens.
    qk_norm: norms on each head of q and k (Qwen3), or on all heads of q, and of k, together (OLMo 2).
    norm: used for `qk_norm` and `value_norm`.
    biases: the matrices with a bias.
    fused: q, k and v are one matrix (Phi-3).
    gated: q has a second half for each head; its sigmoid is multiplied into the result (Qwen3-Next).
    sinks: each head has a score in the softmax that has no value (gpt-oss).
    query_scale: multiplies queries, in addition to 1 / sqrt(head_dim).
    keys_are_values: there is no projection for values (Gemma 4).
    value_norm: norms without weights on each head of v (Gemma 4).
    shares: the number of an earlier layer of the same pool, with the keys and values that this layer reads (Gemma 3n).
    pool: the pool of the KV cache. Layers with other shapes use a separate pool and separate stacks of weights.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    window: int | None = None
    qk_norm: Literal["none", "each head", "all heads"] = "none"
    norm: RMSNorm | None = None
    biases: tuple[str, ...] = ()
    fused: bool = False
    gated: bool = False
    sinks: bool = False
    query_scale: float = 1.0
    keys_are_values: bool = False
    value_norm: bool = False
    shares: int | None = None
    pool: str = ATTENTION

    attends = True  # a class attribute: keys and values are cached

    @classmethod
    def read(
        cls,
        fields: ConfigFields,
        *,
        rope_theta: float = 10_000.0,
        one_rope: bool = True,
        partial: bool = False,
        **variant: Any,
    ) -> Attention:
        """The attention that `config.json` describes. UserError: a field is missing or not supported.

        rope_theta: the default if the file sets none. one_rope: all layers share one rotary embedding; otherwise the
        result uses the rotary embedding of layers with full attention. partial: the family can rotate a part of each
        head. variant: other fields of this class.
        """
        fields.refuse_others(attention_bias=False, use_sliding_window=False)
        heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
        kv_heads, head_dim = fields.size("num_key_value_heads", heads), fields.size("head_dim", hidden // heads)
        ropes = read_ropes(fields, head_dim, rope_theta)
        if one_rope and len(set(ropes.values())) > 1:
            raise fields.error(f"rope_parameters {fields.rope!r} is not supported; must be the same for all layers")
        rope = ropes.get("") or ropes.get(FULL) or next(iter(ropes.values()))
        if rope.dims != head_dim and not partial:
            raise fields.error(
                f"partial_rotary_factor rotates {rope.dims} of {head_dim} dimensions of a head; must be 1"
            )
        if heads % kv_heads or head_dim % 2:
            raise fields.error(
                f"{heads} heads, {kv_heads} key-value heads, head_dim {head_dim}; "
                "key-value heads must divide heads and head_dim must be even"
            )
        return cls(hidden, heads, kv_heads, head_dim, rope, **variant)

    @property
    def widths(self) -> tuple[int, int]:
        """The dimensions of a head of q and k, and of a head of v."""
        return self.head_dim, self.head_dim

    @property
    def cached(self) -> tuple[int, int, int]:
        """The cache of each token: the number of heads, and the widths of a key and of a value."""
        return self.kv_heads, self.head_dim, self.head_dim

    def for_context(self, context: int) -> Attention:
        """The attention for sequences of up to `context` tokens."""
        return replace(self, rope=self.rope and self.rope.for_context(context))

    def projections(self) -> dict[str, Projection]:
        """The matrices, by our names."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.fused:
            inner = {"qkv": queries + 2 * keys}
        else:
            inner = {"q": queries * (2 if self.gated else 1)}
            if self.shares is None:
                inner |= {"k": keys} if self.keys_are_values else {"k": keys, "v": keys}
        matrices = {
            name: Projection(f"self_attn.{name}_proj", self.hidden, width, "train_attn", before_mixing=True)
            for name, width in inner.items()
        }
        matrices["o"] = Projection("self_attn.o_proj", queries, self.hidden, "train_attn", sums_inputs=True)
        return self._in_own_stacks(matrices)

    def tensors(self) -> dict[str, LayerTensor]:
        """Norms, biases and sinks, by our names."""
        heads = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        tensors: dict[str, LayerTensor] = {}
        if self.qk_norm != "none":
            for name in "q" if self.shares is not None else "qk":
                size = self.head_dim if self.qk_norm == "each head" else heads[name] * self.head_dim
                tensors[f"{name}_norm"] = LayerTensor(f"self_attn.{name}_norm.weight", (size,))
        for name in self.biases:
            size = heads[name] * self.head_dim if name in heads else self.hidden
            tensors[f"{name}_bias"] = LayerTensor(f"self_attn.{name}_proj.bias", (size,), split=name in heads)
        if self.sinks:
            tensors["sinks"] = LayerTensor("self_attn.sinks", (self.heads,), split=True)
        return self._in_own_stacks(tensors)

    def _in_own_stacks(self, parts: dict[str, Any]) -> dict[str, Any]:
        return parts if self.pool == ATTENTION else {f"{name}@{self.pool}": part for name, part in parts.items()}

    def mix(self, step: LayerStep, x_BTD: jax.Array, before: RMSNorm) -> jax.Array:
        """The attended values of all heads, [B, T, H * d]: the input of `o`.

        On TPUs, [B, T, H, d]: the kernel puts heads first, so joining them would copy the values.
        before: the norm of x_BTD, if the layer has an `attn_norm`.
        """
        import jax

        from tinkerflow.backend.compute.platforms import TPU, platform

        def attended(x_BTD: jax.Array) -> jax.Array:
            # Twice the MLP's tokens, because heads are narrow. XLA:GPU would keep the zeros of equal loops.
            q_BTHd, k_BTGd, v_BTGd, gate_BTHd = step.by_token(
                lambda x_BTD, tables: self._heads(step, step.norm(before, "attn_norm", x_BTD), tables),
                x_BTD,
                step.rope[self.rope] if self.rope else None,
                times=2,
                own_buffers=step.mixers.recompute_heads,
            )
            sinks_H = step.weights(AttentionWeights).sinks
            o_BTHd = step.mixers.attend(q_BTHd, k_BTGd, v_BTGd, window=self.window, sinks_H=sinks_H)
            if gate_BTHd is not None:
                o_BTHd = o_BTHd * jax.nn.sigmoid(gate_BTHd)
            return o_BTHd if platform() is TPU else o_BTHd.reshape(*x_BTD.shape[:2], -1)

        if step.mixers.recompute_heads:
            policy = jax.checkpoint_policies.save_only_these_names("attended", "log_totals")
            attended = jax.checkpoint(attended, policy=policy)
        return attended(x_BTD)

    def output(self, step: LayerStep, mixed: jax.Array) -> jax.Array:
        """The result of `mix`, reshaped to [B, T, H * d], times `o`: [B, T, D]."""
        return step.project(mixed, step.weights(AttentionWeights).o)[0]

    def _heads(
        self, step: LayerStep, y_BTD: jax.Array, tables: tuple[CosSin, CosSin] | None
    ) -> tuple[jax.Array | None, ...]:
        """Queries, keys and values for `AttentionFn`, and the gates of its result.

        tables: cos and sin for queries, and for keys; None = positions are not encoded.
        """
        import jax.numpy as jnp

        from tinkerflow.backend.compute.models.rotary import rotate

        (B, T, _), queries, keys = y_BTD.shape, self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = step.weights(AttentionWeights)
        k: jax.Array | None
        v: jax.Array | None
        if self.fused:
            fused = step.weights(FusedAttentionWeights).qkv
            q, k, v = jnp.split(step.project(y_BTD, fused)[0], (queries, queries + keys), axis=-1)
        elif weights.k is None:
            (q,), k, v = step.project(y_BTD, weights.q), None, None
        elif weights.v is None:
            q, k = step.project(y_BTD, weights.q, weights.k)
            v = k
        else:
            q, k, v = step.project(y_BTD, weights.q, weights.k, weights.v)

        def norm(x: Any, weight: jax.Array | None) -> Any:
            return x if x is None or weight is None or self.norm is None else self.norm(x, weight)

        if self.qk_norm == "all heads":
            q, k = norm(q, weights.q_norm), norm(k, weights.k_norm)
        q_BTHd, gate_BTHd = q.reshape(B, T, self.heads, -1), None
        if self.gated:
            q_BTHd, gate_BTHd = jnp.split(q_BTHd, 2, axis=-1)
        k_BTGd, v_BTGd = (None if x is None else x.reshape(B, T, self.kv_heads, self.head_dim) for x in (k, v))
        if self.qk_norm == "each head":
            q_BTHd, k_BTGd = norm(q_BTHd, weights.q_norm), norm(k_BTGd, weights.k_norm)
        if self.value_norm and v_BTGd is not None and self.norm is not None:
            v_BTGd = self.norm(v_BTGd, jnp.ones((), v_BTGd.dtype))
        if tables is not None:
            for_queries, for_keys = tables
            q_BTHd, k_BTGd = rotate(q_BTHd, for_queries), None if k_BTGd is None else rotate(k_BTGd, for_keys)
        if self.query_scale != 1:
            q_BTHd = q_BTHd * jnp.asarray(self.query_scale, q_BTHd.dtype)
        return q_BTHd, k_BTGd, v_BTGd, gate_BTHd
