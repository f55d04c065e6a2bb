"""The image processor of a model: the sizes of resized images, and the pixels of PNG and JPEG files.

The rules are those of transformers' Qwen2VLImageProcessor, which Qwen3-VL uses. Height and width are multiples of a
token's side, the number of pixels has bounds, and the aspect ratio is kept as far as possible. Pillow resizes, with
bicubic interpolation.
"""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.core.errors import UserError, broken
from tinkerflow.backend.spec.limits import MAX_IMAGE_PIXELS, MAX_IMAGE_TOKENS

_FORMATS = {"png": "PNG", "jpeg": "JPEG"}
_LONGEST = 200  # times the shorter side: transformers rejects more
_MOST_SCANS = 100  # of a JPEG file: each scan passes over all pixels, and a scan may take only 14 bytes
_SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")  # marker, length, colors


@dataclass(frozen=True)
class ImageProcessor:
    """A model's rules for images.

    token: the id of the placeholder token. side: the side of the square that one token represents, in pixels. least,
    most: bounds of an image's pixels. mean, deviation: of each color channel, where 1 is the brightest value.
    """

    token: int
    side: int
    least: int
    most: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def bytes_of(self, tokens: int) -> int:
        """The size in bytes of the pixels of images with `tokens` tokens in total."""
        return tokens * self.side**2 * len(self.mean)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """The (width, height) after resizing. ValueError: one side is much longer than the other."""
        if max(width, height) > _LONGEST * min(width, height):
            raise ValueError(f"{width} x {height} pixels: the longer side must be at most {_LONGEST} times the other")
        wide, high = (round(size / self.side) * self.side for size in (width, height))
        if wide * high > self.most:
            shrink = math.sqrt(width * height / self.most)
            wide, high = (max(self.side, math.floor(size / shrink / self.side) * self.side) for size in (width, height))
        elif wide * high < self.least:
            grow = math.sqrt(self.least / (width * height))
            wide, high = (math.ceil(size * grow / self.side) * self.side for size in (width, height))
        return wide, high

    def read(
        self, data: bytes, kind: str, name: str, expected: int | None = None, *, blank: bool = False
    ) -> npt.NDArray[np.uint8]:
        """The pixels [rows, columns, 3] of an image file, resized for the model.

        data: the content of the file. kind: its format, png or jpeg. name: the image's field, for errors. expected: the
        number of tokens that the client expects. blank: decode nothing, and return black pixels that take no memory.
        UserError names the wrong property. The size is checked before decoding.
        """
        from PIL import Image, ImageOps, UnidentifiedImageError  # here: few processes read images

        if kind not in list(_FORMATS):  # it may not be a string
            raise broken(f"{name}.format", kind, "png or jpeg")
        try:
            with Image.open(io.BytesIO(data), formats=[_FORMATS[kind]]) as file:
                if file.width * file.height > MAX_IMAGE_PIXELS:
                    rule = f"at most {MAX_IMAGE_PIXELS}"
                    raise UserError(f"{name} has {file.width} x {file.height} pixels: must have {rule}")
                wide, high = self.size(*file.size)  # a rotation keeps the number of tokens
                self._check(name, file.size, wide * high // self.side**2, expected)
                if kind == "jpeg" and (scans := sum(1 for _ in _SCAN.finditer(data))) > _MOST_SCANS:
                    raise UserError(f"{name}.data has {scans} scans: must have at most {_MOST_SCANS}")
                if blank:
                    return np.broadcast_to(np.uint8(0), (high, wide, 3))
                image = ImageOps.exif_transpose(file).convert("RGB")
                image = image.resize(self.size(*image.size), Image.Resampling.BICUBIC)
        except UserError:
            raise
        except UnidentifiedImageError as error:
            raise UserError(f"{name}.data is not a {kind} file") from error
        except Exception as error:  # Pillow raises many classes of errors for damaged files
            raise UserError(f"{name}.data cannot be read as {kind}: {error}") from error
        return np.asarray(image)

    @staticmethod
    def _check(name: str, size: tuple[int, int], tokens: int, expected: int | None) -> None:
        wide, high = size
        if tokens > MAX_IMAGE_TOKENS:
            raise UserError(
                f"{name} has {wide} x {high} pixels, {tokens} tokens: must have at most {MAX_IMAGE_TOKENS} tokens"
            )
        if expected is not None and expected != tokens:
            rule = f"{tokens}, the tokens of {wide} x {high} pixels"
            raise broken(f"{name}.expected_tokens", expected, rule)
