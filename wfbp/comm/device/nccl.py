"""The backend on NCCL, through CuPy's bindings; each has its own communicator.

All ranks connect in the constructor, where time limits apply: by default NCCL from 2.22 on waits
for peers in the first call of each algorithm (:func:`set_variables`). Unlike the host, NCCL
scales averages before adding, and may round partial sums in half precision. Unequal blocks are
reduced by an all-reduce, and gathered by a group of broadcasts.

Threads: one thread at a time uses a backend. A thread of each communicator makes and ends it,
because NCCL may not return from that.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from queue import SimpleQueue
from typing import Any, TypeVar

from wfbp.comm.backend import HostBackend, T_co, Work
from wfbp.comm.device.device import Device
from wfbp.comm.device.device_backend import Blocks, DeviceBackend, DeviceWork
from wfbp.comm.waiting import Check, wait
from wfbp.core.types import Op, item_bytes
from wfbp.errors import BackendError

T = TypeVar("T")

OPS = {Op.SUM: 0, Op.AVERAGE: 4}
"""``ncclRedOp_t``; the bindings take these numbers, but lack names for some. Gradients need no
others."""

BYTE = 1
DTYPES = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
"""``ncclDataType_t``."""

_END_S = 10.0
_IN_PROGRESS = 7
"""``ncclInProgress``: no error."""

log = logging.getLogger("wfbp")


def set_variables() -> None:
    """Let ranks connect when they join. NCCL reads its variables once, when any library of the
    process makes the first communicator, so ``wfbp.init()`` sets them."""
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")


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
        set_variables()
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
        self._thread = _Thread()
        try:
            joining = Joining(self._thread.call(make), self._who)
            self._comm = wait(joining, timeout_s=limit_s, check=check)
        except BaseException:
            self._thread.stop()
            raise
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
            self._end("aborted", self._comm.abort)

    def close(self) -> None:
        """Destroy the communicator. Collective; waits for incomplete works."""
        # NCCL does not wait for kernels on the streams of its callers.
        if not self._over and not self.settles(self._timeout_s):
            self.give_up()
        if not self._over:
            self._end("destroyed its communicator", self._comm.destroy)
        self.host.close()

    def _end(self, what: str, act: Callable[[], None]) -> None:
        """End the communicator; an NCCL that is stuck is left alone after some seconds."""
        self._over = True

        def end() -> None:
            self.device.use()
            act()

        ended = self._thread.call(end)
        self._thread.stop()
        wait_for_futures([ended], _END_S)
        if not ended.done():
            log.error("%s: NCCL has not %s within %g s", self._who, what, _END_S)
        elif error := ended.exception():
            log.error("%s: NCCL has not %s: %s", self._who, what, _reason(error))


class _Thread:
    """A thread for calls of NCCL that may not return."""

    # Made early: at the end of a process, when communicators end, Python 3.12 starts no thread.
    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="wfbp-nccl", daemon=True).start()

    def call(self, act: Callable[[], T]) -> Future[T]:
        """Have ``act`` called after the calls before."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(act())
            except BaseException as error:
                result.set_exception(error)

        self._calls.put(run)
        return result

    def stop(self) -> None:
        """End the thread after its calls."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # or the thread would keep the communicator


class Joining(Work[T_co]):
    """A communicator that is being made, which ends once every rank has joined."""

    def __init__(self, made: Future[T_co], who: str) -> None:
        self._made, self._who = made, who

    def test(self) -> bool:
        return self._made.done()

    @property
    def result(self) -> T_co:
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
