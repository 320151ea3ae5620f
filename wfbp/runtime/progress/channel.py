"""Control channels: collectives of bytes that a training thread waits for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from wfbp.comm.backend import Finished, HostBackend, Work
from wfbp.core.encoding import decode, encode
from wfbp.core.ranks import Sections, differences, name_values
from wfbp.errors import DisagreementError, PeerError, WfbpError
from wfbp.runtime.progress.stall import ALL_RANKS, Members
from wfbp.runtime.progress.thread import CommunicationThread

T = TypeVar("T")


class ControlChannel:
    """Collectives on one backend; every rank calls the same ones in the same order.

    Channels on different backends are independent. Any training thread may use one; threads whose
    order of exchanges differs between ranks need a channel each.
    """

    def __init__(
        self,
        thread: CommunicationThread,
        backend: HostBackend,
        check: Callable[[], None],
        where: str,
        members: Members = ALL_RANKS,
        name: str = "",  # of its user, before labels
    ) -> None:
        self._thread = thread
        self._backend = backend
        self._check = check
        self._where = where
        self._members = members
        self._name = name and f"{name}: "

    def call(self, start: Callable[[HostBackend], Work[T]], label: str) -> T:
        """Run one collective, begun by ``start``, and return its result."""
        self._check()
        backend = self._backend
        return self._thread.call(lambda: start(backend), label, backend, self._members)

    def run(self, act: Callable[[HostBackend], T], label: str) -> T:
        """Run a function under the progress lock after earlier collectives; returns its result."""
        return self.call(lambda backend: Finished(act(backend)), label)

    def exchange(
        self,
        payload: bytes,
        label: str,
        purpose: str = "",
        same: Sections = (),
        remedy: str = "",
        refusal: str = "",
    ) -> list[bytes]:
        """Every rank's payload, in rank order.

        Raises ``DisagreementError`` on every rank if purposes (by default labels) or what must be
        the ``same`` differ, and ``PeerError`` if a rank has a ``refusal``.
        """
        purpose = purpose or label
        told = encode([purpose, refusal, same])
        digest = hashlib.sha256(told).digest()
        label = self._name + label
        letters = self.call(lambda backend: backend.all_gather_bytes(digest + payload), label)
        # Every rank sees whether all agree. Only if they do not, descriptions travel.
        if not all(letter.startswith(digest) for letter in letters):
            texts = self.call(lambda backend: backend.all_gather_bytes(told), label)
            raise self._disagreement(label, purpose, list(map(decode, texts)), remedy)
        return [letter[len(digest) :] for letter in letters]

    def exchange_values(
        self, value: Any, label: str, same: Sections = (), remedy: str = ""
    ) -> list[Any]:
        """As :meth:`exchange`, of values of JSON's types."""
        return [*map(decode, self.exchange(encode(value), label, same=same, remedy=remedy))]

    @contextmanager
    def sharing_errors(self, label: str) -> Iterator[None]:
        """Context for checks of arguments. After an error here, the other ranks' exchange of this
        label raises ``PeerError``: they would wait for this rank otherwise."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):  # the program is to see its own error
                self.exchange(b"", label, refusal=str(error) or type(error).__name__)
            raise

    def _disagreement(self, label: str, mine: str, told: list[Any], remedy: str) -> WfbpError:
        """The error, given each rank's purpose, refusal, and what must be the same."""
        for rank, (purpose, refusal, _) in enumerate(told):
            if refusal:
                called = "" if purpose == mine else f" in {purpose}, which this rank did not call"
                return PeerError(f"{self._where}: {label}: rank {rank}{called}: {refusal}")
        purposes = {rank: purpose for rank, (purpose, _, _) in enumerate(told)}
        if len(set(purposes.values())) > 1:
            return DisagreementError(
                f"{self._where}: ranks called different operations ({name_values(purposes)}). "
                "Every rank must call the same operations in the same order"
            )
        by_rank = {rank: same for rank, (_, _, same) in enumerate(told)}
        what = differences(by_rank) or name_values({r: encode(v) for r, v in by_rank.items()})
        return DisagreementError(f"{self._where}: {label}: ranks disagree on {what}. {remedy}")

    def close(self) -> None:
        """Close the backend; under the progress lock, and nothing may be under way."""
        self._backend.close()
