"""The grammar: random programs that are valid and whose meaning in one process is defined.

Left out, because one process on all the data means something else there: batch normalization's
statistics, dropout, hooks that do more to gradients than to scale them.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

from torch import optim

from tests.fuzz.models import LAYERS, SPARSE, WITH_WEIGHT
from tests.fuzz.optimizers import KINDS
from tests.fuzz.program import ALL_REDUCED, DECOUPLED, Act, Layer, Optimizer, Program, Step

_SIZES = (1, 2, 3, 17, 64, 300)
_VOCABULARIES = (7, 50, 3000)
_WHEN = ("first", "last", "turn", "even", "later", "chance", "never")
_BY_RANK = ("first", "last", "turn", "chance")
_ACTS = (
    *("eval", "observe", "observe", "ema", "clamp", "freeze", "thaw", "add", "lr", "save", "load"),
    *("reload", "broadcast", "clear", "rewrap", "renew", "alone", "metric", "discard", "thread"),
    *("move", "passes", "add"),
)
_READS = ("norm", "plus", "add_", "addcmul_", "copy_", "item", "foreach", "out", "numpy", "rows")
"""Ways to read gradients, none of which changes them."""
_PROPORTIONAL = (
    *("sgd", "fused sgd", "momentum", "nesterov", "dampened", "float32 state", "counting"),
    *("by parameter", "by id", "by attribute", "replacing", "bound", "swapping", "by place"),
    *("scaled", "decorated", "around", "nan", "vector", "patched", "keeping", "own methods"),
)
"""Optimizers that do not make a small gradient, and its rounding, large."""
_COMPLEX = (
    *("sgd", "momentum", "nesterov", "dampened", "adam", "amsgrad", "adamw", "rmsprop"),
    *("adagrad", "adadelta", "replacing", "counting", "by parameter", "by id"),
)
"""Optimizers that update complex parameters."""
_IN_PLACE = ("model zeros", "list", "carry")
"""Ways to begin a step that leave gradients where they are, and tell no optimizer."""
_NOT_COMPLEX = ("scaler", "compiled", "lists", "clamp", "touch clamp", "sync value", "read")
_NOT_TWICE_DIFFERENTIABLE = ("attention", "lstm", "gru", "sparse embedding", "sparse bag")


def draw(seed: str, ranks: int) -> Program:
    """The program of this seed; seeds may be any text."""
    chance = random.Random(f"{seed} {ranks}")
    program = _Drawing(chance, ranks).program()
    if program.dtype == "float32" and chance.random() < 0.4:
        return replace(program, compression=chance.choice(["int8", "fp8", "int4", "bf16"]))
    return _with_complex(program, chance) if chance.random() < 0.1 else program


def _with_complex(program: Program, chance: random.Random) -> Program:
    """The program with a layer of complex numbers, and less what these cannot do; as it is if one
    of its optimizers cannot update them."""
    shared = {part.of for part in program.layers if part.kind in ("again", "tied")}
    plain = [
        n
        for n, part in enumerate(program.layers)
        if part.kind in (*WITH_WEIGHT, "transposed") and not part.dtype and n not in shared
    ]
    can = all(o.kind in _COMPLEX for o in program.optimizers) and program.dtype != "bfloat16"
    autocast = any(isinstance(a, Step) and a.forward == "autocast" for a in program.actions)
    if not (plain and can) or autocast:
        return program
    layers = list(program.layers)
    n = chance.choice(plain)
    layers[n] = replace(layers[n], kind="complex")
    return without(replace(program, layers=tuple(layers)), _NOT_COMPLEX)


def _owned(part: Layer) -> bool:
    """Whether an optimizer takes its parameters from this layer at once."""
    return part.kind not in ("again", "tied") and not part.late


class _Drawing:
    def __init__(self, chance: random.Random, ranks: int) -> None:
        self.chance = chance
        self.ranks = ranks

    def likely(self, p: float) -> bool:
        return self.chance.random() < p

    def program(self) -> Program:
        chance = self.chance
        dtype = chance.choices(["float64", "float32", "bfloat16"], [7, 2, 1])[0]
        models = 2 if self.likely(0.2) else 1
        layers: list[Layer] = []
        self.kinds = [
            k for k in LAYERS if k != "complex" and (dtype != "bfloat16" or k not in SPARSE)
        ]
        for m in range(models):
            layers += self._model(m, len(layers), dtype)
        optimizers: list[Optimizer] = []
        for m in range(models):
            several = len({n % 2 for n, part in enumerate(self._of(layers, m)) if _owned(part)}) > 1
            parts = ("even", "odd") if several and self.likely(0.2) else ("all",)
            op = "sum" if self.likely(0.08) else "average"
            here = self._of(layers, m)
            optimizers += [self._optimizer(m, part, op, dtype, here) for part in parts]
        # A step with a closure calls it more than once, and hooks that touch gradients are refused.
        called = {o.model for o in optimizers if KINDS[o.kind].closure}
        layers = [
            replace(p, hook="") if p.model in called and p.hook.startswith("late") else p
            for p in layers
        ]
        self.layers, self.optimizers = layers, optimizers
        self.passes = 1
        self.declared = False
        if self.likely(0.3):
            self.passes = chance.choice([2, 3])
            if self.likely(0.5):
                self.declared = True
                optimizers[:] = [replace(o, passes=self.passes) for o in optimizers]
        whole = all(o.part == "all" and not KINDS[o.kind].closure for o in optimizers)
        self.scaled = whole and self.likely(0.15)
        self.compiled = self.likely(0.03)
        narrow = {part.dtype or dtype for part in layers} == {"float32"}
        self.autocast = (
            narrow and self.likely(0.4) and all(o.kind in _PROPORTIONAL for o in optimizers)
        )
        self.hooked = any(part.hook.startswith("late") for part in layers)
        # They change what earlier passes have left: to average, ranks must have equally many.
        self.counted = any(part.hook.split()[-1:] in (["place"], ["replace"]) for part in layers)
        self.zero = chance.choice(
            ["optimizer", "optimizer", "optimizer", "zeros", "model", "loop", "end", "model zeros"]
        )
        if self.zero == "model zeros" and any(o.part != "all" for o in optimizers):
            self.zero = "zeros"  # in place, it would change what the other optimizer sends
        # Kept gradients must mean the same in one process, and no other optimizer may send them.
        if (
            whole
            and not (self.scaled or self.hooked or self.counted)
            and all(o.op == "average" for o in optimizers)
            # (A step with Nesterov's momentum changes gradients, and may get their shards.)
            and not any(o.kind == "nesterov" for o in optimizers)
        ):
            # A list is stale, and gradients are carried, once the program has replaced them. That
            # must be so on all ranks: each must have every gradient, which shards do not show.
            # (A sparse gradient that is made dense is another object.)
            ways = [self.zero] * 3 + ["carry"]
            dense = any(part.kind in SPARSE for part in layers) and not all(
                o.sparse for o in optimizers
            )
            if not (dense or any(part.when in _BY_RANK for part in layers)):
                ways.append("list")
            self.zero = chance.choice(ways)
        actions: list[Step | Act] = []
        self.added: set[int] = set()
        num_steps = chance.randint(3, 12)
        if any(o.kind in ("lbfgs", "wolfe") for o in optimizers):
            num_steps = min(num_steps, 5)  # then rounding decides how far a line search goes
        for _ in range(num_steps):
            actions += self._acts()
            actions.append(self._step())
        actions += self._acts()
        return Program(
            seed=chance.randrange(10**6),
            ranks=self.ranks,
            layers=tuple(layers),
            optimizers=tuple(optimizers),
            actions=tuple(actions),
            dtype=dtype,
            width=chance.choice([1, 2, 3, 5, 8, 13, 40]),
            batch=chance.randint(1, 4),
            start=chance.choice(["equal", "broadcast"]),
            changing=self.likely(0.7),
            shared_memory=self.likely(0.6),
            direct_bytes=chance.choice([1, 64, 256, 4096, 2**18]),
        )

    @staticmethod
    def _of(layers: list[Layer], model: int) -> list[Layer]:
        return [part for part in layers if part.model == model]

    def _model(self, model: int, first: int, dtype: str) -> list[Layer]:
        chance = self.chance
        out: list[Layer] = []
        for k in range(first, first + chance.randint(0, 6)):
            kind = chance.choice(self.kinds)
            weights = [n for n, part in enumerate(out, first) if part.kind in WITH_WEIGHT]
            modules = [n for n, part in enumerate(out, first) if part.kind not in ("again", "tied")]
            if weights and self.likely(0.15):
                of = chance.choice(weights)
                part = Layer("tied", model, of=of, dtype=out[of - first].dtype)
            elif modules and self.likely(0.1):
                of = chance.choice(modules)
                part = Layer("again", model, of=of, dtype=out[of - first].dtype)
            else:
                size = chance.choice(_SIZES)
                if kind in SPARSE or "embedding" in kind:
                    size = chance.choice(_VOCABULARIES)
                part = Layer(kind, model, size)
                if dtype == "float64" and self.likely(0.04) and kind not in SPARSE:
                    part = replace(part, dtype=chance.choice(["float32", "bfloat16"]))
                if self.likely(0.1):
                    part = replace(part, late=True)
                elif self.likely(0.07):
                    part = replace(part, trainable=False)
            if self.likely(0.25):
                part = replace(part, when=chance.choice(_WHEN))
            if self.likely(0.1) and k > first and part.kind not in SPARSE:
                part = replace(part, checkpoint=chance.choice(["plain", "reentrant"]))
            if self.likely(0.12) and part.kind not in (*SPARSE, "again", "tied"):
                hook = chance.choice(["tensor", "in place", "replace", "look", "module"])
                always = part.when == "always" and not part.late and part.trainable
                if always and hook in ("in place", "replace") and self.likely(0.3):
                    hook = f"late {hook}"
                if hook != "module" or not part.checkpoint:
                    part = replace(part, hook=hook)
            out.append(part)
        if any(part.hook.split()[-1:] in (["place"], ["replace"]) for part in out):
            # In one process such a backward runs once for each rank's loss, and so do these hooks.
            out = [replace(p, checkpoint=p.checkpoint and "plain") for p in out]
        # Something that always has a gradient.
        out.append(Layer(chance.choice(WITH_WEIGHT), model))
        return out

    def _optimizer(
        self, model: int, part: str, op: str, dtype: str, layers: list[Layer]
    ) -> Optimizer:
        chance = self.chance
        has = {part.kind for part in layers}
        dtypes = {part.dtype or dtype for part in layers}
        cannot: set[str] = set()  # what PyTorch's optimizers themselves cannot do
        if has & {"transposed", "convolution"}:
            cannot |= {"lbfgs", "wolfe"}
        if "empty" in has:
            cannot |= {"adafactor"}
        if has & {
            "attention",
            "norm",
        }:  # some gradients are 0 but for rounding, whose sign it takes
            cannot |= {"rprop"}
        kinds = [
            name
            for name, kind in KINDS.items()
            if name not in cannot
            and not (kind.matrices and (part != "all" or not hasattr(optim, "Muon")))
            and not (dtypes != {"float64"} and name in MAGNIFYING)
            and not ("bfloat16" in dtypes and name == "muon")
            # PyTorch 2.13 computes it wrongly from 16 elements on.
            and not ("bfloat16" in dtypes and name == "fused sgd")
        ]
        name = chance.choice(kinds)
        if self.likely(0.1):
            name = chance.choice(["keeping", "own methods", "own methods"])
        if has & set(SPARSE) and self.likely(0.3):
            name = "sgd"
        kind = KINDS[name]
        one = kind.closure
        decouples = kind.nature in ("elementwise", "tensor", "own") and self.likely(0.65)
        update = "auto"
        if kind.nature == "elementwise" and decouples:
            update = chance.choice(["auto", "auto", "sharded", "whole"])
        scheduler = chance.choice(["before", "after"]) if self.likely(0.2) else ""
        rates = chance.choice(["", "cosine", "one cycle", "chained"]) if scheduler else ""
        if name == "around":  # it has no hooks, and schedulers look for them
            scheduler = rates = ""
        schedule = chance.choice(DECOUPLED if decouples else ALL_REDUCED)
        sparse = name == "sgd" and bool(has & set(SPARSE)) and self.likely(0.6)
        if sparse:  # ``auto`` may decouple, which is an error
            schedule = chance.choice([s for s in ALL_REDUCED if s != "auto"])
            update = "auto"
        return Optimizer(
            name,
            model,
            part,
            groups=1 if one or self.likely(0.6) else 2,
            schedule=schedule,
            update=update,
            threshold_bytes=chance.choice([1, 100, 2000, 25 * 2**20]),
            op=op,
            named=self.likely(0.85),
            scheduler=scheduler,
            rates=rates,
            # Where fused optimizers undo the gradient scaler's factor is their affair.
            step_hooks=chance.choice(["post"] if "fused" in name else ["pre", "post", "both"])
            if self.likely(0.1) and name != "around"
            else "",
            sparse=sparse,
        )

    def _step(self) -> Step:
        chance = self.chance
        count = len(self.optimizers)
        which = tuple(range(count)) if self.likely(0.6) else (chance.randrange(count),)
        step = Step(optimizers=which, zero=self.zero)
        models = {self.optimizers[k].model for k in which}
        closures = [KINDS[self.optimizers[k].kind].closure for k in which]
        closure = any(closures) or (len(which) == 1 and self.likely(0.05))
        if closure:
            k = which[closures.index(True)] if any(closures) else which[0]
            if self.hooked:
                closure = any(closures)
            if closure:
                passes = self._passes(1)
                return replace(step, optimizers=(k,), closure=True, passes=passes)
        none = self.likely(0.1) and not self.hooked and self.zero != "list"
        step = replace(step, passes=self._passes(0 if none else 1))
        if count > 1 and self.likely(0.15) and self.zero not in _IN_PLACE:
            others = {o.model for o in self.optimizers} - models
            step = replace(step, others=tuple(others))
        if self.likely(0.15):
            some = tuple(r for r in range(3) if self.likely(0.6)) or (0,)
            step = replace(
                step,
                discard=chance.choice(["optimizer", "zeros", "model", "loop"]),
                discarded_on=some if self.likely(0.4) and self.zero != "list" else (0, 1, 2),
            )
        sure = min(step.passes) > 0
        # A program that a rank alone is refused would have to end, and others with it.
        alike = sure and not any(
            part.when in _BY_RANK for part in self.layers if part.model in {*models, *step.others}
        )
        sparse = any(part.kind in SPARSE for part in self.layers)
        kept = any(self.optimizers[j].sparse for j in which)
        empty = any(part.kind == "empty" for part in self.layers)
        if self.scaled and sure:
            ways = ["plain", "plain", "unscale", "clip", "own clip"] + (
                ["bare"] if alike and (not sparse or kept) else []
            )
            if kept:  # PyTorch's own functions do not clip sparse gradients
                ways = [way for way in ways if way != "clip"]
            way = chance.choice(ways)
            step = replace(step, scaler=way)
            if self.likely(0.15):
                step = replace(step, infinite_on=chance.randrange(self.ranks))
        elif self.likely(0.45):
            ways = ["clip", "clip", "sync norm", "sync value", "sync scale", "sync look", "sync"]
            ways += ["sync replace", "clip twice", "sync clip", "sync total"]
            if alike and not sparse and self.likely(0.3):
                ways = ["touch scale", "touch data", "touch replace", "touch clamp"]
            if kept:
                ways = ["clip", "clip", "sync scale", "sync look", "sync", "sync replace"]
                if alike and self.likely(0.3):
                    ways = ["touch scale", "touch replace"]
            step = replace(
                step,
                gradients=chance.choice(ways),
                max_norm=chance.choice([1e-3, 0.05, 0.3, 100.0]),
                norm_type=chance.choice([2.0, 2.0, 1.0, 3.0] + ([] if empty else [float("inf")])),
                leave_out=self.likely(0.12) and sure,
            )
            if step.gradients.startswith("touch"):
                step = replace(step, leave_out=False)
        if step.leave_out and not step.gradients:
            step = replace(step, leave_out=False)
        # What a failing backward leaves in parameters of other optimizers, one process never had.
        alone = set(which) == {k for k, o in enumerate(self.optimizers) if o.model in models}
        if self.likely(0.08) and not step.scaler and alone and not step.others:
            some = tuple(r for r in range(3) if self.likely(0.5)) or (0,)
            everywhere = self.likely(0.5) or self.hooked or step.gradients.startswith("touch")
            # Zeros that only a rank that fails has kept would be gone with its gradients.
            everywhere = everywhere or "zeros" in (*self.zero.split(), step.discard)
            everywhere = everywhere or self.zero in _IN_PLACE
            step = replace(
                step,
                error=chance.choice(["forward", "backward", "retry"]),
                error_on=(0, 1, 2) if everywhere else some,
            )
        kinds = {part.kind for part in self.layers if part.model in models | {*step.others}}
        reentrant = any(part.checkpoint for part in self.layers)
        if self.likely(0.05) and not kinds & {*_NOT_TWICE_DIFFERENTIABLE} and not reentrant:
            step = replace(step, penalty=True)
        forward = "call"
        if (
            self.compiled and not reentrant
        ):  # torch.compile may change checkpointed layers' gradients
            forward = "compiled"
            step = replace(step, compiled=not step.scaler and self.likely(0.5))
        elif self.autocast and "lstm" not in kinds:  # which not every CPU runs in bfloat16
            forward = "autocast"
        elif self.likely(0.08):
            forward = chance.choice(["functional", "twice"])
            if forward == "functional" and kinds & {"lstm", "gru", "tied", "old weight norm"}:
                forward = "call"
        # (An optimizer's own method would average these gradients, which late hooks have changed.)
        saliency = self.zero not in _IN_PLACE and self.likely(0.08) and not self.hooked
        read = chance.choice(("norm",) if kept else _READS) if self.likely(0.25) else ""
        step = replace(step, forward=forward, read=read, saliency=saliency)
        apart = len({self.optimizers[j].model for j in which}) == count > 1
        plain = not (step.scaler or step.compiled or step.leave_out or step.error)
        hooks = any(self.optimizers[j].step_hooks for j in which)
        if apart and plain and not hooks and not self.hooked and self.likely(0.5):
            step = replace(step, threads=True, gradients=chance.choice(["", "clip", "clip"]))
        simple = plain and alike and not (sparse or self.hooked or step.threads or step.discard)
        if simple and not reentrant and self.likely(0.15):
            # Behind a saliency pass, whose gradients are only dropped, it would replace those.
            step = replace(step, assigned=self.zero not in ("model", "loop"))
            # To change those before they are averaged is no error, so it must commute with that.
            if step.gradients in ("touch clamp", "touch data"):
                step = replace(step, gradients="touch scale")
        if simple and len(which) == 1 and self.optimizers[which[0]].kind == "own methods":
            ways = ["add", "finish", "finish"]
            averaged = self.optimizers[which[0]].op == "average"
            if averaged and not step.assigned and len(set(step.passes[: self.ranks])) == 1:
                ways += ["backward"] * 2
            step = replace(step, own=chance.choice(ways))
        return step

    def _passes(self, least: int) -> tuple[int, ...]:
        free = not self.declared and not self.counted
        if free and self.likely(0.3):
            return tuple(self.chance.randint(least, self.passes) for _ in range(3))
        return (self.passes,) * 3

    def _acts(self) -> list[Act]:
        out = []
        while self.likely(0.3):
            act = self._act()
            if act is not None:
                out.append(act)
        return out

    def _act(self) -> Act | None:
        chance = self.chance
        k = chance.randrange(len(self.optimizers))
        about = self.optimizers[k]
        act = Act("eval", optimizer=k, model=about.model)
        heads = [n for n, p in enumerate(self.layers[:-1]) if self.layers[n + 1].model != p.model]
        heads.append(len(self.layers) - 1)
        own = [
            n
            for n, part in enumerate(self.layers)
            if part.kind not in ("again", "tied") and n not in heads
        ]
        do = "passes" if self.declared and self.likely(0.15) else chance.choice(_ACTS)
        own_acts = {"swapping": "swap", "scaled": "scale"}
        # Ranks with gradients would wait in such a method for those without.
        uneven = any(part.when in _BY_RANK for part in self.layers)
        if about.kind in own_acts and not uneven and self.likely(0.5):
            do = own_acts[about.kind]
        act = replace(act, do=do)
        kinds = {part.kind for part in self.layers}
        if do == "eval":
            return replace(act, how=chance.choice(["no_grad", "inference"]))
        if do == "observe":
            ways = ["state_dict", "parameters", "save", "synchronized list", "groups", "vector"]
            ways += ["norm", "list"] + ([] if "old weight norm" in kinds else ["deepcopy"])
            ways += ["script", "kept script", "fork"]
            how = chance.choice(ways)
            return replace(act, how=how)
        if do == "ema":
            ways = ["module", "list", "synchronized list", "foreach list"]
            ways += [] if "old weight norm" in kinds else ["averaged model"]
            return replace(act, how=chance.choice(ways))
        if do == "clamp":
            return replace(act, how=chance.choice(["", "list", "foreach list"]))
        if do == "passes":
            if not self.declared:
                return None
            self.passes = chance.randint(1, 3)
            return replace(act, value=float(self.passes))
        if do in ("freeze", "thaw"):
            never = [n for n in own if not self.layers[n].hook]
            if not never:
                return None
            n = chance.choice(never)
            # What is tied to it would stay.
            return replace(act, layer=n)
        if do == "add":
            late = [n for n in own if self.layers[n].late and n not in self.added]
            late = [n for n in late if self.layers[n].model == about.model]
            if not late or KINDS[about.kind].matrices or KINDS[about.kind].closure or about.rates:
                return None
            n = chance.choice(late)
            self.added.add(n)
            return replace(act, layer=n)
        if do == "lr":
            return replace(act, value=chance.choice([0.5, 1.5]))
        if do == "scale":
            return replace(act, value=0.7)
        if do == "clear":
            return None if about.kind in ("adagrad", "lbfgs", "wolfe") else act
        if do in ("rewrap", "renew"):
            if do == "renew" and about.scheduler:
                return None
            nature = KINDS[about.kind].nature
            both = ALL_REDUCED + (() if nature == "coupled" else DECOUPLED)
            if about.sparse:
                both = tuple(s for s in ALL_REDUCED if s != "auto")
            if about.update == "sharded" and nature == "elementwise":
                both = DECOUPLED
            return replace(act, schedule=chance.choice(both))
        if do == "broadcast":
            return replace(act, how=chance.choice(["", "last"]))
        if do == "thread":
            return replace(act, how=chance.choice(["state_dict", "list"]))
        return act


MAGNIFYING = ("rprop", "centered", "rmsprop", "adafactor", "lbfgs", "wolfe")
"""Optimizers that make differences of float32's rounding larger than what is compared."""
LISTS = ("list", "vector", "norm", "groups", "foreach list")


def without(program: Program, names: Collection[str]) -> Program:
    """The program less what is named, while a defect that is known is still open.

    Args:
        program: any.
        names: what an action does (``alone``, ``broadcast``, ...); ``lists``: parameters read
            through lists of the program's own; ``touch``: gradients changed before they are
            averaged; ``zeros``: gradients zeroed in place; ``discards``, ``compiled``,
            ``closure``, ``scaler``, ``hooks``, ``late hooks``, ``step hooks``, ``read``,
            ``saliency``, ``penalty``, ``threads``, ``assigned``; or a kind of layer or of
            optimizer, which is replaced by a plain one.
    """
    actions: list[Step | Act] = []
    for action in program.actions:
        if isinstance(action, Act):
            if action.do in names or ("lists" in names and action.how in LISTS):
                continue
        else:
            if "touch" in names and action.gradients.startswith("touch"):
                action = replace(action, gradients="")
            if "touch" in names and action.scaler == "bare":
                action = replace(action, scaler="plain")
            if "scaler" in names and action.scaler:
                action = replace(action, scaler="", infinite_on=-1)
            if "compiled" in names and action.forward == "compiled":
                action = replace(action, forward="call", compiled=False)
            if "closure" in names and action.closure:
                action = replace(action, closure=False)
            if action.gradients in names or action.error in names:
                action = replace(action, gradients="", error="", leave_out=False)
            if "read" in names:
                action = replace(action, read="")
            if "own methods" in names:
                action = replace(action, own="")
            for flag in ("saliency", "penalty", "threads", "assigned"):
                if flag in names:
                    action = replace(action, **{flag: False})
            if "discards" in names:
                action = replace(action, discard="")
            if "zeros" in names:
                plain = {"zeros": "optimizer", "model zeros": "model", "list": "model"}
                action = replace(action, zero=plain.get(action.zero, action.zero))
                action = replace(action, discard=plain.get(action.discard, action.discard))
        actions.append(action)
    layers = tuple(
        replace(part, kind="linear", size=0) if part.kind in names else part
        for part in program.layers
    )
    if "hooks" in names:
        layers = tuple(replace(part, hook="") for part in layers)
    if "late hooks" in names:
        layers = tuple(replace(p, hook="") if "late" in p.hook else p for p in layers)
    optimizers = tuple(
        replace(o, kind="momentum")
        if o.kind in names or ("closure" in names and KINDS[o.kind].closure)
        else o
        for o in program.optimizers
    )
    if "step hooks" in names:
        optimizers = tuple(replace(o, step_hooks="") for o in optimizers)
    return replace(program, layers=layers, optimizers=optimizers, actions=tuple(actions))
