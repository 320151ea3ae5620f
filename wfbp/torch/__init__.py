"""wfbp for PyTorch, under Horovod's names; what only programs for Horovod use is in
:mod:`wfbp.horovod.torch`.

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

from wfbp.core.types import Op
from wfbp.runtime.collectives.api import (
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    init,
    poll,
    remove_process_set,
    start_timeline,
    stop_timeline,
    synchronize,
)
from wfbp.runtime.collectives.operations import Handle
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.process import is_initialized, local_rank, local_size, rank, shutdown, size
from wfbp.torch.batch_norm import SyncBatchNorm
from wfbp.torch.collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from wfbp.torch.compiling import compile_backend
from wfbp.torch.compression import Compression
from wfbp.torch.joining import join
from wfbp.torch.optimizer import DistributedOptimizer
from wfbp.torch.optimizer_interface import DistributedOptimizerBase
from wfbp.torch.state import broadcast_optimizer_state, broadcast_parameters
from wfbp.torch.tensors import set_local_device

Average = Op.AVERAGE
Sum = Op.SUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT
Adasum = Op.ADASUM

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedOptimizerBase",
    "Handle",
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
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "compile_backend",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
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
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
