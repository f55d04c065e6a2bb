"""The vision tower's inputs and the positions of images as in transformers, refused configs, and planned memory."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.compute.conftest import (
    IMAGE_TOKEN,
    PROCESSOR,
    SHAPE,
    TOWER,
    image_processor,
    inputs_of,
    random_example,
    random_model,
    seeing,
)

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models import vision_tower
from tinkerflow.backend.compute.models.families import parse_config
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.models.vision_config import open_processor
from tinkerflow.backend.compute.models.vision_tower import (
    VisionTower,
    image_positions,
    patches_like,
    to_patches,
    tower_bytes,
)
from tinkerflow.backend.compute.planning.memory_plan import plan_memory
from tinkerflow.backend.compute.training.images import image_features
from tinkerflow.backend.compute.training.packing import pack
from tinkerflow.backend.compute.training.token_losses import choose
from tinkerflow.backend.compute.training.train import to_devices
from tinkerflow.backend.compute.training.train_programs import batch_like, features_like
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import GroupConfig


@pytest.fixture(scope="module")
def sees():
    """A vision model in torch, and its config's fields."""
    model = random_model("qwen3_vl", SHAPE)
    return model, json.loads(model.config.to_json_string())


def test_image_patches_equal_those_of_the_processor(sees):
    shape = parse_config(sees[1], name="tiny").vision
    example = seeing(random_example(np.random.default_rng(0), 40), (2, 3, 5))
    patches = to_patches(shape, example.images[0].pixels_HWC)
    wanted = inputs_of(example)["pixel_values"].numpy().reshape(-1, 3, shape.frames, shape.patch**2)
    count = int(patches.count)
    assert count == len(wanted) == 60
    colors = patches.colors_PC[:count].reshape(count, 3, -1) / np.float32(255)
    mean, deviation = (np.array(PROCESSOR[key], np.float32)[:, None] for key in ("image_mean", "image_std"))
    for frame in range(shape.frames):
        np.testing.assert_allclose((colors - mean) / deviation, wanted[:, :, frame], atol=1e-6)
    # Learned positions, interpolated.
    learned = sees[0].model.visual
    found = (learned.pos_embed.weight.detach().numpy()[patches.corners_P4] * patches.shares_P4[..., None]).sum(1)
    given: list[torch.Tensor] = []  # to the first block: the positions alone, because the patches are zeros
    with (
        learned.patch_embed.register_forward_hook(lambda _, inputs, patches: torch.zeros_like(patches)),
        learned.blocks[0].register_forward_pre_hook(lambda _, inputs: given.append(inputs[0])),
    ):
        learned(inputs_of(example)["pixel_values"], torch.tensor([[1, 6, 10]]))
    np.testing.assert_allclose(found[:count], given[0].detach().numpy(), atol=1e-6)


def test_image_positions_equal_transformers(sees):
    model, fields = sees
    example = seeing(random_example(np.random.default_rng(1), 60), (0, 2, 3), (9, 5, 1), (30, 4, 4))
    given = inputs_of(example)
    wanted, _ = model.model.get_rope_index(given["input_ids"], given["mm_token_type_ids"], given["image_grid_thw"])
    found = image_positions(parse_config(fields, name="tiny").vision, 60, example.images)
    np.testing.assert_array_equal(found, wanted[:, 0].numpy().T)
    no_images = image_positions(parse_config(fields, name="tiny").vision, 4, ())
    np.testing.assert_array_equal(no_images, np.arange(4)[:, None] + np.zeros((1, 3)))


@pytest.mark.parametrize(
    ("part", "field", "value", "text"),
    [
        ("vision_config", "hidden_act", "relu", "hidden_act 'relu' is not supported"),
        ("vision_config", "num_position_embeddings", 17, "positions must be a square"),
        ("vision_config", "deepstack_visual_indexes", [2], "must rise, from 0 to 1"),
        ("vision_config", "out_hidden_size", 16, "out_hidden_size 16"),
        (None, "image_token_id", 4096, "image_token_id 4096"),
        (None, "vision_config", None, "vision_config is None in config.json"),
    ],
)
def test_unsupported_vision_tower_is_refused_with_its_field(sees, part, field, value, text):
    fields = json.loads(json.dumps(sees[1]))
    (fields[part] if part else fields)[field] = value
    with pytest.raises(UserError, match=text):
        parse_config(fields, name="tiny")


def test_the_processor_is_read_from_its_file(sees, tmp_path):
    cfg = parse_config(sees[1], name="tiny")
    assert open_processor(cfg, tmp_path) is None
    assert TOWER["qwen3_vl"]["depth"] == cfg.vision.layers
    file = tmp_path / "preprocessor_config.json"
    image_processor().save_pretrained(tmp_path)
    found = open_processor(cfg, tmp_path)
    assert (found.token, found.side, found.least, found.most) == (IMAGE_TOKEN, 8, 256, 1536)
    assert found.mean == (0.5, 0.4, 0.3)
    assert open_processor(replace(cfg, vision=None), tmp_path) is None
    for key, value in (("patch_size", 14), ("do_resize", False), ("image_mean", [0.5]), ("rescale_factor", 1.0)):
        file.write_text(json.dumps({**PROCESSOR, key: value}))
        with pytest.raises(UserError, match=key):
            open_processor(cfg, tmp_path)


def test_early_compiled_programs_are_those_of_image_batches(sees, monkeypatch):
    cfg, mesh = parse_config(sees[1], name="tiny"), make_mesh(1, 1)
    data = (
        seeing(random_example(np.random.default_rng(2), 60), (4, 2, 3)),
        random_example(np.random.default_rng(3), 9),
    )
    monkeypatch.setattr(vision_tower, "see", lambda *_: jnp.ones((64, 2, cfg.hidden)))
    params = Params(np.zeros((1, 1), np.float32), {}, np.zeros(1), None, tower={})
    tower = VisionTower(cfg, mesh, params, np.ones((2, 3), np.float32))
    (batch,) = pack(data, microbatch_tokens=128)
    images, choice = image_features(tower, data, batch), choose("cross_entropy", {})
    assert images.here_BT.sum() == 6 == images.vectors_BTED[images.here_BT].sum() / (2 * cfg.hidden)
    assert not images.vectors_BTED[~images.here_BT].any()
    assert image_features(tower, data[1:], pack(data[1:], microbatch_tokens=128)[0]) is None
    made, shape = to_devices(batch, choice, mesh, images), batch.tokens_BT.shape
    early = replace(batch_like(mesh, *shape), images=features_like(tower, mesh, *shape))
    described = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree) for tree in (made, early)]
    assert described[0] == described[1]
    image, patches = to_patches(cfg.vision, data[0].images[0].pixels_HWC), patches_like(cfg.vision, 256)
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (image, patches)]
    assert shapes[0] == shapes[1]
    assert [program.name for program in tower.programs(300)] == [
        f"an image of {count} patches" for count in (256, 512, 1024, 2048)
    ]


def test_memory_plan_counts_the_vision_tower_and_its_features(sees):
    cfg = parse_config(sees[1], name="tiny")
    config = GroupConfig("", "float32", 1, 1, 64, 1024, 2, 2, "", device_memory=1.0)
    seeing_it, blind = (plan_memory(each, config, 10**9).uses for each in (cfg, replace(cfg, vision=None)))
    # The tower finishes before the step begins, and the step has memory for its features.
    assert seeing_it.temporaries > blind.temporaries
    large = replace(cfg, vision=replace(cfg.vision, mlp=2**20))
    assert plan_memory(large, config, 10**11).uses.temporaries >= tower_bytes(large.vision, 64, 4) > 10**9
    assert seeing_it.weights > blind.weights
