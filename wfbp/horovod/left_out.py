"""Names of Horovod's that are left out, and what to use instead."""

from __future__ import annotations

from typing import NoReturn

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
    "run": _RUN,
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
"""By name alone, for all of Horovod's modules."""


def refuse(module: str, name: str) -> NoReturn:
    """Raise ``AttributeError`` for a missing name, with its replacement if it was left out on
    purpose."""
    if name in INSTEAD:
        raise AttributeError(f"{module} has no {name}: {INSTEAD[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
