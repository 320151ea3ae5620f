"""DistributedOptimizer: any PyTorch optimizer, with its gradients averaged over the ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import optim

from wfbp.core.planners import AUTO, DECOUPLED_SCHEDULES
from wfbp.core.types import Op
from wfbp.runtime import process
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.runtime import Runtime
from wfbp.torch import tensors
from wfbp.torch.compression import Choice
from wfbp.torch.optimizer import DistributedOptimizerBase
from wfbp.torch.original import check_params, named_params, own_attributes, wrapped_of
from wfbp.torch.own_methods import hidden_names, looked_up, object_of
from wfbp.torch.pending import await_all

log = logging.getLogger("wfbp")


def named_pairs(named_parameters: Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    """The pairs of name and parameter that a caller passed; else ``TypeError``."""
    if isinstance(named_parameters, torch.nn.Module):
        raise TypeError("named_parameters is a module; pass model.named_parameters()")
    pairs = list(named_parameters)
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                "named_parameters must be pairs of name and parameter, found a "
                f"{type(pair).__qualname__}; pass model.named_parameters()"
            )
    return pairs


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    compression: Choice | None = None,
    compression_guard: str = "warn",
    backward_passes_per_step: int = 1,
    op: Op = Op.AVERAGE,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    schedule: str | None = None,
    threshold_bytes: int | None = None,
    optimizer_sharding: bool | None = None,
    check_parameters: bool = True,
) -> DistributedOptimizerBase:
    """Wrap an optimizer so that it averages gradients over all ranks while backward computes.

    The result is an instance of the optimizer's own class, and has all its attributes; use it
    instead of the original, also for learning-rate schedulers. With more than one rank, the
    original's own ``step()`` is an error from here on. Every rank must call this, for the same
    parameters in the same order. The first step raises if their values differ between ranks: call
    :func:`broadcast_parameters` before it.

    The optimizer takes its ordinary step with whole averaged gradients, unless it treats every
    element by itself, as SGD, Adam and most of PyTorch's do. Those can update shards, and be
    stepped while the next forward runs; see ``optimizer_sharding``.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``, for messages and to match ranks; without
            it, parameters are known by their numbers.
        compression: how gradients are sent; gathered parameters are exact. With ``"fp16"`` or
            ``"bf16"`` (also ``Compression.fp16``, ``Compression.bf16``) float32 and float64 are
            rounded to that type as they are packed, averaged in float32, and the average is rounded
            again. Values too large for float16 become infinite, as ``GradScaler`` expects. Both
            parts of complex numbers are rounded so. With ``"int8"`` a message has a quarter of the
            bytes: blocks of 256 elements share a scale, sums are in float32 and are encoded again,
            and what is left out is added to the next step's gradients (this takes as much memory as
            the gradients). Sent as they are: tensors of one dimension, of less than 4 KiB per
            rank, of other types than float32, and those of ``nn.Embedding``; and everything within
            a host that has several ranks. A mapping has rules by patterns of names, the first that
            matches counts: ``{"head.*": "bf16", "*": "int8"}``. ``"fp8"`` sends 8 bits with
            an exponent (e4m3), and ``"int4"`` 4.5 bits, after a Hadamard transform of 32 elements.
            ``"auto:int8"``, ``"auto:int4"`` and ``"auto:bf16"`` try plans with exact and with
            smaller gradients, and keep what is fastest. By default ``WFBP_COMPRESSION``, or
            ``"none"``.
        compression_guard: every 64th step compares an average that was sent encoded with an exact
            one, for :meth:`DistributedOptimizerBase.report`. If five in a row have a cosine below
            0.99 (0.9 with ``"int4"``), ``"warn"`` warns once, and ``"fallback"`` has all ranks send
            16 bits from there on. ``"off"`` compares nothing.
        backward_passes_per_step: how many ``backward()`` calls precede each ``step()``.
        op: ``Average`` or ``Sum``. Sums need gradients that are cleared before each step: what is
            left of the step before is a sum already, and would be added up again.
        sparse_as_dense: whether sparse gradients are made dense. Otherwise they stay sparse: ranks
            exchange indices and values when the step closes. This needs a schedule of all-reduces
            (as ``SparseAdam`` has it anyway).
        process_set: the ranks that average their gradients; each must call this, and the other
            ranks neither communicate nor wait. Numbers of ranks in messages are those in the set.
        schedule: how gradients are grouped, of ``wfbp.core.planners.SCHEDULES``; recommended are
            ``auto``, ``oasr``, ``hybrid`` and ``single``. The default is ``WFBP_SCHEDULE``, or
            ``auto`` without it.
        threshold_bytes: group size of ``threshold``, and of what schedules that have to measure
            begin with; by default ``WFBP_THRESHOLD_BYTES`` or 25 MiB.
        optimizer_sharding: True: each rank updates its shard of each tensor and holds the state of
            it alone, if the schedule decouples. False: every rank updates all, after all-reduces.
            By default True for PyTorch's elementwise optimizers (exactly these classes: SGD, Adam,
            AdamW, NAdam, RAdam, Adamax, RMSprop, Rprop, Adagrad, Adadelta, ASGD). Under
            ``compression`` parameters still travel whole. For your own class True promises three
            things. The new value of an element depends on its own gradients and
            state and on settings in its group alone. State is kept in ``self.state[p]``, in tensors
            of the shape of ``p`` and in numbers. ``step()`` may be called for some parameters or
            parts of them, and changes nothing else.
        check_parameters: whether the first step raises ``DisagreementError`` unless parameters have
            the same values on all ranks, and later ones if they drift apart. False is for programs
            whose ranks are to differ: every rank then updates all.

    Returns:
        The distributed optimizer.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        TypeError: not an optimizer, parameters without names, or no whole number where one is
            expected.
        ValueError: a bad argument, a parameter that cannot be sent, or a process set that was not
            added or that this rank is not in.
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
    process.current("DistributedOptimizer()")
    check_optimizer(optimizer)
    return distribute(
        DistributedOptimizerBase,
        api.runtime_of(process_set, "DistributedOptimizer(process_set=...)"),
        optimizer,
        named_parameters,
        compression=compression,
        compression_guard=compression_guard,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        sparse_as_dense=sparse_as_dense,
        schedule=schedule,
        threshold_bytes=threshold_bytes,
        optimizer_sharding=optimizer_sharding,
        check_parameters=check_parameters,
    )


stepping_locally: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that have ``LocalSteps``."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, found {type(optimizer).__qualname__}")
    if isinstance(optimizer, DistributedOptimizerBase):
        raise ValueError(
            f"this {type(optimizer).__name__} is distributed already: use it as it is; to wrap it "
            "anew, pass the optimizer that it was made of"
        )
    if optimizer in stepping_locally:
        raise ValueError(
            f"this {type(optimizer).__name__} has LocalSteps, which average parameters instead of "
            "gradients: use one of both; LocalSteps.close() removes it"
        )


def distribute(
    base: type[DistributedOptimizerBase],
    runtime: Runtime | None,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    *,
    compression: Choice | None,
    backward_passes_per_step: int,
    op: Op,
    sparse_as_dense: bool,
    schedule: str | None,
    threshold_bytes: int | None,
    optimizer_sharding: bool | None,
    check_parameters: bool = True,
    compression_guard: str = "warn",
) -> DistributedOptimizerBase:
    """As :func:`DistributedOptimizer`, by a class derived from ``base``; ``runtime`` is None on a
    rank that steps alone."""
    whole = process.current("DistributedOptimizer()")
    config = whole.config
    process.note_threads(whole, torch.get_num_threads())  # programs set it after init()
    sharding = optimizer_sharding
    if not any(sharding is value for value in (True, False, None)):
        raise ValueError(f"optimizer_sharding is {sharding!r}; expected True, False or None")
    if sharding and not check_parameters:
        raise ValueError(
            "optimizer_sharding is True and check_parameters is False: ranks that share the update "
            "must have the same parameters"
        )
    known = None if named_parameters is None else named_pairs(named_parameters)
    name = type(optimizer).__name__
    named = named_params(optimizer, known, complete=True)
    compression = config.compression if compression is None else compression
    options = ReducerOptions(
        config.schedule if schedule is None else schedule,
        config.threshold_bytes if threshold_bytes is None else threshold_bytes,
        op,
        backward_passes_per_step,
        decouples=True,
        name=name,
        guard=compression_guard,
    )
    check_params(named, options)
    _check_previous(optimizer, runtime)
    await_all()  # pending parameters of dropped models would never be freed otherwise
    why = why_not_elementwise(optimizer, declared=sharding is True)
    if why and sharding is True:
        raise ValueError(f"optimizer_sharding is True, but {why}; use None or False")
    if sharding is False:
        why = "optimizer_sharding is False"
    elif not check_parameters:
        why = "check_parameters is False"
    if why:
        log.info("%s takes whole steps, after all-reduces: %s", name, why)
        planner = AUTO if options.schedule in DECOUPLED_SCHEDULES else options.schedule
        options = replace(options, decouples=False, schedule=planner)
    if isinstance(optimizer, optim.SparseAdam):
        sparse_as_dense = False  # it takes no dense gradients
    if hidden := hidden_names(type(optimizer), base):
        whole.warn_once(
            f"methods of {name}",
            f"{name} has {', '.join(hidden)}, as distributed optimizers have: theirs are called. "
            "Give your methods other names",
        )
    made = type(name, (base, type(optimizer)), looked_up(type(optimizer)))
    wrapped: DistributedOptimizerBase = made(
        runtime, optimizer, known, options, sparse_as_dense, check_parameters, compression
    )
    return wrapped


def _check_previous(optimizer: torch.optim.Optimizer, runtime: Runtime | None) -> None:
    """Raise ``RuntimeError`` if shards of the optimizer's state were lost with another runtime."""
    sync = getattr(wrapped_of(optimizer), "_wfbp_sync", None)
    if sync is not None and sync.runtime is not runtime and sync.update.sharding:
        raise RuntimeError(
            f"the state of this {type(optimizer).__name__} is shared out among ranks of another "
            "process set, or was when wfbp was shut down; take its state_dict() before that and "
            "load it into a new one"
        )


ELEMENTWISE: frozenset[type] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""PyTorch's optimizers whose new value of an element depends on that element alone, its gradients
and the settings of its group. A subclass may override anything, and is not among them."""

_WHOLE_ONLY = (optim.Adafactor, optim.LBFGS, optim.Muon, optim.SparseAdam)


def why_not_elementwise(optimizer: optim.Optimizer, declared: bool) -> str:
    """Why an optimizer must not be stepped in parts; empty if it may, because it is one of
    :data:`ELEMENTWISE`, or ``declared`` by the program."""
    kind, attributes, groups = type(optimizer), own_attributes(optimizer), optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    own_step = attributes.get("step")
    while hasattr(own_step, "_wrapped_by_lr_sched"):  # a scheduler of rates only counts calls
        own_step = getattr(own_step, "__wrapped__", None)
    if own_step is not None and getattr(own_step, "__func__", own_step) is not kind.step:
        return f"the step of {kind.__name__} was replaced"
    if kinds := {type(p) for p in params} - {torch.nn.Parameter}:
        return f"parameters are of class {', '.join(sorted(k.__name__ for k in kinds))}"
    if not all(tensors.is_dense(p) for p in params):
        return "a parameter has gaps in its memory, or is conjugated lazily"
    if not declared:
        differentiable = any(group.get("differentiable") for group in groups)
        known = kind in ELEMENTWISE and _is_torchs(kind.step) and not differentiable
        return "" if known else "only PyTorch's elementwise optimizers are stepped in parts"
    if issubclass(kind, _WHOLE_ONLY):
        return f"{kind.__name__} looks at whole tensors"
    # A copy of the optimizer steps a part, but a bound method would step the original.
    others = {k: v for k, v in attributes.items() if k != "step"}
    bound = [k for k, v in others.items() if object_of(v) is optimizer]
    return f"{kind.__name__} keeps its own method as the attribute {bound[0]!r}" if bound else ""


def _is_torchs(function: Any) -> bool:
    """Whether PyTorch has defined a function and all that it wraps."""
    while function is not None:
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True
