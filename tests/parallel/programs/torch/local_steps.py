"""Usage: mpirun -n N python local_steps.py OUT FRAGMENTS

Trains by local steps, each rank on another host, and repeats all ranks' training in this process.
Writes how far they differ.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import wfbp.torch as hvd
from tests.parallel.programs.torch.bits import digest
from tests.support.cores import leave_cores
from tests.support.hosts import as_on_hosts, in_rows
from wfbp.config import read_environment
from wfbp.torch.local_steps import OUTER

CONFIG = replace(read_environment()[0], probe_budget_s=0.02, timeout_s=25.0)


def model() -> nn.Module:
    """Large and small tensors, and one whose gradient is always zero."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(40, 90), nn.Tanh(), nn.Linear(90, 60), nn.Linear(60, 2))
    made.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return made


def loss(made: nn.Module, rank: int, step: int) -> torch.Tensor:
    batch = torch.Generator().manual_seed(1000 * rank + step)
    return made(torch.randn(5, 40, generator=batch)).square().mean()


def plain_sgd(rate: float, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=rate)


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def take_steps(
    made: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], rank: int
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(made, rank, step).backward()
        optimizer.step()


def expected(
    size: int, steps: int, every: int, delay: int, bounds: Sequence[int], outer: str
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Every rank's parameters after some steps, and the common ones, with exact averages."""
    models = [model() for _ in range(size)]
    inner = [adam(each.parameters()) for each in models]
    common = [p.detach().clone() for p in models[0].parameters()]
    parts = list(itertools.pairwise(bounds))
    outers = [OUTER[outer](common[a:b]) for a, b in parts]
    left: dict[int, list[list[torch.Tensor]]] = {}
    for step in range(1, steps + 1):
        for rank in range(size):
            take_steps(models[rank], inner[rank], [step], rank)
        for k, (a, b) in enumerate(parts):
            phase = every * (k + 1) // len(parts)
            now = [list(each.parameters())[a:b] for each in models]
            if step >= phase and (step - phase) % every == 0:
                left[k] = [[p.detach().clone() for p in params] for params in now]
            if step - delay >= phase and (step - delay - phase) % every == 0:
                then = left.pop(k)
                for number, tensor in enumerate(common[a:b]):
                    tensor.grad = tensor - torch.stack([each[number] for each in then]).mean(0)
                outers[k].step()
                for params, old in zip(now, then, strict=True):
                    for param, tensor, before in zip(params, common[a:b], old, strict=True):
                        param.detach().add_(tensor - before)
    return [[p.detach() for p in each.parameters()] for each in models], common


def differs(rank: int, size: int, bounds: Sequence[int], outer: str, **numbers: int) -> float:
    """How far parameters are from the expected ones after some steps, relative."""
    made = model()
    optimizer = adam(made.parameters())
    local = hvd.LocalSteps(
        optimizer,
        made.named_parameters(),
        fragments=len(bounds) - 1,
        outer=outer,
        compression="none",
        **numbers,
    )
    steps, params = 26, list(made.parameters())
    assert [len(f.params) for f in local._fragments] == [
        b - a for a, b in itertools.pairwise(bounds)
    ]
    take_steps(made, optimizer, range(1, steps + 1), rank)
    wanted, common = expected(size, steps, numbers["every"], local._delay, bounds, outer)
    pairs = [*zip(params, wanted[rank], strict=True)]
    with local.averaged():
        pairs += [(p.detach().clone(), c) for p, c in zip(params, common, strict=True)]
    pairs += [*zip(params, wanted[rank], strict=True)]
    return max(float((a - b).detach().norm() / b.norm()) for a, b in pairs)


def as_plain(rank: int, size: int) -> float:
    """By every step and the plain average, against training with averaged gradients."""
    both = []
    for number in range(2):
        made = model()
        optimizer: Any = torch.optim.SGD(made.parameters(), lr=0.1)
        if number:
            hvd.LocalSteps(optimizer, every=1, fragments=1, outer="sgd", compression="none")
        else:
            optimizer = hvd.DistributedOptimizer(optimizer, schedule="single")
        take_steps(made, optimizer, range(20), rank)
        both.append(torch.cat([p.detach().flatten() for p in made.parameters()]))
    return float((both[0] - both[1]).norm() / both[0].norm())


def ends(rank: int, compression: str) -> dict[str, Any]:
    """Training that was saved between two exchanges, training that was not, and training that
    continues from the state of rank 0, which was saved while a fragment was under way."""
    found: dict[str, list[str]] = {}
    for how, first in (("whole", 11), ("resumed", 11), ("from rank 0", 13)):
        options: Any = {"every": 8, "fragments": 2, "delay": 2, "compression": compression}
        made = model()
        optimizer = adam(made.parameters())
        local = hvd.LocalSteps(optimizer, made.named_parameters(), **options)
        take_steps(made, optimizer, range(first), rank)  # one fragment is sent after step 12
        kept: Any = None
        if how == "resumed" or (how == "from rank 0" and rank == 0):
            kept = copy.deepcopy([made.state_dict(), optimizer.state_dict()])
            kept.append(local.state_dict())
        if how == "from rank 0":
            kept = hvd.broadcast_object(kept, root_rank=0)
        if how != "whole":
            take_steps(made, optimizer, range(2), rank)  # which are lost
            local.synchronize()
        for again in (True, False) if how != "whole" else ():
            made = model()
            optimizer = adam(made.parameters())
            local = hvd.LocalSteps(optimizer, made.named_parameters(), **options)
            made.load_state_dict(kept[0])
            optimizer.load_state_dict(copy.deepcopy(kept[1]))
            local.load_state_dict(kept[2])
            if again:  # the state is still the same after its first use
                take_steps(made, optimizer, range(first, first + 9), rank)
                local.synchronize()
        take_steps(made, optimizer, range(first, 31), rank)
        digests = [digest(made.parameters())]
        for _ in range(2):  # the second time exchanges nothing
            local.synchronize()
            digests.append(digest(made.parameters()))
        digests.append(digest([t for f in local._fragments for t in f.common]))
        found[how] = digests
    return {
        "resumed equal": found["whole"] == found["resumed"],
        "own": found["whole"][0],
        "common": found["whole"][1:3],
        "from rank 0": found["from rank 0"][1:3],
    }


def message(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_values(rank: int) -> str:
    made = model()
    with torch.no_grad():
        made[0].weight += rank
    return message(lambda: hvd.LocalSteps(adam(made.parameters()), made.named_parameters()))


def fewer_steps(rank: int, fragments: int) -> str:
    """A rank that has skipped a step ends, while others are in the middle of training."""
    made = model()
    optimizer = adam(made.parameters())
    local = hvd.LocalSteps(optimizer, every=4, fragments=fragments, delay=0)

    def act() -> None:
        take_steps(made, optimizer, range(7 if rank == 1 else 8), rank)
        local.synchronize()

    return message(act)


def misused(rank: int) -> list[str]:
    """What is said of calls in the wrong place, on every rank alike."""
    made = model()
    optimizer = adam(made.parameters())
    local = hvd.LocalSteps(optimizer, made.named_parameters(), every=4, fragments=2)
    told = []
    with local.averaged():
        told.append(message(local.synchronize))
        told.append(message(lambda: local.load_state_dict(local.state_dict())))
        told.append(message(lambda: local.averaged().__enter__()))
    told.append(message(lambda: hvd.DistributedOptimizer(optimizer)))
    state = local.state_dict()
    state["settings"]["delay"] = 0
    told.append(message(lambda: local.load_state_dict(state)))
    told.append(message(lambda: local.load_state_dict({})))
    with torch.no_grad():
        made[0].weight += 1.0
    told.append(message(lambda: take_steps(made, optimizer, [0], rank)))
    local.close()
    told.append(message(lambda: hvd.DistributedOptimizer(optimizer)))
    return told


def main(out: str, fragments: int) -> None:
    leave_cores()
    torch.set_num_threads(1)
    with as_on_hosts(lambda size: in_rows([1] * size)):
        hvd.init(config=CONFIG)
    rank, size = hvd.rank(), hvd.size()
    results: dict[str, Any] = {
        "differ": {
            "one": differs(rank, size, [0, 7], "sgd", every=3, delay=0),
            "delayed": differs(rank, size, [0, 7], "nesterov", every=4, delay=3),
            "two": differs(rank, size, [0, 3, 7], "nesterov", every=8),
        },
        "as plain": as_plain(rank, size),
        "ends": {name: ends(rank, name) for name in ("none", "bf16", "int8", "int4")},
    }
    if size > 1:
        results["other values"] = other_values(rank)
        results["other outer"] = message(
            lambda: hvd.LocalSteps(adam(model().parameters()), outer=partial(plain_sgd, 1.0 + rank))
        )
        results["misused"] = misused(rank)
        results["fewer steps"] = fewer_steps(rank, fragments)
    Path(out, f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
