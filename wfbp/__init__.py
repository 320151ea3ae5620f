"""Data-parallel training whose gradients travel while backward still computes.

Importing this package loads neither a framework nor NumPy nor MPI: names are looked up on first
use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wfbp.config import Config as Config
    from wfbp.core.types import Op
    from wfbp.core.types import TensorSpec as TensorSpec
    from wfbp.dispatch import DistributedOptimizer as DistributedOptimizer
    from wfbp.dispatch import allgather as allgather
    from wfbp.dispatch import allreduce as allreduce
    from wfbp.dispatch import broadcast as broadcast
    from wfbp.dispatch import broadcast_optimizer_state as broadcast_optimizer_state
    from wfbp.dispatch import broadcast_parameters as broadcast_parameters
    from wfbp.runtime.api.array_collectives import allgather_object as allgather_object
    from wfbp.runtime.api.array_collectives import barrier as barrier
    from wfbp.runtime.api.array_collectives import broadcast_object as broadcast_object
    from wfbp.runtime.api.reducer import GradientReducer as GradientReducer
    from wfbp.runtime.collectives.api import init as init
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
    "wfbp.dispatch": (
        "DistributedOptimizer",
        "allgather",
        "allreduce",
        "broadcast",
        "broadcast_optimizer_state",
        "broadcast_parameters",
    ),
    "wfbp.runtime.collectives.api": ("init",),
    "wfbp.runtime.api.array_collectives": ("allgather_object", "barrier", "broadcast_object"),
    "wfbp.runtime.api.reducer": ("GradientReducer",),
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


if not TYPE_CHECKING:  # which would take every name for one that exists

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
