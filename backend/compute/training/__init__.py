"""Training steps: packed micro-batches, losses, gradients and optimizer updates, for adapters and all parameters."""

__all__ = [
    "adapter_shards",
    "adapter_trainer",
    "adapters",
    "attention",
    "budget",
    "fetched_states",
    "forward_backward",
    "full_parameters",
    "images",
    "logprobs",
    "optimizer",
    "packing",
    "sequence_losses",
    "token_losses",
    "train",
    "train_programs",
    "trained",
]
