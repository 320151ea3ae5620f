"""Messages between two ranks of a process group: send, receive, and receive from any source.

Each is two messages of MPI, which matches them by their tags in each sender's order: a header with
the type and size, and the data. So a difference of type or size is an error of the receiver.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from wfbp.comm.mpi.exchange import Exchange
from wfbp.errors import DisagreementError, PeerError, StallError, WfbpError
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.operations import sizes
from wfbp.torch.distributed.work import GroupWork

_LEFT_GRACE_S = 2.0

_abandoned: list[GroupMessage] = []
"""Messages without a waiting thread, kept because MPI may still use their memory."""


class GroupMessage(GroupWork):
    """A message to ``peer``, or from it (None: from any rank)."""

    def __init__(
        self,
        kind: str,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        exchange: Exchange,
        runtime: Runtime,
        timeout_s: float,
        group: str,
    ) -> None:
        super().__init__(runtime.thread, timeout_s)
        shown = sizes(tensor.dtype, tensor.numel())
        self.text = f"{kind}({shown}, {'' if peer is None else f'rank {peer}, '}tag {tag})"
        self.results = [tensor]
        self.is_matched = False
        """Whether its data is under way."""
        self._where = f"{runtime.where}: {self.text} of {group}"
        self._exchange, self._left = exchange, runtime.thread.loop.watch.left
        self._peer, self._tag, self._receives = peer, tag, kind != "send"
        self._data = self.target(tensor) if self._receives else self.source(tensor)
        self._header = f"{tensor.nbytes} bytes of {tensor.dtype}"
        self._difference: DisagreementError | None = None
        self._requests: list[Any] = []  # of MPI
        self._left_since: float | None = None

    # Under the progress lock.

    def begin(self) -> None:
        """Send it; what is received begins in :meth:`advance`."""
        if not self._receives:
            assert self._peer is not None
            header = self._header.encode()
            self._requests = self._exchange.send(header, self._data, self._peer, self._tag)
            self.is_matched = True

    def advance(self, unmatched: Sequence[GroupMessage]) -> bool:
        """Move on, after earlier calls that are ``unmatched``; whether it has ended."""
        if not self.is_matched and not any(map(self._overtakes, unmatched)):
            self._match()
        if self.is_matched and all(request.Test() for request in self._requests):
            self.complete(self._difference)
        elif (error := self._lateness()) is not None:
            self.abandon(error)
        return self.is_completed()

    def abandon(self, error: WfbpError) -> None:
        """End it with an error."""
        if self.is_matched:
            _abandoned.append(self)
        self.complete(error)

    def _overtakes(self, earlier: GroupMessage) -> bool:
        """Whether both could receive the same message."""
        any_source = self._peer is None or earlier._peer is None
        return self._tag == earlier._tag and (any_source or self._peer == earlier._peer)

    def _match(self) -> None:
        """Begin to receive the next data, of whatever type and size, once its header is here."""
        if (found := self._exchange.probe(self._peer, self._tag)) is None:
            return
        self.source_number, arrived = found[0], found[1].decode()
        if arrived != self._header:
            self._data = np.empty(int(arrived.split()[0]), np.uint8)
            self._difference = DisagreementError(
                f"{self._where} expects {self._header}, but rank {self.source_number} of the group "
                f"sends {arrived}; both ranks must use the same dtype and size"
            )
        self._requests = [self._exchange.receive(self._data, self.source_number, self._tag)]
        self.is_matched = True

    def _lateness(self) -> WfbpError | None:
        """The error of a message that is overdue, or whose other rank has left."""
        now = time.monotonic()
        if now > self.deadline_s:
            return StallError(
                f"{self._where} timed out; the other rank must make the matching call in time: "
                "raise the timeout of init_process_group or new_group if it needs longer"
            )
        if not self._left:
            return None
        exchange = self._exchange
        peers = range(exchange.size) if self._peer is None else [self._peer]
        ranks = [exchange.ranks[peer] for peer in peers if peer != exchange.rank]
        if not ranks or not all(rank in self._left for rank in ranks):
            return None
        self._left_since = self._left_since or now
        if now - self._left_since <= _LEFT_GRACE_S:
            return None
        return PeerError(
            f"{self._where} waits, but rank {ranks[-1]} {self._left[ranks[-1]]}; every "
            "send needs a matching receive"
        )
