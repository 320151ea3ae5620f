"""Messages between two ranks of a process group: send, receive, and receive from any source.

Each is two messages of MPI, which matches them by their tags in each sender's order: a header with
the type and size, and the data. So a difference of type or size is an error of the receiver.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from wfbp.comm.mpi.exchange import Exchange
from wfbp.comm.mpi.transfers import NUM_TAGS
from wfbp.errors import DisagreementError, PeerError, StallError, WfbpError
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.operations import sizes
from wfbp.torch.distributed.work import Operation

if TYPE_CHECKING:
    from mpi4py import MPI

FIRST_TAG = 2 * NUM_TAGS
"""MPI's tag of headers with tag 0; collectives use smaller ones."""
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
        self.requests: list[MPI.Request] = []

    def overtakes(self, earlier: Message) -> bool:
        """Whether both could receive the same message."""
        any_source = self.peer is None or earlier.peer is None
        return self.tag == earlier.tag and (any_source or self.peer == earlier.peer)


class Messages:
    """The messages of one group under way, in the order of calls; used under the progress lock."""

    def __init__(self, runtime: Runtime, exchange: Exchange, group: str) -> None:
        self.pending: list[Message] = []
        self._runtime, self._exchange, self._group = runtime, exchange, group
        self._mpi, self._comm = exchange.channel.mpi, exchange.channel.comm
        self.largest_tag = ((self._comm.Get_attr(self._mpi.TAG_UB) or 0) - FIRST_TAG) // 2 - 1
        self._left_since: dict[int, float] = {}

    def submit(self, message: Message) -> None:
        """Begin a message."""
        if message.peer is not None and not message.receives:
            tag = FIRST_TAG + 2 * message.tag
            for part, content in enumerate((message.header.encode(), message.data)):
                request = self._comm.Isend([content, self._mpi.BYTE], message.peer, tag + part)
                message.requests.append(request)
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
            elif self._mpi.Request.Testall(message.requests):
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

    @property
    def all_received(self) -> bool:
        """Whether no message waits for a call that receives it."""
        return not self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)

    def _match(self, message: Message) -> None:
        """Begin to receive the next data for a call, of whatever type and size, once its header is
        here."""
        status, tag = self._mpi.Status(), FIRST_TAG + 2 * message.tag
        source = self._mpi.ANY_SOURCE if message.peer is None else message.peer
        arrived = self._comm.Improbe(source, tag, status)
        if arrived is None:
            return
        header = bytearray(status.Get_count(self._mpi.BYTE))
        arrived.Recv([header, self._mpi.BYTE])
        message.arrived, message.work.source = header.decode(), status.Get_source()
        if message.arrived != message.header:
            message.data = np.empty(int(message.arrived.split()[0]), np.uint8)
        data = [message.data, self._mpi.BYTE]
        message.requests.append(self._comm.Irecv(data, message.work.source, tag + 1))

    def _difference(self, message: Message) -> DisagreementError | None:
        """The error of a call that has received another type or size than it expects."""
        if not message.receives or message.arrived == message.header:
            return None
        return DisagreementError(
            f"{self._where(message)} expects {message.header}, but rank {message.work.source} of "
            f"the group sends {message.arrived}; let both ranks use tensors of one type and size"
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
        peer = -1 if message.peer is None else self._exchange.ranks[message.peer]
        if peer in left and now - self._left_since.setdefault(peer, now) > _LEFT_GRACE_S:
            return PeerError(
                f"{self._where(message)} waits, but rank {peer} {left[peer]}; let both ranks "
                "exchange equally many messages"
            )
        return None

    def _where(self, message: Message) -> str:
        return f"{self._runtime.where}: {message.text} of {self._group}"
