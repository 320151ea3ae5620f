"""Makes process groups: numbers their ranks, waits for their members, reuses communicators."""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from wfbp.comm.mpi.backend import MpiBackend
from wfbp.comm.mpi.exchange import Exchange
from wfbp.errors import BackendError, StallError
from wfbp.runtime import process
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.lane import NOTICE
from wfbp.torch.distributed.process_group import ProcessGroup
from wfbp.torch.distributed.work import future_waits

_NUM_TAGS = 1 << 15
_LOOK_S = 1e-3

_groups: Groups | None = None
_world = 0
"""How often all ranks were numbered. Over all runtimes, because a program may pass one store to
several, and keys in it must be new."""


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

    Any training thread may call :meth:`make`; the rest runs under the progress lock.
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
        # The runtime's number of each rank of PyTorch.
        self._numbers: Sequence[int] = range(runtime.size)
        self._made: Counter[tuple[int, ...]] = Counter()
        self._open: dict[str, ProcessGroup] = {}
        # Communicators of groups that were destroyed, by their ranks.
        self._idle: defaultdict[tuple[int, ...], dict[str, Exchange]] = defaultdict(dict)
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
        self._made[ranks] += 1
        who = "all ranks" if len(ranks) == self.runtime.size else f"ranks {list(ranks)}"
        key = f"process group {_world}.{self._made[ranks]} of {who}"
        # Not by PyTorch's name of the group: it counts this rank's other groups.
        store = PrefixStore(f"{key}/", options.store._underlying_non_prefix_store)
        exchange = self._exchange(key, ranks, options.timeout, store)
        group = ProcessGroup(self.runtime, exchange, key, options.timeout, store, self._closed)
        self._open[key] = group
        return group

    def _number_ranks(self, rank: int, size: int) -> None:
        """Learn which rank of the runtime each rank of PyTorch is; collective."""
        global _world
        runtime = self.runtime
        if size != runtime.size:
            raise ValueError(
                f"{runtime.where}: the process group is to have {size} ranks, but MPI started "
                f"{runtime.size}. Start the program by: mpirun -n {size} python PROGRAM, without "
                "torchrun; or, for some of the ranks, call wfbp.init(comm=[...]) before"
            )
        payload = f"{rank} {_world}".encode()
        told = [item.split() for item in runtime.channel.exchange(payload, "init_process_group()")]
        numbers = [int(number) for number, _ in told]
        if sorted(numbers) != list(range(size)):
            raise ValueError(
                f"{runtime.where}: the ranks given to init_process_group are {numbers}; expected "
                f"each of 0 to {size - 1} once"
            )
        self._numbers = [numbers.index(number) for number in range(size)]
        _world = 1 + max(int(world) for _, world in told)
        self._made.clear()

    def _exchange(
        self, key: str, ranks: tuple[int, ...], timeout: timedelta, store: Store
    ) -> Exchange:
        """The communicators of a group, once all of its ranks want it: new ones, or those of a
        group that all of them have destroyed in the same state."""
        timeout_s = timeout.total_seconds()
        idle = {old: exchange.position for old, exchange in self._idle[ranks].items()}
        names, end_s = [str(rank) for rank in ranks], time.monotonic() + timeout_s
        store.set(str(self.runtime.rank), json.dumps(idle))
        while not store.check(names):
            self.runtime.check()
            missing = [rank for rank in ranks if not store.check([str(rank)])]
            has_left = [rank for rank in missing if rank in self._loop.watch.left]
            if has_left or time.monotonic() > end_s:
                raise StallError(
                    f"{self.runtime.where}: {key} was not made within {timeout_s:g} s, because it "
                    f"was not called by rank {', '.join(map(str, missing))}. Every rank of a group "
                    "must make it, in the same order as other groups of these ranks"
                )
            time.sleep(_LOOK_S)
        offers = [json.loads(store.get(name)) for name in names]
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

    def _hear(self, _: int, notice: dict[str, Any]) -> None:
        if (group := self._open.get(notice["group"])) is not None:
            group.lane.hear(notice)
