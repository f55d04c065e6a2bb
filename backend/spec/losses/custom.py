"""A loss that the client traced with torch.fx. It declares its own inputs, and is configured by its id, `loss_id`."""

from __future__ import annotations

from tinkerflow.backend.spec.losses import LossSpec

LOSS = LossSpec("custom", traced=True)
