"""Runs programs that import Horovod, without changing them.

    mpirun -np 4 python -m wfbp.horovod train.py --epochs 3
    mpirun -np 4 python -m wfbp.horovod -m package.train

``stand_in()`` puts ``wfbp.torch`` in the place of ``horovod.torch`` for this process.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.28.1"
"""Of Horovod, whose public functions are followed."""

_INSTEAD = {
    "run": "start ranks with `mpirun -np N python -m wfbp.horovod SCRIPT`",
    "tensorflow": "wfbp has no adapter for TensorFlow",
    "keras": "wfbp has no adapter for Keras",
    "mxnet": "wfbp has no adapter for MXNet",
    "spark": "start ranks with mpirun",
    "ray": "start ranks with mpirun",
    "runner": "start ranks with `mpirun -np N python -m wfbp.horovod SCRIPT`",
}


def stand_in() -> None:
    """Make ``import horovod.torch`` find ``wfbp.torch``, in this process.

    Raises:
        ImportError: Horovod itself has been imported already.
    """
    present = sys.modules.get("horovod")
    if present is not None and not getattr(present, "__wfbp__", False):
        raise ImportError("Horovod itself has been imported already; call stand_in() before")
    surface = import_module("wfbp.torch")
    import_module("wfbp.torch.gradient_sync").follows_horovod = True  # type: ignore[attr-defined]
    names = {
        "horovod.torch": surface,
        "horovod.torch.mpi_ops": surface,
        "horovod.torch.functions": surface,
        "horovod.torch.optimizer": surface,
        "horovod.torch.sync_batch_norm": surface,
        "horovod.torch.compression": import_module("wfbp.torch.compression"),
        "horovod.torch.elastic": import_module("wfbp.torch.elastic"),
        "horovod.torch.elastic.sampler": import_module("wfbp.torch.elastic"),
        "horovod.torch.elastic.state": import_module("wfbp.torch.elastic"),
        "horovod.common": ModuleType("horovod.common"),
        "horovod.common.exceptions": ModuleType("horovod.common.exceptions"),
        "horovod.common.process_sets": ModuleType("horovod.common.process_sets"),
    }
    errors = names["horovod.common.exceptions"]
    errors.HorovodInternalError = surface.HorovodInternalError  # type: ignore[attr-defined]
    for name in ("ProcessSet", "global_process_set", "add_process_set", "remove_process_set"):
        setattr(names["horovod.common.process_sets"], name, getattr(surface, name))
    package = _Package("horovod")
    package.__path__ = []  # a package, of which nothing lies in files
    sys.modules["horovod"] = package
    sys.modules.update(names)
    for name, module in names.items():
        parent, _, child = name.rpartition(".")
        if sys.modules[parent] is not surface or child == "elastic":
            setattr(sys.modules[parent], child, module)


class _Package(ModuleType):
    """``horovod`` itself."""

    __version__ = __version__
    __wfbp__ = True

    def __getattr__(self, name: str) -> Any:
        if name in _INSTEAD:
            raise AttributeError(f"horovod.{name} is not part of wfbp.horovod: {_INSTEAD[name]}")
        raise AttributeError(f"module 'horovod' has no attribute {name!r}")
