"""The inputs and results of the kernels for the softmax over the vocabulary, `softmax_gpu` and `softmax_tpu`.

Letters: M rows, D hidden, V vocabulary, K targets, R rank, N parts of the vocabulary.
"""

from __future__ import annotations

import flax.struct
import jax


@flax.struct.dataclass
class Product:
    """Logits as a product: x times the transpose of the unembedding, plus low times B. The logits are never written.

    x_MD, head_VD and low_MR have one dtype; B_RV float32. low_MR and B_RV: None without an adapter. targets_MK int32:
    the tokens whose logits are returned; tokens outside the vocabulary have no logit. cap: as `ModelConfig.softcap`.
    interpret: run the kernels on a CPU, for tests.
    """

    x_MD: jax.Array
    head_VD: jax.Array
    low_MR: jax.Array | None
    B_RV: jax.Array | None
    targets_MK: jax.Array
    cap: float = flax.struct.field(pytree_node=False, default=0.0)  # type: ignore[no-untyped-call]
    interpret: bool = flax.struct.field(pytree_node=False, default=False)  # type: ignore[no-untyped-call]


@flax.struct.dataclass
class Totals:
    """For each row and each part of the vocabulary, the largest logit and the sum of exp(logit - largest); float32.

    picked_MK float32: the targets' logits; undefined for targets outside the vocabulary. weights_MV: exp(logit -
    largest of its part), in the dtype of x, if the kernel for gradients uses them.
    """

    largest_NM: jax.Array
    total_NM: jax.Array
    picked_MK: jax.Array
    weights_MV: jax.Array | None = None


@flax.struct.dataclass
class Slopes:
    """The gradients of the logits, in the dtype of x; of low and B, float32, if the kernel has multiplied by them."""

    d_MV: jax.Array
    d_low_MR: jax.Array | None = None
    d_B_RV: jax.Array | None = None
