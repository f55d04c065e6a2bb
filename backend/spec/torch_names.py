"""The functions that a traced loss may call: torch functions, Tensor methods, operators and math functions.

Each is mapped to an op. All other functions are rejected. `backend/compute/training/custom_loss/ops.py` implements each
op, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping


def _words(text: str) -> list[str]:
    return text.split()


# torch.X(tensor, ...) and tensor.X(...) are the same.
_BOTH = _words("""
    abs absolute exp expm1 log log1p log2 log10 sqrt rsqrt square neg negative sign sigmoid tanh relu floor ceil
    round trunc reciprocal sin cos erf isnan isinf isfinite logical_not logical_and logical_or logical_xor detach
    clone add sub subtract mul multiply div divide true_divide floor_divide remainder pow maximum minimum max min eq
    ne lt le gt ge logaddexp xlogy nan_to_num clamp clip clamp_min clamp_max lerp masked_fill sum mean prod amax
    amin var std logsumexp softmax log_softmax cumsum cumprod any all argmax argmin count_nonzero reshape squeeze
    unsqueeze flatten transpose permute flip roll narrow index_select gather diff dot matmul numel
""")
_METHODS = _words("size dim float long int bool to type_as view view_as reshape_as contiguous expand expand_as t")
_TORCH = _words("where stack cat concat zeros_like ones_like full_like arange")
OPERATORS = _words(
    "add sub mul truediv floordiv mod pow neg pos abs invert eq ne lt le gt ge and_ or_ xor getitem matmul"
)
MATH = _words("sqrt exp log log2 log10 log1p expm1 sin cos tanh floor ceil pow")
_FUNCTIONAL = _words("relu sigmoid tanh softmax log_softmax silu mse_loss l1_loss smooth_l1_loss huber_loss")
_NAMED = {
    "getattr": "getattr",
    **{f"torch.nn.functional.{name}": name for name in _FUNCTIONAL},
    "torch._C._nn.log_sigmoid": "logsigmoid",
    "torch._C._nn.softplus": "softplus",
    "torch._C._nn.gelu": "gelu",
}

FUNCTIONS: Mapping[str, str] = {
    **{f"torch.{name}": name for name in (*_BOTH, *_TORCH)},
    **{f"operator.{name}": f"operator.{name}" for name in OPERATORS},
    **{f"math.{name}": f"math.{name}" for name in MATH},
    **_NAMED,
}
METHODS: Mapping[str, str] = {name: name for name in (*_BOTH, *_METHODS)}
ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "T", "values", "indices"})
DTYPES = frozenset({"float32", "float16", "bfloat16", "int64", "int32", "bool"})
