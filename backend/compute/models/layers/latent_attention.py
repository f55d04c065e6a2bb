"""Multi-head latent attention of DeepSeek V2 and V3 (arXiv 2405.04434, section 2.1).

The keys and values of all heads are computed from one small vector for each token, its latent. A key also has a rotated
part, which all heads share.

Letters: B rows, T tokens, D hidden, H heads, c the width of a latent. A head of q and k has p dimensions without
rotation and r rotated dimensions, d = p + r. A head of values has v dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers.attention import ATTENTION, Attention
from tinkerflow.backend.compute.models.layers.matrices import LayerTensor, Projection
from tinkerflow.backend.compute.models.layers.norms import RMSNorm
from tinkerflow.backend.compute.models.rope import Rope, YarnRope, yarn_scale

if TYPE_CHECKING:
    import jax

    from tinkerflow.backend.compute.models.layers.step import LayerStep, Linear
    from tinkerflow.backend.compute.models.rotary import CosSin


_EPS = 1e-6  # in the norms of latents, independent of `rms_norm_eps`


class LatentAttentionWeights(NamedTuple):
    """Weights of one layer. q_a, q_norm and q_b: None if q computes queries from hidden states."""

    q: Linear | None  # [H * d, D]
    q_a: Linear | None  # [query_rank, D]
    q_norm: jax.Array | None  # [query_rank]
    q_b: Linear | None  # [H * d, query_rank]
    kv_a: Linear  # [c + r, D]
    kv_norm: jax.Array  # [c]
    kv_b: Linear  # [H * (p + v), c]
    o: Linear  # [D, H * v]


@dataclass(frozen=True)
class LatentAttention:
    """Latent attention of all layers of a model.

    hidden, heads: D and H. rank: c. query_rank: the width of the latent of queries; 0 = no such latent.
    plain, rotary, values: p, r and v.
    interleaved: the two dimensions of a rotated pair are neighbors.
    rope: the rotary embedding of the rotated parts.
    norm: the norm of both latents.
    query_scale: multiplies queries, in addition to 1 / sqrt(d).
    """

    hidden: int
    heads: int
    rank: int
    query_rank: int
    plain: int
    rotary: int
    values: int
    interleaved: bool
    rope: Rope
    norm: RMSNorm
    query_scale: float = 1.0

    attends, window, shares, pool = True, None, None, ATTENTION  # class attributes

    @classmethod
    def read(cls, fields: ConfigFields) -> LatentAttention:
        """The latent attention of a `config.json`. UserError: a field is missing or not supported."""
        rotary = fields.size("qk_rope_head_dim")
        # Some files have head_dim, or fewer key-value heads than heads. Both fields have no meaning here.
        plain = Attention.read(fields.with_values(head_dim=rotary, num_key_value_heads=None))
        rope = plain.rope
        assert rope is not None
        fields.refuse_others(qk_head_dim=fields.size("qk_nope_head_dim") + rotary)
        scale = 1.0
        if rope.scaling is not None:  # of any type, as in transformers
            factor = rope.scaling.factor if isinstance(rope.scaling, YarnRope) else fields.rope.get("factor") or 1.0
            scale = yarn_scale(factor, float(fields.rope.get("mscale_all_dim") or 0.0)) ** 2
        return cls(
            hidden=plain.hidden,
            heads=plain.heads,
            rank=fields.size("kv_lora_rank"),
            query_rank=fields.size("q_lora_rank") if fields.get("q_lora_rank") is not None else 0,
            plain=fields.size("qk_nope_head_dim"),
            rotary=rotary,
            values=fields.size("v_head_dim"),
            interleaved=fields.flag("rope_interleave", True),
            rope=rope,
            norm=RMSNorm(_EPS),
            query_scale=scale,
        )

    @property
    def widths(self) -> tuple[int, int]:
        return self.plain + self.rotary, self.values

    @property
    def cell(self) -> int:
        """How many numbers are cached for each token: its latent, and the rotated part of a key."""
        return self.rank + self.rotary

    @property
    def cached(self) -> tuple[int, int, int]:
        """The cache of each token: one head, and the widths of its key and value. The value is a part of the key."""
        return 1, self.cell, 0

    def for_context(self, context: int) -> LatentAttention:
        return replace(self, rope=self.rope.for_context(context))

    def projections(self) -> dict[str, Projection]:
        def matrix(name: str, inputs: int, outputs: int) -> Projection:
            return Projection(f"self_attn.{name}", inputs, outputs, "train_attn", before_mixing=True)

        queries = self.heads * (self.plain + self.rotary)
        if self.query_rank:
            matrices = {
                "q_a": matrix("q_a_proj", self.hidden, self.query_rank),
                "q_b": matrix("q_b_proj", self.query_rank, queries),
            }
        else:
            matrices = {"q": matrix("q_proj", self.hidden, queries)}
        values = self.heads * self.values
        return {
            **matrices,
            "kv_a": matrix("kv_a_proj_with_mqa", self.hidden, self.cell),
            "kv_b": matrix("kv_b_proj", self.rank, self.heads * self.plain + values),
            "o": Projection("self_attn.o_proj", values, self.hidden, "train_attn", sums_inputs=True),
        }

    def tensors(self) -> dict[str, LayerTensor]:
        """The norms of the latents, by our names."""
        norms = {"kv_norm": LayerTensor("self_attn.kv_a_layernorm.weight", (self.rank,))}
        if self.query_rank:
            norms["q_norm"] = LayerTensor("self_attn.q_a_layernorm.weight", (self.query_rank,))
        return norms

    def mix(self, step: LayerStep, x_BTD: jax.Array, before: RMSNorm) -> jax.Array:
        """The attended values of all heads, [B, T, H * v]: the input of `o`.

        before: the norm of x_BTD.
        """
        import jax.numpy as jnp

        from tinkerflow.backend.compute.kernels.matmul import OfLayer

        y_BTD = step.norm(before, "attn_norm", x_BTD)
        weights, (B, T, _) = step.weights(LatentAttentionWeights), y_BTD.shape
        if weights.q_a is not None and weights.q_b is not None and weights.q_norm is not None:
            low, kv = step.project(y_BTD, weights.q_a, weights.kv_a)
            (q,) = step.project(self.norm(low, weights.q_norm), weights.q_b)
        else:
            assert weights.q is not None
            q, kv = step.project(y_BTD, weights.q, weights.kv_a)
        for_queries, for_keys = step.rope[self.rope]
        q_BTHp, q_BTHr = jnp.split(q.reshape(B, T, self.heads, -1), (self.plain,), axis=-1)
        q_BTHr = self._rotated(q_BTHr, for_queries)
        if self.query_scale != 1:
            q_BTHp, q_BTHr = (x * jnp.asarray(self.query_scale, x.dtype) for x in (q_BTHp, q_BTHr))
        c_BTc, k_BTr = jnp.split(kv, (self.rank,), axis=-1)
        c_BTc = self.norm(c_BTc, weights.kv_norm)
        k_BT1r = self._rotated(k_BTr[:, :, None], for_keys)
        if step.mixers.attend_latents is not None:
            kv_b, pair = weights.kv_b.weight, weights.kv_b.pair
            assert not isinstance(kv_b, OfLayer)
            o_BTHv = step.mixers.attend_latents(q_BTHp, q_BTHr, c_BTc, k_BT1r[:, :, 0], kv_b, pair)
        else:
            (kv,) = step.project(c_BTc, weights.kv_b)
            k_BTHp, v_BTHv = jnp.split(kv.reshape(B, T, self.heads, -1), (self.plain,), axis=-1)
            k_BTHd = jnp.concatenate([k_BTHp, jnp.broadcast_to(k_BT1r, q_BTHr.shape)], axis=-1)
            q_BTHd = jnp.concatenate([q_BTHp, q_BTHr], axis=-1)
            o_BTHv = step.mixers.attend(q_BTHd, k_BTHd, v_BTHv, window=None, sinks_H=None)
        return o_BTHv.reshape(B, T, -1)

    def output(self, step: LayerStep, mixed: jax.Array) -> jax.Array:
        """The result of `mix` times `o`: [B, T, D]."""
        return step.project(mixed, step.weights(LatentAttentionWeights).o)[0]

    def _rotated(self, x_BTHr: jax.Array, tables: CosSin) -> jax.Array:
        import jax.numpy as jnp

        from tinkerflow.backend.compute.models.rotary import rotate

        if self.interleaved:  # from neighbors to a first and a second half
            pairs = x_BTHr.reshape(*x_BTHr.shape[:-1], -1, 2)
            x_BTHr = jnp.swapaxes(pairs, -1, -2).reshape(x_BTHr.shape)
        return rotate(x_BTHr, tables)
