"""Ranks that do not do the same: every rank gets an error that says who, which tensor and what."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import wfbp
import wfbp.horovod.torch as hvd
import wfbp.torch
import wfbp.torch.distributed
from tests.parallel.programs.harness import Checks, raises
from wfbp.comm.mpi.transfers import MpiWork
from wfbp.errors import DisagreementError, WfbpError

check = Checks()

Named = list[tuple[str, torch.Tensor]]


def odd() -> bool:
    """Whether this is the rank that differs: the last one."""
    return wfbp.rank() == wfbp.size() - 1


def last() -> str:
    return f"rank {wfbp.size() - 1}"


def others() -> str:
    """All ranks but the last, as messages name them."""
    ranks = ", ".join(map(str, range(wfbp.size() - 1)))
    return f"rank{'s' * (wfbp.size() > 2)} {ranks}"


def wrap(named: Named, **options: Any) -> Any:
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    return wfbp.torch.DistributedOptimizer(optimizer, named, **options)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype))


# Values of parameters.


@check
def parameters_that_were_not_broadcast() -> None:
    """An error of the first step on every rank, unless the program says that they differ."""

    def step(act: Callable[[Any], Any], **options: Any) -> Any:
        named = [(f"p{k}", nn.Parameter(torch.full((3,), float(odd())))) for k in range(6)]
        optimizer = wrap([("first", parameter(2)), *named], **options)
        for _, p in named:
            p.sum().backward()
        act(optimizer)
        return optimizer

    found = f"{last()}: p0, p1, p2, p3 and 2 more. "
    parts = "These differ from rank 0's: " + found, "call wfbp.broadcast_parameters("
    for act in (lambda o: o.step(), lambda o: o.synchronize(), lambda o: o.clip_grad_norm_(1.0)):
        raises(DisagreementError, *parts, act=lambda act=act: step(act))
    for schedule in ("oasr", "independent"):
        optimizer = step(lambda o: o.step(), check_parameters=False, schedule=schedule)
        shares = [p.tolist() for group in optimizer.param_groups for p in group["params"]]
        wanted = (torch.tensor(float(odd())) - 0.1).tolist()
        assert shares[1:] == [[wanted] * 3] * 6, shares
    options = {"check_parameters": odd(), "optimizer_sharding": False}
    differ = functools.partial(step, lambda o: o.step(), **options)
    raises(DisagreementError, f"check_parameters ({others()}: False", act=differ)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        p = nn.Parameter(torch.full((50,), float(odd())))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), schedule="independent")
        for _ in range(8):
            optimizer.zero_grad()
            p.sum().backward()
            optimizer.step()
    assert p.tolist() == [float(odd()) - 8.0] * 50, p  # each its own, as under Horovod
    texts = [str(w.message) for w in warned]
    assert any("start with diff" in t and "broadcast_parameters(" in t for t in texts), texts


# Tensors of an optimizer.


@check
def tensors() -> None:
    """Shapes, element types, numbers, orders, names, and which are frozen."""
    a, b, c = ("a", parameter(3)), ("b", parameter(2)), ("c", parameter(1))
    double = ("a", parameter(3, dtype=torch.float64))
    frozen = ("a", parameter(3).requires_grad_(False))
    four, five = ("b", parameter(2, 4)), ("b", parameter(2, 5))
    few, many = ([(f"p{k}", parameter(size)) for k in range(300)] for size in (3, 4))
    cases: list[tuple[Named, Named, tuple[str, str, str]]] = [
        ([a, four], [a, five], ("b", "float32(2, 4)", "float32(2, 5)")),
        ([a, b], [double, b], ("a", "float32(3,)", "float64(3,)")),
        ([a, b], [a], ("b", "float32(2,)", "missing")),
        ([a], [a, b], ("b", "missing", "float32(2,)")),
        ([a, b, c], [a, c, b], ("the order, from number 2 on", "b", "c")),
        ([a], [("z", a[1])], ("a", "float32(3,)", "missing")),
        ([frozen, b], [a, b], ("whether a gets a gradient", "False", "True")),
    ]
    for usual, other, (what, here, there) in cases:
        told = f"{what} ({others()}: {here}; {last()}: {there})"
        mine = other if odd() else usual
        raises(DisagreementError, told, act=lambda mine=mine: wrap(mine))
    mine = many if odd() else few
    raises(DisagreementError, "p0 ", "and 295 more", act=lambda: wrap(mine))


@check
def settings() -> None:
    def act(**options: Any) -> None:
        wrap([("a", parameter(3))], **options)

    schedule = "single" if odd() else "layerwise"
    raises(DisagreementError, "schedule", "single", last(), act=lambda: act(schedule=schedule))
    op = wfbp.Sum if odd() else wfbp.Average
    told = f"op ({others()}: wfbp.Average; {last()}: wfbp.Sum)"
    raises(DisagreementError, told, act=lambda: act(op=op))
    limit = 100 if odd() else 200
    raises(
        DisagreementError,
        f"threshold_bytes ({others()}: 200; {last()}: 100)",
        act=lambda: act(schedule="threshold", threshold_bytes=limit),
    )


@check
def classes() -> None:
    kind = torch.optim.Adam if odd() else torch.optim.SGD
    optimizer = kind([parameter(3)], lr=0.1)
    raises(
        DisagreementError,
        f"class ({others()}: torch.optim.sgd.SGD; {last()}: torch.optim.adam.Adam)",
        act=lambda: wfbp.torch.DistributedOptimizer(optimizer),
    )


@check
def learning_rates() -> None:
    """They may differ until the first step: one rank may have loaded a checkpoint."""
    for first in ("step", "synchronize", "clip_grad_norm_"):
        p = parameter(3)
        groups = [{"params": [parameter(1)]}, {"params": [p], "lr": 0.3 if odd() else 0.2}]
        optimizer = wfbp.torch.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
        p.sum().backward()
        arguments = (1.0,) if first == "clip_grad_norm_" else ()
        raises(
            DisagreementError,
            f"lr of parameter group 1 ({others()}: 0.2; {last()}: 0.3)",
            "broadcast_optimizer_state(optimizer, root_rank=0)",
            act=lambda o=optimizer, f=first, a=arguments: getattr(o, f)(*a),
        )
        wfbp.broadcast_optimizer_state(optimizer, 0)
        optimizer.step()
        optimizer.param_groups[1]["lr"] *= (
            wfbp.rank() + 1
        )  # from here on it is the program's affair
        optimizer.step()


@check
def limits_of_clipping() -> None:
    p = parameter(3)
    optimizer = wrap([("p", p)])
    for usual, other, (name, here, there) in (
        ((1.0,), (2.0,), ("max_norm", "1.0", "2.0")),
        ((1.0,), (1.0, float("inf")), ("norm_type", "2.0", "inf")),
        ((1.0,), (1.0, 2, True), ("error_if_nonfinite", "False", "True")),
    ):
        p.sum().backward()
        arguments = other if odd() else usual
        raises(
            DisagreementError,
            f"rank {wfbp.rank()} of {wfbp.size()}: SGD: optimizer.clip_grad_norm_(): ",
            f"ranks disagree on {name} ({others()}: {here}; {last()}: {there})",
            act=lambda a=arguments: optimizer.clip_grad_norm_(*a),
        )
        optimizer.zero_grad()


@check
def a_reducer_disagrees() -> None:
    raises(
        DisagreementError,
        f"w ({others()}: float32(3,); {last()}: float32(4,))",
        act=lambda: wfbp.GradientReducer([("w", np.zeros(4 if odd() else 3, np.float32))]),
    )


# Operations.


@check
def allreduce() -> None:
    def act(shape: int = 3, name: str = "x", dtype: str = "float32", op: Any = wfbp.Sum) -> None:
        wfbp.allreduce(np.zeros(shape, dtype), name=name, op=op)

    different: tuple[tuple[dict[str, Any], str, str, str], ...] = (
        ({"shape": 4}, "disagree on shape", "(3,)", "(4,)"),
        ({"dtype": "float64"}, "disagree on the element type", "float32", "float64"),
        ({"op": wfbp.Max}, "disagree on op", "sum", "max"),
    )
    for options, what, usual, other in different:
        told = f"{what} ({others()}: {usual}; {last()}: {other})"
        raises(DisagreementError, told, "'x'", act=lambda m=options: act(**m if odd() else {}))
    tensor = torch.zeros(4 if odd() else 3)
    raises(DisagreementError, "(3,)", "(4,)", last(), act=lambda: wfbp.torch.allreduce(tensor))


@check
def different_operations() -> None:
    array = np.zeros(3)
    raises(
        DisagreementError,
        "allreduce",
        "broadcast",
        last(),
        act=lambda: wfbp.broadcast(array, 0, "x") if odd() else wfbp.allreduce(array, "x"),
    )
    raises(
        DisagreementError,
        "barrier",
        "allgather",
        act=lambda: wfbp.allgather(array) if odd() else wfbp.barrier(),
    )
    raises(
        DisagreementError,
        "broadcast_object",
        f"root_rank ({others()}: 0; {last()}: 1)",
        act=lambda: wfbp.broadcast_object(1, root_rank=1 if odd() else 0),
    )
    raises(
        DisagreementError,
        "allgather_object",
        act=lambda: wfbp.broadcast_object(1, name="x") if odd() else wfbp.allgather_object(1, "x"),
    )
    state = {"a": torch.zeros(3)}
    raises(
        DisagreementError,
        f"({others()}: comparing tensors; {last()}: broadcast_parameters)",
        act=lambda: wfbp.broadcast_parameters(state) if odd() else wrap([("a", parameter(3))]),
    )
    raises(
        DisagreementError,
        f"allgather 'x': ranks disagree on all dimensions but the first ({others()}: (3,)",
        act=lambda: wfbp.allgather(np.zeros((2, 4 if odd() else 3)), name="x"),
    )
    raises(
        DisagreementError,
        f"the operation ({others()}: allreduce; {last()}: barrier)",
        act=lambda: wfbp.torch.barrier() if odd() else wfbp.torch.allreduce(torch.ones(2)),
    )
    wfbp.barrier()
    assert wfbp.allreduce(array).tolist() == [0.0] * 3


@check
def parameters() -> None:
    def act(arrays: dict[str, Any], root: int = 0) -> None:
        wfbp.broadcast_parameters(arrays, root)

    def mine(usual: Any, other: Any) -> Any:
        return other if odd() else usual

    three, four = np.zeros(3), np.zeros(4)
    told = f"a ({others()}: float64(3,); {last()}: float64(4,))"
    raises(DisagreementError, told, act=lambda: act({"a": mine(three, four)}))
    told = f"b ({others()}: missing; {last()}: float64(3,))"
    raises(DisagreementError, told, act=lambda: act({mine("a", "b"): three}))
    raises(
        DisagreementError,
        f"b ({others()}: missing; {last()}: float64(4,))",
        act=lambda: act(mine({"a": three}, {"a": three, "b": four})),
    )
    raises(
        DisagreementError,
        f"root_rank ({others()}: 0; {last()}: 1)",
        act=lambda: act({"a": three}, mine(0, 1)),
    )
    state = {"a": torch.zeros(3, dtype=mine(torch.float32, torch.float64))}
    raises(DisagreementError, "float64", act=lambda: wfbp.torch.broadcast_parameters(state))


# Steps: these end the runtime, so each begins another.


def fresh(config: wfbp.Config) -> None:
    wfbp.shutdown()
    wfbp.init(config=config)


def stepping(
    act_of_the_last: Any,
    act_of_the_others: Any,
    kind: type[Exception],
    warmup_steps: int,
    stall_warning_s: float = 60.0,
    schedule: str = "layerwise",
) -> str:
    config = wfbp.Config(
        schedule=schedule,
        warmup_steps=warmup_steps,
        profile_steps=100,
        stall_warning_s=stall_warning_s,
        timeout_s=60.0,
    )
    fresh(config)
    model = nn.Linear(3, 2)
    optimizer = wrap(list(model.named_parameters()))
    text = ""
    try:
        for step in range(6):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            if step == 3:
                (act_of_the_last if odd() else act_of_the_others)(optimizer)
            else:
                optimizer.step()
    except kind as error:
        text = str(error)
    fresh(config)
    return text


@check
def one_rank_steps_less_often() -> None:
    for warmup_steps in (1, 100):  # messages held back, messages under way
        text = stepping(lambda o: o.zero_grad(), lambda o: o.step(), WfbpError, warmup_steps)
        assert f"{last()} has left" in text or odd(), text


@check
def one_rank_steps_more_often() -> None:
    text = stepping(lambda o: (o.step(), o.step()), lambda o: o.step(), WfbpError, 100)
    assert "rank 0 has left" in text or not odd(), text


@check
def one_rank_is_in_another_collective() -> None:
    for warmup_steps, act, place in (
        (1, lambda _: wfbp.barrier(), "in barrier"),
        (100, lambda o: o.clip_grad_norm_(1.0), ": optimizer.clip_grad_norm_()"),
    ):
        text = stepping(act, lambda o: o.zero_grad(), DisagreementError, warmup_steps, 0.3)
        assert "ranks wait for each other in different places: " in text, text
        assert place in text.partition(f"{last()}: ")[2], text


@check
def one_rank_synchronizes_what_is_clipped() -> None:
    """It would gather gradients, the others parameters."""
    text = stepping(
        lambda o: (o.clip_grad_norm_(1.0), o.synchronize()),
        lambda o: (o.clip_grad_norm_(1.0), o.step()),
        DisagreementError,
        100,
        0.3,
        "independent",
    )
    assert "ranks wait for each other in different places: " in text, text
    assert ": synchronize() after clip_grad_norm_()" in text.partition(f"{last()}: ")[2], text


@check
def one_rank_is_in_a_barrier_while_others_wrap() -> None:
    fresh(wfbp.Config(stall_warning_s=0.3, timeout_s=60.0))
    raises(
        DisagreementError,
        "ranks wait for each other in different places: ",
        f"{last()}: in barrier",
        act=lambda: wfbp.barrier() if odd() else wrap([("a", parameter(3))]),
    )
    fresh(wfbp.Config())


@check
def a_deadlock_beside_jax_is_told() -> None:
    importlib.import_module("jax")
    wfbp.broadcast_parameters({"weight": np.ones(3)})
    assert "wfbp.jax" in sys.modules, "which has looked for JAX's arrays"
    text = stepping(lambda _: wfbp.barrier(), lambda o: o.zero_grad(), DisagreementError, 100, 0.3)
    assert "ranks wait for each other in different places: " in text, text


@contextmanager
def slow_data() -> Iterator[None]:
    """Within it, collectives of the last rank take longer than others wait before they ask."""
    test, end_s = MpiWork.test, time.monotonic() + 1.5

    def late(work: Any) -> bool:
        return test(work) and (not odd() or time.monotonic() > end_s)

    MpiWork.test = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        MpiWork.test = test  # type: ignore[method-assign]


@check
def waits_in_different_places_prove_nothing() -> None:
    """Bytes under way, and a thread that has yet to begin what others wait for."""
    fresh(wfbp.Config(stall_warning_s=0.3, timeout_s=60.0))
    with slow_data():
        assert wfbp.broadcast(np.ones(3), 0).tolist() == [1.0] * 3
        wfbp.barrier()
    dist.init_process_group("wfbp", timeout=timedelta(seconds=60))
    try:
        rank, size = wfbp.rank(), wfbp.size()
        rows = [rank + r for r in range(size)]  # the ranks' texts differ
        with slow_data():
            dist.all_to_all_single(torch.empty(sum(rows)), torch.ones(sum(rows)), rows, rows)
            dist.barrier()

        def produce() -> None:
            time.sleep(1.5)
            dist.send(torch.ones(1), 0)

        received = torch.zeros(1)
        thread = threading.Thread(target=produce)
        if odd():
            thread.start()
        elif rank == 0:
            dist.recv(received, size - 1)
            assert received.item() == 1
        dist.barrier()
        if odd():
            thread.join()
    finally:
        dist.destroy_process_group()
    fresh(wfbp.Config())
