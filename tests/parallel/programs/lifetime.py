"""What a job keeps and leaves: ``lifetime.py OUT cycles|raise|thread|after|kill`` under mpirun.

Every rank writes OUT/rank<r>.json: with ``cycles`` how many maps and descriptors there are after
each init() and shutdown(), otherwise the files of its MPI library's shared memory.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import wfbp
from wfbp.runtime import process

kept: list[Any] = []


def train(schedule: str) -> None:
    """Some steps with gradients that lie in shared memory and outlive it."""
    import torch

    import wfbp.torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 3))
    optimizer = wfbp.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        schedule=schedule,
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 300)).sum().backward()
        optimizer.step()
    kept.append((model, optimizer))


def reduce() -> None:
    """As :func:`train`, with arrays: PyTorch takes seconds to start."""
    value = np.full(90_000, 1.0, np.float32)
    reducer = wfbp.GradientReducer([("value", value)], schedule="single")
    for _ in range(3):
        reducer.mark_ready(0, value)
        kept.append((reducer, reducer.wait()))


def cycles(out: Path) -> None:
    import torch

    counts = []
    for cycle in range(6):
        wfbp.init()
        rank = wfbp.rank()
        train("single" if cycle % 2 else "independent")
        model, optimizer = kept[-1]
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        wfbp.shutdown()
        held = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(gradients) == len(held)
        assert all(map(torch.equal, gradients, held))
        assert optimizer.report()["schedule"]
        optimizer.zero_grad(set_to_none=False)
        counts.append([len(os.listdir("/proc/self/fd")), len(maps())])
    # What the program still holds of the memory stays what it is.
    wfbp.init()
    value = np.full(50_000, rank, np.float32)
    reducer = wfbp.GradientReducer([("value", value)], schedule="single")
    reducer.mark_ready(0, value)
    found = reducer.wait()[0]
    assert found is not None
    wfbp.shutdown()
    assert (found == found[0]).all()
    found += 1
    # Nothing is left of it once the program holds nothing.
    del found, reducer, model, optimizer, held
    kept.clear()
    gc.collect()
    assert not any("memfd:wfbp" in line for line in maps())
    (out / f"rank{rank}.json").write_text(json.dumps(counts))


def fail(out: Path, how: str) -> None:
    wfbp.init()
    rank = wfbp.rank()
    if how == "raise":
        train("single")
    else:
        reduce()
    (out / f"rank{rank}.json").write_text(json.dumps(segments()))
    wfbp.barrier()
    if how == "after":
        wfbp.shutdown()
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "thread":
            process.current("a test").thread.post(lambda: [].pop())
            wfbp.barrier()
        raise ValueError("this rank fails")
    if how != "after":
        wfbp.barrier()


def maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def segments() -> list[str]:
    """Files of MPICH's that this process has mapped, whether or not they still have a name."""
    lines = [line.removesuffix(" (deleted)") for line in maps()]
    return sorted({"/" + line.partition("/")[2] for line in lines if "/dev/shm/mpich" in line})


if __name__ == "__main__":
    if sys.argv[2] == "cycles":
        cycles(Path(sys.argv[1]))
    else:
        fail(Path(sys.argv[1]), sys.argv[2])
