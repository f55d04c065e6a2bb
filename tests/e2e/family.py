"""Random tiny models of any family, with the tiny model's tokenizer, for tests that serve them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tests.compute.conftest import FAMILY_SHAPE, PROCESSOR, SHAPE, TOWER, random_model

from tinkerflow.deployments.tiny_model import PAD, SPECIALS, VOCAB, make_tiny

IMAGE_TOKEN = SPECIALS.index(PAD)


def make_family(folder: Path, architecture: str) -> Path:
    """Write a random model of this architecture to `folder`, and return `folder`."""
    make_tiny(folder)
    torch.manual_seed(7)
    shape = {**SHAPE, "tie_word_embeddings": True, **FAMILY_SHAPE.get(architecture, {})}
    shape |= {name: VOCAB for name in shape if name.startswith("vocab_size")}
    model = random_model(architecture, shape)
    if architecture in TOWER:
        model.config.image_token_id = IMAGE_TOKEN
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    model.save_pretrained(folder)
    return folder


def png(seed: int) -> bytes:
    """A PNG file of random pixels, which a model sees as 6 tokens."""
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 24, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()
