"""Uses of the MPI library's own functions: payloads of any length, and the extension."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

from wfbp import native
from wfbp.comm.mpi.point_to_point import PointToPoint
from wfbp.comm.mpi.transfers import Channel, Task
from wfbp.errors import BackendError

if TYPE_CHECKING:
    from types import ModuleType


class BytesTask(Task):
    """Every rank's payload, of any length: each rank sends its own to every other."""

    def __init__(self, channel: Channel, payload: bytes) -> None:
        self.nbytes = len(payload)
        self._channel = channel
        self._payloads = {channel.rank: payload}
        self._unmatched = set(channel.peers)  # a later task may use the tag again

    def start(self) -> None:
        channel = self._channel
        # The tag is chosen here, because ranks agree on the order of starts.
        self._messages = PointToPoint(channel.mpi, channel.comm, channel.next_tag())
        for peer in channel.peers:
            self._messages.send(peer, self._payloads[channel.rank])

    def step(self) -> bool:
        self._payloads.update(self._messages.receive(self._unmatched))
        return len(self._payloads) == self._channel.size and not self._messages.sending

    def value(self) -> list[bytes]:
        """The payloads in rank order."""
        return [self._payloads[rank] for rank in range(self._channel.size)]


def load_transfers(mpi: ModuleType) -> native.Transfers:
    """Transfers that call the MPI library that mpi4py has loaded; or ``BackendError``."""
    try:
        # MPICH calls COMM_SELF's error handler for a test of several messages: it must not end
        # the job.
        if mpi.COMM_SELF.Get_errhandler() != mpi.ERRORS_RETURN:
            raise ValueError(
                "the error handler of COMM_SELF is not ERRORS_RETURN, mpi4py's default"
            )
        library = ctypes.CDLL(mpi.__file__)  # which finds the library that it is linked to
        sizes = {mpi._sizeof(kind) for kind in (mpi.Comm, mpi.Datatype, mpi.Request)}
        if len(sizes) > 1:
            raise ValueError(f"handles of {sorted(sizes)} bytes")
        # A status keeps its error at an offset that differs between libraries: look for a marker.
        status, marker = mpi.Status(), 0x5A17C0DE
        status.Set_error(marker)
        raw = ctypes.string_at(mpi._addressof(status), mpi._sizeof(mpi.Status))
        error_at = raw.find(marker.to_bytes(4, sys.byteorder))
        if error_at < 0:
            raise ValueError("a status keeps no error")

        def address(function: Any) -> int:
            return ctypes.cast(function, ctypes.c_void_p).value or 0

        return native.Transfers(
            isend=address(library.MPI_Isend),
            irecv=address(library.MPI_Irecv),
            testsome=address(library.MPI_Testsome),
            handle_bytes=sizes.pop(),
            byte=mpi._handleof(mpi.BYTE),
            status_bytes=mpi._sizeof(mpi.Status),
            error_at=error_at,
            success=mpi.SUCCESS,
            error=mpi.Exception,
        )
    except (OSError, AttributeError, ValueError) as error:
        raise BackendError(
            f"the functions of the MPI library cannot be called directly, which wfbp needs: {error}"
        ) from error
