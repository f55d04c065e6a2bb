"""Tensors cross as they are, whatever their layout in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import save

from tinkerflow.backend.errors import StoreError
from tinkerflow.backend.store.tensors import decode, encode

FLOATS = arrays(np.float32, array_shapes(max_dims=3, max_side=5), elements=st.floats(width=32))


@given(st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), FLOATS, max_size=4))
def test_tensors_come_back_bit_for_bit(tensors: dict[str, np.ndarray]) -> None:
    tensors.pop("__metadata__", None)
    back = decode(encode(tensors))
    assert {k: (a.shape, a.tobytes()) for k, a in back.items()} == {
        k: (a.shape, a.tobytes()) for k, a in tensors.items()
    }


@given(FLOATS, st.sampled_from(["T", "reversed", "step", "fortran", "broadcast"]))
def test_layout_in_memory_does_not_matter(array: np.ndarray, layout: str) -> None:
    view = {
        "T": lambda: array.T,
        "reversed": lambda: array[::-1],
        "step": lambda: array[..., ::2],
        "fortran": lambda: np.asfortranarray(array),
        "broadcast": lambda: np.broadcast_to(array, (3, *array.shape)),
    }[layout]()
    np.testing.assert_array_equal(decode(encode({"x": view}))["x"], view)


def test_same_tensors_same_bytes() -> None:
    a, b = np.ones((2, 3), np.float32), np.zeros(4, np.float32)
    assert encode({"a": a, "b": b}) == encode({"b": b, "a": a})


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(StoreError, match="tensor 'x' is float16"):
        encode({"x": np.zeros(2, np.float16)})
    with pytest.raises(StoreError, match="tensor 'x' is int32"):
        decode(save({"x": np.zeros(2, np.int32)}))


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 64, encode({"x": np.ones(4, np.float32)})[:-1]])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="not a safetensors file"):
        decode(data)
