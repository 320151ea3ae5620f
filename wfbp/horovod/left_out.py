"""Names of Horovod's that are left out, and what to use instead."""

from __future__ import annotations

from typing import NoReturn

_RUN = "start ranks with `wfbprun -n N python -m wfbp.horovod SCRIPT`"
_CHECK = "nothing of wfbp is built for one version of PyTorch, so there is nothing to check"
_AUTOGRAD = "call the function itself, which is differentiable"
_STATE = (
    "use wfbp.horovod.torch.elastic.TorchState, which takes models, optimizers and any other values"
)
_AVERAGE = "pass op=Average or op=Sum"
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
    "HorovodAllgather": _AUTOGRAD,
    "HorovodAllreduce": _AUTOGRAD,
    "HorovodAlltoall": _AUTOGRAD,
    "HorovodBroadcast": _AUTOGRAD,
    "HorovodGroupedAllgather": _AUTOGRAD,
    "HorovodGroupedAllreduce": _AUTOGRAD,
    "HorovodGroupedReducescatter": _AUTOGRAD,
    "HorovodReducescatter": _AUTOGRAD,
    "PartialDistributedOptimizer": "pass DistributedOptimizer the parameters to be averaged",
    "_DistributedAdasumOptimizer": "use DistributedOptimizer(op=Adasum)",
    "_DistributedOptimizer": "call DistributedOptimizer, which returns a DistributedOptimizerBase",
    "check_num_rank_is_power_of_2": "op=Adasum checks the number of ranks itself",
    "handle_average_backwards_compatibility": _AVERAGE,
    "is_adasum": "compare op with wfbp.horovod.torch.Adasum",
    "mpi_lib": "there is no library of that kind; use the functions of wfbp.torch",
    "mpi_lib_v2": "there is no library of that kind; use the functions of wfbp.torch",
    # horovod.torch.elastic and horovod.common.elastic
    "HostUpdateResult": _WATCH,
    "ModelStateHandler": _STATE,
    "ObjectState": _STATE,
    "OptimizerStateHandler": _STATE,
    "SamplerStateHandler": _STATE,
    "State": _STATE,
    "StateHandler": _STATE,
    "WorkerNotificationManager": _WATCH,
    "get_handler_registry": _STATE,
    "notification_manager": _WATCH,
    "run_fn": "use wfbp.horovod.torch.elastic.run",
    "set_handler_registry": _STATE,
    # horovod.common
    "EXTENSIONS": _CHECK,
    "HorovodBasics": "use the functions of wfbp.torch",
    "HorovodVersionMismatchError": _CHECK,
    "check_extension": _CHECK,
    "check_installed_version": _CHECK,
    "env": "set variables by os.environ; wfbp reads WFBP_* variables in init()",
    "extension_available": "wfbp.torch is there where PyTorch is installed",
    "get_average_backwards_compatibility_fun": _AVERAGE,
    "get_ext_suffix": _CHECK,
    "get_extension_full_path": _CHECK,
    "get_version_mismatch_message": _CHECK,
    "gpu_available": "use torch.cuda.is_available(), and hvd.cuda_built() for gradients",
    "is_iterable": "use isinstance(value, collections.abc.Iterable)",
    "is_version_greater_equal_than": "compare packaging.version.Version objects",
    "num_rank_is_power_2": "op=Adasum checks the number of ranks itself",
    "split_list": "use itertools.batched, or slices",
}
"""By name alone, for all of Horovod's modules."""


def refuse(module: str, name: str) -> NoReturn:
    """Raise ``AttributeError`` for a missing name, with its replacement if it was left out on
    purpose."""
    if name in INSTEAD:
        raise AttributeError(f"{module} has no {name}: {INSTEAD[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
