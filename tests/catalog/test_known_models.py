"""The parameter counts of popular models, computed from their configs, equal the published ones."""

from __future__ import annotations

import math

import jax
import pytest
from jax.sharding import AbstractMesh

from tinkerflow.backend.catalog.known_models import known_models
from tinkerflow.backend.compute.mesh import EXPERT, FSDP, TENSOR
from tinkerflow.backend.compute.models.families import parse_config
from tinkerflow.backend.compute.models.params import params_like


@pytest.mark.parametrize("name", known_models())
def test_the_sizes_have_the_published_number_of_parameters(name: str) -> None:
    config, published = known_models()[name]
    cfg = parse_config(config, name=name)
    arrays = params_like(cfg, AbstractMesh((1, 1, 1), (FSDP, EXPERT, TENSOR)), "bfloat16")
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(arrays)) == published
