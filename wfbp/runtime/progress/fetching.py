"""Fetches data that other ranks hold, such as optimizer state, while their training threads work.

A rank asks by a notice, and the other ranks' communication threads answer by notices. Data have a
*version*, the owner's count of updates; an owner that has not reached it answers later. It is not
past it if the asking rank is between two steps, because no other ends the next step without it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from wfbp.comm.backend import Backend, HostBackend
from wfbp.core.ranks import name_ranks
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime.progress.loop import LaneProtocol, ProgressLoop, Reply
from wfbp.runtime.progress.stall import ALL_RANKS, Members, Need

_PIECE_BYTES = 4 << 20
"""Contents travel in pieces, between which ranks communicate for training."""

Fetched = dict[int, bytes]
"""Contents by rank."""


@dataclass
class Store:
    """Data of one rank for others; the training thread replaces ``published`` as a whole.

    The function in it encodes items under the progress lock; it raises ``DisagreementError`` if it
    has others. The training thread sets ``published`` to None before it changes them.
    """

    key: str
    members: Members = ALL_RANKS
    published: tuple[int, Callable[[Any], bytes]] | None = None
    """The only version that others may fetch."""


@dataclass
class _Fetch:
    """One request of this rank."""

    label: str
    reply: Reply[Fetched]
    missing: set[int]  # ranks that have not sent all
    pieces: defaultdict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    refusals: list[str] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Question:
    """One request of another rank."""

    sender: int
    number: int
    key: str
    version: int
    items: Any


class Fetches(LaneProtocol):
    """Requests of and to one rank: a lane while there are any, under the progress lock."""

    polls = True

    def __init__(self, backend: HostBackend, loop: ProgressLoop, where: str) -> None:
        self.backend: Backend = backend
        self._loop = loop
        self._where = where
        self._number = 0
        # A training thread adds a store, which is served until every rank has dropped it.
        self.stores: dict[str, Store] = {}
        self._dropped: dict[str, int] = {}
        self._fetches: dict[int, _Fetch] = {}  # by number
        self._questions: list[_Question] = []
        self._num_heard = 0
        loop.handle_notices("fetch", self._hear_question)
        loop.handle_notices("fetched", self._hear_answer)
        loop.handle_notices("fetch dropped", lambda _, dropped, __: self._count_drop(*dropped))

    def drop(self, store: Store) -> None:
        """This rank will not ask for a store any more; others may."""
        num_members = len(store.members.among(range(self.backend.size)))
        self._loop.send_notice("fetch dropped", [store.key, num_members], store.members.ranks)
        self._count_drop(store.key, num_members)

    def ask(
        self, store: Store, version: int, items: object, label: str, reply: Reply[Fetched]
    ) -> None:
        """Fetch from all other ranks of a store; ``items`` are of JSON's types."""
        if self._loop.error is not None:
            reply.fail(self._loop.error)
            return
        self._number += 1
        others = {*store.members.among(range(self.backend.size))} - {self.backend.rank}
        self._fetches[self._number] = _Fetch(label, reply, others)
        question = self._number, store.key, version, items
        # By a notice, because the owners' training threads may call nothing for a long time.
        self._loop.send_notice("fetch", question, store.members.ranks)
        self._loop.add_lane(self)

    def advance(self) -> bool:
        before = self._num_heard, len(self._questions)
        self._num_heard = 0
        self._questions = [q for q in self._questions if not self._answer(q)]
        for number, fetch in list(self._fetches.items()):
            if fetch.missing:
                continue
            del self._fetches[number]
            if not fetch.refusals:
                fetch.reply.put({rank: b"".join(each) for rank, each in fetch.pieces.items()})
                continue
            error = DisagreementError(
                f"{self._where}: {fetch.label}: {fetch.refusals[0]}. Every rank must step, load "
                "and wrap an optimizer alike"
            )
            fetch.reply.fail(error)
        self._loop.num_fetches = len(self._fetches)
        if not (self.busy or self._questions):
            self._loop.remove_lane(self)
        return before != (0, len(self._questions))

    @property
    def busy(self) -> bool:
        return bool(self._fetches) or self._loop.sends_notices

    @property
    def waiting_since(self) -> float | None:
        """When a piece last arrived for the oldest request of this rank."""
        return min((fetch.since for fetch in self._fetches.values()), default=None)

    def needs(self, members: Members) -> list[Need] | None:
        return None if self._fetches else []  # answers hold up other ranks only

    def describe(self) -> str:
        for fetch in self._fetches.values():
            return f"{fetch.label}: waiting for {name_ranks(sorted(fetch.missing))}"
        return "handing over what others ask for" if self._loop.sends_notices else ""

    def fail(self, error: WfbpError) -> None:
        fetches, self._fetches = self._fetches, {}
        self._questions = []
        for fetch in fetches.values():
            fetch.reply.fail(error)

    def _hear_question(self, sender: int, question: list[Any], _: bytes) -> None:
        self._questions.append(_Question(sender, *question))
        self._loop.add_lane(self)

    def _hear_answer(self, sender: int, answer: list[Any], piece: bytes) -> None:
        number, is_last, refusal = answer
        if (fetch := self._fetches.get(number)) is None:
            return
        self._num_heard += 1
        fetch.since = time.monotonic()
        fetch.pieces[sender].append(piece)
        if refusal:
            fetch.refusals.append(f"rank {sender} {refusal}")
        if is_last:
            fetch.missing.discard(sender)

    def _answer(self, question: _Question) -> bool:
        """Send the requested content; False if it is not published yet."""
        store = self.stores.get(question.key)
        published = None if store is None else store.published
        refusal, content = "", b""
        if store is None:
            refusal = "has released it"
        elif published is None or published[0] < question.version:
            return False
        elif published[0] > question.version:
            refusal = (
                f"already has version {published[0]} of it, not {question.version}: it has stepped "
                "meanwhile. Call state_dict() between two steps, not between clip_grad_norm_() or "
                "synchronize() and step()"
            )
        else:
            try:
                content = published[1](question.items)
            except DisagreementError as error:
                refusal = str(error)
        if store is not None and store.published is not published:
            return False  # the training thread may have changed it in the meantime
        for start in range(0, max(len(content), 1), _PIECE_BYTES):
            end = start + _PIECE_BYTES
            answer = question.number, end >= len(content), refusal
            self._loop.send_notice("fetched", answer, [question.sender], content[start:end])
        return True

    def _count_drop(self, key: str, num_members: int) -> None:
        self._dropped[key] = self._dropped.get(key, 0) + 1
        if self._dropped[key] == num_members:
            del self._dropped[key]
            self.stores.pop(key, None)
