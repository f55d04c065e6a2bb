"""The images of a micro-batch, which the model's tower encodes before the training step."""

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
    side = tower.vision.token_side
    own = [
        (place, image)
        for place in batch.places
        for image in examples[place.example].images
        if image.start + image.tokens(side) > place.shared  # images of shared tokens belong to the example placing them
    ]
    if not own:
        return None
    vectors = to_host([tower.encode(image) for _, image in own])
    features = tower.no_images(*batch.tokens_BT.shape)
    features.positions_BT3[...] = batch.positions_BT[..., None]
    for place in batch.places:
        images = examples[place.example].images
        features.positions_BT3[place.row, place.columns] = image_positions(tower.vision, len(place.columns), images)
    for (place, image), vectors_ED in zip(own, vectors, strict=True):
        columns = place.columns[image.start : image.start + image.tokens(side)]
        features.here_BT[place.row, columns] = True
        features.vectors_BTED[place.row, columns] = vectors_ED[: len(columns)]
    return features
