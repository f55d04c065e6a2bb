"""Images are resized as by transformers' processor. Invalid images are refused before they are decoded."""

from __future__ import annotations

import importlib
import io
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.spec.limits import MAX_IMAGE_PIXELS

QWEN = ImageProcessor(151_655, 32, 65_536, 16_777_216, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
TINY = ImageProcessor(95, 8, 256, 1536, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def theirs() -> Any:
    """Transformers' module of the processor, imported only when needed because the import takes seconds."""
    return importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")


def file_of(image: Image.Image, kind: str = "png", **more: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def noise(width: int, height: int, channels: int = 3) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, channels)).astype(np.uint8)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)


@given(st.integers(1, 6000), st.integers(1, 6000))
@settings(max_examples=60, deadline=None)
def test_image_sizes_equal_transformers(width: int, height: int) -> None:
    try:
        wanted = theirs().smart_resize(height, width, QWEN.side, QWEN.least, QWEN.most)[::-1]
    except ValueError:
        wanted = None
    if wanted is None:
        with pytest.raises(ValueError, match="at most 200 times"):
            QWEN.size(width, height)
    else:
        assert QWEN.size(width, height) == wanted


@pytest.mark.parametrize(("kind", "channels"), [("png", 1), ("png", 3), ("png", 4), ("jpeg", 3)])
@pytest.mark.parametrize("size", [(16, 16), (9, 7), (100, 33)])
def test_image_pixels_equal_transformers(kind: str, channels: int, size: tuple[int, int]) -> None:
    data = file_of(noise(*size, channels), kind)
    found = TINY.read(data, kind, "image")
    plain = theirs().Qwen2VLImageProcessorPil(
        patch_size=TINY.side, merge_size=1, temporal_patch_size=1, do_rescale=False, do_normalize=False,
        size={"shortest_edge": TINY.least, "longest_edge": TINY.most},
    )  # fmt: skip
    values = plain([Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="np")
    _, rows, columns = values["image_grid_thw"][0]
    cells = values["pixel_values"].reshape(rows, columns, 3, TINY.side, TINY.side).transpose(0, 3, 1, 4, 2)
    np.testing.assert_array_equal(found, cells.reshape(found.shape))


def test_a_turned_photo_is_read_upright() -> None:
    upright, exif = noise(32, 16), Image.Exif()
    exif[0x0112] = 6  # to be displayed after a rotation by 90 degrees
    turned = file_of(upright.transpose(Image.Transpose.ROTATE_90), "png", exif=exif)
    np.testing.assert_array_equal(TINY.read(turned, "png", "image", expected=8), TINY.read(file_of(upright), "png", ""))


@pytest.mark.parametrize(
    ("data", "kind", "expected", "text"),
    [
        (file_of(noise(16, 16)), "gif", None, "image.format is 'gif': must be png or jpeg"),
        (file_of(noise(16, 16)), "jpeg", None, "image.data is not a jpeg file"),
        (b"", "png", None, "image.data is not a png file"),
        (file_of(noise(64, 64))[:600], "png", None, "image.data cannot be read as png"),
        (file_of(noise(16, 16)), "png", 5, "image.expected_tokens is 5: must be 4, the tokens of 16 x 16"),
        (file_of(Image.new("L", (1, 201))), "png", None, "the longer side must be at most 200 times the other"),
    ],
)
def test_image_errors_name_the_defect(data: bytes, kind: str, expected: int | None, text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        TINY.read(data, kind, "image", expected)


def test_a_small_file_of_too_many_pixels_is_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = file_of(Image.new("1", (MAX_IMAGE_PIXELS // 1024 + 1, 1024)))
    large = file_of(Image.new("1", (4096, 4096)))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(UserError, match=f"32769 x 1024 pixels: must have at most {MAX_IMAGE_PIXELS}"):
        QWEN.read(bomb, "png", "image")
    with pytest.raises(UserError, match="16384 tokens: must have at most 4096 tokens"):
        QWEN.read(large, "png", "image")


def test_a_small_file_of_many_scans_is_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding each scan of a progressive JPEG visits all pixels."""
    data = file_of(Image.new("RGB", (64, 64)), "jpeg", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    most = data[:-2] + last * 90 + data[-2:]
    assert QWEN.read(most, "jpeg", "image").shape == (256, 256, 3)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(UserError, match=r"image\.data has 101 scans: must have at most 100"):
        QWEN.read(most[:-2] + last + data[-2:], "jpeg", "image")
