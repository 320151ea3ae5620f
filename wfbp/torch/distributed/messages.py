"""Messages between two ranks of a process group: send, receive, and receive from any source.

Each is two messages of MPI, which matches them by their tags in each sender's order: a header with
the type and size, and the data. So a difference of type or size is an error of the receiver.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from wfbp.comm.mpi.exchange import Exchange
from wfbp.errors import DisagreementError, PeerError, StallError, WfbpError
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.operations import sizes
from wfbp.torch.distributed.work import Operation

_LEFT_GRACE_S = 2.0

_abandoned: list[Message] = []
"""Messages that nobody waits for any more: MPI may still use their memory."""


class Message(Operation):
    """A message to ``peer``, or from it (None: from any rank)."""

    def __init__(self, kind: str, tensor: torch.Tensor, peer: int | None, tag: int) -> None:
        super().__init__()
        shown = sizes(tensor.dtype, [tensor.numel()])
        self.text = f"{kind}({shown}, {'' if peer is None else f'rank {peer}, '}tag {tag})"
        self.peer, self.tag, self.receives = peer, tag, kind != "send"
        self.data = self.target(tensor) if self.receives else self.source(tensor)
        self.results = [tensor]
        self.header = f"{tensor.nbytes} bytes of {tensor.dtype}"
        self.arrived = ""  # the header of the other rank's call
        self.requests: list[Any] = []  # of MPI

    def overtakes(self, earlier: Message) -> bool:
        """Whether both could receive the same message."""
        any_source = self.peer is None or earlier.peer is None
        return self.tag == earlier.tag and (any_source or self.peer == earlier.peer)


class Messages:
    """The messages of one group under way, in the order of calls; used under the progress lock."""

    def __init__(self, runtime: Runtime, exchange: Exchange, group: str) -> None:
        self.pending: list[Message] = []
        self._runtime, self._exchange, self._group = runtime, exchange, group
        self._left_since: dict[int, float] = {}

    def submit(self, message: Message) -> None:
        """Begin a message."""
        if message.peer is not None and not message.receives:
            message.requests = self._exchange.send(
                message.header.encode(), message.data, message.peer, message.tag
            )
        self.pending.append(message)

    def advance(self) -> bool:
        """Move all messages on; whether any has ended."""
        unmatched: list[Message] = []
        ended: list[tuple[Message, WfbpError | None]] = []
        for message in self.pending:
            if not message.requests and not any(map(message.overtakes, unmatched)):
                self._match(message)
            if not message.requests:
                unmatched.append(message)
            elif all(request.Test() for request in message.requests):
                ended.append((message, self._difference(message)))
                continue
            if (error := self._lateness(message)) is not None:
                ended.append((message, error))
                _abandoned.extend([message] if message.requests else [])
        for message, error in ended:
            self.pending.remove(message)
            message.complete(error)
        return bool(ended)

    def abandon(self) -> list[Message]:
        """Forget all messages, and return them."""
        pending, self.pending = self.pending, []
        _abandoned.extend(message for message in pending if message.requests)
        return pending

    def _match(self, message: Message) -> None:
        """Begin to receive the next data for a call, of whatever type and size, once its header is
        here."""
        if (found := self._exchange.probe(message.peer, message.tag)) is None:
            return
        message.work.source, header = found
        message.arrived = header.decode()
        if message.arrived != message.header:
            message.data = np.empty(int(message.arrived.split()[0]), np.uint8)
        request = self._exchange.receive(message.data, message.work.source, message.tag)
        message.requests.append(request)

    def _difference(self, message: Message) -> DisagreementError | None:
        """The error of a call that has received another type or size than it expects."""
        if not message.receives or message.arrived == message.header:
            return None
        return DisagreementError(
            f"{self._where(message)} expects {message.header}, but rank {message.work.source} of "
            f"the group sends {message.arrived}; both ranks must use the same dtype and size"
        )

    def _lateness(self, message: Message) -> WfbpError | None:
        """The error of a message that is overdue, or whose other rank has left."""
        now = time.monotonic()
        if now > message.work.deadline_s:
            return StallError(
                f"{self._where(message)} timed out; the other rank must make the matching call "
                "in time: raise the timeout of init_process_group or new_group if it needs longer"
            )
        left = self._runtime.thread.loop.watch.left
        if not left:
            return None
        exchange = self._exchange
        peers = range(exchange.size) if message.peer is None else [message.peer]
        numbers = [exchange.ranks[peer] for peer in peers if peer != exchange.rank]
        since = [self._left_since.setdefault(number, now) for number in numbers if number in left]
        if numbers and len(since) == len(numbers) and now - max(since) > _LEFT_GRACE_S:
            return PeerError(
                f"{self._where(message)} waits, but rank {numbers[-1]} {left[numbers[-1]]}; every "
                "send needs a matching receive"
            )
        return None

    def _where(self, message: Message) -> str:
        return f"{self._runtime.where}: {message.text} of {self._group}"
