"""wfbp for PyTorch, under Horovod's names.

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
    barrier,
    join,
    poll,
    remove_process_set,
    synchronize,
)
from wfbp.runtime.collectives.operations import Adasum
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.operations import allgather_object, broadcast_object
from wfbp.runtime.world import (
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
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
from wfbp.torch.compression import Compression, Compressor
from wfbp.torch.devices import choose_device
from wfbp.torch.optimizer import DistributedOptimizer
from wfbp.torch.state import broadcast_optimizer_state, broadcast_parameters

Average = Op.AVERAGE
Sum = Op.SUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
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
    "choose_device",
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
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]
