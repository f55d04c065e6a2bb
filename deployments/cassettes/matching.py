"""Find the recorded request that a program repeats, by its place and its content (see requests.py)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from tinkerflow.deployments.cassettes.content import difference, equal, fingerprint, tree_of
from tinkerflow.deployments.cassettes.file import Exchange, Recording
from tinkerflow.deployments.cassettes.requests import ClientRequest, asked

_SUBJECTS = {"train": "model", "sample": "sampler"}  # names for people, by the word in an id such as sess-…:train:0


@dataclass
class Recorded:
    """A recorded request. used: whether the program has made it again."""

    exchange: Exchange
    asked: ClientRequest
    used: bool = False


@dataclass
class _RecordedPlace:
    """The recorded requests of one place. by_content: those that are not strict; used ones are dropped at the front."""

    entries: list[Recorded] = field(default_factory=list)
    by_number: dict[int, Recorded] = field(default_factory=dict)
    by_content: dict[bytes, deque[Recorded]] = field(default_factory=lambda: defaultdict(deque))


class Script:
    """The requests of a recording, and which of them a program has made."""

    def __init__(self, recording: Recording, ignore: Collection[str] = ()) -> None:
        """ignore: dotted paths of fields that are not compared, such as `user_metadata.started`."""
        self.entries = [Recorded(one, asked(one.method, one.target, one.body, one.range)) for one in recording.compared]
        self.differences: list[str] = []  # in the order in which the program made them
        self._whole = recording.whole
        self._ignore = tuple(ignore)
        self._places: dict[str, _RecordedPlace] = defaultdict(_RecordedPlace)
        self._given: dict[tuple[str, int], Recorded] = {}  # by place and number of the program's request
        self._sessions: list[str] = []
        for entry in self.entries:
            self._file(entry)

    def _file(self, entry: Recorded) -> None:
        place = self._places[entry.asked.place]
        place.entries.append(entry)
        if entry.asked.number is not None:
            place.by_number[entry.asked.number] = entry
        if not entry.asked.strict:
            place.by_content[fingerprint(entry.asked, self._ignore)].append(entry)
        if entry.asked.operation == "create_session" and entry.exchange.status == 200:
            self._sessions.append(msgspec.json.decode(entry.exchange.answer)["session_id"])

    def has_place(self, now: ClientRequest) -> bool:
        """Whether the recording has requests of this place."""
        return now.place in self._places

    def find(self, now: ClientRequest) -> Recorded | str:
        """The recorded request that `now` repeats, or a text that describes the difference."""
        place = self._places.get(now.place, _RecordedPlace())
        key = None if now.number is None else (now.place, now.number)
        if key is not None and (earlier := self._given.get(key)) is not None and self._alike(now, earlier):
            return earlier  # the client retried
        found = None if now.number is None else place.by_number.get(now.number)
        if now.strict:
            if found is None or not self._alike(now, found):
                return self._unlike(now, place, found)
        elif found is None or found.used or not self._alike(now, found):
            other = self._of_content(now, place)
            if other is None:
                return self._unlike(now, place, found)
            if other.used and not now.reads:
                return (
                    f"{self._numbered(now)} is made more often than in the recording, where it is {self.named(other)}"
                )
            found = other
        found.used = True
        if key is not None:
            self._given[key] = found
        return found

    def _alike(self, now: ClientRequest, then: Recorded) -> bool:
        return equal(now, then.asked, self._ignore)

    def _of_content(self, now: ClientRequest, place: _RecordedPlace) -> Recorded | None:
        """The first unused request with the content of `now`; if all are used, the last one."""
        alike = place.by_content.get(fingerprint(now, self._ignore), deque())
        while len(alike) > 1 and alike[0].used:
            alike.popleft()
        return alike[0] if alike else None

    # ------------------------------------------------------------------ texts
    def differs(self, text: str) -> None:
        """Keep a difference for the report, once even if the client retries."""
        if text not in self.differences:
            self.differences.append(text)

    def report(self) -> list[str]:
        """Lines about the first request that differed, or else about the first request that was never made."""
        if self.differences:
            first, *later = self.differences
            return [first, f"{len(later)} later requests differed"] if later else [first]
        left = [entry for entry in self.entries if not entry.used and not entry.asked.reads]
        if not left:
            return []
        others = f"; {len(left)} requests of the recording were not made" if len(left) > 1 else ""
        return [f"{self.named(left[0])} is in the recording, but was never made{others}"]

    def named(self, entry: Recorded) -> str:
        """A recorded request in messages, such as `request 7 (optim_step of model 0)`."""
        return f"request {entry.exchange.number} ({self._about(entry.asked)})"

    def _about(self, request: ClientRequest) -> str:
        session, _, rest = request.owner.partition(":")
        kind, _, number = rest.partition(":")
        subject = f" of {_SUBJECTS[kind]} {number}" if kind in _SUBJECTS else ""
        several = len(self._sessions) > 1 and session in self._sessions
        return request.operation + subject + (f" of session {self._sessions.index(session) + 1}" if several else "")

    def _numbered(self, request: ClientRequest) -> str:
        return self._about(request) + ("" if request.number is None else f", number {request.number},")

    def _unlike(self, now: ClientRequest, place: _RecordedPlace, then: Recorded | None) -> str:
        """Describe a request that matches no request of its place. then: the recorded request of its number, if any."""
        if not now.strict and (then is None or then.used):
            then = next((entry for entry in place.entries if not entry.used), None)
        if then is None:
            which = "which has" if self._whole else "which was interrupted and has"
            return f"{self._numbered(now)} is not in the recording, {which} {len(place.entries)} of its place"
        text = difference(tree_of(now, self._ignore), tree_of(then.asked, self._ignore))
        if now.operation != then.asked.operation:
            text = f"the operation is {now.operation}, but was {then.asked.operation} in the recording"
        return f"{self.named(then)}: {text}"
