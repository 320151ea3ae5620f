"""A program as users write it, for type checkers: ``make type`` checks it as it checks the package.

Each line marked ``type: ignore`` is a mistake; mypy tells of marks on lines without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

import wfbp
import wfbp.horovod.torch as horovod
import wfbp.torch as hvd
from wfbp import collectives

if TYPE_CHECKING:
    from typing_extensions import assert_type


def train(model: torch.nn.Module, original: torch.optim.Optimizer) -> float:
    """One step by a distributed optimizer, which is one of PyTorch's too."""
    optimizer = hvd.DistributedOptimizer(original, model.named_parameters(), schedule="single")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    scheduler.step()
    model(torch.ones(1, 2)).sum().backward()
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    told: list[str] = [*optimizer.report()]
    if TYPE_CHECKING:
        assert_type(optimizer, hvd.DistributedOptimizerBase)
        optimizer.clip_grad_nrom_(1.0)  # type: ignore[attr-defined]
        optimizer.clip_grad_norm_("1.0")  # type: ignore[arg-type]
        hvd.DistributedOptimizer(original, schedul="single")  # type: ignore[call-arg]
        hvd.DistributedOptimizer(model)  # type: ignore[arg-type]
    return norm.item() + len(told)


def rebind(model: torch.nn.Module) -> hvd.DistributedOptimizerBase:
    """The name of the original may be used again where it is declared as any optimizer's."""
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum)
    optimizer.synchronize_parameters()
    if TYPE_CHECKING:
        assert_type(wfbp.DistributedOptimizer(optimizer), hvd.DistributedOptimizerBase)
        wfbp.alreduce(model)  # type: ignore[attr-defined]
    return optimizer


def reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Handles know what comes back; those kept as numbers work, too."""
    handle = hvd.allreduce_async(tensor, name="a", op=hvd.Average)
    group = horovod.grouped_allreduce_async([tensor, tensor], name="b")
    sent = horovod.alltoall_async(tensor, splits=[len(tensor)], name="c")
    numbers: list[int] = [hvd.allgather_async(tensor), horovod.broadcast_async_(tensor, 0)]
    done: bool = hvd.poll(handle)
    mean = hvd.synchronize(handle)
    rows, received = hvd.synchronize(sent)
    both = hvd.synchronize(group)
    total: torch.Tensor = sum((hvd.synchronize(number) for number in numbers), tensor)
    wait: Callable[[], torch.Tensor] = horovod.sparse_allreduce_async(tensor.to_sparse(), "d")
    mine = hvd.ProcessSet(range(hvd.size()))
    if TYPE_CHECKING:
        assert_type(mean, torch.Tensor)
        assert_type(both, list[torch.Tensor])
        assert_type(rows, torch.Tensor)
        assert_type(hvd.alltoall(tensor), torch.Tensor)
        assert_type(hvd.reducescatter(tensor, op=hvd.Sum, process_set=mine), torch.Tensor)
        hvd.poll(tensor)  # type: ignore[arg-type]
        hvd.allreduce(tensor, op="sum")  # type: ignore[arg-type]
        mean.shap  # type: ignore[attr-defined]  # noqa: B018
        hvd.alreduce(tensor)  # type: ignore[attr-defined]
    return mean + both[0] + rows + wait().to_dense() + total + received.sum() + done


def reduce_arrays(array: npt.NDArray[np.float32], tensor: torch.Tensor) -> float:
    """At the top level results are of the argument's kind."""
    mean = wfbp.allreduce(array)
    handle = wfbp.allreduce_async(tensor, name="a")
    rows, received = wfbp.alltoall(array, splits=[len(array)])
    group = collectives.grouped_allreduce_async([array, array], name="b")
    both = wfbp.synchronize(group)
    if TYPE_CHECKING:
        assert_type(mean, npt.NDArray[Any])
        assert_type(wfbp.synchronize(handle), torch.Tensor)
        assert_type(group, horovod.Handle[list[npt.NDArray[Any]]])
        assert_type(wfbp.broadcast(tensor, 0), torch.Tensor)
        assert_type(wfbp.broadcast([1.0, 2.0], 0), npt.NDArray[Any])
        assert_type(wfbp.allgather(tensor), torch.Tensor)
        mean.shap  # type: ignore[attr-defined]  # noqa: B018
        wfbp.allreduce("text", op="sum")  # type: ignore[call-overload]
        wfbp.reducescatter(object())  # type: ignore[type-var]
    return float(mean.sum() + rows.sum() + received.sum() + both[0].sum())


@horovod.elastic.run
def run(state: horovod.elastic.TorchState, most: int) -> int:
    """What a state was made with are its attributes."""
    while state.epoch < most:
        state.epoch += 1
        state.commit()
    if TYPE_CHECKING:
        run(state, "3")  # type: ignore[arg-type]
    return most


def main() -> None:
    """All of it."""
    hvd.init()
    model = torch.nn.Linear(2, 1)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rebind(model)
    reduce(torch.ones(3))
    reduce_arrays(np.ones(3, np.float32), torch.ones(3))
    run(horovod.elastic.TorchState(model, epoch=0), 2)
    hvd.shutdown()
