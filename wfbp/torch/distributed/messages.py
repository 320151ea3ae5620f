"""Messages between two ranks of a process group: send, receive, and receive from any source.

MPI matches messages by their tags, in each sender's order. A header tells the receiver the element
type, so that a difference of type or size is an error of the receiver.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from wfbp.comm.arrays import Buffer
from wfbp.comm.mpi.exchange import Exchange
from wfbp.comm.mpi.transfers import NUM_TAGS
from wfbp.errors import DisagreementError, PeerError, StallError, WfbpError
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.operations import sizes
from wfbp.torch.distributed.work import Operation

if TYPE_CHECKING:
    from mpi4py import MPI

FIRST_TAG = 2 * NUM_TAGS
"""MPI's tag of messages with tag 0; collectives use smaller ones."""
_HEADER_BYTES = 64
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
        self.content = f"{tensor.nbytes} bytes of {tensor.dtype}"
        content = b"" if self.receives else self.content.encode()
        self.header = np.frombuffer(bytearray(content.ljust(_HEADER_BYTES)), np.uint8)
        self.request: MPI.Request | None = None  # None: nothing has arrived yet

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
        self.largest_tag: int = (self._comm.Get_attr(self._mpi.TAG_UB) or 0) - FIRST_TAG
        self._left_since: dict[int, float] = {}

    def submit(self, message: Message) -> None:
        """Begin a message."""
        if message.peer is not None and not message.receives:
            layout, tag = self._layout(message.header, message.data), FIRST_TAG + message.tag
            message.request = self._comm.Isend([self._mpi.BOTTOM, 1, layout], message.peer, tag)
            layout.Free()
        self.pending.append(message)

    def advance(self) -> bool:
        """Move all messages on; whether any has ended."""
        unmatched: list[Message] = []
        ended: list[tuple[Message, WfbpError | None]] = []
        for message in self.pending:
            if message.request is None and not any(map(message.overtakes, unmatched)):
                self._match(message)
            if message.request is None:
                unmatched.append(message)
            if message.request is not None and message.request.Test():
                ended.append((message, self._difference(message)))
            elif (error := self._lateness(message)) is not None:
                ended.append((message, error))
                if message.request is not None:
                    _abandoned.append(message)
        for message, error in ended:
            self.pending.remove(message)
            message.complete(error)
        return bool(ended)

    def abandon(self) -> list[Message]:
        """Forget all messages, and return them."""
        pending, self.pending = self.pending, []
        _abandoned.extend(message for message in pending if message.request is not None)
        return pending

    @property
    def all_received(self) -> bool:
        """Whether no message waits for a call that receives it."""
        return not self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)

    def _match(self, message: Message) -> None:
        """Receive the next message that matches, of whatever type and size, once it arrives."""
        status, tag = self._mpi.Status(), FIRST_TAG + message.tag
        source = self._mpi.ANY_SOURCE if message.peer is None else message.peer
        arrived = self._comm.Improbe(source, tag, status)
        if arrived is None:
            return
        message.work.source = status.Get_source()
        nbytes = status.Get_count(self._mpi.BYTE) - _HEADER_BYTES
        if nbytes != message.data.nbytes:
            message.data = np.empty(nbytes, np.uint8)
        layout = self._layout(message.header, message.data)
        message.request = arrived.Irecv([self._mpi.BOTTOM, 1, layout])
        layout.Free()

    def _layout(self, *parts: Buffer) -> MPI.Datatype:
        """The bytes of several arrays as one element, at absolute addresses."""
        addresses = [self._mpi.Get_address(part) for part in parts]
        layout: MPI.Datatype = self._mpi.BYTE.Create_hindexed(
            [part.nbytes for part in parts], addresses
        )
        layout.Commit()
        return layout

    def _difference(self, message: Message) -> DisagreementError | None:
        """The error of a call that has received another type or size than it expects."""
        found = bytes(message.header).decode().rstrip()
        if found == message.content:
            return None
        return DisagreementError(
            f"{self._where(message)} expects {message.content}, but rank {message.work.source} of "
            f"the group sends {found}; let both ranks use tensors of one type and size"
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
