"""The images of a micro-batch: each is computed by the model's tower before the training step."""

from __future__ import annotations

from collections.abc import Sequence

from tinkerflow.backend.compute.mesh import to_host
from tinkerflow.backend.compute.models.transformer import ImageFeatures
from tinkerflow.backend.compute.models.vision_tower import VisionTower, image_positions
from tinkerflow.backend.compute.training.packing import MicroBatch
from tinkerflow.backend.spec.commands import Example


def image_features(tower: VisionTower, examples: Sequence[Example], batch: MicroBatch) -> ImageFeatures | None:
    """The features of the images in a micro-batch of `examples`, on the host; None without images.

    Waits for the devices.
    """
    computed = [tower.encode(image) for place in batch.places for image in examples[place.example].images]
    if not computed:
        return None
    features, vectors = tower.no_images(*batch.tokens_BT.shape), iter(to_host(computed))
    features.positions_BT3[...] = batch.positions_BT[..., None]
    for place in batch.places:
        images = examples[place.example].images
        own = slice(place.start, place.start + place.length)
        features.positions_BT3[place.row, own] = image_positions(tower.vision, place.length, images)
        for image in images:
            start, tokens = place.start + image.start, image.tokens(tower.vision.token_side)
            features.here_BT[place.row, start : start + tokens] = True
            features.vectors_BTED[place.row, start : start + tokens] = next(vectors)[:tokens]
    return features
