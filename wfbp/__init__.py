"""Data-parallel training that communicates gradients while backward still computes.

PyTorch programs import :mod:`wfbp.torch`, JAX programs :mod:`wfbp.jax`. These functions are for
arrays, and for programs that use several frameworks; :mod:`wfbp.collectives` has further variants.
Importing this package loads no framework, NumPy or MPI; names are looked up on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wfbp.collectives import allgather as allgather
    from wfbp.collectives import allgather_async as allgather_async
    from wfbp.collectives import allreduce as allreduce
    from wfbp.collectives import allreduce_ as allreduce_
    from wfbp.collectives import allreduce_async as allreduce_async
    from wfbp.collectives import alltoall as alltoall
    from wfbp.collectives import broadcast as broadcast
    from wfbp.collectives import broadcast_ as broadcast_
    from wfbp.collectives import broadcast_async as broadcast_async
    from wfbp.collectives import grouped_allreduce as grouped_allreduce
    from wfbp.collectives import reducescatter as reducescatter
    from wfbp.collectives import reducescatter_async as reducescatter_async
    from wfbp.config import Config as Config
    from wfbp.core.types import Op
    from wfbp.core.types import TensorSpec as TensorSpec
    from wfbp.dispatch import DistributedOptimizer as DistributedOptimizer
    from wfbp.dispatch import broadcast_optimizer_state as broadcast_optimizer_state
    from wfbp.dispatch import broadcast_parameters as broadcast_parameters
    from wfbp.dispatch import join as join
    from wfbp.runtime.api.reducer import GradientReducer as GradientReducer
    from wfbp.runtime.collectives.api import add_process_set as add_process_set
    from wfbp.runtime.collectives.api import allgather_object as allgather_object
    from wfbp.runtime.collectives.api import barrier as barrier
    from wfbp.runtime.collectives.api import broadcast_object as broadcast_object
    from wfbp.runtime.collectives.api import init as init
    from wfbp.runtime.collectives.api import poll as poll
    from wfbp.runtime.collectives.api import remove_process_set as remove_process_set
    from wfbp.runtime.collectives.api import synchronize as synchronize
    from wfbp.runtime.collectives.process_sets import ProcessSet as ProcessSet
    from wfbp.runtime.collectives.process_sets import global_process_set as global_process_set
    from wfbp.runtime.process import is_initialized as is_initialized
    from wfbp.runtime.process import local_rank as local_rank
    from wfbp.runtime.process import local_size as local_size
    from wfbp.runtime.process import rank as rank
    from wfbp.runtime.process import shutdown as shutdown
    from wfbp.runtime.process import size as size

    Average = Op.AVERAGE
    Sum = Op.SUM
    Min = Op.MIN
    Max = Op.MAX
    Product = Op.PRODUCT
    __version__: str

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
    "wfbp.runtime.api.reducer": ("GradientReducer",),
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


if not TYPE_CHECKING:  # type checkers would accept any name

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
