"""Makes every rank launch the collectives of several communicators on a GPU in one order.

A collective's kernel waits on the GPU for those of other ranks. If a GPU cannot run two such
kernels at once, ranks that launch them in different orders deadlock. Two lanes have no common order
by themselves: rank 0 launches what is ready after it has told the others the lane, and they launch
that lane's next collective before any other. A single lane needs no order.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from wfbp.comm.backend import HostBackend, Mailbox
from wfbp.comm.device.backend import DeviceBackend, DeviceWork
from wfbp.comm.waiting import Check, wait


@dataclass(slots=True)
class _Lane:
    """Collectives of a lane; the first ``num_free`` were launched before the order began."""

    num_launched: int = 0
    num_free: int = 0
    waiting: deque[OrderedWork] = field(default_factory=deque)


class LaunchOrder:
    """The order of one runtime's lanes on one device. Used under the progress lock.
    ``advance_others`` advances all lanes while a call waits for one collective."""

    def __init__(self, rank: int, size: int, advance_others: Callable[[], None]) -> None:
        self._rank, self._size = rank, size
        self.advance_others = advance_others
        self._lanes: list[_Lane] = []
        self._mailbox: Mailbox | None = None
        self._turns: deque[int] = deque()
        """Lane numbers: on rank 0 as they became ready, elsewhere as rank 0 sent them."""

    def admit(
        self,
        carrier: DeviceBackend,
        host: HostBackend,
        timeout_s: float | None = None,
        check: Check | None = None,
    ) -> None:
        """Add a lane that has sent nothing yet. Collective and blocking."""
        # A rank may be in the middle of a step: what any rank has launched of the first lane is
        # launched on all ranks before the order begins.
        if len(self._lanes) == 1:
            mine = json.dumps(self._lanes[0].num_launched).encode()
            counts = wait(host.all_gather_bytes(mine), timeout_s=timeout_s, check=check)
            self._lanes[0].num_free = max(map(json.loads, counts))
            self._mailbox = host.mailbox()
        carrier.in_order = partial(self._launch, len(self._lanes))
        self._lanes.append(_Lane())

    def _launch(self, number: int, start: Callable[[], DeviceWork], nbytes: int) -> DeviceWork:
        """Start a lane's next collective when its turn has come."""
        lane = self._lanes[number]
        # One lane's collectives are launched in the same order on all ranks anyway.
        if self._mailbox is None:
            lane.num_launched += 1
            return start()
        work = OrderedWork(self, start, nbytes)
        lane.waiting.append(work)
        if self._rank == 0:
            self._turns.append(number)
        self.progress()
        return work

    def progress(self) -> None:
        """Launch the collectives whose turn it is."""
        assert self._mailbox is not None
        if self._rank:
            for _, payload in self._mailbox.receive():
                self._turns.extend(np.frombuffer(payload, np.uint32).tolist())
        if not self._catch_up():
            return
        due = self._due()
        if self._rank == 0 and due:  # before launching, which may wait for other ranks
            payload = np.asarray(due, np.uint32).tobytes()
            for peer in range(1, self._size):
                self._mailbox.send(peer, payload)
        for number in due:
            self._launch_next(self._lanes[number])

    def _catch_up(self) -> bool:
        """Launch what other ranks had launched when the order began; whether that is done."""
        first = self._lanes[0]
        while first.waiting and first.num_launched < first.num_free:
            if self._rank == 0:
                self._turns.remove(0)
            self._launch_next(first)
        return first.num_launched >= first.num_free

    def _due(self) -> list[int]:
        """Remove and return the turns whose collectives are ready."""
        due: list[int] = []
        # A turn whose collective is not ready here holds up all later ones: that is the order.
        left = [len(lane.waiting) for lane in self._lanes]
        while self._turns and left[self._turns[0]]:
            left[self._turns[0]] -= 1
            due.append(self._turns.popleft())
        return due

    @staticmethod
    def _launch_next(lane: _Lane) -> None:
        lane.num_launched += 1
        lane.waiting.popleft().launch()

    def close(self) -> None:
        """Close the mailbox. Collective; no collective may wait for its turn."""
        if self._mailbox is not None:
            self._mailbox.close()


class OrderedWork(DeviceWork):
    """A collective that is launched in its turn."""

    def __init__(self, order: LaunchOrder, start: Callable[[], DeviceWork], nbytes: int) -> None:
        self._order = order
        self._start = start
        self._work: DeviceWork | None = None
        self.nbytes = nbytes

    def launch(self) -> None:
        """Start it; its turn has come."""
        self._work = self._start()

    @property
    def activity(self) -> int:
        return 0 if self._work is None else 1 + self._work.activity

    def issued(self) -> bool:
        if self._work is None:
            self._order.progress()
        return self._work is not None and self._work.issued()

    def test(self) -> bool:
        if not self.issued() and self._work is None:
            self._order.advance_others()
        return self._work is not None and self._work.test()
