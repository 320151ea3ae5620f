"""Runs programs that import Horovod, without changing them.

    mpirun -np 4 python -m wfbp.horovod train.py --epochs 3
    mpirun -np 4 python -m wfbp.horovod -m package.train

``stand_in()`` puts modules with ``wfbp.torch``'s functions in the place of ``horovod.torch`` and of
what lies in and beside it, for this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.28.1"
"""Of Horovod, whose public functions are followed."""

_SETS = ("ProcessSet", "add_process_set", "global_process_set", "remove_process_set")
_BUILT = ("ccl_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built")
_COMPRESSORS = ("Compression", "Compressor", "FP16Compressor", "NoneCompressor")


def stand_in() -> None:
    """Make ``import horovod.torch`` find the functions of ``wfbp.torch``, in this process.

    What is left out raises an ``ImportError`` or ``AttributeError`` that says what to use instead.

    Raises:
        ImportError: Horovod itself has been imported already.
    """
    present = sys.modules.get("horovod")
    if present is not None:
        if not isinstance(present, _StandIn):
            raise ImportError("Horovod itself has been imported already; call stand_in() before")
        return
    import_module("wfbp.torch.gradient_sync").follows_horovod = True  # type: ignore[attr-defined]
    for name, contents in _contents().items():
        sys.modules[name] = module = _StandIn(name, contents)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.meta_path.insert(0, _Finder())


def _contents() -> dict[str, Mapping[str, Any]]:
    """What each module has, modules before those that lie in them."""
    surface = import_module("wfbp.torch")
    elastic = import_module("wfbp.torch.elastic")
    errors = {
        "HorovodInternalError": surface.HorovodInternalError,
        "HostsUpdatedInterrupt": elastic.HostsUpdatedInterrupt,
    }
    everything = _some(surface, surface.__all__)
    training = {**everything, **_some(elastic, ("ElasticSampler", "TorchState", "run"))}
    return {
        "horovod": {"__version__": __version__},
        "horovod.common": {},
        "horovod.common.basics": _some(surface, ("ProcessSet", "global_process_set")),
        "horovod.common.elastic": errors,
        "horovod.common.exceptions": errors,
        "horovod.common.process_sets": _some(surface, _SETS),
        "horovod.common.util": {name: _verbose(getattr(surface, name)) for name in _BUILT},
        "horovod.torch": everything,
        "horovod.torch.compression": _some(import_module("wfbp.torch.compression"), _COMPRESSORS),
        "horovod.torch.elastic": training,
        "horovod.torch.elastic.sampler": training,
        "horovod.torch.elastic.state": training,
        "horovod.torch.functions": everything,
        "horovod.torch.mpi_ops": everything,
        "horovod.torch.optimizer": everything,
        "horovod.torch.sync_batch_norm": everything,
    }


def _some(module: ModuleType, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def _verbose(built: Callable[[], Any]) -> Callable[[bool], Any]:
    """As Horovod asks before ``init()`` how it was built."""

    def ask(verbose: bool = False) -> Any:
        return built()

    return ask


class _StandIn(ModuleType):
    """A module of Horovod's, as a package of which nothing lies in files."""

    def __init__(self, name: str, contents: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__package__ = name
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__dict__.update(contents)

    def __getattr__(self, name: str) -> NoReturn:
        import_module("wfbp.torch.left_out").refuse(self.__name__, name)
        raise AssertionError("refuse() raises")


class _Finder:
    """Says in what ``import`` raises what to use instead of a module or name that is left out."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        parent, _, child = name.rpartition(".")
        if not isinstance(sys.modules.get(parent), _StandIn):
            return
        instead = import_module("wfbp.torch.left_out").INSTEAD.get(child)
        if instead is not None:
            # Without a name: `from horovod import run` would swallow the error of that module.
            raise ModuleNotFoundError(f"{parent} has no {child} under wfbp.horovod: {instead}")
