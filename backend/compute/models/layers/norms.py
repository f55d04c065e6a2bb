"""RMS norms (arXiv 1910.07467), and their places in a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkerflow.backend.compute.models.fields import ConfigFields

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class RMSNorm:
    """x divided by its root mean square along the last axis, times a weight.

    eps: added to the mean square. plus_one: multiply by 1 + weight instead (Gemma).
    """

    eps: float
    plus_one: bool = False

    @classmethod
    def read(cls, fields: ConfigFields, eps: float = 1e-6, *, plus_one: bool = False) -> RMSNorm:
        """The norm of a `config.json`. eps: the default if the file sets none."""
        return cls(fields.number("rms_norm_eps", eps), plus_one)

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x, normalized in float32, in the dtype of x. weight: broadcasts against x."""
        import jax
        import jax.numpy as jnp

        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.plus_one:
            return (wide * (1 + weight.astype(jnp.float32))).astype(x.dtype)
        return weight * wide.astype(x.dtype)


def gated_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """The RMS norm of x, times silu(gate), in the dtype of x. gate: shaped like x."""
    import jax
    import jax.numpy as jnp

    normed = RMSNorm(eps)(x, weight)
    return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


@dataclass(frozen=True)
class NormPlaces:
    """Hugging Face's names of the norms before and after attention and MLP; "" = no norm.

    x becomes x + after(attention(before(x))), then the same with the MLP.
    """

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""


PRE_NORM = NormPlaces(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
POST_NORM = NormPlaces(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
SANDWICH_NORM = NormPlaces(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
