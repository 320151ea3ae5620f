"""Ordinary programs, one for each thing that programs do: what random ones draw now and then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fuzz.program import Act, Layer, Optimizer, Program, Step

MODES = {
    "overlap": {"ranks": 2, "schedule": "layerwise", "changing": False},
    "changing": {"ranks": 2, "schedule": "auto"},
    "mixed": {"ranks": 3, "schedule": "hybrid"},
}
"""How messages leave: each during backward; by plans that change; some tensors decoupled."""

LAST = Layer("linear without bias")
USUAL = (Layer("linear"), Layer("wide", size=7), LAST)
LOOK = Act("observe", how="parameters")

Actions = Sequence[Step | Act]
Case = tuple[Sequence[Layer], dict[str, Any], Actions]


def steps(count: int = 12, **how: Any) -> list[Step]:
    return [Step(**how)] * count


def thawed(at: int, end: int = 12, **how: Any) -> Case:
    """The first layer is frozen, but for some steps."""
    frozen = (Layer("linear", trainable=False), *USUAL[1:])
    first, then, last = steps(at, **how), steps(end - at, **how), steps(14 - end, **how)
    return frozen, {}, [*first, Act("thaw", layer=0), *then, Act("freeze", layer=0), *last]


def cases() -> dict[str, Case]:
    """Layers, settings of the optimizer, and actions, by name."""
    found: dict[str, Case] = {}

    def add(name: str, actions: Actions, layers: Sequence[Layer] = USUAL, **optimizer: Any) -> None:
        found[name] = (layers, optimizer, actions)

    for zero in ("optimizer", "zeros", "model", "model zeros", "loop", "end", "list", "carry"):
        add(f"zeroed by {zero}", steps(zero=zero), kind="adamw")
    for how in ("optimizer", "zeros", "model"):
        add(f"discarded by {how}", steps(discard=how))
    for rank in (0, 1):
        add(f"discarded on rank {rank}", steps(discard="optimizer", discarded_on=(rank,)))
    for zero in ("optimizer", "zeros"):
        add(f"three passes, {zero}", steps(zero=zero, passes=(3, 3, 3)), passes=3)
        add(f"two passes, {zero}", steps(zero=zero, passes=(2, 2, 2)), kind="adamw")
    add("changing passes", [Step(passes=(n, n, n)) for n in (1, 3, 2, 4) * 3])
    add("passes by rank", [Step(passes=((1, 2, 1), (2, 1, 2))[k % 2]) for k in range(12)])
    add("fewer passes", [Step(passes=(1 + 2 * (k % 5 < 4),) * 3) for k in range(12)], passes=3)
    for late in ((2, 2, 2), (1, 2, 1)):
        some = [Step(zero="zeros", passes=late if k == 8 else (1, 1, 1)) for k in range(12)]
        add(f"late passes {late}", some)
    for when in ("first", "last", "turn", "even", "later", "chance", "never"):
        add(f"used {when}", steps(16), (Layer("linear", when=when), *USUAL[1:]), kind="adamw")
    add("no gradients", [Step(passes=((1, 1, 1), (0, 1, 1), (0, 0, 0))[k % 3]) for k in range(12)])
    for at in range(1, 6):
        found[f"thawed at step {at}"] = thawed(at)
    found["thawed for a while"] = thawed(3, 8)
    found["frozen"] = thawed(12)
    frozen, _, actions = thawed(4, passes=(2, 2, 2))
    add("thawed between passes", actions, frozen, passes=2)
    add("tied", steps(), (Layer("linear"), Layer("tied", of=0), LAST), kind="adamw")
    add("used twice", steps(), (Layer("linear"), Layer("again", of=0), LAST))
    for kind in ("empty", "scalar", "transposed", "convolution", "complex", "vectors"):
        for zero in ("optimizer", "zeros"):
            add(f"{kind}, {zero}", steps(zero=zero), (Layer(kind, size=3), LAST), kind="adamw")
    for kind in ("embedding", "sparse embedding"):
        add(kind, steps(), (Layer(kind, size=50), LAST))
    add("element types", steps(6), (Layer("linear", dtype="float32"), LAST))
    for checkpoint in ("plain", "reentrant"):
        add(checkpoint, steps(), (Layer("linear"), Layer("linear", checkpoint=checkpoint), LAST))
    for forward in ("twice", "functional"):
        add(f"forward {forward}", steps(forward=forward))
    for way in ("state_dict", "deepcopy", "vector"):
        add(f"read by {way}", [*steps(1), Act("observe", how=way)] * 12, kind="adamw")
    add("evaluated", [*steps(1), Act("eval", how="no_grad")] * 12, kind="adamw")
    for closure in ("momentum", "lbfgs", "wolfe"):
        add(f"closures of {closure}", steps(8, closure=True), kind=closure)
    add("closures at times", [Step(closure=k % 3 == 2) for k in range(12)])
    for scheduler in ("before", "after"):
        add(f"scheduler {scheduler}", steps(), scheduler=scheduler)
    loaded = [Act("reload"), Act("broadcast"), *steps()]
    add("scheduler and loaded state", loaded, scheduler="before")
    for gradients in ("sync", "clip"):
        left_out = [Step(gradients=gradients, leave_out=k % 4 == 3) for k in range(12)]
        add(f"left out after {gradients}", left_out)
    return found


def programs(mode: str) -> list[Program]:
    """All of them, in one of :data:`MODES`; parameters are observed after every third step."""
    how = dict(MODES[mode])
    ranks, schedule = how.pop("ranks"), how.pop("schedule")
    return [
        Program(
            seed=7,
            ranks=ranks,
            layers=tuple(layers),
            optimizers=(Optimizer(**{"kind": "momentum", "schedule": schedule, **optimizer}),),
            actions=tuple(
                each
                for number, action in enumerate(actions)
                for each in ((action, LOOK) if number % 3 == 2 else (action,))
            ),
            **how,
        )
        for layers, optimizer, actions in cases().values()
    ]
