"""Messages between two ranks, on a library whose queues are full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from wfbp.comm.mpi.point_to_point import PointToPoint


class Request:
    """Ends at some test after it began."""

    def __init__(self, num_tests: int) -> None:
        self.num_tests = num_tests

    def Test(self) -> bool:  # noqa: N802
        self.num_tests -= 1
        return self.num_tests <= 0


class Comm:
    """Takes messages slowly."""

    rank, size = 0, 3

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.freed = False

    def Isend(self, *_: Any) -> Request:  # noqa: N802
        self.requests.append(Request(20))
        return self.requests[-1]

    def Free(self) -> None:  # noqa: N802
        self.freed = True


def test_notices_are_sent_before_the_communicator_is_freed() -> None:
    """A rank that leaves makes no more progress: at 64 ranks, others waited for its goodbye."""
    comm = Comm()
    mpi: Any = SimpleNamespace(Status=lambda: None, BYTE="byte", Exception=OSError)
    messages = PointToPoint(mpi, comm)  # type: ignore[arg-type]
    for peer in (1, 2):
        messages.send(peer, b"bye")
    assert messages.sending
    messages.close()
    assert comm.freed
    assert all(request.num_tests <= 0 for request in comm.requests)
