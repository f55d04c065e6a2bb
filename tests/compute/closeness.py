"""Assertions that arrays are close, with tolerances that follow from the arithmetic instead of from one machine."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

LOGITS = 8.0  # the magnitude of the tiny models' logits


def close_logprobs(found: npt.ArrayLike, expected: npt.ArrayLike, *, ulps: float = 256) -> None:
    """`close` for float32 logprobs. A logprob near 0 carries the rounding of its logits."""
    close(found, expected, ulps=ulps, scale=LOGITS)


def close(
    found: npt.ArrayLike, expected: npt.ArrayLike, *, ulps: float = 128, dtype: Any = np.float32, scale: float = 0.0
) -> None:
    """Assert that arrays differ by at most `ulps` units in the last place of `dtype`.

    The unit is the largest of that of the element, of a typical element (the root mean square) and of `scale`: sums
    cancel, so small elements carry the rounding of large terms. A few terms need about 16 ulps, and matmuls through
    several layers need a thousand. Another instruction set changes the last digits of both.
    """
    a, b = (np.asarray(array, np.float64) for array in (found, expected))
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
    unit = float(jnp.finfo(dtype).eps)
    typical = max(scale, float(np.sqrt(np.mean(b * b)))) if b.size else scale
    allowed = ulps * unit * np.maximum(np.abs(b), typical)
    excess = np.abs(a - b) - allowed
    if not (excess <= 0).all():
        worst = np.unravel_index(np.argmax(np.where(np.isnan(excess), np.inf, excess)), a.shape)
        raise AssertionError(
            f"{a[worst]!r} and {b[worst]!r} at {tuple(map(int, worst))} differ by {abs(a[worst] - b[worst]):.3g}: "
            f"{abs(a[worst] - b[worst]) / unit / max(abs(b[worst]), typical, 1e-300):.1f} ulps of {dtype}, "
            f"at most {ulps} allowed"
        )
