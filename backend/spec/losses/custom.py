"""A loss that the client traced with torch.fx. It declares its own inputs; its configuration is its id, `loss_id`."""

from __future__ import annotations

from tinkerflow.backend.spec.losses import LossSpec

LOSS = LossSpec("custom", traced=True)
