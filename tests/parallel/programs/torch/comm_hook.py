"""Usage: mpirun -n N python comm_hook.py OUT

Trains by DistributedDataParallel with hooks that send fewer bits, and by a ``DistributedOptimizer``
with the same compression. Each rank is on another host. Writes the results of both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wfbp.torch as hvd
from tests.parallel.programs.torch.bits import digest
from tests.support.cores import leave_cores
from tests.support.hosts import as_on_hosts, in_rows
from wfbp.torch.distributed import comm_hook


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 64), nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 70), nn.Linear(70, 3)
    )


def train(module: nn.Module, optimizer: Any, clears: bool = True) -> str:
    """Parameters after some steps; in some, gradients of two passes are added up."""
    rank = dist.get_rank()
    data = torch.Generator().manual_seed(rank)
    for step in range(12):
        optimizer.zero_grad(set_to_none=clears)
        for last in (False, True)[step % 3 != 2 :]:
            chosen = torch.randint(50, (8,), generator=data)
            if last:
                module(chosen).square().mean().backward()
            else:
                with getattr(module, "no_sync", getattr(optimizer, "no_sync", None))():
                    module(chosen).square().mean().backward()
        optimizer.step()
    return digest(module.parameters())


def momentum(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def by_hook(compression: str, bucket_mb: float, clears: bool = True, **options: Any) -> str:
    module = DistributedDataParallel(model(), bucket_cap_mb=bucket_mb, **options)
    module.register_comm_hook(None, comm_hook(compression))
    return train(module, momentum(module), clears)


def by_optimizer(compression: str) -> str:
    module = model()
    how: Any = {"compression": compression, "schedule": "single"}
    return train(module, hvd.DistributedOptimizer(momentum(module), **how))


def message(compression: Any, state: Any = None) -> str:
    module = DistributedDataParallel(model())
    try:
        module.register_comm_hook(state, comm_hook(compression))
        module(torch.arange(8)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def two_models() -> str:
    hook = comm_hook("int8")
    modules = [DistributedDataParallel(model()) for _ in range(2)]
    for module in modules:
        module.register_comm_hook(None, hook)
    modules[0](torch.arange(8)).sum().backward()
    try:
        modules[1](torch.arange(8)).sum().backward()
    except Exception as error:
        return str(error)
    return "no error"


def sparse() -> bool:
    """Sparse gradients are averaged as they are."""
    module = DistributedDataParallel(nn.Embedding(50, 64, sparse=True))
    module.register_comm_hook(None, comm_hook("int8"))
    chosen = torch.tensor([3, 4 + dist.get_rank()])
    module(chosen).sum().backward()
    expected = torch.zeros(50, 64)
    for rank in range(dist.get_world_size()):
        expected[3] += 1
        expected[4 + rank] += 1
    found = module.module.weight.grad.to_dense()  # type: ignore[union-attr, operator]
    return torch.equal(found, expected / dist.get_world_size())


def after_infinity() -> float:
    """How far the averages are off, after a step with large gradients of which one is infinite."""
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Linear(64, 200, bias=False))
    module.register_comm_hook(None, comm_hook("int8"))
    weight = module.module.weight
    values = torch.randn(200, 64)
    for scale, last in ((1e6, float("inf")), (1.0, 0.0)):
        weight.grad = None
        given = values * scale
        given[0, 0] += last if dist.get_rank() == 0 else 0.0
        (module(torch.eye(64)).T * given).sum().backward()
    assert weight.grad is not None
    return float((weight.grad - values).abs().max())


def main(out: str) -> None:
    leave_cores()
    torch.set_num_threads(1)
    with as_on_hosts(lambda size: in_rows([1] * size)):
        dist.init_process_group("wfbp", init_method="wfbp://")
    results: dict[str, Any] = {
        name: {
            "optimizer": by_optimizer(name),
            "hook": by_hook(name, 25),
            "small buckets": by_hook(name, 0.05),
            "gradients that are kept": by_hook(name, 25, clears=False),
            "views": by_hook(name, 0.05, gradient_as_bucket_view=True),
            "unused": by_hook(name, 25, find_unused_parameters=True),
            "static": by_hook(name, 25, static_graph=True),
        }
        for name in ("none", "bf16", "int8", "fp8", "int4")
    }
    results["auto"], results["rules"] = message("auto:int8"), message({"*": "int8"})
    results["state"] = message("int8", "a group")
    results["two models"] = two_models()
    results["sparse"] = sparse()
    results["after infinity"] = after_infinity()
    # In a new group, whose first operations ranks compare.
    results["codecs"] = message(["int8", "fp8", "bf16"][dist.get_rank()], dist.new_group())
    Path(out, f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
