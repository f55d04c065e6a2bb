"""The features of the images in a prompt that is being prefilled.

The vision tower encodes an image with the first piece that contains one of its tokens. The features are dropped after
its last token. Cached prompts need no encoding, and each image is encoded once for all samples.

Letters: B rows, Q tokens of a piece, E vectors of a token, D hidden.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.compute.mesh import to_host
from tinkerflow.backend.compute.models.transformer import ImageFeatures
from tinkerflow.backend.compute.models.vision_tower import VisionTower, image_positions
from tinkerflow.backend.compute.sampler.prefill_jobs import PrefillJob


class ImageFeatureCache:
    """The image features of one prompt at a time, because prompts with images are prefilled alone."""

    def __init__(self, tower: VisionTower) -> None:
        """Start without features."""
        self._tower = tower
        self.clear()

    def clear(self) -> None:
        """Forget all features."""
        self._job: PrefillJob | None = None
        self._positions_T3 = np.zeros((0, 3), np.int32)  # of the job's prompt
        self._features: dict[int, npt.NDArray[Any]] = {}  # by the index of an image's first token, [tokens, E, D]

    def piece(self, job: PrefillJob, rows: int, size: int, start: int) -> tuple[ImageFeatures | None, int]:
        """The images among tokens [start, start + size) of a prompt, and how many tokens the tower encoded for them.

        None if there is no image before the piece's end. job: the prompt's job. rows: the number of rows of the
        dispatch.
        """
        images, end = job.parent.request.images, start + size
        if not any(image.start < end for image in images):
            return None, 0
        vision = self._tower.vision
        if self._job is not job:
            self._job, self._features = job, {}
            self._positions_T3 = image_positions(vision, len(job.tokens_T), images)
        features, encoded = self._tower.no_images(rows, size), 0
        positions_T3 = self._positions_T3[start:end]
        features.positions_BT3[job.row, : len(positions_T3)] = positions_T3
        for image in images:
            stop = image.start + image.tokens(vision.token_side)
            first, last = max(start, image.start), min(end, stop)
            if first >= last:
                continue
            if image.start not in self._features:
                self._features[image.start] = np.asarray(to_host(self._tower.encode(image)))[: stop - image.start]
                encoded += stop - image.start
            features.here_BT[job.row, first - start : last - start] = True
            here = slice(first - image.start, last - image.start)
            features.vectors_BTED[job.row, first - start : last - start] = self._features[image.start][here]
            if stop <= end:
                del self._features[image.start]
        return features, encoded
