"""Fetches data that other ranks hold, such as optimizer state, while their training threads work.

A rank asks by a notice; communication threads answer by point-to-point messages. Data have a
*version*, the owner's count of updates; an owner that has not reached it answers later. It is not
past it if the asking rank is between two steps, because no other ends the next step without it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Backend, HostBackend, Work
from wfbp.core.ranks import name_ranks
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime.progress.loop import LaneProtocol, ProgressLoop, Reply
from wfbp.runtime.progress.stall import ALL_RANKS, Members, Need

_PIECE_BYTES = 64 << 20
_TAGS = 1 << 14

Content = tuple[object, list[Buffer]]
"""Data of one owner: a picklable head, and parts (one-dimensional, uint8)."""

Fetched = dict[int, Content]
"""By rank."""


@dataclass
class Store:
    """Data of one rank for others; the training thread replaces ``published`` as a whole.

    The function in it copies items under the progress lock; it raises ``DisagreementError`` if it
    has others. The training thread sets ``published`` to None before it changes them.
    """

    key: str
    members: Members = ALL_RANKS
    published: tuple[int, Callable[[Any], Content]] | None = None
    """The only version that others may fetch."""


@dataclass
class _Fetch:
    """One request of this rank."""

    label: str
    reply: Reply[Fetched]
    streams: dict[int, Generator[bool, None, Content]]  # from the ranks that have not sent all
    contents: Fetched = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Question:
    """One request of another rank."""

    sender: int
    key: str
    version: int
    tag: int
    items: Any


class Fetches(LaneProtocol):
    """Requests of and to one rank: a lane while there are any, under the progress lock."""

    polls = True

    def __init__(self, backend: HostBackend, loop: ProgressLoop, where: str) -> None:
        self.backend: Backend = backend
        self._host = backend
        self._loop = loop
        self._where = where
        self._number = 0
        # A training thread adds a store, which is served until every rank has dropped it.
        self.stores: dict[str, Store] = {}
        self._dropped: dict[str, int] = {}
        self._fetches: list[_Fetch] = []
        self._questions: list[_Question] = []
        self._sends: list[tuple[Work[None], Buffer]] = []
        for kind in ("fetch", "fetch dropped"):
            loop.handle_notices(kind, self._hear)

    def drop(self, store: Store) -> None:
        """This rank will not ask for a store any more; others may."""
        members = store.members.among(range(self.backend.size))
        self._loop.send_notice({"kind": "fetch dropped", "key": store.key, "members": members})
        self._count_drop(store.key, len(members))

    def ask(
        self, store: Store, version: int, items: object, label: str, reply: Reply[Fetched]
    ) -> None:
        """Fetch from all other ranks of a store; ``items`` are of JSON's types."""
        if self._loop.error is not None:
            reply.fail(self._loop.error)
            return
        tag = self._number = (self._number + 1) % _TAGS
        members = store.members.among(range(self.backend.size))
        question = {"key": store.key, "version": version, "tag": tag, "items": items}
        # By a notice, because the owners' training threads may call nothing for a long time.
        self._loop.send_notice({"kind": "fetch", "members": members, **question})
        others = [r for r in members if r != self.backend.rank]
        self._fetches.append(_Fetch(label, reply, {r: self._receive(r, tag) for r in others}))
        self._loop.add_lane(self)

    def advance(self) -> bool:
        before = len(self._questions) + len(self._sends)
        self._questions = [q for q in self._questions if not self._answer(q)]
        # Pieces are kept until they are sent: MPI reads their memory.
        self._sends = [item for item in self._sends if not item[0].test()]
        progressed = len(self._questions) + len(self._sends) != before
        for fetch in list(self._fetches):
            for rank, stream in list(fetch.streams.items()):
                try:
                    moved = next(stream)
                except StopIteration as end:
                    fetch.contents[rank] = end.value
                    del fetch.streams[rank]
                    moved = True
                except DisagreementError as refusal:
                    fetch.refusals.append(f"rank {rank} {refusal}")
                    del fetch.streams[rank]
                    moved = True
                if moved:
                    progressed, fetch.since = True, time.monotonic()
            if fetch.streams:
                continue
            self._fetches.remove(fetch)
            if not fetch.refusals:
                fetch.reply.put(fetch.contents)
                continue
            error = DisagreementError(
                f"{self._where}: {fetch.label}: {fetch.refusals[0]}. Every rank must step, load "
                "and wrap an optimizer alike"
            )
            fetch.reply.fail(error)
        self._loop.num_fetches = len(self._fetches)
        if not (self._fetches or self._questions or self._sends):
            self._loop.remove_lane(self)
        return progressed

    @property
    def busy(self) -> bool:
        return bool(self._fetches or self._sends)

    @property
    def waiting_since(self) -> float | None:
        """When a message last arrived for the oldest request of this rank."""
        return min((fetch.since for fetch in self._fetches), default=None)

    def needs(self, members: Members) -> list[Need] | None:
        return None if self._fetches else []  # answers hold up other ranks only

    def describe(self) -> str:
        if not self._fetches:
            return "handing over what others ask for" if self._sends else ""
        fetch = self._fetches[0]
        return f"{fetch.label}: waiting for {name_ranks(list(fetch.streams))}"

    def fail(self, error: WfbpError) -> None:
        fetches, self._fetches = self._fetches, []
        self._questions, self._sends = [], []
        for fetch in fetches:
            fetch.reply.fail(error)

    def _hear(self, sender: int, notice: dict[str, Any]) -> None:
        """A notice of another rank."""
        members = notice.pop("members")  # notices go to all ranks
        if self.backend.rank not in members:
            return
        if notice.pop("kind") == "fetch dropped":
            self._count_drop(notice["key"], len(members))
        else:
            self._questions.append(_Question(sender, **notice))
            self._loop.add_lane(self)

    def _answer(self, question: _Question) -> bool:
        """Send the requested content; False if it is not published yet."""
        store = self.stores.get(question.key)
        published = None if store is None else store.published
        refusal = ""
        head: object = None
        parts: list[Buffer] = []
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
                head, parts = published[1](question.items)
            except DisagreementError as error:
                refusal = str(error)
        head_bytes = pickle.dumps((refusal, head, [part.nbytes for part in parts]))
        if store is not None and store.published is not published:
            return False  # the training thread may have changed it in the meantime
        # A receive must know its size. Messages of one tag arrive in the order of sending.
        length = np.frombuffer(len(head_bytes).to_bytes(8, "little"), np.uint8)
        for buffer in (length, np.frombuffer(head_bytes, np.uint8), *parts):
            for piece in _pieces(buffer):
                work = self._host.send(piece, question.sender, question.tag)
                self._sends.append((work, piece))
        return True

    def _receive(self, rank: int, tag: int) -> Generator[bool, None, Content]:
        """Receive one rank's content; yields whether anything has arrived since the last look."""
        buffer = np.zeros(8, np.uint8)
        yield from self._receive_all([buffer], rank, tag)
        buffer = np.empty(int.from_bytes(buffer.tobytes(), "little"), np.uint8)
        yield from self._receive_all([buffer], rank, tag)
        refusal, head, sizes = pickle.loads(buffer.tobytes())
        if refusal:
            raise DisagreementError(refusal)
        parts: list[Buffer] = [np.empty(size, np.uint8) for size in sizes]
        yield from self._receive_all(parts, rank, tag)
        return head, parts

    def _receive_all(
        self, buffers: Sequence[Buffer], rank: int, tag: int
    ) -> Generator[bool, None, None]:
        pieces = [piece for buffer in buffers for piece in _pieces(buffer)]
        works = [self._host.receive(piece, rank, tag) for piece in pieces]
        while works:
            left = [work for work in works if not work.test()]
            moved, works = len(left) < len(works), left
            yield moved

    def _count_drop(self, key: str, num_members: int) -> None:
        self._dropped[key] = self._dropped.get(key, 0) + 1
        if self._dropped[key] == num_members:
            del self._dropped[key]
            self.stores.pop(key, None)


def _pieces(buffer: Buffer) -> Iterator[Buffer]:
    for start in range(0, buffer.nbytes, _PIECE_BYTES):
        yield buffer[start : start + _PIECE_BYTES]
