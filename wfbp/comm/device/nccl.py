"""The backend on NCCL, through CuPy's bindings; each has its own communicator.

All ranks connect in the constructor, where time limits apply: by default NCCL from 2.22 on waits
for peers in the first call of each algorithm (``NCCL_RUNTIME_CONNECT=1``). Unlike the host, NCCL
scales averages before adding, and may round partial sums in half precision. Unequal blocks are
reduced by an all-reduce, and gathered by a group of broadcasts.

Threads: one thread at a time uses a backend; :class:`Joining` makes the communicator on another.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from wfbp.comm.backend import HostBackend, Work
from wfbp.comm.device.backend import Blocks, DeviceBackend, DeviceWork
from wfbp.comm.device.device import Device
from wfbp.comm.waiting import Check, wait
from wfbp.core.types import Op, item_bytes
from wfbp.errors import BackendError

OPS = {Op.SUM: 0, Op.AVERAGE: 4}
"""``ncclRedOp_t``; the bindings take these numbers, but lack names for some. Gradients need no
others."""

BYTE = 1
DTYPES = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
"""``ncclDataType_t``."""

_ABORT_S = 10.0
_IN_PROGRESS = 7
"""``ncclInProgress``: no error."""

log = logging.getLogger("wfbp")


class NcclBackend(DeviceBackend):
    """Collectives of one NCCL communicator; ``BackendError`` if it cannot be made. Making one is
    collective and blocking; NCCL has half of ``timeout_s`` to connect the ranks."""

    def __init__(
        self,
        device: Device,
        host: HostBackend,
        nccl: Any,
        timeout_s: float | None = None,
        check: Check | None = None,
    ) -> None:
        super().__init__(device, host)
        self._nccl = nccl
        self._timeout_s = timeout_s
        self._who = f"rank {self.rank} of {self.size}"
        self._over = False
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        mine, problem = b"", None
        if self.rank == 0:
            try:
                mine = nccl.get_unique_id()
            except Exception as error:  # told below: the other ranks wait for the id
                problem = error
        uid = wait(host.all_gather_bytes(mine), timeout_s=timeout_s)[0]
        if not uid:
            reason = "rank 0 has no id for them" if problem is None else _reason(problem)
            raise BackendError(_not_connected(self._who, reason)) from problem
        size, rank = self.size, self.rank

        def make() -> Any:
            device.use()
            return nccl.NcclCommunicator(size, uid, rank)

        # Half of the time: a rank on which NCCL has failed waits for the others, and is to hear
        # from those that wait for it in NCCL before its own time is over.
        limit_s = None if timeout_s is None else timeout_s / 2
        self._comm = wait(Joining(make, self._who), timeout_s=limit_s, check=check)
        if host.local_rank == 0:
            log.info("%s: NCCL %d", self._who, nccl.get_version())

    def _all_reduce(self, work: DeviceWork, dtype: str, op: Op) -> None:
        address = self.device.address(work.data)
        count = work.nbytes // item_bytes(dtype)
        self._comm.allReduce(address, address, count, DTYPES[dtype], OPS[op], self.stream)
        work.conclude()

    def _reduce_scatter(self, work: DeviceWork, blocks: Blocks, dtype: str, op: Op) -> None:
        if not blocks.are_equal:
            self._all_reduce(work, dtype, op)
            return
        address = self.device.address(work.data)
        start, stop = blocks.ranges[self.rank]
        count = (stop - start) // item_bytes(dtype)
        types = DTYPES[dtype], OPS[op]
        self._comm.reduceScatter(address, address + start, count, *types, self.stream)
        work.conclude()

    def _all_gather(self, work: DeviceWork, blocks: Blocks) -> None:
        address = self.device.address(work.data)
        if blocks.are_equal:
            start, stop = blocks.ranges[self.rank]
            self._comm.allGather(address + start, address, stop - start, BYTE, self.stream)
            work.conclude()
            return
        # No sends and receives: NCCL connects these at first use despite NCCL_RUNTIME_CONNECT=0.
        self._nccl.groupStart()
        try:
            for root, (start, stop) in enumerate(blocks.ranges):
                if stop > start:
                    place = address + start
                    self._comm.broadcast(place, place, stop - start, BYTE, root, self.stream)
        finally:
            self._nccl.groupEnd()
        work.conclude()

    def check(self) -> None:
        if self._over:
            return
        try:
            self._comm.check_async_error()
        except Exception as error:
            if isinstance(error, KeyError) and error.args == (_IN_PROGRESS,):
                return
            self.give_up()
            raise BackendError(f"{self._who}: NCCL failed: {_reason(error)}") from error

    def give_up(self) -> None:
        if not self._over:
            self._over = True
            # By a thread, because an abort that finds NCCL stuck does not return.
            aborting = threading.Thread(target=self._comm.abort, name="wfbp-abort", daemon=True)
            try:
                aborting.start()
            except RuntimeError:  # the interpreter is ending, and starts no thread any more
                self._comm.abort()
                return
            aborting.join(_ABORT_S)
            if aborting.is_alive():
                log.error("%s: NCCL has not aborted within %g s", self._who, _ABORT_S)

    def close(self) -> None:
        """Destroy the communicator. Collective; waits for incomplete works."""
        # NCCL does not wait for kernels on the streams of its callers.
        if not self._over and not self.settles(self._timeout_s):
            self.give_up()
        if not self._over:
            self._over = True
            self.device.use()
            self._comm.destroy()
        self.host.close()


class Joining(Work[Any]):
    """Makes a communicator on a thread; ``make`` returns once every rank has joined."""

    def __init__(self, make: Callable[[], Any], who: str) -> None:
        self._who = who
        self._made: Future[Any] = Future()
        run = partial(self._run, make)
        threading.Thread(target=run, name="wfbp-joining", daemon=True).start()

    def _run(self, make: Callable[[], Any]) -> None:
        try:
            self._made.set_result(make())
        except BaseException as error:
            self._made.set_exception(error)

    def test(self) -> bool:
        return self._made.done()

    @property
    def result(self) -> Any:
        if error := self._made.exception():
            raise BackendError(_not_connected(self._who, _reason(error))) from error
        return self._made.result()


def _not_connected(who: str, reason: str) -> str:
    return f"{who}: NCCL could not connect the ranks: {reason} (NCCL_DEBUG=WARN tells more)"


def _reason(error: BaseException) -> str:
    """The error as text: CuPy raises ``KeyError`` for results that it has no name for."""
    if isinstance(error, KeyError):
        return f"ncclResult_t {error.args[0]}, which CuPy does not know"
    return str(error)
