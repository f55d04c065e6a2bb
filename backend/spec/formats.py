"""The number formats and device platforms of a group, by the names that settings and commands use."""

from __future__ import annotations

from typing import Literal

PlatformName = Literal["auto", "cpu", "cuda", "tpu"]  # auto = JAX's choice
Dtype = Literal["auto", "float32", "bfloat16"]  # auto = the platform's
BaseWeights = Literal["full", "int8", "nf4", "mxfp4"]  # full = as dtype
CacheFormat = Literal["full", "float8"]  # full = as dtype
