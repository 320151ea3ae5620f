"""Fetching data that other ranks hold, while their training threads do something else.

One rank alone may want data that are distributed among all, as the optimizer's state when it saves
a checkpoint. It asks all others by a notice, and their communication threads answer by messages
between two ranks: the number of bytes of a head, the head, and the parts that it announces, cut
into pieces.

Data belong to a *version*, a count of the owner's updates. An owner that has not come to it yet
answers later. It cannot be past it: the asking rank is in a call between two steps, so the others
cannot have ended the next step, whose gradients they need from it.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wfbp.comm.backend import Backend, Buffer, HostBackend, Work
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime.progress.deadlock import ALL_RANKS, Members, RankStatus
from wfbp.runtime.progress.loop import Reply

_PIECE_BYTES = 64 << 20
_TAGS = 1 << 14

Content = tuple[object, list[Buffer]]
"""What an owner hands over: something that can be pickled, and parts (one-dimensional, uint8)."""

Fetched = dict[int, Content]
"""By rank."""


class RefusalError(Exception):
    """An owner does not have the items; raised by the ``collect`` of :meth:`Store.publish`."""


class Store:
    """What one rank lets others fetch. Equal on every rank but for its content.

    The training thread publishes; the communication thread reads ``published``, which is replaced
    as a whole. ``key`` is the same on every rank that has the store; ``members`` are these ranks.
    """

    def __init__(self, key: str, members: Members = ALL_RANKS) -> None:
        self.key = key
        self.members = members
        self.published: tuple[int, Callable[[Any], Content]] | None = None

    def publish(self, version: int, collect: Callable[[Any], Content]) -> None:
        """From now on others may fetch this version, larger than those before, and no other.

        ``collect`` is called under the progress lock with the items that a rank asks for; the parts
        that it returns may not change before the next version is published. It may raise
        :class:`RefusalError`.
        """
        self.published = version, collect


@dataclass
class _Incoming:
    """What comes from one rank."""

    rank: int
    tag: int
    stage: str = "length"
    head: object = None
    parts: list[Buffer] = field(default_factory=list)
    works: list[Work[None]] = field(default_factory=list)
    buffer: Buffer = field(default_factory=lambda: np.zeros(8, np.uint8))


@dataclass
class _Fetch:
    """One request of this rank."""

    label: str
    reply: Reply[Fetched]
    incoming: list[_Incoming]
    since: float


@dataclass
class _Question:
    """One request of another rank."""

    sender: int
    key: str
    version: int
    tag: int
    items: Any


class Fetches:
    """All requests of and to one rank, as a ``Lane``."""

    expected_s = None
    has_room = False
    has_events = False
    owes_work = False
    counts = (0, 0)

    def __init__(self, backend: HostBackend, where: str) -> None:
        self.backend: Backend = backend
        self._host = backend
        self._where = where
        self._number = 0
        self._stores: dict[str, Store] = {}
        self._dropped: dict[str, int] = {}
        self._fetches: list[_Fetch] = []
        self._questions: list[_Question] = []
        self._sends: list[tuple[Work[None], Buffer]] = []
        self._error: WfbpError | None = None

    def add(self, store: Store) -> None:
        """Serve a store, until every rank has dropped it."""
        self._stores[store.key] = store

    def drop(self, store: Store) -> None:
        """This rank will not ask for a store any more; others may."""
        members = store.members.among(range(self.backend.size))
        self._send_notice({"kind": "fetch dropped", "key": store.key, "members": members})
        self._count_drop(store.key, len(members))

    def ask(
        self, store: Store, version: int, items: object, label: str, reply: Reply[Fetched]
    ) -> None:
        """Fetch from all other ranks that have a store.

        ``store`` is this rank's own; ``items``, in JSON's types, are passed to the owners'
        ``collect``. ``reply`` gets the content of every other rank.
        """
        if self._error is not None:
            reply.fail(self._error)
            return
        tag = self._number = (self._number + 1) % _TAGS
        members = store.members.among(range(self.backend.size))
        question = {"key": store.key, "version": version, "tag": tag, "items": items}
        self._send_notice({"kind": "fetch", "members": members, **question})
        others = [r for r in members if r != self.backend.rank]
        incoming = [_Incoming(rank, tag) for rank in others]
        for one in incoming:
            one.works = [self._host.receive(one.buffer, one.rank, tag)]
        self._fetches.append(_Fetch(label, reply, incoming, time.monotonic()))

    def hear(self, sender: int, notice: dict[str, Any]) -> None:
        """A notice of another rank, of a kind that begins with ``fetch``."""
        members = notice.pop("members")
        if self.backend.rank not in members:
            return
        if notice.pop("kind") == "fetch dropped":
            self._count_drop(notice["key"], len(members))
        else:
            self._questions.append(_Question(sender, **notice))

    # As a lane.

    def advance(self) -> bool:
        """Answer, send and receive; True where anything moved."""
        progressed = False
        waiting, self._questions = self._questions, []
        for question in waiting:
            if self._answer(question):
                progressed = True
            else:
                self._questions.append(question)
        if self._sends:
            left = [item for item in self._sends if not item[0].test()]
            progressed |= len(left) < len(self._sends)
            self._sends = left
        for fetch in list(self._fetches):
            moved = [self._receive(one) for one in fetch.incoming]
            if any(moved):
                progressed = True
                fetch.since = time.monotonic()
            if all(one.stage == "done" for one in fetch.incoming):
                self._fetches.remove(fetch)
                self._finish(fetch)
        return progressed

    def may_progress(self) -> bool:
        """Whether anything could have arrived; always True, since that is unknown."""
        return True

    def rest(self, nap_s: float, most_s: float) -> bool:
        return False  # what other ranks have to say has to be read

    def extend_status(self, status: RankStatus, awaited: Reply[Any]) -> RankStatus:
        """A rank that fetches is in no deadlock: the others' communication threads answer."""
        return replace(status, waits=False) if self._fetches else status

    @property
    def busy(self) -> bool:
        """Whether messages are under way."""
        return bool(self._fetches or self._sends)

    @property
    def waiting_since(self) -> float | None:
        """When a message last arrived for the oldest request of this rank."""
        return min((fetch.since for fetch in self._fetches), default=None)

    def describe(self) -> str:
        """What this rank waits for, for people."""
        if not self._fetches:
            return "handing over what others ask for" if self._sends else ""
        fetch = self._fetches[0]
        missing = [str(one.rank) for one in fetch.incoming if one.stage != "done"]
        return f"{fetch.label}: waiting for rank{'s' * (len(missing) > 1)} {', '.join(missing)}"

    def fail(self, error: WfbpError) -> None:
        """End all that waits."""
        self._error = error
        fetches, self._fetches = self._fetches, []
        self._questions, self._sends = [], []
        for fetch in fetches:
            fetch.reply.fail(error)

    def _answer(self, question: _Question) -> bool:
        """Send the requested content; False where it is not published yet."""
        store = self._stores.get(question.key)
        published = None if store is None else store.published
        refusal = ""
        head: object = None
        parts: list[Buffer] = []
        if store is None:
            refusal = "has let it go"
        elif published is None or published[0] < question.version:
            return False
        elif published[0] > question.version:
            refusal = f"has gone on to version {published[0]} of it, from {question.version}"
        else:
            try:
                head, parts = published[1](question.items)
            except RefusalError as error:
                refusal = str(error)
        head_bytes = pickle.dumps((refusal, head, [part.nbytes for part in parts]))
        length = np.frombuffer(len(head_bytes).to_bytes(8, "little"), np.uint8)
        for buffer in (length, np.frombuffer(head_bytes, np.uint8), *parts):
            for piece in _pieces(buffer):
                work = self._host.send(piece, question.sender, question.tag)
                self._sends.append((work, piece))
        return True

    def _receive(self, one: _Incoming) -> bool:
        """Take arrived messages of one rank, and expect the next; True where any had arrived."""
        if one.stage == "done":
            return False
        left = [work for work in one.works if not work.test()]
        moved = len(left) < len(one.works)
        one.works = left
        if left:
            return moved
        if one.stage == "length":
            one.stage = "head"
            one.buffer = np.empty(int.from_bytes(one.buffer.tobytes(), "little"), np.uint8)
            self._expect(one, [one.buffer])
        elif one.stage == "head":
            refusal, one.head, sizes = pickle.loads(one.buffer.tobytes())
            one.stage = "parts"
            if refusal:
                one.stage, one.head = "done", RefusalError(refusal)
            one.parts = [np.empty(size, np.uint8) for size in sizes]
            self._expect(one, one.parts)
        else:
            one.stage = "done"
        return True

    def _expect(self, one: _Incoming, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            for piece in _pieces(buffer):
                one.works.append(self._host.receive(piece, one.rank, one.tag))

    def _finish(self, fetch: _Fetch) -> None:
        for one in fetch.incoming:
            if isinstance(one.head, RefusalError):
                fetch.reply.fail(
                    DisagreementError(
                        f"{self._where}: {fetch.label}: rank {one.rank} {one.head}. Every rank "
                        "must step, load and wrap an optimizer alike"
                    )
                )
                return
        fetch.reply.put({one.rank: (one.head, one.parts) for one in fetch.incoming})

    def _count_drop(self, key: str, num_members: int) -> None:
        self._dropped[key] = self._dropped.get(key, 0) + 1
        if self._dropped[key] == num_members:
            del self._dropped[key]
            self._stores.pop(key, None)

    def _send_notice(self, notice: dict[str, Any]) -> None:
        self.backend.send_notice(json.dumps(notice).encode())


def _pieces(buffer: Buffer) -> Iterator[Buffer]:
    for start in range(0, buffer.nbytes, _PIECE_BYTES):
        yield buffer[start : start + _PIECE_BYTES]
