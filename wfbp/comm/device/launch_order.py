"""Makes every rank run the collectives of several communicators on a GPU in one order.

A collective's kernel waits on the GPU for those of other ranks. If a GPU cannot run two such
kernels at once, ranks that run them in different orders deadlock. Two lanes have no common order
by themselves: rank 0 launches what is ready after it has told the others the lane, and they launch
that lane's next collective before any other. On the GPU each collective waits for that of another
lane before it, which may still wait for its gradients. A single lane needs no order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from wfbp.comm.backend import HostBackend
from wfbp.comm.memory import Event
from wfbp.comm.waiting import Check, exchange_values


@dataclass(slots=True)
class _Lane:
    """Collectives of a lane; the first ``num_free`` were launched before the order began."""

    num_launched: int = 0
    num_free: int = 0
    waiting: deque[Callable[[], None]] = field(default_factory=deque)

    def launch_next(self) -> None:
        self.num_launched += 1
        self.waiting.popleft()()


class LaunchOrder:
    """The order of one runtime's lanes on one device. Used under the progress lock.

    ``tell`` sends rank 0's turns to the other ranks' :meth:`hear`. ``advance_others`` advances all
    lanes while a call waits for one collective.
    """

    def __init__(
        self, rank: int, tell: Callable[[list[int]], object], advance_others: Callable[[], None]
    ) -> None:
        self._rank, self._tell = rank, tell
        self.advance_others = advance_others
        self._lanes: list[_Lane] = []
        self.last: tuple[int, Event] | None = None
        """The lane of the latest launched collective, and an event at its end."""
        self._turns: deque[int] = deque()
        """Lane numbers: on rank 0 as they became ready, elsewhere as rank 0 sent them."""

    def admit(
        self, host: HostBackend, timeout_s: float | None = None, check: Check | None = None
    ) -> int:
        """Add a lane that has sent nothing yet, and return its number. Collective and blocking."""
        # A rank may be in the middle of a step: what any rank has launched of the first lane is
        # launched on all ranks before the order begins.
        if len(self._lanes) == 1:
            mine = self._lanes[0].num_launched
            counts = exchange_values(host, mine, timeout_s=timeout_s, check=check)
            self._lanes[0].num_free = max(counts)
        self._lanes.append(_Lane())
        return len(self._lanes) - 1

    def launch(self, number: int, start: Callable[[], None]) -> None:
        """Start a lane's next collective when its turn has come."""
        lane = self._lanes[number]
        lane.waiting.append(start)
        # One lane's collectives are launched in the same order on all ranks anyway.
        if len(self._lanes) == 1:
            lane.launch_next()
            return
        if self._rank == 0:
            self._turns.append(number)
        self.progress()

    def hear(self, turns: list[int]) -> None:
        """Learn the next turns from rank 0."""
        self._turns.extend(turns)

    def progress(self) -> None:
        """Launch the collectives whose turn it is."""
        # First those that other ranks had launched when the order began.
        first = self._lanes[0]
        while first.num_launched < first.num_free:
            if not first.waiting:
                return
            if self._rank == 0:
                self._turns.remove(0)
            first.launch_next()
        # A turn whose collective is not ready here holds up all later ones: that is the order.
        due: list[int] = []
        left = [len(lane.waiting) for lane in self._lanes]
        while self._turns and left[self._turns[0]]:
            left[self._turns[0]] -= 1
            due.append(self._turns.popleft())
        if self._rank == 0 and due:  # before launching, which may wait for other ranks
            self._tell(due)
        for number in due:
            self._lanes[number].launch_next()
