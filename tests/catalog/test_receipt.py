"""Marks of receipts, and the first step in which a history differs from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tinkerflow.backend.catalog.receipt import Link, Mark, first_difference, marks
from tinkerflow.backend.spec.history import digest


def links(steps: int) -> list[Link]:
    """A creation, and two requests for each step."""
    made = [Link(0, "create_model", None, digest(b"create"), digest(b"made"), None)]
    for step in range(1, steps + 1):
        data, result = digest(b"data %d" % step), digest(b"loss %d" % step)
        made += [
            Link(2 * step - 1, "forward_backward", None, data, result, None),
            Link(2 * step, "optim_step", step, digest(b"adam"), digest(b"norm"), None),
        ]
    return made


@pytest.mark.parametrize("part", ["kind", "payload_hash", "result_hash", "error"])
@pytest.mark.parametrize("place", range(1, 11))
def test_changed_request_is_found_at_its_step(part: str, place: int) -> None:
    run = links(5)
    wanted = list(marks(run))
    assert [mark.step for mark in wanted] == [1, 2, 3, 4, 5]
    assert first_difference(wanted, marks(run)) is None
    changed = run[place]._replace(**{part: "another"})
    if part == "error":
        changed = changed._replace(result_hash="")
    run[place] = changed
    found = first_difference(wanted, marks(run))
    assert found is not None and found.startswith(f"step {(place + 1) // 2}: the ")


def test_sparse_marks_give_a_span_and_a_missing_request() -> None:
    run = links(6)
    few = [mark for mark in marks(run) if mark.step in (3, 6)]
    changed = [*run[:9], run[9]._replace(payload_hash="another"), *run[10:]]
    assert first_difference(few, marks(changed)) == "steps 4 to 6: the inputs differ from the receipt"
    assert first_difference(few, marks(run[:11])) == "steps 4 to 6: the history has no request 12"
    assert first_difference(few, marks([*run, run[1]._replace(seq_id=13)])) is None, "the run went on"


def test_requests_after_the_last_step_are_marked() -> None:
    *_, last = marks([*links(1), Link(3, "save_weights", None, digest(b"s"), digest(b"r"), None)])
    assert (last.step, last.seq_id) == (1, 3)
    assert last != replace(last, step=2) and isinstance(last, Mark)
