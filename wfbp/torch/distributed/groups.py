"""Makes process groups: numbers their ranks, waits for their members, reuses communicators."""

from __future__ import annotations

import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from wfbp.comm.backend import Work
from wfbp.comm.mpi.backend import MpiBackend
from wfbp.comm.mpi.exchange import Exchange
from wfbp.errors import BackendError, StallError
from wfbp.runtime import process
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.lanes import NOTICE
from wfbp.torch.distributed.process_group import ProcessGroup
from wfbp.torch.distributed.work import future_waits

_ARRIVAL = "process group wanted"
_NUM_TAGS = 1 << 15

_groups: Groups | None = None


def create(options: Any, _: object = None) -> ProcessGroup:
    """Make a process group for ``init_process_group`` and ``new_group``."""
    return of_runtime().make(
        options.group_rank,
        options.group_size,
        list(options.global_ranks_in_group),
        options.timeout,
        options.store,
    )


def of_runtime() -> Groups:
    """The groups of the current runtime, which is started if necessary."""
    global _groups
    process.start()
    runtime = process.current("init_process_group()")
    if _groups is None or _groups.runtime is not runtime:
        _groups = Groups(runtime)
    return _groups


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
        self._backend = backend
        # The runtime's number of each rank of PyTorch, and of this numbering.
        self._numbers: Sequence[int] = range(runtime.size)
        self._world = 0
        self._made: Counter[tuple[int, ...]] = Counter()
        self._open: dict[str, ProcessGroup] = {}
        # Of groups that were destroyed, by their ranks: communicators, and how far they got.
        self._idle: defaultdict[tuple[int, ...], dict[str, tuple[Exchange, int]]]
        self._idle = defaultdict(dict)
        # By group, what its members have told before they make it.
        self._arrived: defaultdict[str, dict[int, dict[str, int]]] = defaultdict(dict)
        runtime.thread.loop.handle_notices(_ARRIVAL, self._hear_arrival)
        runtime.thread.loop.handle_notices(NOTICE, self._hear)
        if not backend.progresses_alone:  # else naps do not delay the data
            runtime.thread.loop.is_awaited = future_waits.is_blocked

    def make(
        self,
        rank: int,
        size: int,
        members: list[int],
        timeout: timedelta,
        store: Store,
    ) -> ProcessGroup:
        """Make a group of ``members`` (none: all), as PyTorch numbers them."""
        if not members:
            self._number_ranks(rank, size)
            members = list(range(size))
        ranks = tuple(self._numbers[member] for member in members)
        # The group's name is of no use: PyTorch counts this rank's other groups in it.
        self._made[ranks] += 1
        who = "all ranks" if len(ranks) == self.runtime.size else f"ranks {list(ranks)}"
        key = f"process group {self._world}.{self._made[ranks]} of {who}"
        exchange = self._exchange(key, ranks, timeout)
        group = ProcessGroup(self.runtime, exchange, key, timeout, store, self._closed)
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
        label = "init_process_group()"
        payload = f"{rank} {self._world}".encode()
        told = [item.split() for item in runtime.channel.exchange(payload, label)]
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
        idle = {old: position for old, (_, position) in self._idle[ranks].items()}
        runtime = self.runtime
        arrival = _Arrival(self, key, ranks, idle, timeout.total_seconds())
        offers = runtime.thread.call(arrival.begin, f"making {key}", object())
        common = set.intersection(*(set(offer.items()) for offer in offers.values()))
        if common:
            oldest, _ = min(common)
            return self._idle[ranks].pop(oldest)[0]
        # All ranks are here, so this does not take long. The communication thread keeps running.
        return self._backend.among(ranks, zlib.crc32(key.encode()) % _NUM_TAGS)

    def _closed(self, group: ProcessGroup) -> None:
        """A group ends on this rank."""
        if self._open.pop(group.key, None) is None:
            return
        position = group.collectives.position
        if position >= 0 and group.messages.is_clean:
            exchange = group.exchange
            self._idle[exchange.ranks][group.key] = exchange, position

    # Under the progress lock.

    def announce(self, key: str, idle: dict[str, int]) -> None:
        """Tell the other ranks that this one wants a group."""
        self._arrived[key][self.runtime.rank] = idle
        self.runtime.thread.loop.send_notice({"kind": _ARRIVAL, "group": key, "idle": idle})

    def arrived(self, key: str, ranks: Sequence[int]) -> dict[int, dict[str, int]]:
        """The offers of the members that want a group."""
        self.runtime.thread.loop.read_notices()
        told = self._arrived[key]
        return {rank: told[rank] for rank in ranks if rank in told}

    def _hear_arrival(self, sender: int, notice: dict[str, Any]) -> None:
        self._arrived[notice["group"]][sender] = notice["idle"]

    def _hear(self, _: int, notice: dict[str, Any]) -> None:
        if (group := self._open.get(notice["group"])) is not None:
            group.collectives.hear(notice["from"], notice)


class _Arrival(Work[dict[int, dict[str, int]]]):
    """Waits until all members of a group want it."""

    def __init__(
        self,
        groups: Groups,
        key: str,
        ranks: Sequence[int],
        idle: dict[str, int],
        timeout_s: float,
    ) -> None:
        self._groups, self._key, self._ranks, self._idle = groups, key, ranks, idle
        self._timeout_s = timeout_s
        self._told: dict[int, dict[str, int]] = {}

    def begin(self) -> _Arrival:
        self._deadline_s = time.monotonic() + self._timeout_s
        self._groups.announce(self._key, self._idle)
        return self

    def test(self) -> bool:
        self._told = self._groups.arrived(self._key, self._ranks)
        if len(self._told) == len(self._ranks):
            del self._groups._arrived[self._key]
            return True
        if time.monotonic() > self._deadline_s:
            missing = ", ".join(str(rank) for rank in self._ranks if rank not in self._told)
            raise StallError(
                f"{self._groups.runtime.where}: {self._key} was not made within "
                f"{self._timeout_s:g} s, because it was not called by rank {missing}. Every rank "
                "of a group must make it, in the same order as other groups of these ranks"
            )
        return False

    @property
    def result(self) -> dict[int, dict[str, int]]:
        return self._told
