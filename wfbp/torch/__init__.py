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
from wfbp.runtime.operations import allgather_object, barrier, broadcast_object
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
from wfbp.torch.devices import choose_device
from wfbp.torch.operations import allgather, allreduce, allreduce_, broadcast, broadcast_
from wfbp.torch.optimizer import DistributedOptimizer
from wfbp.torch.state import broadcast_optimizer_state, broadcast_parameters

Average = Op.AVERAGE
Sum = Op.SUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT

__all__ = [
    "Average",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "choose_device",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
