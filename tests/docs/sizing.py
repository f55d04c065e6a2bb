"""Which model fits on which machine: the arithmetic behind `docs/sizing.md`, from the shapes of models.

Nothing here is measured. Shares of memory are those of backend/compute: 0.2 of a device for the KV cache (it exists
twice while it grows), a quarter of that for prefixes, and 0.3 of what the weights leave free for activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinkerflow.backend.spec.ranks import expert_rank

RANK = 32
KV_SHARE = 0.2
PREFIX_SHARE = 0.25
KEPT_SHARE = 0.3
JAX_SHARE = 0.75  # of a GPU's memory, which JAX takes by default


@dataclass(frozen=True)
class Shape:
    """A base model's shape, as its `config.json` on the hub has it."""

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0

    @property
    def _attention(self) -> tuple[tuple[int, int], ...]:
        """[in, out] of q, k, v and o."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return ((self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden))

    @property
    def _mlp(self) -> tuple[tuple[int, int], ...]:
        """[in, out] of gate, up and down, for each expert."""
        return ((self.hidden, self.mlp), (self.hidden, self.mlp), (self.mlp, self.hidden)) * (self.experts or 1)

    @property
    def layer_parameters(self) -> int:
        """Parameters in matrices of all layers; `int8` halves or quarters these."""
        return self.layers * sum(i * o for i, o in self._attention + self._mlp)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, norms and biases (under 0.1 %) left out."""
        router = self.layers * self.experts * self.hidden
        return self.layer_parameters + router + self.vocab * self.hidden * (1 if self.tied else 2)

    def weights(self, itemsize: int, *, int8: bool) -> int:
        """Bytes of the base weights."""
        rest = self.parameters - self.layer_parameters
        return self.layer_parameters * (1 if int8 else itemsize) + rest * itemsize

    @property
    def adapter(self) -> int:
        """Bytes of one model in training: weights, gradients and two moments in float32, all targets, rank 32."""
        own = expert_rank(RANK, self.experts_per_token, "divided") or RANK
        mlp = own * self.layers * sum(i + o for i, o in self._mlp)
        others = RANK * (self.layers * sum(i + o for i, o in self._attention) + self.hidden + self.vocab)
        return 16 * (mlp + others)

    def kv(self, itemsize: int) -> int:
        """Bytes of the KV cache for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class Device:
    """One device, and how much of its memory the worker uses."""

    name: str
    memory: float
    share: float = 1.0

    def trained(self, shape: Shape, itemsize: int, *, int8: bool) -> int:
        """How many models of rank 32 can be trained at the same time; below 0: the base model does not fit."""
        memory = self.memory * self.share
        free = memory - shape.weights(itemsize, int8=int8)
        taken = memory * KV_SHARE * (2 + PREFIX_SHARE) + KEPT_SHARE * max(0.0, free)
        return int((free - taken) // shape.adapter)


MODELS = (
    Shape("Qwen3-0.6B", 151936, 1024, 28, 16, 8, 128, 3072, tied=True),
    Shape("Qwen3-1.7B", 151936, 2048, 28, 16, 8, 128, 6144, tied=True),
    Shape("Llama-3.2-1B", 128256, 2048, 16, 32, 8, 64, 8192, tied=True),
    Shape("Qwen3-4B", 151936, 2560, 36, 32, 8, 128, 9728, tied=True),
    Shape("Qwen2.5-7B", 152064, 3584, 28, 28, 4, 128, 18944, tied=False),
    Shape("Llama-3.1-8B", 128256, 4096, 32, 32, 8, 128, 14336, tied=False),
    Shape("Qwen3-8B", 151936, 4096, 36, 32, 8, 128, 12288, tied=False),
    Shape("Qwen3-14B", 151936, 5120, 40, 40, 8, 128, 17408, tied=False),
    Shape("Qwen3-32B", 151936, 5120, 64, 64, 8, 128, 25600, tied=False),
    Shape("Qwen3-30B-A3B", 151936, 2048, 48, 32, 4, 128, 768, tied=False, experts=128, experts_per_token=8),
)
DEVICES = (
    Device("TPU v5e, 16 GB", 16e9),
    Device("24 GB GPU", 24e9, JAX_SHARE),
    Device("TPU v6e, 32 GB", 32e9),
    Device("48 GB GPU", 48e9, JAX_SHARE),
    Device("80 GB GPU", 80e9, JAX_SHARE),
    Device("141 GB GPU", 141e9, JAX_SHARE),
)


def needs() -> str:
    """What each model takes, as a table."""
    head = "model | parameters | weights, float32 | bfloat16 | bfloat16 + int8 | one in training | KV, 1,000 tokens"
    rows = [f"| {head} |", "|---" * 7 + "|"]
    for shape in MODELS:
        rows.append(
            f"| {shape.name} | {shape.parameters / 1e9:.1f} B | {_gb(shape.weights(4, int8=False))} "
            f"| {_gb(shape.weights(2, int8=False))} | {_gb(shape.weights(2, int8=True))} "
            f"| {_gb(shape.adapter)} | {_gb(1000 * shape.kv(2))} |"
        )
    return "\n".join(rows)


def fits(*, int8: bool) -> str:
    """How many models of rank 32 one device trains at the same time, in bfloat16, as a table."""
    rows = ["| model | " + " | ".join(d.name for d in DEVICES) + " |", "|---" * (1 + len(DEVICES)) + "|"]
    for shape in MODELS:
        counts = [device.trained(shape, 2, int8=int8) for device in DEVICES]
        rows.append(f"| {shape.name} | " + " | ".join(str(n) if n > 0 else "no" for n in counts) + " |")
    return "\n".join(rows)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
