"""DistributedOptimizer: any PyTorch optimizer, with its gradients averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from wfbp.core.types import Op
from wfbp.runtime import world
from wfbp.runtime.arguments import check_arguments
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.tuning.candidates import check_schedule
from wfbp.torch import tensors
from wfbp.torch.arguments import check_update, chosen_coupling, named_pairs, named_params, param_ids
from wfbp.torch.compression import Compression, Compressor
from wfbp.torch.exchange import OptimizerSync
from wfbp.torch.nature import UpdateCoupling
from wfbp.torch.original import PATCHED, bare_step, patch_original, restore_original
from wfbp.torch.wrapper import DistributedOptimizerBase, SyncState

_WRAPPED = "_wfbp_wrapped"
"""Attribute of an optimizer: what was last made of it, and may hold shards of its state."""


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    schedule: str | None = None,
    threshold_bytes: int | None = None,
    update: str = "auto",
) -> Any:
    """Wrap an optimizer so that it averages gradients over all ranks while backward computes.

    The result is an instance of the optimizer's own class that shares its parameter groups and
    state; use it instead of the original, also for learning-rate schedulers; with more than one
    rank, the original's own ``step()`` is an error from here on. Every rank must call this, for
    the same parameters in the same order.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``, for messages and to match ranks; numbers
            stand in for names where it is missing.
        compression: for Horovod's programs; ``Compression.none`` alone. Gradients travel in the
            element type of their parameters.
        backward_passes_per_step: how many ``backward()`` calls precede each ``step()``.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: for Horovod's programs, with ``Average``; averages are formed in
            float32 at least, so it makes no difference.
        num_groups: for Horovod's programs; the schedule groups gradients.
        groups: for Horovod's programs, like ``num_groups``.
        sparse_as_dense: whether sparse gradients are made dense.
        process_set: for Horovod's programs; that of all ranks alone.
        schedule: how gradients are grouped: ``auto``, ``oasr``, ``mgwfbp``, ``wfbp``, ``single``
            or ``threshold``; or, decoupled into backward and the next forward, ``dear``,
            ``ipart``, ``independent``, ``hybrid``, ``ps`` or ``ps_layerwise``; by default what
            ``WFBP_SCHEDULE`` says, or ``auto``.
        threshold_bytes: group size of ``threshold``, and of what schedules that have to measure
            begin with; by default ``WFBP_THRESHOLD_BYTES`` or 25 MiB.
        update: what follows decoupled gradients: ``sharded``, each rank updates its shard of
            each tensor and holds the state of it alone; ``replicated``, every rank updates all;
            or ``auto``, what the optimizer allows, which is found by experiment.

    Returns:
        The distributed optimizer.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        TypeError: not an optimizer, parameters without names, or no whole number where one is
            expected.
        ImportError: ``dear`` without the ``search`` extra.
        ValueError: a bad argument, or a parameter that cannot be sent.
        DisagreementError: ranks passed different parameters or settings.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> wfbp.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = wfbp.DistributedOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """
    runtime = world.current("DistributedOptimizer()")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, found {type(optimizer).__qualname__}")
    if isinstance(optimizer, DistributedOptimizerBase):
        raise ValueError(
            f"this {type(optimizer).__name__} is distributed already: use it as it is; to wrap it "
            "anew, pass the optimizer that it was made of"
        )
    _check_horovods(compression, op, gradient_predivide_factor, num_groups, process_set)
    kind = type(optimizer)
    config = runtime.config
    planner = config.schedule if schedule is None else schedule
    limit_bytes = config.threshold_bytes if threshold_bytes is None else threshold_bytes
    made: list[Any] = []
    known = None if named_parameters is None else named_pairs(named_parameters)

    def passes() -> int:
        given: int = made[0]._wfbp_passes if made else backward_passes_per_step
        return given

    def check(named: list[tuple[str, torch.Tensor]]) -> None:
        for name, param in named:
            tensors.check(name, param)
        specs = [tensors.spec(name, p) for name, p in named]
        check_arguments(specs, planner, limit_bytes, op, passes(), decouples=True)

    check_update(update)
    check(named_params(optimizer, known, complete=True))
    # What can be refused without looking at the bare optimizer has been: an earlier one goes on.
    previous = optimizer.__dict__.pop(_WRAPPED, None)
    if previous is not None:
        previous._wfbp_release(runtime)
        restore_original(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (DistributedOptimizerBase, kind), {}))
    # A scheduler made before may have put its own step() on the instance: ours must be found.
    wrapped.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in PATCHED})
    nature = chosen_coupling(optimizer, update)
    decouples = nature is not UpdateCoupling.COUPLED
    check_schedule(planner, decouples, kind.__name__)

    def make() -> OptimizerSync | None:
        named = named_params(wrapped, known, complete=wrapped._wfbp_sync is None)
        if runtime.size == 1:
            check(named)
            return None
        return OptimizerSync(
            runtime,
            wrapped,
            named,
            nature,
            bare_step(wrapped, kind),
            schedule=planner,
            threshold_bytes=limit_bytes,
            op=op,
            passes=wrapped._wfbp_passes,
            sparse_as_dense=sparse_as_dense,
            name=kind.__name__,
            kind=kind,
        )

    wrapped._wfbp_original = optimizer
    wrapped._wfbp_sync_state = SyncState.NOBODY
    wrapped._wfbp_skip = False
    wrapped._wfbp_passes = backward_passes_per_step
    wrapped._wfbp_sync = None
    wrapped._wfbp_sync = make()
    wrapped._wfbp_known = param_ids(wrapped)
    made.append(wrapped)
    wrapped._wfbp_named = lambda: named_params(wrapped, known, complete=False)
    wrapped._wfbp_check = lambda: check(wrapped._wfbp_named())
    wrapped._wfbp_make = make
    optimizer.__dict__[_WRAPPED] = wrapped
    if runtime.size > 1:
        patch_original(optimizer, wrapped)
    return wrapped


def _check_horovods(
    compression: object,
    op: object,
    predivide_factor: float,
    num_groups: object,
    process_set: ProcessSet,
) -> None:
    """Raise ``ValueError`` for values of Horovod's arguments that cannot be served."""
    if compression is not Compression.none:
        raise ValueError(
            f"compression is {getattr(compression, '__name__', compression)}; gradients travel in "
            "the element type of their parameters: pass Compression.none"
        )
    if predivide_factor != 1.0 and op is not Op.AVERAGE:
        raise ValueError(f"gradient_predivide_factor needs op=Average; found {op}")
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 0:
        raise ValueError(f"num_groups is {num_groups!r}; expected a whole number of at least 0")
    if process_set is not global_process_set and process_set.size() != world.size():
        raise ValueError(
            f"process_set is {process_set}; gradients are averaged over all ranks. Start a job for "
            "those ranks alone with init(ranks), or average by hand with grouped_allreduce_()"
        )
