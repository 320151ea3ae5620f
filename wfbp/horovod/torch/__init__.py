"""``horovod.torch`` by wfbp: ``import wfbp.horovod.torch as hvd``.

It has the functions of :mod:`wfbp.torch` and those that only programs for Horovod use. Two things
differ from :mod:`wfbp.torch`: hyperparameters that differ between ranks cause a warning instead of
an error, and a rank outside the process set of an optimizer steps alone.

Example:
    >>> import torch, wfbp.horovod.torch as hvd
    >>> hvd.init()
    >>> hvd.mpi_built(), hvd.gloo_enabled()
    (True, False)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import wfbp.torch
from wfbp.core.types import Op
from wfbp.errors import InternalError as HorovodInternalError
from wfbp.horovod import refuse
from wfbp.horovod.torch import elastic
from wfbp.horovod.torch.adasum import HorovodOp
from wfbp.horovod.torch.collectives import *  # noqa: F403
from wfbp.horovod.torch.optimizer import AdasumOptimizer, HorovodOptimizer
from wfbp.runtime import process
from wfbp.runtime.collectives.api import runtime_of
from wfbp.runtime.collectives.forms import FORMS
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.named.operations import Handle
from wfbp.runtime.timeline_files import TraceWriter
from wfbp.torch import (  # noqa: F401 - in __all__
    Average,
    DistributedOptimizerBase,
    LocalSteps,
    Max,
    Min,
    Product,
    Sum,
    SyncBatchNorm,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_buffers,
    broadcast_object,
    broadcast_parameters,
    compile_backend,
    is_initialized,
    local_rank,
    local_size,
    poll,
    rank,
    remove_process_set,
    set_local_device,
    shutdown,
    size,
    synchronize,
)
from wfbp.torch.compression import Compression, Compressor, check_compressor
from wfbp.torch.wrapping import check_optimizer, distribute, named_pairs

Adasum = HorovodOp.ADASUM


def init(
    comm: Any = None,
    process_sets: Iterable[ProcessSet | Iterable[int]] | str | None = None,
    **options: Any,
) -> None:
    """:func:`wfbp.torch.init`; ``process_sets`` may be ``"dynamic"``, which is always so here."""
    if isinstance(process_sets, str) and process_sets.lower() == "dynamic":
        process_sets = None
    wfbp.torch.init(comm, process_sets, **options)  # type: ignore[arg-type]


def join(device: int = -1) -> int:
    """:func:`wfbp.torch.join`; ``device`` is ignored. Operations by Adasum need every rank."""
    return wfbp.torch.join()


def cross_rank() -> int:
    """Number of this host among those that have a rank with this ``local_rank()``, from 0."""
    runtime = process.current("cross_rank()")
    return [place for place, _ in runtime.places[: runtime.rank]].count(runtime.local_rank)


def cross_size() -> int:
    """Number of hosts that have a rank with this ``local_rank()``."""
    runtime = process.current("cross_size()")
    return [place for place, _ in runtime.places].count(runtime.local_rank)


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return len({count for _, count in process.current("is_homogeneous()").places}) == 1


def mpi_threads_supported() -> bool:
    """Whether MPI may be called by several threads: always, else ``init()`` fails."""
    process.current("mpi_threads_supported()")
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Whether ranks talk through MPI: always."""
    return True


def gloo_built(verbose: bool = False) -> bool:
    """Whether Gloo, IBM's or Intel's library, or an AMD device is used: never."""
    return False


mpi_enabled = mpi_built
gloo_enabled = ddl_built = ccl_built = rocm_built = gloo_built


def nccl_built(verbose: bool = False) -> int:
    """0, because Adasum does not average within a host by NCCL.

    Horovod's programs scale learning rates for Adasum by this. Operations use NCCL all the same.
    """
    return 0


def cuda_built(verbose: bool = False) -> bool:
    """Whether gradients on CUDA devices can be served: if CuPy is installed."""
    return find_spec("cupy") is not None


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op | HorovodOp = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    schedule: str | None = None,
    threshold_bytes: int | None = None,
    optimizer_sharding: bool | None = None,
) -> DistributedOptimizerBase:
    """:func:`wfbp.torch.DistributedOptimizer` with Horovod's arguments in Horovod's order.

    The other arguments, what is returned and what is raised are as there.

    Args:
        op: ``Average`` or ``Sum`` of gradients; or ``Adasum``, with a power of two of ranks: each
            rank steps on its own gradients, and the changes are combined over the ranks.
            There is no schedule then.
        gradient_predivide_factor: with ``Average`` only; averages are formed in float32 at least,
            so it makes no difference.
        num_groups, groups: ignored, because the schedule groups gradients.
        process_set: the ranks that average their gradients; a rank outside it steps alone.
    """
    process.current("DistributedOptimizer()")
    check_optimizer(optimizer)
    if not isinstance(op, Op | HorovodOp):
        raise ValueError(f"op is {op!r}; expected Average, Sum or Adasum")
    if gradient_predivide_factor != 1.0 and op is not Op.AVERAGE:
        raise ValueError(f"gradient_predivide_factor needs op=Average; found {op}")
    runtime = None
    if process_set.included():
        runtime = runtime_of(process_set, "DistributedOptimizer(process_set=...)")
    planning: dict[str, Any] = {
        "schedule": schedule,
        "threshold_bytes": threshold_bytes,
        "optimizer_sharding": optimizer_sharding,
    }
    if isinstance(op, Op):
        return distribute(
            HorovodOptimizer,
            runtime,
            optimizer,
            named_parameters,
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            sparse_as_dense=sparse_as_dense,
            **planning,
        )
    for name, value in planning.items():
        if value is not None:
            raise ValueError(
                f"{name} is {value!r}; with op={op} no gradients are sent while backward "
                "computes, so there is nothing to plan: leave it out"
            )
    check_compressor(compression, f"DistributedOptimizer with op={op}")
    known = None if named_parameters is None else named_pairs(named_parameters)
    kind = type(optimizer)
    made: Any = type(kind.__name__, (AdasumOptimizer, kind), {})
    wrapped: DistributedOptimizerBase = made(
        runtime, optimizer, known, process_set, compression, sparse_as_dense
    )
    return wrapped


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """:func:`wfbp.torch.broadcast_optimizer_state`; ``model`` is ignored.

    Horovod makes a missing state by a step on zeros, and leaves these gradients: some programs
    read them.
    """
    wfbp.torch.broadcast_optimizer_state(optimizer, root_rank, process_set)
    if process_set.size() == 1 or isinstance(optimizer, torch.optim.SparseAdam):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Record training steps and named operations for Perfetto or ``chrome://tracing``.

    Any rank may call it. ``WFBP_RECORD=directory`` records all ranks from ``init()`` on and also
    compares the clocks of hosts. An earlier recording is closed first.

    Args:
        file_path: rank 0's file; rank 3 writes ``NAME.rank3.json`` beside ``NAME.json``. It is
            readable at any time; ``wfbp timeline`` merges the files of all ranks.
        mark_cycles: ignored; there are no cycles.

    Raises:
        OSError: the file cannot be written.
    """
    runtime = process.current("start_timeline()")
    path = Path(file_path)
    if runtime.rank:
        path = path.with_name(f"{path.stem}.rank{runtime.rank}{path.suffix}")
    runtime.record(None)
    runtime.record(TraceWriter(path, runtime.rank, warn=runtime.warn_once))


def stop_timeline() -> None:
    """Write what is left of the timeline, and record no more."""
    process.current("stop_timeline()").record(None)


__all__ = [
    *sorted({*wfbp.torch.__all__, *FORMS, "sparse_allreduce_async"}),
    "Adasum",
    "Compressor",
    "Handle",
    "HorovodInternalError",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
    "start_timeline",
    "stop_timeline",
]

if not TYPE_CHECKING:  # which would take every name for one that exists
    __getattr__ = partial(refuse, __name__)
