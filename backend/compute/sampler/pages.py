"""The pages of the KV cache on the host: who uses each, which are free, and which still hold the prompt of somebody.

A sequence has a page table. Pages are shared by reference: the samples of one prompt, and prompts that begin alike,
name the same pages. A page with several users, or with a key, is copied before a sequence writes into it. A page keeps
its key after its last user is gone, until it is taken for something else, the page that was used least recently first:
so the free pages are the prefix cache.

    free --take--> used by one --share--> used by several --release--> free (maybe with a key)

Layers with linear attention have no pages: they keep one state of a sequence. States lie in a pool of their own kind, a
page of one position each, and go with page tables: who writes positions gets a state of its own, forks share it until
then, and a state with a key, which is that of a prompt up to some token, stays until its room is needed.

Page 0 of each shard holds zeros and is never written: a page table names it where a sequence has no page, or none any
more, because all layers see a window of the last tokens. A page that may hold what is not finite is overwritten with
it. Pure: what the devices are to copy waits in `pending`. Every process of a group takes the same pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PAGE = 128  # positions of a page; attention works on one page of each row at once


def pages_for(positions: int, page: int = PAGE) -> int:
    """How many pages of `page` positions hold so many positions."""
    return -(-positions // page)


class Key(NamedTuple):
    """What decides every number in a page. scope: who may use it, and the weights. digest: the tokens, in pieces."""

    scope: Any
    digest: bytes


class PageCopy(NamedTuple):
    """Page `source` is to be copied to page `into`."""

    source: int
    into: int


@dataclass(eq=False)
class PageTable:
    """The pages of one sequence, in the order of its positions, and its state. All lie in one shard of the pool.

    state: a table of one page in the pool of states; None in models without them, and before the first position.
    """

    shard: int
    pages: list[int] = field(default_factory=list)
    state: PageTable | None = None


class PagePool:
    """The pages of one KV cache, by reference count."""

    def __init__(
        self, pages: int, *, shards: int = 1, page: int = PAGE, states: int = 0, window: int | None = None
    ) -> None:
        """All pages free.

        pages: of each shard, page 0 included; page p of shard s is number s * pages + p. shards: parts of the cache on
        different devices. page: positions of a page. states: of each shard, counted alike; 0 = there are none. There
        must be enough for all sequences of a chunk. window: how many of the last tokens a query sees; None = all.
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
        self._free = [OrderedDict[int, None].fromkeys(shard) for shard in numbers]  # the next one to be taken first
        self._users: dict[int, int] = {}
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._spoiled: set[int] = set()  # may hold what is not finite
        self._pending: list[PageCopy] = []

    # ------------------------------------------------------------------ what it looks like
    @property
    def capacity(self) -> int:
        """The most positions that one sequence can have."""
        return (self.pages - 1) * self.page

    @property
    def used(self) -> int:
        """How many pages and states have a user."""
        return len(self._users) + (self.states.used if self.states else 0)

    def free(self, shard: int) -> int:
        """How many pages of a shard have no user."""
        return len(self._free[shard])

    def roomiest(self) -> int:
        """The shard with the most free pages."""
        return max(range(self.shards), key=self.free)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` positions."""
        return pages_for(tokens, self.page)

    def pending(self) -> list[PageCopy]:
        """What the devices are to copy before they use the pool again, in order. The caller has it done."""
        pending, self._pending = self._pending, []
        return pending

    # ------------------------------------------------------------------ tables
    def extend(self, table: PageTable, start: int, end: int, *, spare: int = 0) -> bool:
        """Let the sequence write positions [start, end): pages that are missing are taken, shared ones are copied.

        False, and nothing has changed, when the shard has too few free pages, of which `spare` are to stay free, or
        no free state.
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
            table.pages[place] = self._take(table.shard)
            self._pending.append(PageCopy(old, table.pages[place]))
            self._release(old)
        table.pages += [self._take(table.shard) for _ in range(missing)]
        return True

    def fork(self, table: PageTable, shard: int) -> PageTable | None:
        """A table of the same content: the same pages in their own shard, copies elsewhere; None without room."""
        if shard == table.shard:
            for page in table.pages:
                self._share(page)
            return PageTable(shard, list(table.pages), self._forked_state(table, shard))
        if len(table.pages) > self.free(shard) or (self.states and table.state and not self.states.free(shard)):
            return None
        copies = [PageCopy(page, self._take(shard)) for page in table.pages]
        self._pending += copies
        return PageTable(shard, [copy.into for copy in copies], self._forked_state(table, shard))

    def cut(self, table: PageTable, tokens: int) -> None:
        """Release the pages after those that hold the first `tokens` positions."""
        self.release(PageTable(table.shard, table.pages[self.pages_for(tokens) :]))
        del table.pages[self.pages_for(tokens) :]

    def slide(self, table: PageTable, start: int) -> None:
        """Release the pages that no query from position `start` on sees; page 0 takes their places."""
        if self._window is None:
            return
        for place in reversed(range(max(0, start - self._window + 1) // self.page)):
            if not self._held(table.pages[place]):
                return  # those before it are gone, too
            self._release(table.pages[place])
            table.pages[place] = table.shard * self.pages

    def release(self, table: PageTable, *, spoiled: int | None = None) -> None:
        """The sequence needs its pages no more.

        spoiled: from this place in the table on, its pages may hold what is not finite, and lose their keys.
        """
        for page in filter(self._held, table.pages[spoiled:] if spoiled is not None else ()):
            self._spoiled.add(page)
            self._unkey(page)
        # A page of a prompt is of no use without those before it: these stay longer.
        for page in filter(self._held, reversed(table.pages)):
            self._release(page)
        table.pages.clear()
        self.release_state(table)

    # ------------------------------------------------------------------ states
    def own_state(self, table: PageTable) -> bool:
        """Let the sequence write its state: one that others share, or that has a key, is copied. False without room."""
        state = table.state or PageTable(table.shard)
        if self.states and not self.states.extend(state, 0, 1):
            return False
        table.state = state if self.states else None
        return True

    def fork_state(self, table: PageTable) -> PageTable:
        """A table without pages that shares the state as it is now."""
        return PageTable(table.shard, state=self._forked_state(table, table.shard))

    def release_state(self, table: PageTable) -> None:
        """The sequence needs its state no more."""
        if self.states and table.state:
            self.states.release(table.state)
            table.state = None

    def find_state(self, key: Key, table: PageTable) -> bool:
        """Whether a state is kept under `key` in the table's shard; it is then the table's."""
        assert self.states, "a pool without states"
        found = self.states.find([key])
        if found.pages and found.shard == table.shard:
            self.release_state(table)
            table.state = found
            return True
        self.states.release(found)
        return False

    def keep_state(self, key: Key, table: PageTable) -> None:
        """The table's state is what `key` says: it can be found until it is taken for something else."""
        if self.states and table.state:
            self.states.keep([key], table.state)

    def _forked_state(self, table: PageTable, shard: int) -> PageTable | None:
        if not self.states or not table.state:
            return None
        forked = self.states.fork(table.state, shard)
        assert forked is not None, "there are fewer states than sequences"
        return forked

    # ------------------------------------------------------------------ pages by what they hold
    def find(self, keys: Sequence[Key]) -> PageTable:
        """A table of the pages that hold the first of `keys`, as many as there are in one shard."""
        first = self._page_of.get(keys[0]) if keys else None
        if first is None:
            return PageTable(self.roomiest())
        table = PageTable(first // self.pages)
        for key in keys:
            page = self._page_of.get(key)
            if page is None or page // self.pages != table.shard:
                break
            self._share(page)
            table.pages.append(page)
        return table

    def keep(self, keys: Sequence[Key], table: PageTable) -> None:
        """The table's first pages hold what `keys` say: they can be found until they are taken for something else.

        Pages that are to be zeroed when their users are gone get no key.
        """
        for key, page in zip(keys, table.pages, strict=False):
            if self._page_of.get(key) == page or page in self._spoiled:
                continue
            self._unkey(page)
            if (other := self._page_of.get(key)) is not None:
                self._unkey(other)
            self._page_of[key], self._key_of[page] = page, key

    def kept(self, table: PageTable) -> bool:
        """Whether the table's last page can be found: who writes into it gets a copy."""
        return bool(table.pages) and table.pages[-1] in self._key_of

    def forget(self, gone: Callable[[Any], bool], *, spoiled: bool = False) -> None:
        """Drop the keys of every scope for which `gone` is true. spoiled: their pages may hold what is not finite."""
        if self.states:
            self.states.forget(gone, spoiled=spoiled)
        for page in [page for key, page in self._page_of.items() if gone(key.scope)]:
            self._unkey(page)
            if spoiled:
                self._spoiled.add(page)
                self._clean(page)

    def _held(self, page: int) -> bool:
        """Whether it is one of the table's own, and not page 0."""
        return page % self.pages > 0

    def _writable(self, page: int) -> bool:
        return self._users[page] == 1 and page not in self._key_of

    def _take(self, shard: int) -> int:
        page = next(iter(self._free[shard]))
        self._unkey(page)
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
        if page in self._spoiled and page not in self._users:
            self._spoiled.discard(page)
            self._pending.append(PageCopy(page // self.pages * self.pages, page))

    def _unkey(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
