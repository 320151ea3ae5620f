"""Usage: mpirun -n N python codecs.py OUT HOSTS CODEC

Trains with encoded gradients under every schedule, and reduces given gradients as the reference
does; writes digests, and what differs.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import wfbp.torch as hvd
from tests.parallel.programs.torch.bits import STEPS, differentiated, digest, reduced
from tests.support.codec_reference import Reduction
from tests.support.cores import leave_cores
from tests.support.hosts import as_on_hosts, in_rows
from wfbp.config import SCHEDULES, read_environment
from wfbp.core.planners import ALL_REDUCE_SCHEDULES
from wfbp.runtime import compression_guard
from wfbp.runtime.tuning import tuner

CONFIG = replace(
    read_environment()[0],
    warmup_steps=1,
    profile_steps=1,
    trial_steps=2,
    probe_budget_s=0.05,
    replan_threshold=0.0,
)
SHAPES = ((160, 129), (70, 300), (1, 5), (41,), (9000,), (3, 50, 64))
"""Some are encoded; none is a whole number of blocks for three ranks or five."""


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)


def trained(
    schedule: str, rank: int, make: Callable[..., torch.optim.Optimizer], codec: str
) -> str:
    """One layer is not used in every step, nor on every rank; gradients are clipped."""
    torch.manual_seed(0)
    first, last = nn.Linear(90, 200), nn.Linear(200, 7)
    model = nn.ModuleList([first, nn.Linear(200, 200), last])
    optimizer = hvd.DistributedOptimizer(
        make(list(model.parameters())),
        model.named_parameters(),
        schedule=schedule,
        compression=codec,
    )
    data = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        hidden = first(torch.randn(3, 90, generator=data)).relu()
        if (step + rank) % 3:
            hidden = model[1](hidden)
        last(hidden).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return digest(model.parameters())


def given(rank: int, step: int, shape: tuple[int, ...]) -> np.ndarray:
    """A gradient; in some steps a rank has none, or large and small blocks."""
    rng = np.random.default_rng((rank, step, len(shape), shape[0]))
    values = rng.standard_normal(shape).astype(np.float32)
    if (step + rank) % 5 == 4:
        values[:] = 0
    values.reshape(-1)[: values.size // 2] *= np.float32(1e-3)
    return values


def compared(schedule: str, rank: int, hosts: list[list[int]], codec: str) -> list[str]:
    """The shapes whose values after some steps differ from those that the reference calculates."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(params, lr=1.0), schedule=schedule, compression=codec
    )
    size = hvd.size()
    sent = [Reduction(int(np.prod(s)), hosts, len(s) > 1 and s[0] > 1, codec) for s in SHAPES]
    expected = [np.zeros(shape, np.float32) for shape in SHAPES]
    for step in range(20):
        optimizer.zero_grad()
        mine = [torch.from_numpy(given(rank, step, shape)) for shape in SHAPES]
        torch.stack([(p * g).sum() for p, g in zip(params, mine, strict=True)]).sum().backward()
        optimizer.step()
        for shape, value, reduction in zip(SHAPES, expected, sent, strict=True):
            every = [given(r, step, shape).reshape(-1) for r in range(size)]
            value -= reduction.average(every).reshape(shape)
    pairs = zip(SHAPES, params, expected, strict=True)
    return [str(s) for s, p, e in pairs if p.detach().numpy().tobytes() != e.tobytes()]


def after_a_spike(schedule: str, what: str, rank: int) -> float:
    """The largest error of an average in the step after one that is as large as 1e6 and not applied
    as it was averaged."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.zeros(SHAPES[0]))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param], lr=1.0), schedule=schedule, compression="int8"
    )
    state = copy.deepcopy(optimizer.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def backward(step: int, scale: float, spoilt: bool = False) -> None:
        values = torch.from_numpy(given(rank, step, SHAPES[0])) * scale
        if spoilt:
            values[5, 6] = math.inf
        (param * values).sum().backward()

    scaler.scale(torch.ones(()))
    backward(0, 1e6, spoilt=what == "skipped by a scaler")
    if what == "synchronized and cleared":
        optimizer.synchronize()
        optimizer.zero_grad()
    elif what == "synchronized and cleared by the program":
        optimizer.synchronize()
        param.grad = None
    elif what == "clipped":
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    elif what == "clipped and cleared":
        optimizer.clip_grad_norm_(1e8)
        optimizer.zero_grad()
    elif what == "clipped by torch":
        optimizer.synchronize()
        nn.utils.clip_grad_norm_([param], 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    elif what == "clipped by both":
        optimizer.synchronize()
        nn.utils.clip_grad_norm_([param], 10.0)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    elif what == "skipped by a scaler":
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() < 4.0
        param.grad = None
    elif what == "unscaled, then clipped":
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    elif what == "rolled back":
        optimizer.step()
        optimizer.load_state_dict(state)
    optimizer.zero_grad()
    backward(1, 1.0)
    optimizer.synchronize()
    every = [torch.from_numpy(given(r, 1, SHAPES[0])) for r in range(hvd.size())]
    assert param.grad is not None
    return float((param.grad - torch.stack(every).mean(0)).abs().max())


def makes_up(schedule: str, rank: int, what: str) -> float:
    """How far the sum of 30 updates by the same gradient is from exact, over that of one update."""
    param = nn.Parameter(torch.zeros(SHAPES[0]))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param], lr=1.0), schedule=schedule, compression="int8"
    )
    exact = torch.stack([torch.from_numpy(given(r, 0, SHAPES[0])) for r in range(hvd.size())])
    errors, part = [], {"clipped": 0.1, "divided": 1 / 16}.get(what, 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(1, 31):
        optimizer.zero_grad()
        loss = (param * exact[rank]).sum()
        (scaler.scale(loss) if what == "scaled" else loss).backward()
        if what == "scaled":
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1e6)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        elif what == "synchronized":
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        elif what == "clipped":
            optimizer.clip_grad_norm_(0.1 * float(exact.mean(0).norm()))
            optimizer.step()
        elif what == "divided":
            optimizer.synchronize()
            assert param.grad is not None
            param.grad.div_(16.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        elif what == "closure":
            optimizer.step(lambda: param.sum().detach() * 0)
        else:
            optimizer.step()
        errors.append(float((param.detach() + step * part * exact.mean(0)).abs().max()))
    return errors[-1] / errors[0]


def trained_on(rank: int, steps: int, **options: Any) -> tuple[str, dict[str, Any]]:
    """Parameters after some steps, and the report."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(90, 200), nn.ReLU(), nn.Linear(200, 70))
    optimizer = hvd.DistributedOptimizer(
        momentum(list(model.parameters())), model.named_parameters(), **options
    )
    data = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 90, generator=data)).square().mean().backward()
        optimizer.step()
    report = optimizer.report()
    if options.get("compression_guard") == "fallback":
        for _ in range(2):
            optimizer.set_backward_passes_per_step(1)  # which makes the exchange anew
        report["sent_as"] |= optimizer.report()["sent_as"]
    return digest(model.parameters()), report


def chosen(rank: int, schedule: str) -> list[Any]:
    """The plan decides how gradients are sent; which way it takes depends on measured times."""
    parameters, report = trained_on(rank, 150, compression="auto:int8", schedule=schedule)
    known = {"float32", "bfloat16", "int8"}
    return [parameters, report["phase"], set(report["sent_as"]) <= known, report["plan_digest"]]


def mixed(rank: int, schedule: str) -> list[Any]:
    """Each group of the plan is sent in another way, whatever the times are."""
    ways = ("", "int8", "", "bfloat16")
    given, tuner.sent_fastest = (
        tuner.sent_fastest,
        lambda plan, costs: plan.with_wires(lambda group: ways[group % len(ways)]),
    )
    try:
        parameters, report = trained_on(rank, 150, compression="auto:int8", schedule=schedule)
    finally:
        tuner.sent_fastest = given
    return [parameters, sorted(report["sent_as"]), report["plan_digest"]]


def guarded(rank: int, guard: str) -> list[Any]:
    """Every second step is compared, and no sample is good enough."""
    every, least = compression_guard.EVERY_STEPS, compression_guard._LEAST_COSINES
    compression_guard.EVERY_STEPS, compression_guard._LEAST_COSINES = 2, {"int8": 2.0}
    try:
        how: dict[str, Any] = {"compression": "int8", "compression_guard": guard}
        parameters, report = trained_on(rank, 60, schedule="hybrid", **how)
    finally:
        compression_guard.EVERY_STEPS, compression_guard._LEAST_COSINES = every, least
    sample = report["compression_sample"] or {"cosine": None}
    return [parameters, sorted(report["sent_as"]), sample["cosine"]]


SPIKES = (
    "synchronized and cleared",
    "synchronized and cleared by the program",
    "clipped",
    "clipped and cleared",
    "clipped by torch",
    "clipped by both",
    "skipped by a scaler",
    "unscaled, then clipped",
    "rolled back",
)


def main(out: str, layout: str, codec: str) -> None:
    leave_cores()
    sizes = json.loads(layout)
    with as_on_hosts(lambda size: in_rows(sizes or [1] * size)):
        hvd.init(config=CONFIG)
    rank, size = hvd.rank(), hvd.size()
    hosts = in_rows(sizes or [1] * size)
    guards = ("warn", "fallback", "off") if codec == "int8" else ()

    def gradients(step: int) -> list[np.ndarray]:
        return [given(rank, step, shape) for shape in SHAPES]

    results = {
        "adam": {name: trained(name, rank, adam, codec) for name in SCHEDULES},
        "momentum": {name: trained(name, rank, momentum, codec) for name in SCHEDULES},
        "averages": {
            **{
                f"reducer, {name}": reduced(gradients, schedule=name, compression=codec)
                for name in ALL_REDUCE_SCHEDULES
            },
            "jax": differentiated(gradients, schedule="layerwise", compression=codec),
        },
        "exact averages": {
            "reducer": reduced(gradients, schedule="layerwise"),
            "jax": differentiated(gradients, schedule="layerwise"),
        },
        "differ": {name: compared(name, rank, hosts, codec) for name in ("oasr", "independent")},
        "guarded": {how: guarded(rank, how) for how in guards},
    }
    if codec == "int8":
        results |= applied(rank)
    Path(out, f"rank{rank}.json").write_text(json.dumps(results))


def applied(rank: int) -> dict[str, Any]:
    """Errors of unused averages, choices and samples, which are the same for all codecs."""
    return {
        "after a spike": {
            f"{what}, {name}": after_a_spike(name, what, rank)
            for what in SPIKES
            for name in ("oasr", "hybrid")
        },
        "made up": {
            f"{what}, {name}": makes_up(name, rank, what)
            for what in ("", "synchronized", "clipped", "divided", "closure", "scaled")
            for name in ("oasr", "hybrid")
        },
        "chosen": {name: chosen(rank, name) for name in ("auto", "oasr")},
        "mixed": {name: mixed(rank, name) for name in ("layerwise", "dear")},
    }


if __name__ == "__main__":
    main(*sys.argv[1:4])
