"""The few shapes of the sampler's programs: the numbers of slots, and of prompt tokens, in one dispatch.

Sizes grow by factors of four, because each size costs a compilation. On CPUs, a few rows already keep the devices busy
and an unused slot costs time, so slots grow by factors of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinkerflow.backend.compute.platforms import CPU, RANK_COLUMNS

SHORT_PROMPT = 128  # prompts of up to this many tokens are prefilled together, longer prompts alone
PREFILL_ROWS = (1, 4, 16)
INVARIANT_COLUMNS = 128  # columns of the smallest stack of a batch-invariant sampler: four adapters of rank 32
LARGE_AFTER = 4  # a piece of the largest size is at most a quarter of all earlier tokens
_FACTOR = 4
_FEW_SLOTS = 4  # a step of two slots takes nearly as long as a step of four


@dataclass(frozen=True)
class Shapes:
    """The sizes that one sampler uses, ascending. `slots` and `rows` are multiples of the mesh's fsdp axis.

    pieces: tokens of a row in one prefill dispatch: `Platform.prefill_tokens`. rows_are_dear: every row of a step costs
    time, used or not. invariant: slots and rows have one size, and each prompt is prefilled alone, so the bits of a
    result do not depend on other requests.
    """

    slots: tuple[int, ...]
    rows: tuple[int, ...]
    pieces: tuple[int, ...]
    rows_are_dear: bool = False
    invariant: bool = False

    @property
    def most_prompts(self) -> int:
        """How many prompts may be prefilled together."""
        return 1 if self.invariant else self.rows[-1]

    @property
    def slots_of_one_token(self) -> tuple[int, ...]:
        """The sizes of a one-token dispatch, if it has its own programs: every second size, including the largest."""
        return self.slots[::-2][::-1]

    def together(self, prompts: int) -> int:
        """How many of `prompts` prompts to prefill together: all, unless more than an eighth of the rows would be idle.

        On CPUs, 16 rows of 32 tokens take 700 CPU-ms, 4 rows 204 and one row 83. Besides, a prompt alone gets larger
        pieces.
        """
        prompts = min(prompts, self.most_prompts)
        if not self.rows_are_dear or 8 * prompts >= 7 * at_least(self.rows, prompts):
            return prompts
        return max((rows for rows in self.rows if rows <= prompts), default=prompts)


def make_shapes(
    max_slots: int,
    fsdp: int,
    pieces: tuple[int, ...] = CPU.prefill_tokens,
    *,
    rows_are_dear: bool = False,
    invariant: bool = False,
) -> Shapes:
    """Make the sizes of one sampler.

    max_slots: the most sequences that decode together, rounded up to a multiple of fsdp. fsdp: the number of devices
    that share the rows. pieces, rows_are_dear, invariant: as in `Shapes`.
    """
    slots = _ladder(1, max_slots)
    if rows_are_dear and max_slots > _FEW_SLOTS:
        slots = [1, *_ladder(_FEW_SLOTS, max_slots, factor=2)]
    rows = [rows for rows in PREFILL_ROWS if rows <= slots[-1]]
    if invariant:
        slots, rows = slots[-1:], rows[:1]
    return Shapes(_multiples(slots, fsdp), _multiples(rows, fsdp), pieces, rows_are_dear, invariant)


def prefill_piece(sizes: tuple[int, ...], *, alone: bool, start: int, remaining: int, capacity: int) -> int:
    """How many tokens of each prompt to compute next: one of `sizes`, at most `capacity` or the smallest.

    sizes: ascending. alone: whether no other prompt is in the dispatch. start: the number of computed tokens.
    remaining: the number of tokens left to compute. capacity: positions of the prompt's pages for them.

    A prompt is computed in pieces of several sizes, with little padding. The next piece has the smallest size that
    covers all remaining tokens if it costs no more than full pieces, otherwise the largest full size. On CPUs each
    piece costs as much as 32 more tokens (1x32 takes 83 CPU-ms, 1x64 124, 1x128 209). The second size is therefore
    cheaper than twice the first, and larger pieces should be three quarters full. Large pieces come late, so a prompt
    and its continuation have the same borders except the last few, and the continuation can start with the cached pages
    of the prompt. Prompts in one dispatch always use the smallest size: each ends within one piece of the others'
    borders.
    """
    least = sizes[0]
    if not alone or remaining <= least:
        return least
    sizes = tuple(size for size in sizes if size <= max(sizes[-2], start // LARGE_AFTER))
    holding = at_least(sizes, remaining)
    if holding <= capacity and (holding <= 2 * least or 4 * remaining >= 3 * holding):
        return holding
    return max((size for size in sizes if size <= min(remaining, capacity)), default=least)


def prefill_pieces(sizes: tuple[int, ...], tokens: int, capacity: int) -> list[int]:
    """The sizes of all pieces of a prompt that is prefilled alone.

    sizes: ascending. tokens: the prompt's length. capacity: the positions of its pages.
    """
    pieces: list[int] = []
    while (start := sum(pieces)) < tokens:
        pieces.append(
            prefill_piece(sizes, alone=True, start=start, remaining=tokens - start, capacity=capacity - start)
        )
    return pieces


def rank_columns(ranks: int) -> int:
    """The width of a stack of adapters whose padded ranks sum to `ranks`: 32, 128, 512 and so on.

    Never 0. On CPUs, the base model alone has 32 unused columns, which cost a few percent, but no extra programs.
    """
    width = RANK_COLUMNS
    while width < ranks:
        width *= _FACTOR
    return width


def at_least(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of ascending `sizes` that is at least `wanted`, or the last."""
    return next((size for size in sizes if size >= wanted), sizes[-1])


def _ladder(first: int, last: int, factor: int = _FACTOR) -> list[int]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * factor, max(last, first)))
    return sizes


def _multiples(sizes: list[int], of: int) -> tuple[int, ...]:
    return tuple(sorted({-(-size // of) * of for size in sizes}))
