"""Public functions that take no tensors, the same for every framework."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, TypeVar, overload

import cloudpickle
import numpy as np

from wfbp.comm.backend import HostBackend
from wfbp.config import Config
from wfbp.runtime import process
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.named.coordinator import Kind, Request
from wfbp.runtime.named.named_lane import NamedOperation, Outcome
from wfbp.runtime.named.operations import Handle
from wfbp.runtime.progress.stall import Members
from wfbp.runtime.runtime import Runtime

T = TypeVar("T")


def init(
    comm: Any = None,
    process_sets: Iterable[ProcessSet | Iterable[int]] | None = None,
    *,
    backend: HostBackend | None = None,
    config: Config | None = None,
) -> None:
    """Join the other ranks of this job; call it before any other function.

    Under ``mpirun -np N`` all N processes must call it; without a launcher the job has one rank. A
    second call does nothing; after ``shutdown()`` it starts again. From then on an uncaught
    exception on one rank ends all ranks with its message.

    Args:
        comm: an mpi4py communicator, which is duplicated, or numbers of the participating ranks
            in ``COMM_WORLD``; all by default.
        process_sets: sets to add, or the numbers of their ranks, the same on every rank.
            ``add_process_set`` adds sets later.
        backend: transport to use instead of MPI.
        config: settings; by default from the environment's ``WFBP_*`` variables.

    Raises:
        ValueError: an unreadable ``WFBP_*`` variable, or a record directory or process set that
            cannot be made.
        PeerError: another rank had such an error.
        BackendError: MPI is missing or does not start.
        DisagreementError: ranks have different settings.
    """
    if process.is_initialized():
        return
    problem: Exception | None = None
    sets: list[ProcessSet] = []
    try:
        sets = _process_sets(process_sets)
    except (TypeError, ValueError) as error:  # the other ranks hear of it
        problem = error
    process.start(comm, backend=backend, config=config, problem=problem)
    try:
        for process_set in sets:
            add_process_set(process_set)
    except BaseException:
        process.shutdown()
        raise


def _process_sets(given: Any) -> list[ProcessSet]:
    """The argument of :func:`init` as sets."""
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Iterable):
        kind = ValueError if isinstance(given, str) else TypeError
        raise kind(f"process_sets is {given!r}; expected sets of ranks")
    return [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in given]


def runtime_of(process_set: ProcessSet, call: str) -> Runtime:
    """The runtime of a process set, for a public function; ``ValueError`` on a rank outside it."""
    lane = process.operations(call).lanes.get(process_set.known_id(call))
    if lane is None:
        raise ValueError(
            f"{process.current(call).where} is not in the process set of ranks "
            f"{process_set.ranks}: call {call} only where process_set.included()"
        )
    return lane.runtime


def poll(handle: int) -> bool:
    """Whether an operation is complete; on a GPU, whether the GPU has finished it.

    Args:
        handle: from a function whose name ends in ``_async``.

    Raises:
        ValueError: no such operation, or it was synchronized already.
    """
    return process.operations("poll()").poll(handle)


@overload
def synchronize(handle: Handle[T]) -> T: ...
@overload
def synchronize(handle: int) -> Any: ...
def synchronize(handle: int) -> Any:
    """Wait until an operation is complete, and return its result; the handle is used up.

    For a GPU tensor sent by NCCL only the calling thread's current stream waits, not the host.

    Args:
        handle: from a function whose name ends in ``_async``.

    Raises:
        ValueError: no such operation, or it was synchronized already.
        DisagreementError: on every rank, if ranks' operations of this name differ; the runtime
            stays usable.
        WfbpError: communication failed.
    """
    return process.operations("synchronize()").synchronize(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of a process set has called this.

    Raises:
        ValueError: this rank is not in the set.
    """
    operations, number = process.operations("barrier()"), process_set.known_id("barrier()")
    request, nothing = Request(Kind.BARRIER, ""), np.empty(0, np.uint8)
    operations.run([NamedOperation(request, number, nothing, lambda _: None)])


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set; every rank of the job must call this, members or not.

    Args:
        process_set: a set, or the numbers of its ranks, the same on every rank.

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
    operations = process.operations("add_process_set()")
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made is global_process_set:
        raise ValueError("the process set of all ranks exists already: use global_process_set")
    made.bind(operations, operations.add_set(made.ranks or ()))
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; every rank of the job must call this, members or not.

    Distributed optimizers of the set cannot step any more, but keep their state.

    Returns:
        Whether the set existed; the set of all ranks is never removed.

    Raises:
        ValueError: operations of it are pending.
    """
    operations = process.operations("remove_process_set()")
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    operations.remove_set(process_set.known_id(), process.let_go)
    process_set.bind(None, None)
    return True


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Copy the root's object to every rank.

    Args:
        obj: anything that cloudpickle can pickle; only the root's is used.
        root_rank: the rank that has the object.
        name: matches the operations of ranks; those without one match by their order.
        process_set: the ranks that take part.

    Returns:
        On the root the object itself, elsewhere a copy.

    Raises:
        ValueError: no such rank, or a name that is pending.
        DisagreementError: on every rank, if they do not match.

    Example:
        >>> import wfbp.torch as wfbp
        >>> wfbp.init()
        >>> wfbp.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    number = process_set.known_id("broadcast_object()")
    operations = process.operations("broadcast_object()")
    root = Members(number, operations.sets[number]).root(root_rank)
    is_root = operations.rank == root_rank
    payload = cloudpickle.dumps(obj) if is_root else b""
    parts = _gather_bytes("broadcast_object", name, number, payload, root)
    return obj if is_root else pickle.loads(b"".join(parts))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather every rank's object.

    Args:
        obj: anything that cloudpickle can pickle.
        name: matches the operations of ranks; those without one match by their order.
        process_set: the ranks that take part.

    Returns:
        The objects, in rank order.

    Raises:
        ValueError: a name that is pending.
        DisagreementError: on every rank, if they do not match.

    Example:
        >>> import wfbp.torch as wfbp
        >>> wfbp.init()
        >>> wfbp.allgather_object("me") == ["me"] * wfbp.size()
        True
    """
    number = process_set.known_id("allgather_object()")
    payloads = _gather_bytes("allgather_object", name, number, cloudpickle.dumps(obj))
    return [pickle.loads(payload) for payload in payloads]


def _gather_bytes(
    function: str, name: str | None, process_set: int, payload: bytes, root: int = -1
) -> list[bytes]:
    """Every rank's bytes; function, name and root are compared."""

    def split(outcome: Outcome) -> list[bytes]:
        parts = np.split(outcome.data, np.cumsum(outcome.rows)[:-1])
        return [part.tobytes() for part in parts]

    request = Request(
        Kind.ALLGATHER,
        f"{name}.object" if name else "",
        "uint8",
        (len(payload),),
        root=root,
        called=f"{function} {name!r}" if name else function,
    )
    operation = NamedOperation(request, process_set, np.frombuffer(payload, np.uint8), split)
    parts: list[bytes] = process.operations(f"{function}()").run([operation], is_group=False)
    return parts
