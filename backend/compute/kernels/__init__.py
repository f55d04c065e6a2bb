"""Kernels for CPU, NVIDIA GPU and TPU: attention, softmax, grouped and small matmuls, gated DeltaNet.

Models call the functions of `NAME.py`, which choose between its kernels in `NAME_gpu.py` and `NAME_tpu.py`.
"""

__all__ = [
    "adapter_gpu",
    "delta_chunks_gpu",
    "delta_gpu",
    "delta_tpu",
    "flash",
    "grouped",
    "grouped_gpu",
    "matmul",
    "paged_gpu",
    "paged_tpu",
    "softmax",
    "softmax_gpu",
    "softmax_tpu",
    "split",
    "tree",
    "tree_gpu",
    "tree_tpu",
    "triton_calls",
    "whole_rows",
]
