"""Messages between two ranks of a process group: send, receive, and receive from any source.

A sender announces each message in an envelope with its tag, type and size, which contains the
data if they are small. The receiver matches envelopes with its own calls, in each sender's order,
and then fetches the data. A difference of type or size is therefore an error of both ranks.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Finished, Work
from wfbp.comm.mpi.exchange import Exchange
from wfbp.errors import DisagreementError, PeerError, StallError, WfbpError
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.lanes import Lane
from wfbp.torch.distributed.work import GroupWork, closed

_INLINE_BYTES = 4096
_NUM_TAGS = 1 << 14
_LEFT_GRACE_S = 2.0
_SPLIT = b"\n"


@dataclass(eq=False, slots=True)
class Message:
    """A message that this rank sends to or expects from ``peer`` (None: any rank)."""

    data: Buffer
    dtype: str
    peer: int | None
    tag: int
    work: GroupWork
    deliver: Callable[[], None] = lambda: None  # what is left to do when it has arrived
    transfer: Work[None] | None = None


@dataclass(slots=True)
class _Envelope:
    source: int
    tag: int
    dtype: str
    nbytes: int
    channel: int  # tag of the message with the data; -1: they are here
    data: bytes


class MessageLane(Lane):
    """The messages of one group, under the progress lock."""

    polls = True

    def __init__(self, runtime: Runtime, exchange: Exchange, name: str) -> None:
        super().__init__(runtime, exchange, name)
        self._mailbox = exchange.mailbox
        self._expected: deque[Message] = deque()
        self._arrived: deque[_Envelope] = deque()
        self._moving: list[Message] = []
        self._num_sent = 0
        self._left_since: dict[int, float] = {}

    def send(self, message: Message) -> None:
        """Begin to send."""
        if self.error is not None:
            message.work.complete(self.error)
            return
        data, peer = message.data, message.peer
        assert peer is not None
        inline = data.nbytes <= _INLINE_BYTES
        channel = -1
        if not inline:
            channel = self._num_sent % _NUM_TAGS
            self._num_sent += 1
        head = json.dumps([message.tag, message.dtype, data.nbytes, channel]).encode()
        self._mailbox.send(peer, head + _SPLIT + (data.tobytes() if inline else b""))
        if inline:
            message.work.complete()
        else:
            message.transfer = self._mailbox.start(data, peer, channel, receives=False)
            self._moving.append(message)
        self._serve(True)

    def receive(self, message: Message) -> None:
        """Expect a message."""
        if self.error is not None:
            message.work.complete(self.error)
            return
        self._expected.append(message)
        self._serve(True)

    def advance(self) -> bool:
        progressed = False
        for source, payload in self._mailbox.receive():
            head, _, data = payload.partition(_SPLIT)
            tag, dtype, nbytes, channel = json.loads(head)
            self._arrived.append(_Envelope(source, tag, dtype, nbytes, channel, data))
            progressed = True
        for message in list(self._expected):
            if (envelope := self._match(message)) is not None:
                self._expected.remove(message)
                self._open(message, envelope)
                progressed = True
        for message in list(self._moving):
            if message.transfer is not None and message.transfer.test():
                self._moving.remove(message)
                message.deliver()
                message.work.complete()
                progressed = True
        if self._expected or self._moving:
            self._check_limits()
        if not (self.busy or progressed):
            self._serve(False)
        return progressed

    def _match(self, message: Message) -> _Envelope | None:
        for envelope in self._arrived:
            if message.tag == envelope.tag and message.peer in (None, envelope.source):
                self._arrived.remove(envelope)
                return envelope
        return None

    def _open(self, message: Message, envelope: _Envelope) -> None:
        """Take the data of a message that has arrived."""
        message.work.source = envelope.source
        data = message.data
        problem = None
        if (message.dtype, data.nbytes) != (envelope.dtype, envelope.nbytes):
            problem = DisagreementError(
                f"{self._runtime.where}: {message.work.text} of {self._name} expects "
                f"{data.nbytes} bytes of {message.dtype}, but rank {envelope.source} of the group "
                f"sends {envelope.nbytes} bytes of {envelope.dtype}; let both ranks use tensors "
                "of one type and size"
            )
            data = np.empty(envelope.nbytes, np.uint8)
        if envelope.channel < 0:
            data[:] = np.frombuffer(envelope.data, np.uint8)
            message.transfer = Finished(None)
        else:
            message.transfer = self._mailbox.start(
                data, envelope.source, envelope.channel, receives=True
            )
        if problem is not None:
            message.work.complete(problem)
        else:
            self._moving.append(message)

    def _check_limits(self) -> None:
        """Fail messages that are overdue, or whose other rank has left."""
        now, left = time.monotonic(), self._loop.watch.left
        for message in [*self._expected, *self._moving]:
            error: WfbpError | None = None
            if now > message.work.deadline_s:
                error = StallError(
                    f"{self._runtime.where}: {message.work.text} of {self._name} timed out; the "
                    "other rank must make the matching call in time: raise the timeout of "
                    "init_process_group or new_group if it needs longer"
                )
            elif left and message.peer is not None:
                world = self._exchange.ranks[message.peer]
                since = self._left_since.setdefault(world, now) if world in left else now
                if now - since > _LEFT_GRACE_S:
                    error = PeerError(
                        f"{self._runtime.where}: {message.work.text} of {self._name} waits, but "
                        f"rank {world} {left[world]}; let both ranks exchange equally many messages"
                    )
            if error is not None:
                if message in self._expected:
                    self._expected.remove(message)
                else:
                    self._moving.remove(message)
                message.work.complete(error)

    @property
    def busy(self) -> bool:
        return bool(self._expected or self._moving or self._mailbox.sending)

    waiting_since = None  # each message has a limit, and ranks that it does not concern may leave

    def describe(self) -> str:
        pending = [message.work.text for message in (*self._expected, *self._moving)]
        return ", ".join(pending[:3])

    @property
    def is_clean(self) -> bool:
        """Whether nothing is under way."""
        return not (self.busy or self._arrived) and self.error is None

    def fail(self, error: WfbpError) -> None:
        if self.error is not None:
            return
        self.error = error
        pending = [*self._expected, *self._moving]
        self._expected.clear()
        self._moving.clear()
        for message in pending:
            message.work.complete(error)

    def close(self) -> None:
        """End the group on this rank."""
        self.fail(closed(self._runtime.where, self._name))
        self._serve(False)
