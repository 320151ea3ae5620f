"""Messages between two ranks of a process group: send, receive, and receive from any source.

A sender announces each message in an envelope with its tag, type and size, which contains the
data if they are small. The receiver matches envelopes with its own calls, in each sender's order,
and then fetches the data. A difference of type or size is therefore an error of the receiver.
"""

from __future__ import annotations

import json
from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Finished, Work
from wfbp.comm.mpi.messages import PointToPoint
from wfbp.errors import DisagreementError
from wfbp.torch.distributed.work import GroupWork

_INLINE_BYTES = 4096
_NUM_TAGS = 1 << 14
_SPLIT = b"\n"


class _Envelope(NamedTuple):
    source: int
    tag: int
    dtype: str
    nbytes: int
    channel: int  # tag of the message with the data; -1: they are here
    data: bytes


class Messages:
    """The envelopes of one group, under the progress lock."""

    def __init__(self, mailbox: PointToPoint) -> None:
        self._mailbox = mailbox
        self._arrived: deque[_Envelope] = deque()
        self._num_sent = 0

    def send(self, data: Buffer, dtype: torch.dtype, peer: int, tag: int) -> Work[None]:
        """Send a message; complete once its memory may be changed."""
        inline = data.nbytes <= _INLINE_BYTES
        channel = -1
        if not inline:
            channel = self._num_sent % _NUM_TAGS
            self._num_sent += 1
        head = json.dumps([tag, str(dtype), data.nbytes, channel]).encode()
        self._mailbox.send(peer, head + _SPLIT + (data.tobytes() if inline else b""))
        if inline:
            return Finished(None)
        return self._mailbox.start(data, peer, channel, receives=False)

    def read(self) -> bool:
        """Read the envelopes that have arrived; whether there are any."""
        arrived = self._mailbox.receive()
        for source, payload in arrived:
            head, _, data = payload.partition(_SPLIT)
            tag, dtype, nbytes, channel = json.loads(head)
            self._arrived.append(_Envelope(source, tag, dtype, nbytes, channel, data))
        return bool(arrived)

    def match(self, peer: int | None, tag: int) -> _Envelope | None:
        """Take the first envelope of a rank (None: any) with a tag."""
        for envelope in self._arrived:
            if tag == envelope.tag and peer in (None, envelope.source):
                self._arrived.remove(envelope)
                return envelope
        return None

    def fetch(self, envelope: _Envelope, data: Buffer) -> Work[None]:
        """Receive what an envelope announces."""
        if envelope.channel >= 0:
            return self._mailbox.start(data, envelope.source, envelope.channel, receives=True)
        data[:] = np.frombuffer(envelope.data, np.uint8)
        return Finished(None)

    @property
    def sending(self) -> bool:
        """Whether envelopes are under way."""
        return self._mailbox.sending

    @property
    def is_empty(self) -> bool:
        """Whether all messages have been received."""
        return not (self._arrived or self._mailbox.sending)


class Receipt(Work[None]):
    """A message that this rank expects; raises ``DisagreementError`` for a wrong one."""

    def __init__(
        self,
        messages: Messages,
        data: Buffer,
        dtype: torch.dtype,
        peer: int | None,
        tag: int,
        work: GroupWork,
    ) -> None:
        self._messages, self._data, self._dtype = messages, data, str(dtype)
        self._peer, self._tag, self._work = peer, tag, work
        self._transfer: Work[None] | None = None

    def test(self) -> bool:
        if self._transfer is None:
            envelope = self._messages.match(self._peer, self._tag)
            if envelope is None:
                return False
            self._work.source = envelope.source
            if (self._dtype, self._data.nbytes) != (envelope.dtype, envelope.nbytes):
                self._messages.fetch(envelope, np.empty(envelope.nbytes, np.uint8))
                raise DisagreementError(
                    f"expects {self._data.nbytes} bytes of {self._dtype}, but rank "
                    f"{envelope.source} of the group sends {envelope.nbytes} bytes of "
                    f"{envelope.dtype}; let both ranks use tensors of one type and size"
                )
            self._transfer = self._messages.fetch(envelope, self._data)
        return self._transfer.test()

    @property
    def result(self) -> None:
        return None
