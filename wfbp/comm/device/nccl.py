"""The backend on NCCL, through CuPy's bindings.

A collective is one call that enqueues it on the backend's stream; the host never waits for it.
Ranks connect when a communicator is made, where time limits hold: left to itself, NCCL from 2.22 on
waits for its peers within the first call of each algorithm. A program that wants that sets
``NCCL_RUNTIME_CONNECT=1``.
Each backend has a communicator of its own, whose id travels over the host backend, or which is
split from another one and shares its resources. What NCCL does not define as
:mod:`wfbp.comm.backend` does (NaN in minima and maxima, averages of integers) goes through the
host; gradients never need it.

    equal blocks      reduce-scatter and all-gather are NCCL's own, in place
    unequal blocks    reduce-scatter is an all-reduce, all-gather one group of broadcasts

(Not of sends and receives: NCCL connects ranks for these when they are first used, whatever
``NCCL_RUNTIME_CONNECT`` says.)

Half precision is added as NCCL adds it: averages are scaled before they are added, so they do not
overflow, and partial sums may be rounded; on the host they are not.

Threads: a backend is used by one thread at a time; making one may take long, and is done by a
thread of its own (:class:`Joining`), so that somebody can watch the time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from wfbp.comm.backend import INTEGER, Backend, Buffer, Work
from wfbp.comm.device.backend import Blocks, DeviceBackend, DeviceWork
from wfbp.comm.device.device import Device, Event
from wfbp.comm.device.staged import StagedBackend
from wfbp.comm.waiting import Check, wait
from wfbp.core.types import Op, item_bytes
from wfbp.errors import BackendError

OPS = {Op.SUM: 0, Op.PRODUCT: 1, Op.MAX: 2, Op.MIN: 3, Op.AVERAGE: 4}
"""``ncclRedOp_t``; older bindings take these numbers, but have no names for all of them."""

DTYPES = {
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
"""``ncclDataType_t``."""

BYTE = DTYPES["uint8"]

_FIRST_THAT_SPLITS = 21801

_IDLE_S = 0.1
_ABORT_S = 10.0

_IN_PROGRESS = 7
"""``ncclInProgress``: no error."""

log = logging.getLogger("wfbp")


class NcclBackend(DeviceBackend):
    """Collectives of one NCCL communicator. Making one is collective and blocking.

    Args:
        device: where buffers lie.
        host: over the same ranks, used by nobody else.
        nccl: the bindings, ``cupy.cuda.nccl`` or what stands for it.
        timeout_s: how long other ranks are waited for; NCCL has half of it to join them.
        check: called while they do; what it raises ends that.
        parent: whose resources this communicator shares; all ranks have asked its :meth:`splits`.

    Raises:
        BackendError: the communicator could not be made.
    """

    def __init__(
        self,
        device: Device,
        host: Backend,
        nccl: Any,
        timeout_s: float | None = None,
        check: Check | None = None,
        parent: NcclBackend | None = None,
    ) -> None:
        super().__init__(device, host)
        self._nccl = nccl
        self._timeout_s = timeout_s
        self._who = f"rank {self.rank} of {self.size}"
        self._shares = parent is not None
        make = self._join() if parent is None else partial(self._split, parent)
        joining = Joining(make, self._who)
        # Half of it: a rank on which NCCL has failed waits for the others, and is to hear from
        # those that wait for it in NCCL before its own time is over.
        limit_s = None if timeout_s is None else timeout_s / 2
        self._comm = wait(joining, timeout_s=limit_s, check=check)
        self._staged: StagedBackend | None = None
        self._over = False

    def _join(self) -> Callable[[], Any]:
        """What makes the communicator, with the first rank's id."""
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        mine, problem = b"", None
        if self.rank == 0:
            try:
                mine = bytes(c % 256 for c in self._nccl.get_unique_id())
            except Exception as error:  # told below: the other ranks wait for the id
                problem = error
        uid = wait(self.host.all_gather_bytes(mine), timeout_s=self._timeout_s)[0]
        if not uid:
            reason = "rank 0 has no id for them" if problem is None else _reason(problem)
            raise BackendError(_not_connected(self._who, reason)) from problem
        size, rank, device = self.size, self.rank, self.device
        config = (self._nccl.NcclConfig(1),) if _splits(self._nccl) else ()

        def make() -> Any:
            device.use()
            try:
                return self._nccl.NcclCommunicator(size, uid, rank, *config)
            except TypeError:  # CuPy before 14 has ids as tuples of signed characters
                signed = tuple(c - 256 if c > 127 else c for c in uid)
                return self._nccl.NcclCommunicator(size, signed, rank)

        return make

    def _split(self, parent: NcclBackend) -> Any:
        self.device.use()
        return parent._comm.commSplit(0, self.rank, self._nccl.NcclConfig(1))

    def splits(self) -> bool:
        """Whether a further communicator could share this one's resources: NCCL asks that none of
        its collectives is under way then."""
        if self._over or not _splits(self._nccl):
            return False
        return self.settles(_IDLE_S)

    def _all_reduce(self, data: Buffer, dtype: str, op: Op) -> DeviceWork:
        if not defines(dtype, op):
            return self._through_host().all_reduce(data, dtype, op)
        address = self.device.address(data)
        count = data.nbytes // item_bytes(dtype)
        with self.device.annotate("wfbp all-reduce"):
            self._comm.allReduce(address, address, count, DTYPES[dtype], OPS[op], self.stream)
        return self._started(data.nbytes, data)

    def _reduce_scatter(self, data: Buffer, blocks: Blocks, dtype: str, op: Op) -> DeviceWork:
        if not defines(dtype, op):
            return self._through_host()._reduce_scatter(data, blocks, dtype, op)
        address = self.device.address(data)
        types = DTYPES[dtype], OPS[op]
        with self.device.annotate("wfbp reduce-scatter"):
            if blocks.are_equal:
                own = address + blocks.starts[self.rank]
                count = blocks.counts[self.rank] // item_bytes(dtype)
                self._comm.reduceScatter(address, own, count, *types, self.stream)
            else:
                count = blocks.total // item_bytes(dtype)
                self._comm.allReduce(address, address, count, *types, self.stream)
        return self._started(blocks.total, data)

    def _broadcast(self, data: Buffer, root: int) -> DeviceWork:
        address = self.device.address(data)
        with self.device.annotate("wfbp broadcast"):
            self._comm.broadcast(address, address, data.nbytes, BYTE, root, self.stream)
        return self._started(data.nbytes, data)

    def _all_gather(self, data: Buffer, blocks: Blocks) -> DeviceWork:
        address = self.device.address(data)
        with self.device.annotate("wfbp all-gather"):
            if blocks.are_equal:
                own = address + blocks.starts[self.rank]
                self._comm.allGather(own, address, blocks.counts[self.rank], BYTE, self.stream)
            else:
                self._broadcast_all(address, blocks)
        return self._started(blocks.total, data)

    def _broadcast_all(self, address: int, blocks: Blocks) -> None:
        """An all-gather of unequal blocks: every rank broadcasts its own."""
        self._nccl.groupStart()
        try:
            for root, (start, nbytes) in enumerate(zip(blocks.starts, blocks.counts, strict=True)):
                if nbytes:
                    place = address + start
                    self._comm.broadcast(place, place, nbytes, BYTE, root, self.stream)
        finally:
            self._nccl.groupEnd()

    def _nothing(self) -> DeviceWork:
        return self._started(0, None)

    def _started(self, nbytes: int, memory: object) -> DeviceWork:
        return _NcclWork(self, nbytes, memory)

    def _through_host(self) -> StagedBackend:
        """For what NCCL does not define; made when it is first needed, which is collective."""
        if self._staged is None:
            self._staged = StagedBackend(self.device, self.host.duplicate(), self.stream)
        return self._staged

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

    def discard(self) -> None:
        """Let it go unused, because another rank could not join.

        To abort one that shares resources would abort all that share them.
        """
        if self._shares:
            self._destroy()
        else:
            self.give_up()

    def duplicate(self) -> Backend:
        return NcclBackend(self.device, self.host.duplicate(), self._nccl, self._timeout_s)

    def close(self) -> None:
        """Give the communicator back. Collective; waits for works that are not complete."""
        if self._staged is not None:
            self._staged.close()
        self._destroy()
        self.host.close()

    def _destroy(self) -> None:
        """When the device is done: NCCL does not wait for kernels on the streams of its callers."""
        if not self._over and not self.settles(self._timeout_s):
            self.give_up()
        if not self._over:
            self._over = True
            self.device.use()
            self._comm.destroy()


class _NcclWork(DeviceWork):
    def __init__(self, backend: NcclBackend, nbytes: int, memory: object) -> None:
        self._backend = backend
        self._memory = memory  # kept alive
        self.nbytes = nbytes
        self._event: Event = backend.device.record(backend.stream)

    def issued(self) -> bool:
        return True

    def test(self) -> bool:
        if self._backend.device.done(self._event):
            return True
        self._backend.check()
        return False

    def then(self, target: Buffer, source: Buffer) -> None:
        device, stream = self._backend.device, self._backend.stream
        device.copy(target, source, stream)
        self._event = device.record(stream)


class Joining(Work[Any]):
    """A communicator on its way: NCCL returns it when every rank has joined, maybe never.

    Args:
        make: blocks until then.
        who: this rank in words, for errors.
    """

    def __init__(self, make: Callable[[], Any], who: str) -> None:
        self._who = who
        self._made: list[Any] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(make,), name="wfbp-joining", daemon=True
        )
        self._thread.start()

    def _run(self, make: Callable[[], Any]) -> None:
        try:
            self._made.append(make())
        except BaseException as error:
            self._error = error

    def test(self) -> bool:
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise BackendError(_not_connected(self._who, _reason(self._error))) from self._error
        return True

    @property
    def result(self) -> Any:
        return self._made[0]


def _not_connected(who: str, reason: str) -> str:
    return f"{who}: NCCL could not connect the ranks: {reason} (NCCL_DEBUG=WARN tells more)"


def _reason(error: BaseException) -> str:
    """An error of the bindings in words: CuPy fails on results that it has no name for."""
    if isinstance(error, KeyError):
        return f"ncclResult_t {error.args[0]}, which CuPy does not know"
    return str(error)


def _splits(nccl: Any) -> bool:
    """Whether communicators can be split: by CuPy 14 and NCCL 2.18.1."""
    return hasattr(nccl, "NcclConfig") and nccl.get_version() >= _FIRST_THAT_SPLITS


def defines(dtype: str, op: Op) -> bool:
    """Whether NCCL combines elements of a type as :mod:`wfbp.comm.backend` says.

    Args:
        dtype: a key of :data:`DTYPES`.
        op: how contributions combine.

    Example:
        >>> defines("float32", Op.AVERAGE), defines("int32", Op.AVERAGE), defines("float32", Op.MAX)
        (True, False, False)
    """
    if dtype in INTEGER:
        return op is not Op.AVERAGE
    return op not in (Op.MIN, Op.MAX)
