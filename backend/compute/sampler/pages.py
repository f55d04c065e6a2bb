"""The pages of the KV cache on the host: their users, the free pages, and the prompts that free pages still hold.

A sequence has a page table. Pages are shared by reference: the tables of samples of one prompt, and of prompts with a
common beginning, contain the same pages. A page with several users, or with a key, is copied before a sequence writes
to it. After its last user is gone, a page keeps its key until the page is reused. The least recently used page is
reused first. So the free pages are the prefix cache.

    free --reserve--> one user --fork--> several users --release--> free (with its key, if it has one)

Layers with linear attention have no pages, but one state for each sequence. States are in their own pool, as pages of
one position, and belong to page tables. Forks of a table share its state, until a table writes positions and gets its
own state. A state with a key is the state of a prompt after some token. The pool keeps it until it is reused.

Page 0 of each shard contains zeros and is never written. It replaces pages that a sequence lacks, and released pages
before the window of all layers. Pages that may contain NaN or infinity are overwritten with zeros before reuse. This
module has no device arrays: `pop_copies` returns the copies that the devices must make. Every process of a group uses
the same pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PAGE = 128  # positions of a page: attention reads one page of each row at a time


def pages_for(positions: int, page: int = PAGE) -> int:
    """How many pages of `page` positions are needed for this many positions."""
    return -(-positions // page)


class Key(NamedTuple):
    """The key of a page's content. scope: the users and the weights. digest: of the tokens, in prefill pieces."""

    scope: Any
    digest: bytes


class PageCopy(NamedTuple):
    """Page `source` must be copied to page `into`."""

    source: int
    into: int


@dataclass(eq=False)
class PageTable:
    """The pages of one sequence, in the order of its positions, and its state, all in one shard of the pool.

    state: a table of one page in the pool of states; None in models without states, and before the first position.
    """

    shard: int
    pages: list[int] = field(default_factory=list)
    state: PageTable | None = None


class PagePool:
    """The pages of one KV cache, with reference counts."""

    def __init__(
        self, pages: int, *, shards: int = 1, page: int = PAGE, states: int = 0, window: int | None = None
    ) -> None:
        """Start with all pages free.

        pages: of each shard, including page 0; page p of shard s is number s * pages + p. shards: parts of the cache on
        different devices. page: positions of a page. states: of each shard, including page 0, enough for all sequences
        of a chunk; 0: there are none. window: how many of the last tokens a query sees; None: all.
        """
        self._window = window
        self.pages, self.shards, self.page = pages, shards, page
        self.states = PagePool(states, shards=shards, page=1) if states else None
        self.clear()

    def clear(self) -> None:
        """Forget all users and keys."""
        if self.states:
            self.states.clear()
        numbers = (range(shard * self.pages + 1, (shard + 1) * self.pages) for shard in range(self.shards))
        self._free = [OrderedDict[int, None].fromkeys(shard) for shard in numbers]  # in the order of use
        self._users: dict[int, int] = {}
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._tainted: set[int] = set()  # may contain NaN or infinity
        self._unverified: set[int] = set()  # likewise, but only requests of the key's scope read them
        self._copies: list[PageCopy] = []

    # ------------------------------------------------------------------ what it holds
    @property
    def capacity(self) -> int:
        """The most positions that one sequence can have."""
        return (self.pages - 1) * self.page

    @property
    def used(self) -> int:
        """The number of pages and states that have a user."""
        return len(self._users) + (self.states.used if self.states else 0)

    def free(self, shard: int) -> int:
        """The number of pages of a shard without a user."""
        return len(self._free[shard])

    def emptiest_shard(self) -> int:
        """The shard with the most free pages."""
        return max(range(self.shards), key=self.free)

    def pages_for(self, tokens: int) -> int:
        """How many pages are needed for `tokens` positions."""
        return pages_for(tokens, self.page)

    def pop_copies(self) -> list[PageCopy]:
        """The copies that the devices must make, in order, before they use the pool again."""
        copies, self._copies = self._copies, []
        return copies

    # ------------------------------------------------------------------ tables
    def reserve(self, table: PageTable, start: int, end: int, *, spare: int = 0) -> bool:
        """Let the sequence write positions [start, end): add missing pages, and copy shared pages.

        False, without any change: fewer than `spare` pages of the shard would stay free, or no state is free.
        """
        first, last = start // self.page, self.pages_for(end) if start < end else 0
        shared = [
            place for place in range(first, min(last, len(table.pages))) if not self._writable(table.pages[place])
        ]
        missing = max(0, last - len(table.pages))
        wanted = len(shared) + missing
        if wanted and wanted + spare > self.free(table.shard):
            return False
        if start < end and not self.own_state(table):
            return False
        for place in shared:
            old = table.pages[place]
            table.pages[place] = self._use_free_page(table.shard)
            self._copies.append(PageCopy(old, table.pages[place]))
            self._release(old)
        table.pages += [self._use_free_page(table.shard) for _ in range(missing)]
        return True

    def fork(self, table: PageTable, shard: int) -> PageTable | None:
        """A table with the same content: the same pages in their own shard, copies elsewhere; None: no free pages."""
        if shard == table.shard:
            for page in table.pages:
                self._share(page)
            return PageTable(shard, list(table.pages), self._forked_state(table, shard))
        if len(table.pages) > self.free(shard) or (self.states and table.state and not self.states.free(shard)):
            return None
        copies = [PageCopy(page, self._use_free_page(shard)) for page in table.pages]
        self._copies += copies
        return PageTable(shard, [copy.into for copy in copies], self._forked_state(table, shard))

    def truncate(self, table: PageTable, tokens: int) -> None:
        """Release the pages after the first `tokens` positions."""
        self.release(PageTable(table.shard, table.pages[self.pages_for(tokens) :]))
        del table.pages[self.pages_for(tokens) :]

    def release_outside_window(self, table: PageTable, start: int) -> None:
        """Release the pages that no query from position `start` on sees. Page 0 replaces them."""
        if self._window is None:
            return
        for place in reversed(range(max(0, start - self._window + 1) // self.page)):
            if not self._is_own(table.pages[place]):
                return  # all earlier pages are also released
            self._release(table.pages[place])
            table.pages[place] = table.shard * self.pages

    def release(self, table: PageTable, *, tainted_from: int | None = None) -> None:
        """Release all pages and the state of a sequence that no longer needs them.

        tainted_from: from this place in the table on, the pages may contain NaN or infinity, and lose their keys.
        """
        for page in filter(self._is_own, table.pages[tainted_from:] if tainted_from is not None else ()):
            self._tainted.add(page)
            self._remove_key(page)
        # A page of a prompt is useless without the earlier pages, so earlier pages are kept longer.
        for page in filter(self._is_own, reversed(table.pages)):
            self._release(page)
        table.pages.clear()
        self.release_state(table)

    # ------------------------------------------------------------------ states
    def own_state(self, table: PageTable) -> bool:
        """Let the sequence write its state. A shared state, or one with a key, is copied. False: no state is free."""
        state = table.state or PageTable(table.shard)
        if self.states and not self.states.reserve(state, 0, 1):
            return False
        table.state = state if self.states else None
        return True

    def fork_state(self, table: PageTable) -> PageTable:
        """A table without pages that shares the current state."""
        return PageTable(table.shard, state=self._forked_state(table, table.shard))

    def release_state(self, table: PageTable) -> None:
        """Release the state of a sequence that no longer needs it."""
        if self.states and table.state:
            self.states.release(table.state)
            table.state = None

    def find_state(self, key: Key, table: PageTable) -> bool:
        """Give the table the state with `key`. False: there is none in the table's shard."""
        assert self.states, "a pool without states"
        kept = self.states.find_prefix([key])
        if kept.pages and kept.shard == table.shard:
            self.release_state(table)
            table.state = kept
            return True
        self.states.release(kept)
        return False

    def keep_state(self, key: Key, table: PageTable) -> None:
        """Give the table's state a key. `find_state` finds it until it is reused."""
        if self.states and table.state:
            self.states.keep_prefix([key], table.state)

    def _forked_state(self, table: PageTable, shard: int) -> PageTable | None:
        if not self.states or not table.state:
            return None
        forked = self.states.fork(table.state, shard)
        assert forked is not None, "there are fewer states than sequences"
        return forked

    # ------------------------------------------------------------------ the prefix cache
    def find_prefix(self, keys: Sequence[Key]) -> PageTable:
        """A table of the pages with the first of `keys`, as many as there are in one shard."""
        first = self._page_of.get(keys[0]) if keys else None
        if first is None:
            return PageTable(self.emptiest_shard())
        table = PageTable(first // self.pages)
        for key in keys:
            page = self._page_of.get(key)
            if page is None or page // self.pages != table.shard:
                break
            self._share(page)
            table.pages.append(page)
        return table

    def keep_prefix(self, keys: Sequence[Key], table: PageTable, *, unverified: bool = False) -> None:
        """Give the table's first pages these keys. `find_prefix` finds them until they are reused.

        Pages that will be zeroed after their last user get no key. unverified: no chunk shows that the pages contain
        neither NaN nor infinity. They are zeroed when they lose their keys.
        """
        for key, page in zip(keys, table.pages, strict=False):
            if self._page_of.get(key) == page:
                continue
            self._remove_key(page)
            if page in self._tainted:
                continue
            self._remove_key(self._page_of.get(key, page))  # another page has this key
            if unverified:
                self._unverified.add(page)
            self._page_of[key], self._key_of[page] = page, key

    def last_page_is_kept(self, table: PageTable) -> bool:
        """Whether the table's last page has a key, so that a sequence that writes to it gets a copy."""
        return bool(table.pages) and table.pages[-1] in self._key_of

    def drop_keys(self, dead: Callable[[Any], bool], *, tainted: bool = False) -> None:
        """Drop the keys of dead scopes. tainted: their pages may contain NaN or infinity."""
        if self.states:
            self.states.drop_keys(dead, tainted=tainted)
        for page in [page for key, page in self._page_of.items() if dead(key.scope)]:
            self._remove_key(page)
            if tainted:
                self._tainted.add(page)
                self._clean(page)

    def _is_own(self, page: int) -> bool:
        """Whether a page is one of the table's own, and not page 0."""
        return page % self.pages > 0

    def _writable(self, page: int) -> bool:
        return self._users[page] == 1 and page not in self._key_of

    def _use_free_page(self, shard: int) -> int:
        page = next(iter(self._free[shard]))
        self._remove_key(page)
        self._share(page)
        return page

    def _share(self, page: int) -> None:
        self._free[page // self.pages].pop(page, None)
        self._users[page] = self._users.get(page, 0) + 1

    def _release(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]
            free = self._free[page // self.pages]
            free[page] = None
            if page not in self._key_of:
                free.move_to_end(page, last=False)
            self._clean(page)

    def _clean(self, page: int) -> None:
        if page in self._tainted and page not in self._users:
            self._tainted.discard(page)
            self._copies.append(PageCopy(page // self.pages * self.pages, page))

    def _remove_key(self, page: int) -> None:
        if (key := self._key_of.pop(page, None)) is not None:
            del self._page_of[key]
        if page in self._unverified:
            self._unverified.remove(page)
            self._tainted.add(page)
            self._clean(page)
