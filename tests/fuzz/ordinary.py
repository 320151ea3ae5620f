"""Ordinary programs, one for each thing that programs do: what random ones draw now and then."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from torch import optim

from tests.fuzz.optimizers import KINDS
from tests.fuzz.program import Act, Layer, Optimizer, Program, Step

MODES = {
    "overlap": {"ranks": 2, "schedule": "layerwise", "changing": False},
    "changing": {"ranks": 2, "schedule": "auto"},
    "mixed": {"ranks": 3, "schedule": "hybrid"},
    "alone": {"ranks": 1, "schedule": "auto"},
}
"""How messages leave: each during backward; by plans that change; some tensors decoupled; one rank
sends none."""

LAST = Layer("linear without bias")
USUAL = (Layer("linear"), Layer("wide", size=7), LAST)
LOOK = Act("observe", how="parameters")

WAYS = (
    *("clip", "sync", "sync norm", "sync total", "sync value", "sync scale", "sync replace"),
    *("clip twice", "sync look", "sync clip"),
)
"""What is done to gradients between backward and step."""
BY_RANK = ((1, 1, 1), (0, 1, 1), (0, 0, 0), (1, 0, 0))
READS = ("norm", "plus", "add_", "addcmul_", "copy_", "item", "foreach", "out", "numpy", "rows")
LOOKS = (
    *("state_dict", "parameters", "save", "synchronized list", "groups", "vector", "norm"),
    *("deepcopy", "list", "script", "kept script", "fork", "modes", "subclass"),
)
ACTS = {
    "evaluated": [Act("eval", how=how) for how in ("no_grad", "inference")],
    "averaged": [
        Act("ema", how=how)
        for how in ("module", "averaged model", "list", "foreach list", "synchronized list")
    ],
    "changed": [
        *(Act("clamp", how=how) for how in ("", "list", "foreach list")),
        *(Act("move"), Act("lr", value=0.5), Act("clear")),
    ],
    "loaded": [
        *(Act("save"), Act("alone"), Act("reload"), Act("load"), Act("broadcast", how="last")),
        *(Act("renew", schedule="ps_layerwise"), Act("rewrap", schedule="oasr")),
        *(Act("rewrap", schedule="independent"), Act("renew", schedule="layerwise")),
    ],
    "beside operations": [Act("metric"), Act("discard")],
    "read by threads": [Act("thread", how=how) for how in ("list", "", "state_dict", "")],
}
"""What happens between steps, in turns."""

Actions = Sequence[Step | Act]
Case = tuple[Sequence[Layer], Sequence[dict[str, Any]], Actions, dict[str, Any]]
"""Layers, settings of each optimizer, actions, and settings of the program."""


def steps(count: int = 8, **how: Any) -> list[Step]:
    return [Step(**how)] * count


def carried() -> list[Step]:
    """Gradients are halved instead of zeroed, and clipped in every other step."""
    return [
        Step(zero="carry", gradients=("", "clip")[k % 2], passes=(1 + (k == 6),) * 3)
        for k in range(8)
    ]


def thawed(at: int, end: int = 9, **how: Any) -> Case:
    """The first layer is frozen, but for some steps."""
    frozen = (Layer("linear", trainable=False), *USUAL[1:])
    first, then, last = steps(at, **how), steps(end - at, **how), steps(11 - end, **how)
    actions = [*first, Act("thaw", layer=0), *then, Act("freeze", layer=0), *last]
    return frozen, [{}], actions, {}


def cases() -> dict[str, Case]:
    """Of every mode, by name."""
    found: dict[str, Case] = {}

    def add(name: str, actions: Actions, layers: Sequence[Layer] = USUAL, **optimizer: Any) -> None:
        found[name] = (layers, [optimizer], actions, {})

    for zero in ("optimizer", "zeros", "model", "model zeros", "loop", "end", "list", "carry"):
        add(f"zeroed by {zero}", steps(zero=zero), kind="adamw")
    for how in ("optimizer", "zeros", "model"):
        add(f"discarded by {how}", steps(discard=how))
    for rank in (0, 1):
        add(f"discarded on rank {rank}", steps(discard="optimizer", discarded_on=(rank,)))
    for on in ((0,), (0, 1, 2)):
        left = [Step(discard="model", discarded_on=on, passes=p) for p in BY_RANK]
        add(f"discarded on {on}, and some have others", left * 2)
    for zero in ("optimizer", "zeros"):
        add(f"three passes, {zero}", steps(zero=zero, passes=(3, 3, 3)), passes=3)
        add(f"two passes, {zero}", steps(zero=zero, passes=(2, 2, 2)), kind="adamw")
    add("changing passes", [Step(passes=(n, n, n)) for n in (1, 3, 2, 4) * 2])
    add("passes by rank", [Step(passes=((1, 2, 1), (2, 1, 2))[k % 2]) for k in range(8)])
    add("fewer passes", [Step(passes=(1 + 2 * (k % 5 < 4),) * 3) for k in range(10)], passes=3)
    for late in ((2, 2, 2), (1, 2, 1)):
        some = [Step(zero="zeros", passes=late if k == 6 else (1, 1, 1)) for k in range(9)]
        add(f"late passes {late}", some)
    for when in ("first", "last", "turn", "even", "later", "chance", "never"):
        add(f"used {when}", steps(10), (Layer("linear", when=when), *USUAL[1:]), kind="adamw")
    add("no gradients", [Step(passes=((1, 1, 1), (0, 1, 1), (0, 0, 0))[k % 3]) for k in range(9)])
    for at in range(1, 6):
        found[f"thawed at step {at}"] = thawed(at)
    found["thawed for a while"] = thawed(3, 8)
    found["frozen"] = thawed(9)
    frozen, _, actions, _ = thawed(4, passes=(2, 2, 2))
    add("thawed between passes", actions, frozen, passes=2)
    add("tied", steps(), (Layer("linear"), Layer("tied", of=0), LAST), kind="adamw")
    add("used twice", steps(), (Layer("linear"), Layer("again", of=0), LAST))
    for kind in ("empty", "scalar", "transposed", "convolution", "complex", "vectors"):
        for zero in ("optimizer", "zeros"):
            add(f"{kind}, {zero}", steps(zero=zero), (Layer(kind, size=3), LAST), kind="adamw")
    for kind in ("embedding", "sparse embedding"):
        add(kind, steps(), (Layer(kind, size=50), LAST))
    add("element types", steps(6), (Layer("linear", dtype="float32"), LAST))
    halves = (Layer("linear", dtype="float16"), Layer("linear", dtype="bfloat16"))
    add("element types of 16 bits", steps(6), (*halves, Layer("linear", dtype="float32"), LAST))
    for checkpoint in ("plain", "reentrant"):
        add(checkpoint, steps(), (Layer("linear"), Layer("linear", checkpoint=checkpoint), LAST))
    for forward in ("twice", "functional"):
        add(f"forward {forward}", steps(forward=forward))
    looks = [Act("observe", how=how) for how in LOOKS]
    add("read", [each for look in looks for each in (*steps(1), look)], kind="adamw")
    for name, acts in ACTS.items():
        add(name, [each for act in [*acts, *acts] for each in (*steps(2), act)], kind="adamw")
    for closure in ("momentum", "lbfgs", "wolfe"):
        add(f"closures of {closure}", steps(8, closure=True), kind=closure)
    add("closures at times", [Step(closure=k % 3 == 2) for k in range(8)])
    for scheduler in ("before", "after"):
        add(f"scheduler {scheduler}", steps(), scheduler=scheduler)
    loaded = [Act("reload"), Act("broadcast"), *steps()]
    add("scheduler and loaded state", loaded, scheduler="before")
    some = ((1, 0, 1), (0, 1, 1), (1, 1, 1))
    for gradients in ("sync", "clip"):
        left_out = [
            Step(gradients=gradients, leave_out=k % 4 == 3, passes=some[k % 3]) for k in range(12)
        ]
        add(f"left out after {gradients}", left_out)
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        limits = [
            Step(
                gradients="clip",
                max_norm=(1e-3, 1e3)[k % 2],
                norm_type=norm_type,
                passes=(int(k % 4 < 3), 1, int(k % 4 < 3)),
            )
            for k in range(8)
        ]
        add(f"clipped by norm {norm_type}", limits, (Layer("complex"), *USUAL), kind="adamw")
    for hooks in ("pre", "post", "both", "change"):
        add(f"step hooks: {hooks}", [*steps(4), Act("reload"), *steps(4)], step_hooks=hooks)
    for zero in ("optimizer", "zeros"):
        add(f"inference mode, {zero}", steps(8, zero=zero, inference=True), kind="sgd")
    moved = [Step(gradients="sync share" if k % 5 == 2 else "sync look") for k in range(12)]
    add("averages moved to shared memory", moved)
    twice = [Step(zero="loop", gradients="clip" if k % 3 else "", again=True) for k in range(8)]
    add("stepped twice", twice, kind="adam")
    clipped = steps(4, zero="model", gradients="clip")
    add("parameter removed", [*clipped, Act("remove"), *clipped], kind="sgd")
    return found


def cases_of_gradients() -> dict[str, Case]:
    """What happens to gradients between backward and step."""
    found: dict[str, Case] = {}

    def add(name: str, actions: Actions, layers: Sequence[Layer] = USUAL, **optimizer: Any) -> None:
        found[name] = (layers, [optimizer], actions, {})

    every = [Step(gradients=way, passes=(1, int(k % 4 < 3), 1)) for k, way in enumerate(WAYS)]
    add("changed after averaging", every, kind="adamw")
    few = [Step(gradients="clip", norm_type=n) for n in (2.0, float("inf")) * 3]
    add("clipped where ranks have no elements", few, (Layer("scalar"),))
    for way in ("scale", "data", "replace", "clamp"):
        touched = [Step(gradients=f"touch {way}" if k in (3, 6) else "") for k in range(9)]
        add(f"touched by {way}", touched)
    add("gradients that are read", [Step(read=way) for way in READS])
    for scaler in ("plain", "unscale", "clip", "own clip"):
        some = [Step(scaler=scaler, infinite_on=(-1, 0, -1, 1, -1)[k % 5]) for k in range(10)]
        add(f"scaler, {scaler}", some, kind="fused adam")
    skipped = [
        Step(scaler="plain", zero="model", infinite_on=(-1, 1, -1)[k % 3], passes=some)
        for k, some in enumerate([(1, 1, 1), (1, 1, 1), (1, 0, 0)] * 4)
    ]
    add("scaler, and some have no gradients after a skipped step", skipped)
    add("carried and clipped", carried())
    add("unscaled too early", [*steps(2), Step(scaler="bare")] * 2)
    add("assigned", [Step(assigned=True, zero=("optimizer", "zeros")[k % 2]) for k in range(8)])
    add("sums", [Step(gradients=("", "sync clip")[k % 2]) for k in range(8)], op="sum")
    hooked = [Layer("linear", hook=how) for how in ("tensor", "in place", "replace", "look")]
    add("hooks", steps(8), [*hooked, Layer("linear", hook="module"), LAST])
    for error in ("forward", "backward", "retry"):
        for on in ((0, 1, 2), (1,)):
            failing = [Step(error=error if k % 4 == 1 else "", error_on=on) for k in range(8)]
            add(f"fails in {error} on {on}", failing)
    added = [*steps(5), Act("add", layer=1), *steps(4)]
    add("layer added", added, (Layer("linear"), Layer("linear", late=True), LAST))
    return found


def further_cases() -> dict[str, Case]:
    """Each kind of optimizer, and several of them; some tensors are decoupled."""
    found: dict[str, Case] = {}

    def add(
        name: str,
        actions: Actions,
        layers: Sequence[Layer] = USUAL,
        optimizers: Sequence[dict[str, Any]] = (),
        **program: Any,
    ) -> None:
        hybrid = [{"schedule": "hybrid", **optimizer} for optimizer in optimizers or [{}]]
        found[name] = (layers, hybrid, actions, program)

    unlike: dict[str, dict[str, Any]] = {name: {"kind": name, "groups": 2} for name in KINDS}
    for name in ("swapping", "vector", "keeping", "scaled"):
        unlike[f"{name}, sharded"] = {"kind": name, "update": "sharded"}
    unlike["by place, whole"] = {"kind": "by place", "groups": 2, "update": "whole"}
    meanwhile = {
        "swapping": Act("swap"),
        "scaled": Act("scale", value=0.7),
        "rate in a tensor": Act("lr", value=0.7),
    }
    for name, optimizer in unlike.items():
        kind = KINDS[optimizer["kind"]]
        if not kind.closure and (not kind.matrices or hasattr(optim, "Muon")):
            act = meanwhile.get(optimizer["kind"], Act("reload"))
            turns = [*steps(3), act, *steps(3), Act("broadcast", how="last"), *steps(2)]
            add(name, turns, (Layer("scalar"), *USUAL), [optimizer])
    few = (Layer("vectors", size=2), LAST)  # of three elements, of which one rank has one
    vector = [{"kind": "vector", "update": "sharded"}]
    add("shards of one element", [*steps(3), Act("reload")] * 3, few, vector, width=3)
    for own, how in product(("add", "finish", "backward"), ("", "sync", "clip")):
        some = [own != "backward" and k % 3 == 2 for k in range(8)]
        mine = [Step(own=own, gradients=how, assigned=assigned) for assigned in some]
        add(f"own methods: {own}, {how}", mine, USUAL, [{"kind": "own methods"}])
    two = (*USUAL, Layer("linear", model=1), Layer("linear without bias", model=1))
    models = [{"kind": "momentum"}, {"kind": "adamw", "model": 1}]
    for zero in ("optimizer", "model"):
        turns = [Step((k % 2,), (1 - k % 2,), zero=zero) for k in range(10)]
        add(f"adversaries, zeroed by {zero}", turns, two, models)
    beside = steps(8, optimizers=(0, 1), threads=True, gradients="clip")
    add("clipped by threads", beside, two, models)
    parts = [{"part": "even"}, {"part": "odd", "kind": "adamw"}]
    add("two optimizers of one backward", steps(8, optimizers=(0, 1)), USUAL, parts)
    words = (Layer("sparse embedding", size=20), LAST)
    sparse = [{"kind": "sgd", "sparse": True, "schedule": "layerwise"}]
    add("sparse gradients in a list", steps(6, zero="list"), words, sparse)
    for way in ("scale", "replace"):
        touched = [Step(gradients=f"touch {way}" if k == 2 else "clip") for k in range(4)]
        add(f"sparse gradients touched by {way}", touched, words, sparse)
    add("sparse gradients unscaled", [*steps(2), Step(scaler="bare")] * 2, words, sparse)
    add("carried, updated whole", carried(), USUAL, [{"kind": "sgd", "update": "whole"}])
    alone = (Layer("linear without bias"), Layer("scalar"))  # of which only one rank has a part
    add("a group of one element", steps(8), alone, [{"kind": "counting", "groups": 2}])
    normed = [Step(forward=("autocast", "call")[k % 2]) for k in range(8)]
    add("autocast", normed, USUAL, [{"kind": "normed"}], dtype="float32")
    wide = [*steps(5), Act("broadcast", how="last"), *steps(3)]
    add("wide state", wide, USUAL, [{"kind": "float32 state"}], dtype="bfloat16")
    add("begun by a broadcast", steps(6), USUAL, [{"kind": "adamw"}], start="broadcast")
    compiled = [Step(forward="compiled", compiled=k % 2 == 0) for k in range(6)]
    add("compiled", compiled, USUAL, [{"kind": "adamw"}])
    return found


def programs(mode: str) -> list[Program]:
    """Those of one of :data:`MODES`; parameters are observed after every third step."""
    how = dict(MODES[mode])
    ranks, schedule = how.pop("ranks"), how.pop("schedule")
    usual = {"kind": "momentum", "schedule": schedule}
    chosen = cases_of_gradients() if mode != "changing" else further_cases()
    if mode != "alone":
        chosen = cases() | chosen
    return [
        Program(
            seed=7,
            ranks=ranks,
            layers=tuple(layers),
            optimizers=tuple(Optimizer(**{**usual, **optimizer}) for optimizer in optimizers),
            actions=tuple(
                each
                for number, action in enumerate(actions)
                for each in ((action, LOOK) if number % 3 == 2 else (action,))
            ),
            **{**how, **program},
        )
        for layers, optimizers, actions, program in chosen.values()
    ]
