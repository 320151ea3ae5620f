"""The interface of lanes to the progress loop."""

from __future__ import annotations

from typing import Protocol

from wfbp.comm.backend import Backend
from wfbp.errors import WfbpError


class LaneProtocol(Protocol):
    """Moves communication of one kind on; everything is used under the progress lock."""

    backend: Backend

    @property
    def polls(self) -> bool:
        """Whether it looks for more than the backend's works, such as messages of other ranks or
        events of a device: the loop then never sleeps in the backend."""

    def advance(self) -> bool:
        """Move on; True if something was started or completed."""

    @property
    def busy(self) -> bool:
        """Whether a collective is under way."""

    @property
    def owes_work(self) -> bool:
        """Whether other ranks wait for something that has been promised to them."""

    @property
    def has_events(self) -> bool:
        """Whether events wait to be read."""

    @property
    def has_room(self) -> bool:
        """Whether a group that became ready now could start."""

    @property
    def expected_s(self) -> float | None:
        """Expected duration of the operation under way, None if unknown."""

    @property
    def waiting_since(self) -> float | None:
        """When the oldest collective under way was started (``time.monotonic``)."""

    def describe(self) -> str:
        """The current place, for messages."""

    def fail(self, error: WfbpError) -> None:
        """Abandon the step, and raise the error in the thread that waits for it."""
