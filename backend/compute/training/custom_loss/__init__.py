"""Losses that clients traced: their values and slopes, and the torch functions they may call, in jax.numpy (`ops`).

`backend/spec/torch_names.py` lists these functions; `backend/wire/custom_losses.py` refuses all others.
"""

from tinkerflow.backend.compute.training.custom_loss.evaluate import Outcome, custom_loss

__all__ = ["Outcome", "custom_loss"]
