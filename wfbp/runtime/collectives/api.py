"""What programs call whatever framework they use; tensors are the affair of the adapters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from wfbp.runtime import world
from wfbp.runtime.collectives.operations import Collectives
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.collectives.request import Kind


def current(call: str) -> Collectives:
    """The named operations of this process, for a public function of this name.

    Raises:
        NotInitializedError: there is no runtime.
    """
    runtime = world.current(call)
    if runtime.collectives is None:
        runtime.collectives = Collectives(runtime)
    return runtime.collectives


def poll(handle: int) -> bool:
    """Whether an operation is complete, so that :func:`synchronize` would return at once.

    Args:
        handle: what a function whose name ends in ``_async`` returned.

    Raises:
        ValueError: no such operation, or it was synchronized already.
    """
    return current("poll()").poll(handle)


def synchronize(handle: int) -> Any:
    """Wait until an operation is complete, and return its result. The handle is used up.

    Args:
        handle: what a function whose name ends in ``_async`` returned.

    Raises:
        ValueError: no such operation, or it was synchronized already.
        DisagreementError: on every rank, where ranks submitted operations of this name that do not
            match; the runtime stays usable.
        WfbpError: communication failed.
    """
    return current("synchronize()").synchronize(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of a process set has come here.

    Raises:
        ValueError: this rank is not in the set.
    """
    operations = current("barrier()")
    nothing = np.empty(0, np.uint8)
    number = process_set.known_id("barrier()")
    operations.synchronize(operations.submit(Kind.BARRIER, None, number, nothing, lambda _: None))


def join(device: int = -1) -> int:
    """Tell that this rank has no more data, and wait until all ranks have called this.

    Until then this rank contributes zeros to every ``allreduce`` of the others.

    Args:
        device: ignored; for programs written for Horovod.

    Returns:
        The rank that called it last, the same on every rank.
    """
    return current("join()").join()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a process set known; every rank of the job must call this, members or not.

    Args:
        process_set: a set, or the numbers of its ranks.

    Returns:
        The set.

    Raises:
        ValueError: no ranks, not all of them ranks of this job, or a set that exists.
        DisagreementError: ranks passed different ones.

    Example:
        >>> import wfbp.torch as wfbp
        >>> wfbp.init()
        >>> try:
        ...     wfbp.add_process_set(range(wfbp.size()))
        ... except ValueError:
        ...     print("the set of all ranks exists already")
        the set of all ranks exists already
    """
    operations = current("add_process_set()")
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if found is global_process_set:
        raise ValueError("the process set of all ranks exists already, with number 0")
    found.bind(operations, operations.add_set(found.ranks or ()))
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give a process set back; every rank of the job must call this, members or not.

    Returns:
        Whether it was known; that of all ranks is not removed.

    Raises:
        ValueError: operations of it are pending.
    """
    operations = current("remove_process_set()")
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    operations.remove_set(process_set.known_id())
    process_set.bind(None, None)
    return True
