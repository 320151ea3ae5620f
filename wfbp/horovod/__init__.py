"""Runs programs that import Horovod, without changing them.

    mpirun -np 4 python -m wfbp.horovod train.py --epochs 3
    mpirun -np 4 python -m wfbp.horovod -m package.train

``stand_in()`` replaces ``horovod.torch``, its submodules and ``horovod.common`` by modules with
the functions of :mod:`wfbp.horovod.torch`. Processes that multiprocessing starts, such as workers
of a ``DataLoader``, inherit this: ``spawn`` and ``forkserver`` import the program again with this
process's ``sys.path``, and ``search_path`` is the first folder after the program's own.

A program whose imports may change says ``import wfbp.horovod.torch as hvd`` instead.
"""

from __future__ import annotations

import itertools
import sys
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

__version__ = "0.28.1"
"""Of Horovod, whose public functions are followed."""

_SEARCH_PATH = str(Path(__file__).parent / "search_path")
_modules: dict[str, ModuleType] = {}
"""Replacements of Horovod's modules, by name."""

_RUN = "start ranks with `wfbprun -n N python -m wfbp.horovod SCRIPT`"
_STATE = (
    "use wfbp.horovod.torch.elastic.TorchState, which takes models, optimizers and any other values"
)
_WATCH = (
    "the set of ranks is fixed, so there is nothing to watch; use wfbp.horovod.torch.elastic.run"
)

INSTEAD = {
    # horovod
    "keras": "wfbp has no adapter for Keras; PyTorch is served by wfbp.torch",
    "mxnet": "wfbp has no adapter for MXNet; PyTorch is served by wfbp.torch",
    "ray": "use wfbp.integrations.ray.run, or launch/ray_job.py for a script",
    "runner": _RUN,
    "spark": f"wfbp has no adapter for Spark; {_RUN}",
    "tensorflow": "wfbp has no adapter for TensorFlow; PyTorch is served by wfbp.torch",
    # horovod.torch
    "DistributedGradientTape": "wfbp has no adapter for TensorFlow",
    "PartialDistributedOptimizer": "pass DistributedOptimizer the parameters to be averaged",
    "_DistributedAdasumOptimizer": "use DistributedOptimizer(op=Adasum)",
    "_DistributedOptimizer": "call DistributedOptimizer, which returns a DistributedOptimizerBase",
    "mpi_lib": "there is no library of that kind; use the functions of wfbp.torch",
    # horovod.torch.elastic
    "ObjectState": _STATE,
    "State": _STATE,
    "notification_manager": _WATCH,
}
"""Replacements of names that are left out, for all of Horovod's modules."""


def stand_in() -> None:
    """Make ``import horovod.torch`` find the functions of ``wfbp.horovod.torch``.

    Names that are left out raise an ``ImportError`` or ``AttributeError`` with their replacement.

    Raises:
        ImportError: Horovod itself has been imported already.
    """
    present = sys.modules.get("horovod")
    if present is not None:
        if present is not _modules.get("horovod"):
            raise ImportError("Horovod itself has been imported already; call stand_in() before")
        return
    for name, contents in _contents().items():
        _modules[name] = sys.modules[name] = module = ModuleType(name)
        module.__path__ = []  # a package without files
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__dict__.update(contents, __package__=name, __getattr__=partial(refuse, name))
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(_modules[parent], child, module)
    finder: Any = SimpleNamespace(find_spec=_refuse_import)
    sys.meta_path.insert(0, finder)
    if _SEARCH_PATH not in sys.path:
        sys.path.insert(1, _SEARCH_PATH)  # after the program's own folder


_TORCH = ("functions", "mpi_ops", "sync_batch_norm", "elastic.sampler", "elastic.state")
_COMMON = ("basics", "elastic", "exceptions", "process_sets")


def _contents() -> dict[str, Mapping[str, Any]]:
    """The contents of each module; parents come before their submodules."""
    surface = import_module("wfbp.horovod.torch")
    elastic = import_module("wfbp.horovod.torch.elastic")
    compression = import_module("wfbp.torch.compression")
    _OptimizerClass.register(surface.DistributedOptimizerBase)
    names = {name: getattr(surface, name) for name in surface.__all__}
    errors = {
        "HorovodInternalError": surface.HorovodInternalError,
        "HostsUpdatedInterrupt": elastic.HostsUpdatedInterrupt,
    }
    elastic_names = {name: getattr(elastic, name) for name in ("ElasticSampler", "TorchState")}
    return {
        "horovod": {"__version__": __version__, "run": run},
        "horovod.common": {},
        "horovod.torch": names,
        "horovod.torch.elastic": {**names, **elastic_names, "run": elastic.run},
        "horovod.torch.compression": {
            name: value for name, value in vars(compression).items() if not name.startswith("_")
        },
        "horovod.torch.optimizer": {**names, "_DistributedOptimizer": _OptimizerClass},
        "horovod.common.util": {**names, **_UTIL},
        **{f"horovod.common.{name}": {**names, **errors} for name in _COMMON},
        **{f"horovod.torch.{name}": {**names, **elastic_names} for name in _TORCH},
    }


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    **options: Any,
) -> list[Any]:
    """Call a function on ``np`` ranks of this machine, as Horovod's ``run`` does.

    Args:
        func: may import ``horovod.torch``.
        args: positional arguments, the same on every rank.
        kwargs: arguments by name.
        np: number of ranks.
        options: Horovod's others, of which ``verbose``, ``use_mpi``, ``use_gloo`` and those that
            are None have no effect.

    Returns:
        The function's results, by rank.

    Raises:
        TypeError: an option asks for something else, such as other hosts.
        WfbpError: as :func:`wfbp.run`.
    """
    ignored = ("verbose", "use_mpi", "use_gloo", "start_timeout", "executable")
    for name, value in options.items():
        if name not in ignored and value is not None:
            raise TypeError(
                f"run({name}={value!r}): wfbp runs a function on this machine's ranks; for other "
                "hosts start the program by `wfbprun -H`"
            )
    results: list[Any] = import_module("wfbp.launcher.function").run(
        _in_rank, (func, args, kwargs), np=np
    )
    return results


def _in_rank(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    stand_in()
    return func(*args, **(kwargs or {}))


class _OptimizerClass(ABC):  # noqa: B024 - its instances are registered
    """Horovod's class of optimizers, which programs name in annotations and ``isinstance()``."""

    def __init_subclass__(cls) -> None:
        raise TypeError(
            "wfbp.horovod has no optimizers to derive from: call DistributedOptimizer(optimizer), "
            "and derive from the optimizer's own class"
        )

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("call DistributedOptimizer(optimizer), which makes an optimizer")


def _split_list(items: Sequence[Any], num_parts: int) -> list[Any]:
    """Successive parts of a list; the first ones are longer by one if it does not divide."""
    rest = iter(items)
    length, longer = divmod(len(items), num_parts)
    return [list(itertools.islice(rest, length + (k < longer))) for k in range(num_parts)]


_UTIL: dict[str, Callable[..., Any]] = {
    "check_extension": lambda *_: None,  # wfbp has no build for one version of PyTorch
    "extension_available": lambda ext_base_name, verbose=False: ext_base_name == "torch",
    "gpu_available": lambda *_, **__: import_module("torch").cuda.is_available(),
    "split_list": _split_list,
}
"""Functions that programs copied from Horovod's sources import."""


def refuse(module: str, name: str) -> NoReturn:
    """Raise ``AttributeError`` for a missing name, with what replaces it if it was left out."""
    if name in INSTEAD:
        raise AttributeError(f"{module} has no {name}: {INSTEAD[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _refuse_import(name: str, path: Any, target: Any = None) -> None:
    """Have ``import`` of a module or name that is left out raise what to use instead."""
    parent, _, child = name.rpartition(".")
    if parent in _modules and child in INSTEAD:
        # Without a name: `from horovod import run` would swallow the error of that module.
        raise ModuleNotFoundError(f"{parent} has no {child} under wfbp.horovod: {INSTEAD[child]}")
