"""Makes process groups: numbers their ranks, waits for their members, reuses communicators."""

from __future__ import annotations

import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from wfbp.comm.backend import Work
from wfbp.comm.mpi.backend import MpiBackend
from wfbp.comm.mpi.exchange import Exchange
from wfbp.errors import BackendError, StallError
from wfbp.runtime import process
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.lane import NOTICE
from wfbp.torch.distributed.process_group import ProcessGroup
from wfbp.torch.distributed.work import future_waits

_ARRIVAL = "process group wanted"
_NUM_TAGS = 1 << 15

Positions = dict[str, int]
"""How far groups that were destroyed had come, by their keys."""

_groups: Groups | None = None


def create(options: Any, _: object = None) -> ProcessGroup:
    """Make a process group for ``init_process_group`` and ``new_group``."""
    global _groups
    process.start()
    runtime = process.current("init_process_group()")
    if _groups is None or _groups.runtime is not runtime:
        _groups = Groups(runtime)
    return _groups.make(options)


class Groups:
    """The process groups of one runtime.

    Any training thread may call :meth:`make`; the notices of other ranks come under the progress
    lock.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        backend = runtime.backend
        if not isinstance(backend, MpiBackend):
            raise BackendError(
                f"{runtime.where}: process groups need MPI, but the runtime was started with "
                f"{type(backend).__name__}; call wfbp.init() without a backend"
            )
        self._backend, self._loop = backend, runtime.thread.loop
        # The runtime's number of each rank of PyTorch, and of this numbering.
        self._numbers: Sequence[int] = range(runtime.size)
        self._world = 0
        self._made: Counter[tuple[int, ...]] = Counter()
        self._open: dict[str, ProcessGroup] = {}
        # Communicators of groups that were destroyed, by their ranks.
        self._idle: defaultdict[tuple[int, ...], dict[str, Exchange]] = defaultdict(dict)
        # What the members of a group that is being made have told.
        self._arrived: defaultdict[str, dict[int, Positions]] = defaultdict(dict)
        self._loop.handle_notices(_ARRIVAL, self._hear_arrival)
        self._loop.handle_notices(NOTICE, self._hear)
        if not backend.progresses_alone:  # else naps do not delay the data
            self._loop.is_awaited = future_waits.is_blocked

    def make(self, options: Any) -> ProcessGroup:
        """Make the group that PyTorch describes; one without ranks has all of them."""
        members = list(options.global_ranks_in_group)
        if not members:
            self._number_ranks(options.group_rank, options.group_size)
            members = list(range(options.group_size))
        ranks = tuple(self._numbers[member] for member in members)
        # The group's name is of no use: PyTorch counts this rank's other groups in it.
        self._made[ranks] += 1
        who = "all ranks" if len(ranks) == self.runtime.size else f"ranks {list(ranks)}"
        key = f"process group {self._world}.{self._made[ranks]} of {who}"
        exchange = self._exchange(key, ranks, options.timeout)
        group = ProcessGroup(
            self.runtime, exchange, key, options.timeout, options.store, self._closed
        )
        self._open[key] = group
        return group

    def _number_ranks(self, rank: int, size: int) -> None:
        """Learn which rank of the runtime each rank of PyTorch is; collective."""
        runtime = self.runtime
        if size != runtime.size:
            raise ValueError(
                f"{runtime.where}: the process group is to have {size} ranks, but MPI started "
                f"{runtime.size}. Start the program by: mpirun -n {size} python PROGRAM, without "
                "torchrun; or, for some of the ranks, call wfbp.init(comm=[...]) before"
            )
        payload = f"{rank} {self._world}".encode()
        told = [item.split() for item in runtime.channel.exchange(payload, "init_process_group()")]
        numbers = [int(number) for number, _ in told]
        if sorted(numbers) != list(range(size)):
            raise ValueError(
                f"{runtime.where}: the ranks given to init_process_group are {numbers}; expected "
                f"each of 0 to {size - 1} once"
            )
        self._numbers = [numbers.index(number) for number in range(size)]
        self._world = 1 + max(int(world) for _, world in told)
        self._made.clear()

    def _exchange(self, key: str, ranks: tuple[int, ...], timeout: timedelta) -> Exchange:
        """The communicators of a group, once all of its ranks want it."""
        idle = {old: exchange.position for old, exchange in self._idle[ranks].items()}
        deadline_s = time.monotonic() + timeout.total_seconds()

        def begin() -> _Arrival:
            self._hear_arrival(self.runtime.rank, {"group": key, "idle": idle})
            self._loop.send_notice({"kind": _ARRIVAL, "group": key, "idle": idle})
            return _Arrival(look)

        def look() -> list[Positions]:
            self._loop.read_notices()
            told = self._arrived[key]
            missing = [rank for rank in ranks if rank not in told]
            if not missing:
                return list(self._arrived.pop(key).values())
            if time.monotonic() > deadline_s:
                raise StallError(
                    f"{self.runtime.where}: {key} was not made within "
                    f"{timeout.total_seconds():g} s, because it was not called by rank "
                    f"{', '.join(map(str, missing))}. Every rank of a group must make it, in the "
                    "same order as other groups of these ranks"
                )
            return []

        offers = self.runtime.thread.call(begin, f"making {key}", object())
        if common := set.intersection(*(set(offer.items()) for offer in offers)):
            oldest, _ = min(common)
            return self._idle[ranks].pop(oldest)
        # All ranks are here, so this does not take long; the communication thread goes on.
        return self._backend.among(ranks, zlib.crc32(key.encode()) % _NUM_TAGS)

    # Under the progress lock.

    def _closed(self, group: ProcessGroup) -> None:
        """A group ends on this rank."""
        if self._open.pop(group.key, None) is not None and group.lane.is_clean:
            self._idle[group.exchange.ranks][group.key] = group.exchange

    def _hear_arrival(self, sender: int, notice: dict[str, Any]) -> None:
        self._arrived[notice["group"]][sender] = notice["idle"]

    def _hear(self, _: int, notice: dict[str, Any]) -> None:
        if (group := self._open.get(notice["group"])) is not None:
            group.lane.hear(notice)


class _Arrival(Work[list[Positions]]):
    """Waits until all members of a group want it; ``look`` returns what they have told."""

    def __init__(self, look: Callable[[], list[Positions]]) -> None:
        self._look = look
        self._told: list[Positions] = []

    def test(self) -> bool:
        self._told = self._look()
        return bool(self._told)

    @property
    def result(self) -> list[Positions]:
        return self._told
