"""The tensors of a folder, mapped from one file or several. Errors name a damaged file."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tinkerflow.backend.compute.weights.files import INDEX, WEIGHTS, open_tensors
from tinkerflow.backend.core.errors import UserError


def test_parts_of_a_bfloat16_matrix(tmp_path):
    matrix = np.arange(24, dtype=np.float32).reshape(4, 6).astype(ml_dtypes.bfloat16)
    save_file({"x": matrix}, tmp_path / WEIGHTS)
    stored = open_tensors(tmp_path, "m")["x"]
    assert (stored.shape, stored.dtype) == ((4, 6), "BF16")
    np.testing.assert_array_equal(stored.view(ml_dtypes.bfloat16)[1:3, 2:5], matrix[1:3, 2:5])


def test_tensors_are_read_by_name_without_a_copy(tmp_path):
    arrays = {
        "a": np.arange(3, dtype=np.int64),
        "b": np.array([[True, False, True]]),
        "c": np.zeros((0, 4), np.float32),
        "d": np.array(7, np.float32),
        "e": np.arange(5, dtype=np.float16),
        "f": np.arange(6, dtype=np.uint8).reshape(2, 3),
    }
    save_file(arrays, tmp_path / WEIGHTS)
    for name, stored in open_tensors(tmp_path, "m").items():
        np.testing.assert_array_equal(stored.view(arrays[name].dtype), arrays[name])
        assert name == "c" or isinstance(stored.raw, np.memmap)  # an empty slice of a map is an array


def test_an_index_names_the_files(tmp_path):
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "1.safetensors")
    save_file({"b": np.ones(3, np.float16)}, tmp_path / "2.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert {name: stored.shape for name, stored in open_tensors(tmp_path, "m").items()} == {"a": (2,), "b": (3,)}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"base model 'm': .*there is no .*model\.safetensors; weights must be safetensors"),
        ({WEIGHTS: "no header"}, r"base model 'm': .*model\.safetensors is not a safetensors file"),
        ({INDEX: '{"weight_map": 3}'}, "has no object 'weight_map'"),
        ({INDEX: '{"weight_map": {"a": "gone.safetensors"}}'}, r"there is no .*gone\.safetensors"),
        *(
            (
                {INDEX: json.dumps({"weight_map": {"a": path}})},
                r"weight_map\['a'\] is .*: must be a path below the index",
            )
            for path in ("../m.safetensors", "x/../../m.safetensors", "/etc/m.safetensors", "m\0", 3)
        ),
    ],
)
def test_missing_or_broken_weight_file_is_named(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        open_tensors(tmp_path, "m")
