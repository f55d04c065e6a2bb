"""Which steps are unusual, and which rows of them come first."""

from __future__ import annotations

import math

from tinkerflow.backend.spec.outliers import (
    BlamedRow,
    UsualNorms,
    cells,
    least_likely,
    markdown_table,
    ranked,
    remedy,
    stands_out,
)


def test_a_norm_is_unusual_after_ten_usual_ones() -> None:
    norms = UsualNorms()
    for norm in (100.0, *[1.0] * 8):
        norms.add(norm)
    assert norms.median == math.inf and not norms.unusual(1e9) and norms.unusual(math.nan)
    norms.add(2.0)
    assert norms.median == 1.0 and norms.unusual(4.1) and not norms.unusual(4.0)
    norms.add(5.0)  # stays out
    assert norms.median == 1.0
    for _ in range(50):
        norms.add(3.0)
    assert norms.median == 3.0, "only the last fifty count"


def test_rows_are_ranked_by_their_part_and_repetitions_are_left_out_before_their_original() -> None:
    usual, large = BlamedRow(0, 10, 20.0, 3.0), BlamedRow(1, 10, 30.0, 9.0)
    repeated, broken = BlamedRow(2, 10, 5.0, 2.0, repeated=(4, 6, 7, 8, 9, 10)), BlamedRow(3, 0, None, None)
    assert ranked([usual, large, repeated, broken]) == [broken, repeated, large, usual]
    assert remedy("r", 7, large) == "tinkerflow rerun r --from 7 --without 7:1"
    assert remedy("r", 7, BlamedRow(2, 1, 1.0, 1.0, repeated=(4, 6))).endswith("--without 7:4 --without 7:6")
    assert cells(broken) == ("3", "0", "not finite", "not finite", "", "")
    assert cells(repeated)[-1] == "6 times: 4, 6, 7, 8, 9, …"
    assert markdown_table([usual])[2] == "| 0 | 10 | 2 | 3 |  |  |"


def test_a_row_stands_out_if_the_others_are_unlike_it() -> None:
    rows = [BlamedRow(number, 10, 1.0, norm) for number, norm in enumerate((1.0, 1.5, 5.0, 0.5))]
    assert [stands_out(row, rows) for row in rows] == [False, False, True, False]
    assert not stands_out(rows[2], [rows[2]]) and stands_out(rows[2], rows[1:4:2])
    assert stands_out(BlamedRow(4, 1, None, None), rows)


def test_the_least_likely_tokens_have_a_weight() -> None:
    targets, logprobs = [5, 6, 7, 8], [-1.0, -9.0, -3.0, -2.0]
    assert least_likely(targets, logprobs, None, 2) == ((1, 6, -9.0), (2, 7, -3.0))
    assert least_likely(targets, logprobs, [1.0, 0.0, 1.0, 1.0], 2) == ((2, 7, -3.0), (3, 8, -2.0))
    row = BlamedRow(0, 4, 8.0, 2.0, ((2, 7, -3.0),))
    assert cells(row)[4] == "7 at 2: -3.00" and cells(row, "abcdefghij".__getitem__)[4] == "'h' at 2: -3.00"
