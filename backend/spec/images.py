"""Images as the image processor of a model takes them: which sizes it makes, and the pixels of a PNG or JPEG file.

The rules are those of transformers' Qwen2VLImageProcessor, which Qwen3-VL uses: sides are multiples of a token's, the
number of pixels has bounds, the shape stays as it is as far as possible. Resizing is Pillow's, bicubic.
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
_LONGEST = 200  # times the shorter side: transformers refuses more
_MOST_SCANS = 100  # of a JPEG file: each passes over all pixels, and a file could hold one in every 14 bytes
_SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")  # marker, length, colours


@dataclass(frozen=True)
class ImageProcessor:
    """How a model wants its images.

    token: the id of its placeholder. side: of the square of pixels that one token stands for. least, most: pixels of an
    image. mean, deviation: of each colour, where 1 is the brightest.
    """

    token: int
    side: int
    least: int
    most: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def bytes_of(self, tokens: int) -> int:
        """What the pixels of images with so many tokens take."""
        return tokens * self.side**2 * len(self.mean)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """What an image is resized to, as (width, height); ValueError when it is too long for its width."""
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
        """The pixels [rows, columns, 3] of a file, as many as the model takes.

        data: of a file of format `kind`, png or jpeg. name: how errors call the image. expected: how many tokens the
        client thinks it has. blank: only the number of pixels is wanted: nothing is decoded, they are black and take no
        memory. UserError names what is wrong. The size is checked before anything is decoded.
        """
        from PIL import Image, ImageOps, UnidentifiedImageError  # here: most processes never see an image

        if kind not in list(_FORMATS):  # maybe no text at all
            raise broken(f"{name}.format", kind, "png or jpeg")
        try:
            with Image.open(io.BytesIO(data), formats=[_FORMATS[kind]]) as file:
                if file.width * file.height > MAX_IMAGE_PIXELS:
                    rule = f"at most {MAX_IMAGE_PIXELS}"
                    raise UserError(f"{name} has {file.width} x {file.height} pixels: must have {rule}")
                wide, high = self.size(*file.size)  # as many tokens as when it is turned
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
            raise UserError(f"{name}.data is no {kind} file") from error
        except Exception as error:  # Pillow raises whatever it finds in a broken file
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
            rule = f"{tokens}, what the model makes of {wide} x {high} pixels"
            raise broken(f"{name}.expected_tokens", expected, rule)
