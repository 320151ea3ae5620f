"""Runs a program: as one rank of a job, or in one process as the reference.

Both ways go through the same code. In one process a pass takes the sum of what the ranks' losses
would be, divided by their number (``op="average"``), and calls backward once; a rank that leaves a
layer or a pass out contributes nothing there. What a program sees on its way is *observed* and
compared at the end: bit by bit between ranks, and with the reference up to rounding.
"""

from __future__ import annotations

import copy
import io
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, List  # noqa: UP035 - TorchScript needs it

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import wfbp.torch as wfbp
from tests.fuzz.models import DTYPES, SPARSE, Network, ProgramError
from tests.fuzz.optimizers import KINDS
from tests.fuzz.program import Act, Layer, Optimizer, Program, Step, used

REFUSED = ("and before it was averaged over the ranks",)
"""What errors say that a program may get instead of a right result, because it touches gradients
between backward and step without ``synchronize()``."""

_TOKENS = 6


class Table(nn.Module):
    """Returns copies of its parameters, also as a script."""

    def __init__(self, params: list[Any]) -> None:
        super().__init__()
        self.table = nn.ParameterList(params)

    def forward(self) -> List[torch.Tensor]:  # noqa: UP006
        found: List[torch.Tensor] = []  # noqa: UP006
        for p in self.table:
            found.append(p.clone())
        return found


def _write_in_a_fork(params: Sequence[Any]) -> None:
    """A forked process overwrites its parameters and gradients; those here stay as they are."""
    grads = [p.grad for p in params if p.grad is not None and not p.grad.is_sparse]
    before = [grad.clone() for grad in grads]
    child = os.fork()
    if not child:
        for tensor in (*grads, *params):
            tensor.detach().zero_()
        os._exit(0)
    os.waitpid(child, 0)
    for grad, kept in zip(grads, before, strict=True):
        if not torch.allclose(grad, kept, 0.0, 0.0, equal_nan=True):
            raise AssertionError("a forked process has changed a gradient")


class Thread:
    """Reads parameters all the time, as a logger or a server beside training does."""

    def __init__(self, read: Callable[[], object]) -> None:
        self._read = read
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(2e-4):
                self._read()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        """Stop, and raise what reading has raised."""
        self._stop.set()
        self._thread.join(60)
        if self.error is not None:
            raise AssertionError(f"a thread that reads: {self.error!r}") from self.error
        if self._thread.is_alive():
            raise AssertionError("a thread that reads parameters does not come back")


class Run:
    """One program in the making.

    Args:
        program: what to run.
        rank: of the job, or None for the reference.
        refused: steps that the job was refused, for the reference to leave out.
        shaken: change parameters by some rounding errors, by chance from this seed.
    """

    def __init__(
        self,
        program: Program,
        rank: int | None,
        refused: Iterable[tuple[int, int]] = (),
        shaken: int | None = None,
    ) -> None:
        self.program = program
        self.parallel = rank is not None
        self.rank = rank or 0
        self.ranks = range(program.ranks) if rank is None else (rank,)
        self.refused = set(refused)
        self.seen: list[tuple[str, list[Any]]] = []
        """What was observed, with a label."""
        self.notes: list[str] = []
        self.place = "start"
        self._number = 0
        self._optimizer_of: dict[int, int] = {}
        self._saved: Any = None
        self._ema: list[torch.Tensor] | None = None
        self._averaged: dict[int, torch.optim.swa_utils.AveragedModel] = {}
        self._thread: Thread | None = None
        self._gradients: dict[int, torch.Tensor] = {}  # by parameter's id, for a list of them
        self._compiled: dict[int, Any] = {}
        self._scripts: dict[int, Any] = {}
        spread = program.start == "broadcast" and self.parallel
        torch.manual_seed(program.seed + (self.rank if spread else 0))
        count = 1 + max(part.model for part in program.layers)
        self.models = [Network(program, m) for m in range(count)]
        if shaken is not None:
            _shake(self.models, shaken)
        self._hook_all(late=False)
        self.lists = [list(m.parameters()) for m in self.models]
        self.plain: list[torch.optim.Optimizer] = []
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        for k, about in enumerate(program.optimizers):
            self._make(k, about)
        self._hook_all(late=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=program.scale, growth_interval=2)
        if program.start == "broadcast":
            for k in range(len(self.optimizers)):
                self._broadcast(k, 0)

    def run(self) -> None:
        """All of it."""
        try:
            for number, action in enumerate(self.program.actions):
                self._number = number
                if isinstance(action, Step):
                    self.place = f"step {self._number}"
                    self._step(action)
                else:
                    self.place = f"{action.do} {self._number}"
                    getattr(self, f"do_{action.do}")(action)
            self.place = "end"
        finally:
            if self._thread is not None:
                self._thread.end()
        for k, optimizer in enumerate(self.optimizers):
            state = optimizer.state_dict()
            self._observe(f"state of optimizer {k}", *_flat(state))
        for k, model in enumerate(self.models):
            self._observe(f"model {k}", *model.state_dict().values())
        if self._ema is not None:
            self._observe("moving average", *self._ema)
        for k, averaged in self._averaged.items():
            self._observe(f"average of model {k}", *averaged.state_dict().values())

    # What a program is made of

    def _make(self, k: int, about: Optimizer) -> None:
        optimizer = KINDS[about.kind].make(self._groups(about))
        scheduler = None
        if about.scheduler == "before":
            scheduler = _scheduler(about.rates, optimizer)
        self.plain.append(optimizer)
        self.optimizers.append(self._wrap(k, about, optimizer, about.schedule))
        if about.scheduler == "after":
            scheduler = _scheduler(about.rates, self.optimizers[k])
        self.schedulers.append(scheduler)
        self._step_hooks(k, about)

    def _broadcast(self, k: int, root: int) -> None:
        """A model and its optimizer's state, as they are on one rank."""
        optimizer = self.optimizers[k]
        model = self.models[self.program.optimizers[k].model]
        if self.parallel:
            wfbp.broadcast_parameters(model.state_dict(), root_rank=root)
            wfbp.broadcast_optimizer_state(optimizer, root_rank=root)
        else:  # all ranks get the optimizer that ranks get that load the root's state
            torch.optim.Optimizer.__setstate__(getattr(optimizer, "base", optimizer), {})

    def _step_hooks(self, k: int, about: Optimizer) -> None:
        optimizer = self.optimizers[k]

        def before(*_: Any) -> None:
            grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
            self._observe("gradients before a step", *(g for g in grads if g is not None))

        def after(*_: Any) -> None:
            params = [p for g in optimizer.param_groups for p in g["params"]]
            self._observe("parameters behind a step", *params)

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_(_params(optimizer), 1e-2)

        def scale(*_: Any) -> None:
            with torch.no_grad():
                torch._foreach_mul_(_params(optimizer), 0.9)

        if about.step_hooks == "change":
            optimizer.register_step_pre_hook(clip)
            optimizer.register_step_post_hook(scale)
        if about.step_hooks in ("pre", "both"):
            optimizer.register_step_pre_hook(before)
        if about.step_hooks in ("post", "both"):
            optimizer.register_step_post_hook(after)

    def _groups(self, about: Optimizer) -> list[dict[str, Any]]:
        """The parameter groups of an optimizer, without layers that join later."""
        model = self.models[about.model]
        found: dict[int, torch.Tensor] = {}
        matrices = KINDS[about.kind].matrices
        for n, k in enumerate(model.places):
            part = self.program.layers[k]
            if part.kind in ("again", "tied") or part.late:
                continue
            if about.part != "all" and (n % 2 == 0) != (about.part == "even"):
                continue
            for p in model.parts[str(k)].parameters():
                if not matrices or p.dim() == 2:
                    found[id(p)] = p
        params = list(found.values())
        if about.groups == 1 or len(params) < 2:
            return [{"params": params}]
        return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.013}]

    def _wrap(self, k: int, about: Optimizer, optimizer: Any, schedule: str) -> Any:
        if not self.parallel:
            return optimizer
        named = self.models[about.model].named_parameters() if about.named else None
        options: dict[str, Any] = {
            "schedule": schedule,
            "threshold_bytes": about.threshold_bytes,
            "backward_passes_per_step": about.passes,
            "op": wfbp.Sum if about.op == "sum" else wfbp.Average,
            "sparse_as_dense": not about.sparse
            and any(part.kind in SPARSE for part in self.program.layers),
            "optimizer_sharding": _SHARDING[about.update],
            "compression": self.program.compression or "none",
        }
        try:
            return wfbp.DistributedOptimizer(optimizer, named, **options)
        except ValueError as error:
            # Whether its own optimizer may be cut up, only wfbp knows.
            if KINDS[about.kind].nature == "elementwise":
                raise
            self.notes.append(f"{about.kind}: {error}")
            named = self.models[about.model].named_parameters() if about.named else None
            options.update(schedule="auto", optimizer_sharding=None)
            return wfbp.DistributedOptimizer(optimizer, named, **options)

    def _hook_all(self, late: bool) -> None:
        for k, part in enumerate(self.program.layers):
            if part.hook and part.kind != "again" and part.hook.startswith("late") == late:
                self._hook(self._module(k), part.hook.removeprefix("late "))

    def _hook(self, part: nn.Module, how: str) -> None:
        """A hook that changes gradients in a way that averages over ranks do not notice."""

        def in_place(p: torch.Tensor) -> None:
            p.grad.mul_(0.5)  # type: ignore[union-attr]

        def replace(p: torch.Tensor) -> None:
            p.grad = p.grad * 0.5  # type: ignore[operator]

        def look(p: torch.Tensor) -> None:
            float(p.grad.norm())  # type: ignore[union-attr]

        for p in part.parameters():
            if not p.requires_grad:
                continue
            if how == "tensor":
                p.register_hook(lambda g: g * 0.5)
            elif how == "in place":
                p.register_post_accumulate_grad_hook(in_place)
            elif how == "replace":
                p.register_post_accumulate_grad_hook(replace)
            elif how == "look":
                p.register_post_accumulate_grad_hook(look)
        if how == "module":
            part.register_full_backward_hook(lambda m, gi, go: None)

    # A step

    def _step(self, step: Step) -> None:
        optimizers = [self.optimizers[k] for k in step.optimizers]
        self._zero(step)
        if step.discard:
            self._backward(step, 90, [r for r in self.ranks if r in step.discarded_on])
            self._zero(step, step.discard)
        ranks = list(self.ranks)
        if step.error:
            ranks = self._failing(step, ranks)
            if self._fails_everywhere(step) and step.error != "retry":
                return
        if step.closure:
            self._with_closure(step)
            return
        for n in range(max(step.passes[: self.program.ranks])):
            self._backward(step, n, [r for r in ranks if step.passes[r] > n])
        if step.read:
            for optimizer in optimizers:
                _read(step.read, [p.grad for p in _params(optimizer) if p.grad is not None])
        if step.threads:
            self._finish_in_threads(step)
            refused = [False] * len(step.optimizers)
        else:
            refused = [self._finish(step, k) for k in step.optimizers]
        if step.scaler and any(self.scaler._per_optimizer_states):
            self.scaler.update()
            self._observe("scale", self.scaler.get_scale())
        for k, was in zip(step.optimizers, refused, strict=True):
            if self.schedulers[k] is not None and not was and not step.leave_out:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a scaler may have left out the first step
                    self.schedulers[k].step()
        if step.saliency:
            model = self.models[self.program.optimizers[step.optimizers[0]].model]
            x, tokens = self._data(model, 70, self.ranks[0])
            x.requires_grad_()
            model(x, tokens).sum().backward()
            assert x.grad is not None
        if step.zero == "end":
            for optimizer in optimizers:
                optimizer.zero_grad()

    def _zero(self, step: Step, how: str = "") -> None:
        models = {self.program.optimizers[k].model for k in step.optimizers}
        how = how or step.zero
        if how in ("optimizer", "zeros", "end"):
            for k, optimizer in enumerate(self.optimizers):
                if k in step.optimizers:
                    optimizer.zero_grad(set_to_none=how != "zeros")
        elif how in ("model", "model zeros"):
            for m in models:
                self.models[m].zero_grad(set_to_none=how == "model")
        elif how == "loop":
            for m in models:
                for p in self.lists[m]:
                    p.grad = None
        elif how in ("list", "carry"):
            averaged = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
            for p in (p for m in models for p in self.lists[m] if p.grad is not None):
                if how == "list" and id(p) not in averaged:
                    p.grad.zero_()  # ranks have it in different steps: their lists would differ
                elif how == "list":
                    self._gradients.setdefault(id(p), p.grad).zero_()
                else:
                    p.grad.mul_(0.5)
        else:
            raise ValueError(f"zero is {how!r}")

    def _fails_everywhere(self, step: Step) -> bool:
        return {*step.error_on} >= {*range(self.program.ranks)}

    def _failing(self, step: Step, ranks: list[int]) -> list[int]:
        """An exception that the program catches; returns the ranks that go on with this batch."""
        where = "backward" if step.error == "retry" else step.error
        if self.parallel and self.rank in step.error_on:
            try:
                self._backward(step, 80, ranks, where)
            except ProgramError:
                for k in step.optimizers:
                    self.optimizers[k].zero_grad()
            else:
                raise AssertionError("the program's own exception did not come back")
        elif not self.parallel and self._fails_everywhere(step):
            for k in step.optimizers:
                self.optimizers[k].zero_grad()
        if step.error == "retry":
            return ranks
        return [r for r in ranks if r not in step.error_on]

    def _with_closure(self, step: Step) -> None:
        (k,) = step.optimizers
        # Gradients of an earlier step are averaged first, and perhaps only some ranks have any.
        self.optimizers[k].zero_grad()

        def closure() -> torch.Tensor:
            self.optimizers[k].zero_grad()
            loss = torch.zeros((), dtype=DTYPES[self.program.dtype])
            for n in range(max(step.passes[: self.program.ranks])):
                loss = self._backward(step, n, [r for r in self.ranks if step.passes[r] > n])
            return loss

        self.optimizers[k].step(closure)

    def _backward(self, step: Step, n: int, ranks: Sequence[int], error: str = "") -> torch.Tensor:
        """One pass; in one process, of all these ranks together."""
        if not ranks:
            return torch.zeros((), dtype=DTYPES[self.program.dtype])
        models = sorted(
            {self.program.optimizers[k].model for k in step.optimizers} | {*step.others}
        )
        losses = []
        for rank in ranks:
            for m in models:
                loss = self._loss(step, self.models[m], n, rank, error)
                if not self.parallel and self._averages(m):
                    loss = loss / self.program.ranks
                if step.infinite_on == rank and n == 0:
                    loss = loss * float("inf")
                losses.append(loss)
        total = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
        if step.assigned and n < max(step.passes):
            self._assign(models, total)
        elif step.scaler:
            self.scaler.scale(total).backward()
        elif step.own == "backward" and n < max(step.passes):
            self.optimizers[step.optimizers[0]].backward(total)
        else:
            total.backward()
        if not self.parallel:
            for m in models:
                for p in self.lists[m]:
                    if p.grad is not None and p.grad.is_sparse:
                        p.grad = p.grad.to_dense()
        return total

    def _assign(self, models: Sequence[int], loss: torch.Tensor) -> None:
        """Add to gradients without a hook."""
        params = [p for m in models for p in self.lists[m] if p.requires_grad]
        params = list({id(p): p for p in params}.values())
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        for p, grad in zip(params, grads, strict=True):
            if grad is not None:
                p.grad = grad.detach() if p.grad is None else p.grad + grad.detach()

    def _averages(self, model: int) -> bool:
        return all(o.op == "average" for o in self.program.optimizers if o.model == model)

    def _data(self, model: Network, n: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = hash((self.program.seed, self._number, n, rank)) % 2**31
        generator = torch.Generator().manual_seed(seed)
        size = self.program.batch, self.program.width
        x = torch.randn(size, generator=generator, dtype=torch.float64)
        tokens = torch.randint(1, _TOKENS, (size[0], 2), generator=generator)
        return x.to(model.dtype), tokens

    def _loss(self, step: Step, model: Network, n: int, rank: int, error: str = "") -> torch.Tensor:
        program = self.program
        x, tokens = self._data(model, n, rank)
        uses = [
            used(part.when, rank, self._number, program.ranks, program.seed + k)
            for k, part in zip(model.places, model.about, strict=True)
        ]
        if step.penalty:
            x.requires_grad_()
        arguments = (x, tokens, uses, error)
        if step.forward == "functional":
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            y = torch.func.functional_call(model, tensors, arguments)
        elif step.forward == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = model(*arguments)
            y = y.to(model.dtype)
        elif step.forward == "compiled":
            which = self.models.index(model)
            if which not in self._compiled:
                self._compiled[which] = torch.compile(model, backend="eager")
            y = self._compiled[which](*arguments)
        else:
            y = model(*arguments)
            if step.forward == "twice":
                y = model(y, tokens, uses)
        loss = (y - x.detach().sin().flip(0)).square().mean()
        if step.penalty:
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = loss + 0.1 * gradient.square().mean()
        return loss

    def _finish(self, step: Step, k: int) -> bool:
        """From gradients to a step, by one optimizer; returns whether it was refused."""
        if (self._number, k) not in self.refused:
            try:
                self._end(step, k)
                return False
            except RuntimeError as error:
                touched = step.gradients.startswith("touch") or step.scaler == "bare"
                touched = touched or self._hooks_touch
                if not (touched and self.parallel and any(t in str(error) for t in REFUSED)):
                    raise
                self.refused.add((self._number, k))
        self.optimizers[k].zero_grad()
        self.scaler._per_optimizer_states.pop(id(self.optimizers[k]), None)
        return True

    def _finish_in_threads(self, step: Step) -> None:
        """Clip and step each optimizer in its own thread; which comes first differs."""

        def finish(k: int) -> float | None:
            time.sleep(2e-3 * ((k + self.rank) % 2))
            optimizer = self.optimizers[k]
            norm = None
            if step.gradients == "clip":
                norm = float(self._clip(optimizer, _params(optimizer), step))
            optimizer.step()
            return norm

        with ThreadPoolExecutor(len(step.optimizers)) as executor:
            self._observe("norms", *executor.map(finish, step.optimizers))

    def _end(self, step: Step, k: int) -> None:
        optimizer = self.optimizers[k]
        params = _params(optimizer)
        how = step.gradients
        skip: Any = nullcontext
        if step.scaler in ("unscale", "clip", "own clip"):
            self._synchronize(optimizer)
            self.scaler.unscale_(optimizer)
            skip = optimizer.skip_synchronize if self.parallel else nullcontext
            if step.scaler == "clip":
                nn.utils.clip_grad_norm_(params, step.max_norm)
            elif step.scaler == "own clip":
                self._observe("norm", float(self._clip(optimizer, params, step)))
        elif step.scaler == "bare":
            # What changes nothing cannot be noticed: a scale of 1, or infinite gradients, whose
            # rank would wait for those that are refused.
            if self.scaler.get_scale() != 1.0 and step.infinite_on < 0:
                self.scaler.unscale_(optimizer)
        elif how == "clip" or how == "clip twice":
            for _ in range(1 + (how == "clip twice")):
                self._observe("norm", float(self._clip(optimizer, params, step)))
        elif how.startswith("sync"):
            self._synchronize(optimizer)
            skip = optimizer.skip_synchronize if self.parallel else nullcontext
            if how == "sync norm":
                norm = nn.utils.clip_grad_norm_(params, step.max_norm, step.norm_type)
                self._observe("norm", float(norm))
            elif how == "sync total":
                found = [p.grad for p in params if p.grad is not None]
                norm = nn.utils.get_total_norm(found, step.norm_type)
                nn.utils.clip_grads_with_norm_(params, step.max_norm, norm)
                self._observe("norm", float(norm))
            elif how == "sync value":
                if any(p.grad is not None for p in params):
                    nn.utils.clip_grad_value_(params, step.max_norm)
            elif how == "sync scale":
                for p in params:
                    if p.grad is not None:
                        p.grad.mul_(0.5)
            elif how == "sync replace":
                for p in params:
                    if p.grad is not None:
                        p.grad = p.grad * 0.5
            elif how == "sync share":  # as queues of torch.multiprocessing do
                for p in params:
                    if p.grad is not None:
                        p.grad.share_memory_()
            elif how == "sync look":
                self._observe("averages", *(p.grad for p in params if p.grad is not None))
                skip = nullcontext
            elif how == "sync clip":
                self._observe("norm", float(self._clip(optimizer, params, step)))
        elif how.startswith("touch"):
            _touch(how, params)
        if step.leave_out:
            optimizer.zero_grad()
            return
        if step.own == "add":
            optimizer.add()
        with skip():
            if step.own == "finish":
                optimizer.finish()
            elif step.scaler:
                self.scaler.step(optimizer)
            elif step.compiled and self.parallel:
                torch.compile(lambda: optimizer.step(), backend="eager")()
            else:
                with torch.inference_mode(step.inference and self.parallel):
                    optimizer.step()
        if step.again:
            optimizer.step()

    @property
    def _hooks_touch(self) -> bool:
        """Whether hooks that were registered behind wfbp's change gradients."""
        return any(part.hook.startswith("late") for part in self.program.layers)

    def _synchronize(self, optimizer: Any) -> None:
        if self.parallel:
            optimizer.synchronize()

    def _clip(self, optimizer: Any, params: list[torch.Tensor], step: Step) -> torch.Tensor:
        if self.parallel:
            norm: torch.Tensor = optimizer.clip_grad_norm_(step.max_norm, step.norm_type)
            return norm
        return nn.utils.clip_grad_norm_(params, step.max_norm, step.norm_type)

    # Other things that programs do

    def do_eval(self, act: Act) -> None:
        """A loss without gradients, on the same data everywhere."""
        model = self.models[act.model]
        x, tokens = self._data(model, 60, 0)
        mode = torch.inference_mode if act.how == "inference" else torch.no_grad
        model.eval()
        with mode():
            y = model(x, tokens)
        model.train()
        self._observe("evaluation", torch.tensor(y.tolist(), dtype=y.dtype))

    def do_observe(self, act: Act) -> None:
        """Look at parameters."""
        model = self.models[act.model]
        own = self.lists[act.model]
        if act.how == "state_dict":
            found = list(model.state_dict().values())
        elif act.how == "parameters":
            found = list(model.parameters())
        elif act.how == "save":
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            found = list(torch.load(file).values())
        elif act.how == "deepcopy":
            found = list(copy.deepcopy(model).state_dict().values())
        elif act.how == "synchronized list":
            if self.parallel:
                for optimizer in self.optimizers:
                    optimizer.synchronize_parameters()
            found = own
        elif "script" in act.how:
            found = self._by_script(act.model, kept=act.how == "kept script")
        elif act.how == "fork":
            _write_in_a_fork(own)
            found = own
        elif act.how == "groups":
            found = _params(self.optimizers[act.optimizer])
        elif act.how == "vector":
            found = [nn.utils.parameters_to_vector([p.reshape(-1) for p in own])]
        elif act.how == "modes":
            with torch.inference_mode(), torch.device("meta"), FlopCounterMode(display=False):
                found = [p.detach().clone() for p in own]
        elif act.how == "subclass":
            found = [p.as_subclass(torch.Tensor) for p in own]
        elif act.how == "norm":
            found = [torch.stack([p.detach().double().norm() for p in own])]
        else:  # a list of the program's own
            found = own
        self._observe(f"parameters by {act.how}", *found)

    def _by_script(self, model: int, kept: bool) -> list[torch.Tensor]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit")
            script = self._scripts.get(model) or torch.jit.script(Table(self.lists[model]))
            if kept:
                self._scripts[model] = script
            with torch.no_grad():
                return list(script())

    def do_ema(self, act: Act) -> None:
        """A moving average of weights."""
        if act.how == "averaged model":
            model = self.models[act.model]
            if act.model not in self._averaged:
                self._averaged[act.model] = torch.optim.swa_utils.AveragedModel(model)
            self._averaged[act.model].update_parameters(model)
            return
        if act.how == "synchronized list" and self.parallel:
            for optimizer in self.optimizers:
                optimizer.synchronize_parameters()
        params = (
            self.lists[act.model] if "list" in act.how else [*self.models[act.model].parameters()]
        )
        if self._ema is None or len(self._ema) != len(params):
            self._ema = [p.detach().clone() for p in params]
        elif act.how == "foreach list":
            with torch.no_grad():
                torch._foreach_lerp_(self._ema, params, 0.3)
        else:
            for mean, p in zip(self._ema, params, strict=True):
                mean.lerp_(p.detach(), 0.3)

    def do_clamp(self, act: Act) -> None:
        """Change weights in place, by the module or a list of the program's own."""
        params = self.lists[act.model] if act.how else list(self.models[act.model].parameters())
        with torch.no_grad():
            if act.how == "foreach list":
                torch._foreach_mul_(params, 0.95)
                return
            for p in params:
                p.clamp_(-0.9, 0.9)

    def do_move(self, act: Act) -> None:
        """Give parameters other memory, as ``model.to()`` does."""
        for p in self.models[act.model].parameters():
            p.data = p.data.clone()

    def do_passes(self, act: Act) -> None:
        """Declare another number of backward passes per step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            if self.parallel:
                optimizer.set_backward_passes_per_step(int(act.value))

    def do_freeze(self, act: Act) -> None:
        self._module(act.layer).requires_grad_(False)

    def do_thaw(self, act: Act) -> None:
        self._module(act.layer).requires_grad_(True)

    def do_add(self, act: Act) -> None:
        """A layer that was there from the start joins the optimizer."""
        params = list(self._module(act.layer).parameters())
        for p in params:
            p.grad = None
        optimizer = self.optimizers[act.optimizer]
        optimizer.zero_grad()
        if params:
            optimizer.add_param_group({"params": params, "lr": act.value or 0.03})

    def do_remove(self, act: Act) -> None:
        """Take a parameter out of the optimizer's groups."""
        del self.optimizers[act.optimizer].param_groups[0]["params"][1]

    def do_lr(self, act: Act) -> None:
        for group in self.optimizers[act.optimizer].param_groups:
            group["lr"] *= act.value

    def do_save(self, act: Act) -> None:
        states = [copy.deepcopy(o.state_dict()) for o in self.optimizers]
        self._saved = [copy.deepcopy(m.state_dict()) for m in self.models], states
        for k, state in enumerate(states):
            self._observe(f"saved state {k}", *_flat(state))

    def do_load(self, act: Act) -> None:
        if self._saved is None:
            return
        for model, state in zip(self.models, self._saved[0], strict=True):
            model.load_state_dict(state)
        for optimizer, state in zip(self.optimizers, self._saved[1], strict=True):
            if len(state["param_groups"]) == len(optimizer.param_groups):
                optimizer.load_state_dict(copy.deepcopy(state))

    def do_reload(self, act: Act) -> None:
        optimizer = self.optimizers[act.optimizer]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def do_broadcast(self, act: Act) -> None:
        self._broadcast(act.optimizer, self.program.ranks - 1 if act.how == "last" else 0)

    def do_swap(self, act: Act) -> None:
        """Look at the averages that an optimizer keeps in its state."""
        optimizer = self.optimizers[act.optimizer]
        optimizer.swap()
        self._observe("averages of parameters", *_params(optimizer))
        optimizer.swap()

    def do_scale(self, act: Act) -> None:
        """Change an attribute of the optimizer's."""
        self.optimizers[act.optimizer].scale *= act.value

    def do_clear(self, act: Act) -> None:
        self.optimizers[act.optimizer].state.clear()

    def do_rewrap(self, act: Act) -> None:
        """Wrap the same optimizer once more, with another schedule."""
        k = act.optimizer
        self.optimizers[k].zero_grad()
        about = self.program.optimizers[k]
        self.optimizers[k] = self._wrap(k, about, self.plain[k], act.schedule)

    def do_renew(self, act: Act) -> None:
        """Make an optimizer anew, and give it the state of the one before."""
        k = act.optimizer
        about = self.program.optimizers[k]
        self.optimizers[k].zero_grad()
        state = copy.deepcopy(self.optimizers[k].state_dict())
        groups = [
            {"params": list(g["params"]), "lr": g["lr"]} for g in self.optimizers[k].param_groups
        ]
        self.plain[k] = KINDS[about.kind].make(groups)
        self.optimizers[k] = self._wrap(k, about, self.plain[k], act.schedule)
        self.optimizers[k].load_state_dict(state)

    def do_alone(self, act: Act) -> None:
        """Rank 0 alone takes the optimizer's state, as Horovod's examples do."""
        if self.rank == 0:
            self.optimizers[act.optimizer].state_dict()

    def do_metric(self, act: Act) -> None:
        """A value averaged over the ranks."""
        value = torch.full((3,), float(self._number), dtype=torch.float64)
        if self.parallel:
            value = wfbp.allreduce(value, name="metric")
        self._observe("metric", value)

    def do_discard(self, act: Act) -> None:
        """Gradients for the input alone, thrown away at once, several times over."""
        model = self.models[act.model]
        for n in range(3):
            x, tokens = self._data(model, 50 + n, self.ranks[0])
            x.requires_grad_()
            model(x, tokens).sum().backward()
            for k, about in enumerate(self.program.optimizers):
                if about.model == act.model:
                    self.optimizers[k].zero_grad()

    def do_thread(self, act: Act) -> None:
        """Begin or end to read beside training."""
        if not self.parallel:
            return
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.end()
            return
        model, own = self.models[act.model], self.lists[act.model]

        def state() -> object:
            return {k: v.clone() for k, v in model.state_dict().items()}

        def norms() -> object:
            return [p.detach().norm() for p in own]

        self._thread = Thread(norms if act.how == "list" else state)

    def _module(self, layer: int) -> nn.Module:
        about: Layer = self.program.layers[layer]
        found: nn.Module = self.models[about.model].parts[str(layer)]
        return found

    def _observe(self, label: str, *values: Any) -> None:
        """Keep a copy of what was seen."""
        kept = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]
        self.seen.append((f"{self.place}: {label}", kept))


_SHARDING = {"auto": None, "sharded": True, "whole": False}


def _scheduler(rates: str, optimizer: Any) -> Any:
    from torch.optim import lr_scheduler

    if rates == "cosine":
        return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
    if rates == "one cycle":
        return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200, cycle_momentum=False)
    if rates == "chained":
        first = lr_scheduler.ConstantLR(optimizer, 0.5, 3)
        return lr_scheduler.SequentialLR(
            optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.8)], [3]
        )
    return lr_scheduler.StepLR(optimizer, 2, 0.7)


def _read(how: str, grads: list[torch.Tensor]) -> None:
    """Read gradients in one of many ways, and check what was read."""
    if how == "norm":
        sum(float(g.norm()) for g in grads)
        return
    if how not in ("plus", "add_"):  # what else there is has no sparse form
        grads = [g for g in grads if not g.is_sparse]
    found = [torch.zeros(g.shape, dtype=g.dtype) for g in grads]
    if how == "foreach" and grads:
        torch._foreach_add_(found, grads)
    for total, grad in zip(found, grads, strict=True):
        if how == "plus":
            total += grad
        elif how == "add_":
            total.add_(grad)
        elif how == "addcmul_":
            total.addcmul_(grad, torch.ones_like(total))
        elif how == "copy_":
            total.copy_(grad)
        elif how == "item":
            total[...] = grad
        elif how == "out":
            torch.add(total, grad, out=total)
        elif how == "numpy" and grad.dtype is not torch.bfloat16:
            total.add_(torch.from_numpy(grad.numpy()))
        elif how != "foreach":  # "rows", and what NumPy does not have
            for a, b in zip(total.reshape(1, *total.shape), grad[None], strict=True):
                a.add_(b)
        # An infinity that the program makes leaves NaN.
        held = grad.data.to_dense() if grad.is_sparse else grad.data
        assert torch.allclose(total, held, rtol=0, atol=0, equal_nan=True), how


def _touch(how: str, params: list[torch.Tensor]) -> None:
    """Change gradients behind wfbp's back."""
    for p in params:
        if p.grad is None:
            continue
        if how == "touch scale":
            p.grad.mul_(0.5)
        elif how == "touch data":  # all elements, because only samples of them are compared
            p.grad.data.add_(1.0)
        elif how == "touch replace":
            p.grad = p.grad * 0.5
        elif how == "touch clamp":
            p.grad.clamp_(-0.01, 0.01)


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _flat(state: Any, path: str = "") -> list[Any]:
    """Names and values of everything in a state, in an order of its own."""
    if isinstance(state, dict):
        out = []
        for key in sorted(state, key=str):
            out += _flat(state[key], f"{path}/{key}")
        return out
    if isinstance(state, list | tuple):
        out = []
        for n, value in enumerate(state):
            out += _flat(value, f"{path}/{n}")
        return out
    return [path, state]


def tolerance(program: Program) -> float:
    """Largest difference from the reference, relative to the largest entry of a tensor."""
    names = {program.dtype, *(part.dtype for part in program.layers if part.dtype)}
    if any(isinstance(a, Step) and a.forward == "autocast" for a in program.actions):
        names.add("bfloat16")
    by_type = {"float64": 1e-7, "float32": 2e-3, "float16": 0.15, "bfloat16": 0.15}
    return max(*(by_type[n] for n in names), *(KINDS[o.kind].rough for o in program.optimizers))


def difference(run: Run, reference: Run) -> str:
    """How a rank's observations differ from the reference's; empty where they do not."""
    return _first_difference(run, reference)[1]


def rounding_decides(run: Run, reference: Run) -> bool:
    """Whether some rounding errors of the parameters make one process differ from itself as early.

    In bfloat16 a few steps suffice for that; with Rprop, a gradient that is zero but for rounding.
    """
    program = reference.program
    place, _ = _first_difference(run, reference)
    for seed in range(4):
        shaken = Run(program, None, reference.refused, shaken=seed)
        shaken.run()
        if _first_difference(shaken, reference)[0] <= place:
            return True
    return False


def _shake(models: Iterable[nn.Module], seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in (p for model in models for p in model.parameters()):
            if param.dtype.is_floating_point or param.dtype.is_complex:
                far = 2 if param.dtype is torch.bfloat16 else 64
                by = torch.randint(-far, far + 1, param.shape, generator=chance)
                param.mul_(1 + by.double() * torch.finfo(param.dtype).eps)


def _first_difference(run: Run, reference: Run) -> tuple[int, str]:
    """The number of the first observation that differs (of all, if none), and how."""
    limit = tolerance(run.program)
    labels = [label for label, _ in run.seen], [label for label, _ in reference.seen]
    if labels[0] != labels[1]:
        return 0, f"observed {labels[0]}, in one process {labels[1]}"
    pairs = enumerate(zip(run.seen, reference.seen, strict=True))
    for number, ((label, found), (_, expected)) in pairs:
        if len(found) != len(expected):
            more, less = set(_names(found)), set(_names(expected))
            return (
                number,
                f"{label}: {sorted(more - less)} which one process lacks; "
                f"{sorted(less - more)} which only one process has",
            )
        path = ""
        for n, (a, b) in enumerate(zip(found, expected, strict=True)):
            problem = _differs(a, b, limit)
            if problem:
                return number, f"{label}{path or f' [{n}]'}: {problem}"
            path = a if isinstance(a, str) else ""
    return len(run.seen), ""


def _names(values: list[Any]) -> list[str]:
    return [v for v in values if isinstance(v, str)]


def _differs(a: Any, b: Any, limit: float) -> str:
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return f"{a!r}, in one process {b!r}"
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype} {tuple(a.shape)}, in one process {b.dtype} {tuple(b.shape)}"
        if a.is_sparse or b.is_sparse:
            a, b = a.to_dense(), b.to_dense()
        a, b = a.double(), b.double()
        if not a.numel():
            return ""
        finite = torch.isfinite(b)
        if not torch.equal(finite, torch.isfinite(a)):
            return f"{a.flatten()[:4].tolist()}, in one process {b.flatten()[:4].tolist()}"
        off = float(torch.where(finite, a - b, 0.0).abs().max())
        size = float(torch.where(finite, b, 0.0).abs().max())
        # In bfloat16 what is small beside 1 has rounding errors of what was not.
        if off > limit * (size + (5e-2 if limit > 0.1 else 1e-2)):
            return (
                f"{off:.3g} off, where the largest is {size:.3g}: {a.flatten()[:3].tolist()}, "
                f"in one process {b.flatten()[:3].tolist()}"
            )
        return ""
    if isinstance(a, float) and isinstance(b, float):
        same = a == b or (a != a and b != b) or abs(a - b) <= limit * (abs(b) + 1e-2)
    else:
        same = a == b
    return "" if same else f"{a!r}, in one process {b!r}"
