"""Limits that requests and workers share. `wire/` checks most of them and raises the errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_RANK = 1024  # of a LoRA adapter, because all adapters share the memory
ALL_PARTS = "trains all parameters: train_attn, train_mlp and train_unembed must be true"
TEXT_CONTEXT = 5  # tokens of a prompt with which the text that continues it is decoded, as in vLLM
DEFAULT_MAX_CONTEXT = 32_768  # tokens of a sequence, unless the settings or the model have another limit
MODEL_CONTEXT = "the model's context"  # the reason for the longest sequence, unless memory limits it
MAX_SEQ = 2**31 - 1  # a sequence number of a model, or of a session's models and samplers: int32 on the wire
MAX_TARGETS = 256  # scored tokens at one position of a datum
# Target cells of one request, and cells of one datum's inputs: a sparse tensor could declare any shape.
MAX_REQUEST_CELLS = 2**26
MAX_INPUT_CELLS = 2**27  # of all inputs of all data of one request
MAX_DATA = 4096  # of one request; the SDK sends 1,024. All work waits while their micro-batches are laid out
# Cells of any tensor that a traced loss computes: a T x T tensor of a long example would otherwise take all memory.
MAX_TRACED_CELLS = 2**26
MAX_TRACED_RANK = 8  # dimensions of any tensor that a traced loss computes
MAX_IMAGE_PIXELS = 2**25  # of an image before it is resized: a small file could contain any number
MAX_IMAGE_TOKENS = 4096  # of one image: every patch attends to all others
MAX_REQUEST_PIXEL_BYTES = 2**27  # of all resized images of one request: about 3 KB for each token

# Bytes of the answer to one sample request, and of everything that its samples record besides their tokens: most likely
# tokens, experts and supports. SQLite stores at most 10**9 bytes in a row, which holds the request and its answer.
MAX_RECORDED_BYTES = 900 * 10**6

MIN_TTL, MAX_TTL = 3600, 10 * 365 * 24 * 3600  # seconds: the SDK's documentation says one hour to ten years
MAX_ASSET_BYTES = 2**25  # of an uploaded image
MAX_ASSETS = 1024  # different uploaded images that one request names


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number: finite, >= `low` and < `below`; > `low` if `above`."""

    low: float = -math.inf
    below: float = math.inf
    above: bool = False

    def hold(self, value: float) -> bool:
        """Whether `value` is finite and within the bounds."""
        return math.isfinite(value) and (value > self.low if self.above else value >= self.low) and value < self.below

    @property
    def rule(self) -> str:
        """The bounds as text for errors."""
        low = f" {'>' if self.above else '>='} {self.low:g}" if math.isfinite(self.low) else ""
        return f"a finite number{low}" + (f" and < {self.below:g}" if math.isfinite(self.below) else "")
