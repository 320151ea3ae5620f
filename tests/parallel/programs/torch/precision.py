"""Mixed precision, and values that are no numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    data,
    mlp,
    same,
    twins,
)

check = Checks()


def rounded(
    model: nn.Module, backward: Callable[..., None], step: int, passes: int, dtype: torch.dtype
) -> None:
    """Set ``p.grad`` to what ranks make of their gradients that travel in this type."""
    params = list(model.parameters())
    sums = [torch.zeros_like(p) for p in params]
    for rank in range(wfbp.size()):
        model.zero_grad()
        for part in range(passes):
            backward(model, rank, passes * step + part)
        for total, p in zip(sums, params, strict=True):
            total += p.grad.to(dtype).to(p.dtype)
    for total, p in zip(sums, params, strict=True):
        p.grad = (total / wfbp.size()).to(dtype).to(p.dtype)


@check
def compression() -> None:
    """As one process that rounds before and after the average; clipped, accumulated, sharded."""

    def backward(net: nn.Module, rank: int, step: int) -> None:
        net(data(step, rank, 4, 5, dtype=torch.float32)).square().mean().backward()

    for kind, dtype in (
        (wfbp.torch.Compression.fp16, torch.float16),
        (wfbp.torch.Compression.bf16, torch.bfloat16),
    ):
        for passes, clips, sharding in (
            (1, False, None),
            (2, True, None),
            (1, True, False),
            (1, True, True),
        ):
            torch.manual_seed(3)
            both = twins(
                model=mlp(5, 7, 3).float(),
                compression=kind,
                backward_passes_per_step=passes,
                optimizer_sharding=sharding,
            )
            model, optimizer, reference, _ = both
            for step in range(12):
                optimizer.zero_grad()
                for part in range(passes):
                    backward(model, wfbp.rank(), passes * step + part)
                rounded(reference, backward, step, passes, dtype)
                if clips:
                    same(*both.clip(0.1), f"{dtype}, norm of step {step}", 1e-5)
                if step == 8 and wfbp.size() > 1:
                    optimizer.synchronize()
                    grads = [p.grad for p in model.parameters()]
                    assert clips or all(torch.equal(g, g.to(dtype).to(g.dtype)) for g in grads)
                    for g, p in zip(grads, reference.parameters(), strict=True):
                        same(g, p.grad, f"{dtype}, gradient of step {step}", 1e-2)
                        p.grad.copy_(g)  # what is rounded otherwise must not add up
                    both.step_synchronized()
                else:
                    optimizer.step()
                both.plain.step()
                if step % 3 == 2:
                    both.equal(f"{dtype}, step {step}", 1e-5)
            bits = [p.detach().numpy().tobytes() for p in model.parameters()]
            assert all(theirs == bits for theirs in wfbp.allgather_object(bits))
            if wfbp.size() > 1:
                count = sum(p.numel() for p in model.parameters())
                assert optimizer.report()["total_bytes"] == 2 * count


@check
def compression_overflows_for_the_scaler_to_see() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = wfbp.torch.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), compression=wfbp.torch.Compression.fp16
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=100)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (1.0 + wfbp.rank() % 2)).backward()
        scaler.step(optimizer)
        scaler.update()
        if wfbp.size() > 1:  # 2**15 is too large on rank 1 alone
            assert scaler.get_scale() == 2.0 ** max(14, 16 - step), step
    raises(
        ValueError,
        "compression is 'half'; expected one of 'none', 'fp16', 'bf16', 'int8'",
        act=lambda: wfbp.torch.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), compression="half"
        ),
    )


@check
def element_types_side_by_side() -> None:
    """Groups of one step go different ways; what ranks compare in the first step waits for them."""
    rank, size = wfbp.rank(), wfbp.size()
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    for _ in range(3):
        params = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
        optimizer = wfbp.torch.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
        sum(p.double().sum() * (rank + 1.0) for p in params).backward()
        optimizer.step()
        assert all((p == -(size + 1) / 2).all() for p in params)
