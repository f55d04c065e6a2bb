"""What the tower has seen of the images in a prompt that is being prefilled.

An image is looked at when the first piece with a token of it is computed, and what was seen is forgotten behind its
last token: so a prompt whose pages are found is not looked at, and each image is looked at once for all samples.

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


class Views:
    """The images of one prompt at a time: prompts with images are prefilled alone."""

    def __init__(self, tower: VisionTower) -> None:
        """Nothing is seen yet."""
        self._tower = tower
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self._job: PrefillJob | None = None
        self._positions_T3 = np.zeros((0, 3), np.int32)  # of the job's prompt
        self._seen: dict[int, npt.NDArray[Any]] = {}  # by where an image begins, [tokens, E, D]

    def piece(self, job: PrefillJob, rows: int, size: int, start: int) -> tuple[ImageFeatures | None, int]:
        """The images among tokens [start, start + size) of a prompt, and how many tokens its tower had to look at.

        None when there is no image before the piece's end. job: of the prompt. rows: of the dispatch.
        """
        images, end = job.parent.request.images, start + size
        if not any(image.start < end for image in images):
            return None, 0
        vision = self._tower.vision
        if self._job is not job:
            self._job, self._seen = job, {}
            self._positions_T3 = image_positions(vision, len(job.tokens_T), images)
        features, looked = self._tower.no_images(rows, size), 0
        known_T3 = self._positions_T3[start:end]
        features.positions_BT3[job.row, : len(known_T3)] = known_T3
        for image in images:
            behind = image.start + image.tokens(vision.token_side)
            first, last = max(start, image.start), min(end, behind)
            if first >= last:
                continue
            if image.start not in self._seen:
                self._seen[image.start] = np.asarray(to_host(self._tower.encode(image)))[: behind - image.start]
                looked += behind - image.start
            features.here_BT[job.row, first - start : last - start] = True
            here = slice(first - image.start, last - image.start)
            features.vectors_BTED[job.row, first - start : last - start] = self._seen[image.start][here]
            if behind <= end:
                del self._seen[image.start]
        return features, looked
