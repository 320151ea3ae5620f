"""The base of lanes that seldom have work."""

from __future__ import annotations

from wfbp.runtime.progress.lane_protocol import LaneProtocol
from wfbp.runtime.progress.loop import ProgressLoop
from wfbp.runtime.progress.stall import ALL_RANKS, Members


class OccasionalLane(LaneProtocol):
    """A lane that the loop serves only while there is work for it."""

    expected_s = None
    has_room = False
    has_events = False

    def __init__(self, loop: ProgressLoop, members: Members = ALL_RANKS) -> None:
        self._loop = loop
        self._members = members
        self._served = False

    @property
    def owes_work(self) -> bool:
        return False

    def _serve(self, wanted: bool) -> None:
        if wanted and not self._served:
            self._loop.add_lane(self, self._members)
        elif self._served and not wanted:
            self._loop.remove_lane(self)
        self._served = wanted
