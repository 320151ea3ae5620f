"""Data-parallel training that communicates gradients while backward still computes.

PyTorch programs import :mod:`wfbp.torch`, JAX programs :mod:`wfbp.jax`. These functions are for
arrays, and for programs that use several frameworks; :mod:`wfbp.collectives` has further variants.
Importing this package loads no framework, NumPy or MPI; names are looked up on first use.
Type checkers read ``__init__.pyi``, which ``python -m tests.support.stubs`` writes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "wfbp.config": ("Config",),
    "wfbp.core.types": ("TensorSpec",),
    "wfbp.collectives": (
        "allgather",
        "allgather_async",
        "allreduce",
        "allreduce_",
        "allreduce_async",
        "alltoall",
        "broadcast",
        "broadcast_",
        "broadcast_async",
        "grouped_allreduce",
        "reducescatter",
        "reducescatter_async",
    ),
    "wfbp.dispatch": (
        "DistributedOptimizer",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "join",
    ),
    "wfbp.launcher.function": ("run",),
    "wfbp.runtime.api.array_reducer": ("GradientReducer",),
    "wfbp.runtime.collectives.api": (
        "add_process_set",
        "allgather_object",
        "barrier",
        "broadcast_object",
        "init",
        "poll",
        "remove_process_set",
        "synchronize",
    ),
    "wfbp.runtime.collectives.process_sets": (
        "ProcessSet",
        "global_process_set",
    ),
    "wfbp.runtime.process": (
        "is_initialized",
        "local_rank",
        "local_size",
        "rank",
        "shutdown",
        "size",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_OPS = ("Average", "Sum", "Min", "Max", "Product")

__all__ = [*_HOME, *_OPS]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in _OPS:
        value = import_module("wfbp.core.types").Op[name.upper()]
    elif name == "__version__":
        value = import_module("importlib.metadata").version("wfbp")
    else:
        raise AttributeError(f"module 'wfbp' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
