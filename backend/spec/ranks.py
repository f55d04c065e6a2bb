"""The shape of an adapter, the rank of experts' matrices, and its representation in PEFT's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RankRule = Literal["divided", "full"]
NOT_SAMPLED = (
    "sampling: the devices of this group have no room for the weights of a full-parameter model (lora_config.rank 0) "
    "in addition to a model in training. Save its state, write it with `tinkerflow checkpoint merge`, and serve that "
    "folder as a base model; or use more devices"
)


@dataclass(frozen=True)
class LoraSpec:
    """The shape of an adapter: `rank` >= 1, and which parts of the model it adapts. Rank 0: all parameters are trained.

    expert_rank: of every expert's matrices, from 1 to `rank`; None: `rank`, as in all adapters of earlier versions.
    """

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    expert_rank: int | None = None

    @property
    def full(self) -> bool:
        """Whether all parameters of the model are trained, without an adapter."""
        return self.rank == 0


def expert_rank(rank: int, experts_per_token: int, rule: RankRule) -> int | None:
    """The rank of every expert's matrices in an adapter of `rank`. None means `rank`, as for all other matrices.

    With "divided" it is rank // experts_per_token, but at least 1. The experts of a token together then have the
    adapter size of one dense MLP (Schulman et al., "LoRA Without Regret", 2025). experts_per_token: 0 without experts.
    Rank 0 gives None, because there is no adapter.
    """
    if not rank:
        return None
    own = max(1, rank // max(1, experts_per_token)) if rule == "divided" else rank
    return None if own == rank else own


def peft_factor(rank: int, own: int) -> int:
    """The factor of B in PEFT's files, for a matrix of rank `own` in an adapter of `rank`.

    Readers such as vLLM use one scale, alpha / rank, although this matrix needs alpha / own. B is multiplied by the
    quotient if it is a power of two, which causes no rounding. Otherwise the factor is 1, and these readers scale the
    matrix wrongly. PEFT itself always uses the patterns of its config.
    """
    quotient, rest = divmod(rank, own)
    return quotient if not rest and quotient.bit_count() == 1 else 1
