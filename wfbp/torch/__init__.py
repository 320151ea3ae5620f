"""wfbp for PyTorch, under Horovod's names.

:mod:`wfbp.torch.collectives` has further variants of the operations on tensors, and
:mod:`wfbp.horovod.torch` what only programs for Horovod use.

Example:
    >>> import torch, wfbp.torch as wfbp
    >>> wfbp.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = wfbp.DistributedOptimizer(
    ...     optimizer, named_parameters=model.named_parameters())
    >>> wfbp.broadcast_parameters(model.state_dict(), root_rank=0)
    >>> wfbp.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ImportError as _error:
    raise ImportError(
        f"wfbp.torch needs PyTorch, which cannot be imported ({_error}): pip install "
        "'wfbp[torch]'. wfbp and wfbp.jax work without PyTorch"
    ) from _error

from wfbp.core.types import Op
from wfbp.runtime.collectives.api import (
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    init,
    poll,
    remove_process_set,
    synchronize,
)
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.process import is_initialized, local_rank, local_size, rank, shutdown, size
from wfbp.torch.batch_norm import SyncBatchNorm
from wfbp.torch.collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_async,
    grouped_allreduce,
    reducescatter,
    reducescatter_async,
)
from wfbp.torch.compiling import compile_backend, uncompiled
from wfbp.torch.compression import Compression
from wfbp.torch.ending import join
from wfbp.torch.local_steps import LocalSteps
from wfbp.torch.optimizer import DistributedOptimizerBase
from wfbp.torch.state import (
    broadcast_buffers,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from wfbp.torch.tensors import set_local_device
from wfbp.torch.wrapping import DistributedOptimizer

for _function in (allgather_object, barrier, broadcast_object, poll, synchronize):
    uncompiled(_function)

Average = Op.AVERAGE
Sum = Op.SUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedOptimizerBase",
    "LocalSteps",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_buffers",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "compile_backend",
    "global_process_set",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "set_local_device",
    "shutdown",
    "size",
    "synchronize",
]
