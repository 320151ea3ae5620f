"""Messages between two ranks of a process group: send, receive, and receive from any source.

Each is a header with the tag, type and size, and the data, which MPI matches by their tag in each
sender's order. So a difference of type or size is an error of the receiver.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch

from wfbp.comm.mpi.group_exchange import GroupExchange
from wfbp.errors import DisagreementError, PeerError, StallError, WfbpError
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.group_collectives import sizes
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
        exchange: GroupExchange,
        runtime: Runtime,
        timeout_s: float,
        group: str,
    ) -> None:
        super().__init__(runtime.thread, timeout_s)
        shown = sizes(tensor.dtype, tensor.numel())
        self.text = f"{kind}({shown}, {'' if peer is None else f'rank {peer}, '}tag {tag})"
        self.results = [tensor]
        self.requests: list[Any] = []
        """Of MPI, while its data is under way."""
        self.moved_s = 0.0
        """When a piece of it was last sent or received."""
        self._where = f"{runtime.where}: {self.text} of {group}"
        self._exchange, self._left = exchange, runtime.thread.loop.watch.left
        self.peer, self.tag, self.receives = peer, tag, kind != "send"
        self._data = self.target(tensor) if self.receives else self.source(tensor)
        self._header = f"{tensor.nbytes} bytes of {tensor.dtype}"
        self._difference: DisagreementError | None = None
        self._left_since: float | None = None

    # Under the progress lock.

    def send(self) -> None:
        """Begin to send it."""
        assert self.peer is not None
        self.requests = self._exchange.send(self._header, self._data, self.peer, self.tag)

    def receive(self, source: int, header: str) -> None:
        """Begin to receive the data, of whatever type and size, that this header announces."""
        self.source_number = source
        if header != self._header:
            self._data = np.empty(int(header.split()[0]), np.uint8)
            self._difference = DisagreementError(
                f"{self._where} expects {self._header}, but rank {source} of the group "
                f"sends {header}; both ranks must use the same dtype and size"
            )
        self.requests = self._exchange.receive(self._data, source, self.tag)

    def advance(self) -> bool:
        """Whether the message under way has ended, after its requests were tested."""
        left = [request for request in self.requests if request]
        if len(left) < len(self.requests):
            self.requests, self.moved_s = left, time.monotonic()
        if not left:
            self.complete(self._difference)
        return not left

    def abandon(self, error: WfbpError) -> None:
        """End it with an error."""
        if self.requests:
            _abandoned.append(self)
        self.complete(error)

    def lateness(self, now: float) -> WfbpError | None:
        """The error of a message that is overdue, or whose other rank has left."""
        # Without a waiting caller a message has no time limit.
        since = math.inf if self.awaited_since is None else max(self.awaited_since, self.moved_s)
        if now > min(self.deadline_s, since + self.timeout_s):
            return StallError(
                f"{self._where} timed out; the other rank must make the matching call in time: "
                "raise the timeout of init_process_group or new_group if it needs longer"
            )
        if not self._left:
            return None
        exchange = self._exchange
        peers = range(exchange.size) if self.peer is None else [self.peer]
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
