"""``equality.py`` with gradients on a software device: the whole runtime under real MPI.

PyTorch computes on the host, which plays the consumer's stream; what the lane does happens later,
on streams that are threads. Usage: as of ``equality.py``, and NCCL or STAGED behind it.
"""

from __future__ import annotations

import copy
import sys
import time

import torch

import wfbp.torch as wfbp
from tests.parallel.programs.torch import equality
from tests.support.fake_nccl import FakeNccl
from tests.support.software_device import SoftwareDevice
from wfbp.comm import probe
from wfbp.comm.mpi.backend import MpiBackend
from wfbp.torch import gradient_sync

OPTIMIZERS = ("adamw",)


def two_optimizers(device: SoftwareDevice) -> None:
    """Gradients of the one come first on one rank, those of the other on another; the ranks launch
    both in one order, and train as one process does."""
    torch.set_num_threads(1)
    wfbp.init(config=equality.CONFIG)
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)) for _ in range(2)]
    references = copy.deepcopy(models)
    optimizers, plain = [], []
    for model, reference in zip(models, references, strict=True):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        named = model.named_parameters()
        optimizers.append(wfbp.DistributedOptimizer(sgd, named, schedule="wfbp"))
        plain.append(torch.optim.SGD(reference.parameters(), lr=0.1))

    def backward(model: torch.nn.Module, rank: int, step: int) -> None:
        data = torch.linspace(-1, 1, 20).reshape(4, 5) * (rank + 1) + step
        model(data).square().mean().backward()

    for step in range(5):
        for k in (0, 1) if wfbp.rank() == 0 else (1, 0):
            optimizers[k].zero_grad()
            backward(models[k], wfbp.rank(), step)
            time.sleep(5e-3)  # so that what may go has gone
        for k in (0, 1):
            optimizers[k].step()
            plain[k].zero_grad()
            for rank in range(wfbp.size()):
                backward(references[k], rank, step)
            for param in references[k].parameters():
                assert param.grad is not None
                param.grad /= wfbp.size()
            plain[k].step()
    for model, reference in zip(models, references, strict=True):
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    streams = [call.stream for call in device.library.calls]
    orders = wfbp.allgather_object([sorted(set(streams)).index(stream) for stream in streams])
    assert all(order == orders[0] for order in orders), orders
    assert set(orders[0]) == {0, 1}


def main() -> None:
    probe.LONGEST_STREAM = 2
    device = SoftwareDevice(seed=len(sys.argv), most_s=2e-4)
    if sys.argv.pop() == "NCCL":
        device.library = FakeNccl(device, MpiBackend)
    gradient_sync.device_of = lambda *_: device  # type: ignore[assignment]
    if device.library is not None:
        two_optimizers(device)
    equality.OPTIMIZERS = {n: equality.OPTIMIZERS[n] for n in OPTIMIZERS}
    equality.main()
    device.drain()
    assert device.calls["pack"] > 100


if __name__ == "__main__":
    main()
