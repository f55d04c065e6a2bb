"""Gated DeltaNet, the linear attention of Qwen3-Next and Qwen3.5 (arXiv 2412.06464): its matrices and its norm.

`delta_rule` computes the recurrence over the tokens.

Letters: B rows, T tokens, D hidden, C channels of the convolution, W its taps, h key heads, H value heads.
k and v are the dimensions of a key head and of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers.matrices import LayerTensor, Projection
from tinkerflow.backend.compute.models.layers.norms import RMSNorm, gated_norm

if TYPE_CHECKING:
    import jax

    from tinkerflow.backend.compute.models.layers.step import LayerStep, Linear

DELTA = "delta"  # the pool of states


class GatedDeltaNetWeights(NamedTuple):
    """Weights of one layer. in_qkvz, in_ba: for each key head, q, k, v and z, and b and a.

    If in_qkvz and in_ba are given, the other in_* are None, and vice versa.
    """

    in_qkv: Linear | None  # [C, D]
    in_z: Linear | None  # [H * v, D]
    in_b: Linear | None  # [H, D]
    in_a: Linear | None  # [H, D]
    in_qkvz: Linear | None  # [C + H * v, D]
    in_ba: Linear | None  # [2 * H, D]
    out_norm: jax.Array  # [v]
    out: Linear  # [D, H * v]


class DeltaRuleWeights(NamedTuple):
    """conv [C, 1, W] in the dtype of activations; A_log and dt_bias [H], float32."""

    conv: jax.Array
    A_log: jax.Array
    dt_bias: jax.Array


@dataclass(frozen=True)
class GatedDeltaNet:
    """The linear-attention layers of a model.

    hidden: D. key_heads, value_heads, key_dim, value_dim: h, H, k and v; key heads divide value heads.
    taps: W.
    fused: q, k, v and z are one matrix, and so are b and a (Qwen3-Next).
    norm_eps: the epsilon of the result's gated norm.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    fused: bool
    norm_eps: float

    attends, window, shares, rope, pool = False, None, None, None, DELTA  # class attributes

    @classmethod
    def read(cls, fields: ConfigFields, *, fused: bool, norm_eps: float) -> GatedDeltaNet:
        """The layers that `config.json` describes. UserError: a field is missing or not supported."""
        shape = cls(
            hidden=fields.size("hidden_size"),
            key_heads=fields.size("linear_num_key_heads"),
            value_heads=fields.size("linear_num_value_heads"),
            key_dim=fields.size("linear_key_head_dim"),
            value_dim=fields.size("linear_value_head_dim"),
            taps=fields.size("linear_conv_kernel_dim"),
            fused=fused,
            norm_eps=norm_eps,
        )
        if shape.value_heads % shape.key_heads or shape.taps < 2:
            raise fields.error(
                f"linear_num_key_heads {shape.key_heads}, linear_num_value_heads {shape.value_heads}, "
                f"linear_conv_kernel_dim {shape.taps}; key heads must divide value heads, and the kernel be at least 2"
            )
        return shape

    @property
    def channels(self) -> int:
        """C: the width of queries, keys and values, which go through the convolution."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """The width of the values of all heads."""
        return self.value_heads * self.value_dim

    def for_context(self, context: int) -> GatedDeltaNet:
        """These layers, because nothing in them depends on the length of sequences."""
        return self

    def projections(self) -> dict[str, Projection]:
        if self.fused:
            inner = {"in_qkvz": self.channels + self.values, "in_ba": 2 * self.value_heads}
        else:
            inner = {
                "in_qkv": self.channels,
                "in_z": self.values,
                "in_b": self.value_heads,
                "in_a": self.value_heads,
            }
        matrices = {
            name: Projection(
                f"linear_attn.{name.replace('in_', 'in_proj_')}", self.hidden, width, "train_attn", before_mixing=True
            )
            for name, width in inner.items()
        }
        out = Projection("linear_attn.out_proj", self.values, self.hidden, "train_attn", sums_inputs=True)
        return {**matrices, "out": out}

    def tensors(self) -> dict[str, LayerTensor]:
        """The convolution, the decays and the norm, by our names."""
        return {
            "conv": LayerTensor("linear_attn.conv1d.weight", (self.channels, 1, self.taps)),
            "A_log": LayerTensor("linear_attn.A_log", (self.value_heads,), wide=True),
            "dt_bias": LayerTensor("linear_attn.dt_bias", (self.value_heads,), wide=True),
            "out_norm": LayerTensor("linear_attn.norm.weight", (self.value_dim,)),
        }

    def mix(self, step: LayerStep, x_BTD: jax.Array, before: RMSNorm) -> jax.Array:
        """The gated values that the tokens read, [B, T, H * v]: the input of `out`.

        before: the norm of x_BTD.
        """
        import jax.numpy as jnp

        assert step.mixers.delta_rule is not None
        y_BTD = step.norm(before, "attn_norm", x_BTD)
        weights, (B, T, _) = step.weights(GatedDeltaNetWeights), y_BTD.shape
        if weights.in_qkvz is not None and weights.in_ba is not None:
            by_head = [x.reshape(B, T, self.key_heads, -1) for x in step.project(y_BTD, weights.in_qkvz, weights.in_ba)]
            each = self.value_heads // self.key_heads * self.value_dim
            ends = (self.key_dim, 2 * self.key_dim, 2 * self.key_dim + each)
            q, k, v, z = (x.reshape(B, T, -1) for x in jnp.split(by_head[0], ends, axis=-1))
            b, a = (x.reshape(B, T, -1) for x in jnp.split(by_head[1], 2, axis=-1))
            qkv = jnp.concatenate([q, k, v], axis=-1)
        else:
            assert weights.in_qkv and weights.in_z and weights.in_b and weights.in_a
            qkv, z, b, a = step.project(y_BTD, weights.in_qkv, weights.in_z, weights.in_b, weights.in_a)
        o_BTHv = step.mixers.delta_rule(step.weights(DeltaRuleWeights), qkv, a, b)
        normed = gated_norm(o_BTHv, z.reshape(o_BTHv.shape), weights.out_norm, self.norm_eps)
        return normed.reshape(B, T, -1)

    def output(self, step: LayerStep, mixed: jax.Array) -> jax.Array:
        """The result of `mix` times `out`: [B, T, D]."""
        return step.project(mixed, step.weights(GatedDeltaNetWeights).out)[0]
