"""Losses that clients traced: the torch functions that they may call, in jax.numpy (`ops`), and their value and slope.

`backend/spec/torch_names.py` lists what may be called; `backend/wire/custom_losses.py` refuses everything else.
"""

from tinkerflow.backend.compute.training.custom_loss.evaluate import Outcome, custom_loss

__all__ = ["Outcome", "custom_loss"]
