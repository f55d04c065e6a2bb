"""The machine's peak rate of arithmetic: float32 matmuls of a training step's shape, by torch and by JAX."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np
import torch

M, K, N = 1024, 768, 2048
TIMES, BEST_OF = 10, 3


def matmul_peak() -> float:
    """GFLOP per CPU-second of the faster library."""
    left, right = np.ones((M, K), np.float32), np.ones((K, N), np.float32)
    a, b, c, d = torch.from_numpy(left), torch.from_numpy(right), jax.numpy.asarray(left), jax.numpy.asarray(right)
    multiply = jax.jit(jax.numpy.matmul)
    return max(_rate(lambda: a @ b), _rate(lambda: multiply(c, d).block_until_ready()))


def _rate(call: Callable[[], object]) -> float:
    call()
    best = 0.0
    for _ in range(BEST_OF):
        began = time.process_time()
        for _ in range(TIMES):
            call()
        best = max(best, TIMES * 2 * M * K * N / (time.process_time() - began) / 1e9)
    return best
