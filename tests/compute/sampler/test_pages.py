"""Pages on the host: sharing, copies, the prefix cache, and zeroed pages. No device is used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkerflow.backend.compute.sampler.pages import Key, PageCopy, PagePool, PageTable

KEYS = [Key("one", bytes([number])) for number in range(3)]


@pytest.fixture
def pool() -> PagePool:
    """Seven pages of 32 positions, including the page of zeros."""
    return PagePool(7, page=32)


def grown(pool: PagePool, tokens: int, shard: int = 0) -> PageTable:
    table = PageTable(shard)
    assert pool.reserve(table, 0, tokens)
    return table


def test_a_sequence_takes_a_page_when_it_needs_one(pool: PagePool) -> None:
    table = grown(pool, 33)
    assert (len(table.pages), pool.free(0), pool.used) == (2, 4, 2)
    assert 0 not in table.pages, "page 0 holds zeros"
    assert pool.reserve(table, 33, 64) and len(table.pages) == 2
    assert pool.reserve(table, 64, 65) and len(table.pages) == 3
    assert pool.pop_copies() == [], "no page was shared, so none is copied"
    pool.release(table)
    assert (pool.free(0), pool.used, table.pages) == (6, 0, [])


def test_pages_before_the_window_are_released() -> None:
    pool = PagePool(7, page=32, window=40)
    table = grown(pool, 130)
    whole = list(table.pages)
    pool.keep_prefix(KEYS[:1], table)
    pool.release_outside_window(table, 70)
    assert table.pages == whole, "a query at 70 sees positions from 31 on"
    pool.release_outside_window(table, 104)
    assert table.pages == [0, 0, *whole[2:]] and pool.free(0) == 3
    found = pool.find_prefix(KEYS[:1])
    assert found.pages == whole[:1], "other prompts may still begin with it"
    pool.release(found)
    pool.release(table, tainted_from=1)
    assert pool.used == 0 and [copy.into for copy in pool.pop_copies()] == whole[:1:-1], (
        "its remaining pages are zeroed"
    )


def test_reserve_without_a_free_state_changes_nothing() -> None:
    pool = PagePool(9, page=32, states=3)
    table, other, third = PageTable(0), PageTable(0), PageTable(0)
    assert pool.reserve(table, 0, 10) and pool.reserve(other, 0, 10)
    assert not pool.reserve(third, 0, 40)
    assert (third.pages, third.state, pool.free(0)) == ([], None, 6)
    forked = pool.fork(table, 0)
    assert forked is not None and not pool.reserve(forked, 10, 20) and forked.pages == table.pages
    pool.release(other)
    assert pool.reserve(forked, 10, 20) and forked.pages != table.pages


def test_fork_into_another_shard_needs_a_free_state() -> None:
    pool = PagePool(9, shards=2, page=32, states=2)
    table, other = PageTable(0), PageTable(1)
    assert pool.reserve(table, 0, 5) and pool.reserve(other, 0, 5)
    assert pool.fork(table, 1) is None
    pool.release(other)
    assert pool.fork(table, 1) is not None


def test_reserve_without_free_pages_changes_nothing(pool: PagePool) -> None:
    table, other = grown(pool, 100), PageTable(0)
    before = list(table.pages)
    assert not pool.reserve(table, 100, 250)
    assert not pool.reserve(other, 0, 64, spare=1), "one page must stay free"
    assert (table.pages, other.pages, pool.free(0)) == (before, [], 2)
    assert pool.reserve(other, 0, 64)


def test_a_shared_page_is_copied_before_it_is_written(pool: PagePool) -> None:
    prompt = grown(pool, 40)
    samples = [pool.fork(prompt, 0) for _ in range(2)]
    pool.release(prompt)
    assert pool.used == 2
    first, second = samples
    assert first is not None and second is not None and first.pages == second.pages
    whole, part = first.pages
    assert pool.reserve(first, 40, 48)
    assert first.pages[0] == whole and first.pages[1] != part
    assert pool.pop_copies() == [PageCopy(part, first.pages[1])]
    assert pool.reserve(second, 40, 48)
    assert second.pages == [whole, part], "its last user writes to it"
    assert pool.pop_copies() == []


def test_prefix_is_found_until_its_pages_are_reused(pool: PagePool) -> None:
    prompt = grown(pool, 80)
    pages = list(prompt.pages)
    pool.keep_prefix(KEYS, prompt)
    pool.release(prompt)
    assert pool.free(0) == 6
    assert pool.find_prefix(KEYS).pages == pages
    again = pool.find_prefix([KEYS[0], Key("two", KEYS[1].digest)])
    assert again.pages == pages[:1], "only the equal beginning"
    assert pool.find_prefix([Key("two", KEYS[0].digest)]).pages == []
    assert pool.reserve(again, 20, 32) and again.pages != pages[:1], "a page with a key is not written"


def test_pages_at_the_end_of_a_prompt_are_evicted_first(pool: PagePool) -> None:
    prompt = grown(pool, 80)
    first = prompt.pages[0]
    pool.keep_prefix(KEYS, prompt)
    pool.release(prompt)
    other = grown(pool, 5 * 32)
    assert first not in other.pages
    found = pool.find_prefix(KEYS)
    assert found.pages == [first]


def test_pages_that_may_hold_nan_are_zeroed_before_reuse(pool: PagePool) -> None:
    prompt = grown(pool, 80)
    pool.keep_prefix(KEYS, prompt)
    sample = pool.fork(prompt, 0)
    assert sample is not None
    first, *written = prompt.pages
    pool.release(prompt, tainted_from=1)
    assert pool.pop_copies() == [], "they still have a user"
    assert pool.find_prefix(KEYS).pages == [first]
    pool.release(sample)
    assert sorted(pool.pop_copies()) == [PageCopy(0, page) for page in sorted(written)]


def test_failed_scope_is_forgotten_and_zeroed(pool: PagePool) -> None:
    prompt = grown(pool, 80)
    pages = list(prompt.pages)
    pool.keep_prefix(KEYS, prompt)
    pool.release(prompt)
    pool.drop_keys(lambda scope: scope == "two", tainted=True)
    assert pool.pop_copies() == []
    pool.drop_keys(lambda scope: scope == "one", tainted=True)
    assert sorted(pool.pop_copies()) == [PageCopy(0, page) for page in sorted(pages)]
    assert pool.find_prefix(KEYS).pages == []


def test_pages_of_one_sequence_are_in_one_shard() -> None:
    pool = PagePool(4, shards=2, page=32)
    assert pool.capacity == 96
    here = grown(pool, 64, shard=1)
    assert all(page in (5, 6, 7) for page in here.pages), "page 4 is the page of zeros of the other shard"
    assert pool.emptiest_shard() == 0
    there = pool.fork(here, 0)
    assert there is not None
    assert pool.pop_copies() == [PageCopy(*pair) for pair in zip(here.pages, there.pages, strict=True)]
    assert pool.fork(here, 0) is None, "one page is left"
    pool.release(here, tainted_from=0)
    assert {copy.source for copy in pool.pop_copies()} == {4}


@given(st.lists(st.tuples(st.sampled_from(["grow", "fork", "end", "fail", "keep"]), st.integers(0, 200)), max_size=60))
def test_pages_are_neither_lost_nor_allocated_twice(steps: list[tuple[str, int]]) -> None:
    pool, tables, reach = PagePool(9, shards=2, page=32), [PageTable(0), PageTable(1)], {}
    for what, number in steps:
        table = tables[number % len(tables)]
        if what == "grow":
            start = reach.get(id(table), 0)
            if pool.reserve(table, start, start + number % 70):
                reach[id(table)] = start + number % 70
        elif what == "fork":
            if (made := pool.fork(table, number % 2)) is not None:
                tables.append(made)
                reach[id(made)] = reach.get(id(table), 0)
        elif what == "keep":
            pool.keep_prefix([Key(number % 3, bytes([number, place])) for place in range(len(table.pages))], table)
        else:
            pool.release(table, tainted_from=0 if what == "fail" else None)
            reach[id(table)] = 0
        held = {page for each in tables for page in each.pages}
        assert pool.used == len(held) and not held & {0, 9}
        assert pool.used + pool.free(0) + pool.free(1) == 16
        assert all(page // 9 == each.shard for each in tables for page in each.pages)
    for table in tables:
        pool.release(table)
    assert pool.free(0) == pool.free(1) == 8


def test_page_to_be_zeroed_gets_no_key(pool: PagePool) -> None:
    one = grown(pool, 80)
    pool.keep_prefix(KEYS, one)
    two = pool.find_prefix(KEYS)
    # as after a cancellation before the first chunk, while another request computes the same prompt
    pool.release(one, tainted_from=0)
    pool.keep_prefix(KEYS, two)
    pool.release(two)
    assert len(pool.pop_copies()) == 3
    assert pool.find_prefix(KEYS).pages == [], "no prompt finds a zeroed page"


def test_page_that_no_chunk_has_read_is_zeroed_when_it_loses_its_key(pool: PagePool) -> None:
    answer = grown(pool, 80)
    first, *later = answer.pages
    pool.keep_prefix(KEYS[:1], answer)
    pool.keep_prefix(KEYS, answer, unverified=True)
    pool.release(answer)
    assert pool.find_prefix(KEYS).pages == [first, *later] and pool.pop_copies() == []
    pool.drop_keys(lambda scope: True)
    assert pool.pop_copies() == []
    pool.release(PageTable(0, [first, *later]))
    assert sorted(pool.pop_copies()) == [PageCopy(0, page) for page in sorted(later)], "the first page is verified"
