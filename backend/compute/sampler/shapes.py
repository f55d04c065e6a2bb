"""The few shapes that the sampler compiles for: how many slots, and how many tokens of prompt at once.

Sizes go up by factors of four, because each costs a compilation. An unused slot costs time where a few rows keep the
devices busy, on CPUs: there slots go up by factors of two. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinkerflow.backend.compute.platforms import CPU, RANK_COLUMNS

SHORT_PROMPT = 128  # prompts up to this many tokens are prefilled together, longer ones alone
PREFILL_ROWS = (1, 4, 16)
LARGE_AFTER = 4  # a piece of the largest size is at most a quarter of what comes before it
_FACTOR = 4
_FEW_SLOTS = 4  # a step of two takes nearly as long


@dataclass(frozen=True)
class Shapes:
    """The sizes in use by one sampler, ascending. `slots` and `rows` are multiples of the mesh's fsdp axis.

    pieces: tokens of a row that are prefilled at once: `Platform.prefill_tokens`. rows_are_dear: the devices take
    longer for every row of a step, used or not.
    """

    slots: tuple[int, ...]
    rows: tuple[int, ...]
    pieces: tuple[int, ...]
    rows_are_dear: bool = False

    def together(self, prompts: int) -> int:
        """How many of `prompts` prompts to prefill together: all, unless more than an eighth of the rows would be idle.

        On CPUs 16 rows of 32 tokens take 700 CPU-ms, 4 take 204 and one 83, and alone a prompt goes in larger pieces.
        """
        prompts = min(prompts, self.rows[-1])
        if not self.rows_are_dear or 8 * prompts >= 7 * at_least(self.rows, prompts):
            return prompts
        return max((rows for rows in self.rows if rows <= prompts), default=prompts)


def make_shapes(
    *, max_slots: int, fsdp: int, pieces: tuple[int, ...] = CPU.prefill_tokens, rows_are_dear: bool = False
) -> Shapes:
    """The sizes of one sampler.

    max_slots: the most sequences that decode together, rounded up to a multiple of fsdp. fsdp: devices that rows are
    split over. pieces, rows_are_dear: as in `Shapes`.
    """
    slots = _ladder(1, max_slots)
    if rows_are_dear and max_slots > _FEW_SLOTS:
        slots = [1, *_ladder(_FEW_SLOTS, max_slots, factor=2)]
    return Shapes(
        slots=_multiples(slots, fsdp),
        rows=_multiples([rows for rows in PREFILL_ROWS if rows <= slots[-1]], fsdp),
        pieces=pieces,
        rows_are_dear=rows_are_dear,
    )


def prefill_piece(sizes: tuple[int, ...], *, alone: bool, start: int, remaining: int, room: int) -> int:
    """How many tokens of each prompt to compute next: one of `sizes`, at most `room` or the smallest.

    sizes: ascending. alone: whether no other prompt goes with it. start: tokens that are computed. remaining: those
    that are not. room: positions that its pages have for them.

    A prompt goes in pieces of several sizes, so that little is computed only to fill up: the smallest size that holds
    all that remains if that is no dearer than pieces which are filled, else the largest that is filled wholly. On CPUs
    a piece costs as much as 32 more tokens would (1x32 takes 83 CPU-ms, 1x64 124, 1x128 209): so the second size is
    cheaper than twice the first, and of larger ones three quarters are to be used. Large pieces come late: so a prompt
    and its continuation are cut alike up to the last few borders, and the one may begin with what was computed for the
    other. Prompts that go together always use the smallest size: each ends within one piece of the others' borders.
    """
    least = sizes[0]
    if not alone or remaining <= least:
        return least
    sizes = tuple(size for size in sizes if size <= max(sizes[-2], start // LARGE_AFTER))
    holding = at_least(sizes, remaining)
    if holding <= room and (holding <= 2 * least or 4 * remaining >= 3 * holding):
        return holding
    return max((size for size in sizes if size <= min(remaining, room)), default=least)


def prefill_pieces(sizes: tuple[int, ...], tokens: int, room: int) -> list[int]:
    """The sizes of all pieces of a prompt that is prefilled alone.

    sizes: those there are, ascending. tokens: of the prompt. room: positions of its pages.
    """
    pieces: list[int] = []
    while (start := sum(pieces)) < tokens:
        pieces.append(prefill_piece(sizes, alone=True, start=start, remaining=tokens - start, room=room - start))
    return pieces


def rank_columns(ranks: int) -> int:
    """The width of a stack of adapters whose padded ranks sum to `ranks`: 32, 128, 512 and so on.

    Never 0: on CPUs the base model alone sees none of 32 columns, which costs a few per cent, but no programs.
    """
    width = RANK_COLUMNS
    while width < ranks:
        width *= _FACTOR
    return width


def at_least(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest of ascending `sizes` that is at least `wanted`, or the last."""
    return next((size for size in sizes if size >= wanted), sizes[-1])


def _ladder(first: int, last: int, factor: int = _FACTOR) -> list[int]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * factor, max(last, first)))
    return sizes


def _multiples(sizes: list[int], of: int) -> tuple[int, ...]:
    return tuple(sorted({-(-size // of) * of for size in sizes}))
