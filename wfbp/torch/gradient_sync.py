"""One distributed optimizer's part in the steps of all ranks.

:class:`OptimizerSync` ties parameters to a reducer. Hooks announce gradients while backward
computes; when the step closes, results become ``p.grad``, and the optimizer is updated
(:class:`wfbp.torch.updates.Update`). :class:`GradientGuard` notices gradients that were changed
in between. Parameters and hyperparameters are compared among ranks before the first update.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from wfbp.core.types import Op
from wfbp.errors import DisagreementError
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.step import BufferView, GradientRef
from wfbp.torch import tensors, unplanned_exchanges
from wfbp.torch.clipping import Limit, clip
from wfbp.torch.compiling import uncompiled
from wfbp.torch.drift import Drift
from wfbp.torch.forward_profiler import ForwardProfiler
from wfbp.torch.own_methods import Differentiation, has_own_methods, own_method_names
from wfbp.torch.state_sharding import StateSharding
from wfbp.torch.updates import Reduced, Update

_EMPTY = 1
"""Stands for the address of a tensor without elements, which has none; 0 means no gradient."""

_SAMPLED_GRADIENTS = 4
_USUAL_STEPS = 4
_UNUSUAL = 0.9
_FIRST_STEPS, _EVERY_STEPS = 8, 64
"""Only these steps sample a device's gradients; the results are read when they have arrived."""

owners: weakref.WeakValueDictionary[int, OptimizerSync] = weakref.WeakValueDictionary()
"""By a parameter's id, the object that exchanges its gradients, and keeps it alive. (An attribute
of the parameter would be pickled with it.)"""

_made = count()


class GradientGuard:
    """Notices gradients that were changed between their hooks and their reduction, by PyTorch's
    count of changes in place, addresses, and samples of some values. Used by the training thread
    and by backward's."""

    def __init__(self, name: str, names: Sequence[str], on_host: bool = True) -> None:
        self._name = name
        self._names = names
        self._on_host = on_host
        self.seen: list[tuple[torch.Tensor, int, int] | None] = [None] * len(names)
        """By index: gradient, version and address (0 if sparse); None where no hook has run."""
        self.samples: dict[int, torch.Tensor | None] = {}
        """Of the gradients that are sampled in this step; None before their hooks."""
        self.wants_sample: list[None] = []
        """On the host, not empty until a sample of this step would show a scaling of all gradients.
        (On a device, the host would wait for each sample in the middle of backward.)"""
        self._comparisons: deque[_Comparison] = deque()
        self._num_steps = 0
        self._is_averaged = False
        self._known: list[int] = []
        """Those that have had gradients in any step."""
        self._new = set(range(len(names)))
        self._choose()

    def watch(self, index: int, grad: torch.Tensor, averaged: bool = False) -> None:
        """Notice changes of a gradient from now on. ``averaged``: its average lies elsewhere."""
        self._is_averaged = averaged
        self.seen[index] = grad, grad._version, 0 if grad.is_sparse else grad.data_ptr()
        if grad.is_sparse or self.wants_sample or index in self.samples:
            self.take_sample(index, grad)

    def take_sample(self, index: int, grad: torch.Tensor) -> None:
        """Keep a sample of a gradient. Every gradient is sampled until one sample differs from its
        double: ``GradScaler.unscale_`` leaves zeros, infinities and NaN as they are."""
        sample = self.samples[index] = tensors.sample(grad)
        if self.wants_sample and not grad.is_sparse:
            values = sample.view(grad.dtype.to_real())
            if not torch.equal((values + values).view(torch.uint8), sample):
                self.wants_sample.clear()

    def refuse(self, index: int, how: str, averaged: bool = False) -> None:
        """Raise ``RuntimeError`` because a gradient was changed."""
        where = f"{self._name}: the gradient of {self._names[index]} was {how} after "
        if self._is_averaged or averaged:
            raise RuntimeError(
                f"{where}clip_grad_norm_(), and a schedule may leave averages in shards that "
                "p.grad does not show. Call optimizer.synchronize() before clip_grad_norm_(), then "
                "change gradients; to forget gradients, call optimizer.zero_grad()"
            )
        raise RuntimeError(
            f"{where}backward and before it was averaged over the ranks. Call "
            "optimizer.synchronize() first, then change gradients, then step inside 'with "
            "optimizer.skip_synchronize():'; to clip, call optimizer.clip_grad_norm_() instead; to "
            "forget gradients, optimizer.zero_grad(). A model that is wrapped in PyTorch's DDP "
            "causes this, too, and so does a hook of a parameter that changes its gradient and was "
            "registered after DistributedOptimizer was made"
        )

    def check(self, params: Sequence[torch.Tensor]) -> list[int]:
        """Compare every gradient with what its hook saw; returns the indices of those that are
        cleared. Raises ``RuntimeError`` if one was changed or replaced; samples of a device are
        judged in a later call."""
        cleared = []
        changed: dict[int, torch.Tensor] = {}
        for index, seen in enumerate(self.seen):
            if seen is None:
                continue
            grad, (old, version, address) = params[index].grad, seen
            if grad is None:
                cleared.append(index)
            elif grad is not old:
                self.refuse(index, "replaced")
            elif grad._version != version and not (address and self._is_counted_elsewhere(grad)):
                self.refuse(index, "changed in place")
            elif address and grad.data_ptr() != address:
                self.refuse(index, "moved to other memory")
            sample = self.samples.get(index)
            if grad is None or sample is None:
                continue
            if not self._on_host and len(now := tensors.sample(grad)) == len(sample):
                changed[index] = (now != sample).any()
            elif not torch.equal(tensors.sample(grad), sample):
                self.refuse(index, "changed in place")
        if changed:
            results = _fetch(torch.stack(list(changed.values())))
            self._comparisons.append(_Comparison(list(changed), *results, self._is_averaged))
        while self._comparisons and self._comparisons[0].arrived():
            self._judge(self._comparisons.popleft())
        return cleared

    def _judge(self, comparison: _Comparison) -> None:
        for index, changed in zip(comparison.indices, comparison.changed.tolist(), strict=True):
            if changed:
                self._is_averaged = comparison.averaged
                self.refuse(index, "changed in place in this step or an earlier one")

    def clear(self) -> None:
        """Forget all gradients. The lists and the dictionary stay the same ones."""
        if self._new:
            appeared = [k for k in self._new if self.seen[k] is not None]
            self._new.difference_update(appeared)
            self._known = sorted(self._known + appeared)
        self.seen[:] = [None] * len(self.seen)
        self._is_averaged = False
        self._num_steps += 1
        self._choose()

    def _is_counted_elsewhere(self, grad: torch.Tensor) -> bool:
        """Whether another gradient's hook has counted all changes of memory that both share."""
        memory = grad.untyped_storage().data_ptr()
        return any(
            address and version == grad._version and other.untyped_storage().data_ptr() == memory
            for other, version, address in filter(None, self.seen)
        )

    def _choose(self) -> None:
        """Have gradients sampled that are spread over all, and so over the groups; and new ones,
        because a step may have no others."""
        self.samples.clear()
        self.wants_sample[:] = [None] if self._on_host else []
        number, known = self._num_steps, self._known
        if self._on_host or number < _FIRST_STEPS or number % _EVERY_STEPS == 0:
            stride = max(1, len(known) // _SAMPLED_GRADIENTS)
            self.samples.update(dict.fromkeys((*known[number % stride :: stride], *self._new)))


class _Comparison(NamedTuple):
    """Which of these gradients have changed: true once it ``arrived`` on the host."""

    indices: list[int]
    changed: torch.Tensor
    arrived: Callable[[], bool]
    averaged: bool


def _fetch(values: torch.Tensor) -> tuple[torch.Tensor, Callable[[], bool]]:
    """A copy on the host, and whether it has arrived; the host does not wait for the device."""
    if not values.is_cuda:
        return values, lambda: True
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return copy, arrived.query


class OptimizerSync:
    """Reduces the gradients of one optimizer, and has it updated.

    Used by the training thread. Hooks run in the thread that called ``backward()``; on a GPU that
    is a thread of autograd's, which the training thread waits for. Between :meth:`reduce` and
    :meth:`step` it holds the reduced gradients, which may be shards.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,  # the program's own
        step: Callable[..., Any],  # its ordinary step
        named: Sequence[tuple[str, torch.Tensor]],  # equal on every rank, as ``options``
        options: ReducerOptions,
        *,
        local: list[None],  # not empty while backward passes accumulate without being sent
        calls: list[str],  # methods of the optimizer that are running; "" for a closure
        after_backward: Callable[[], None],  # called where such a method has run backward
        sparse_as_dense: bool,
        check_parameters: bool,
        on_difference: Callable[[DisagreementError], None],  # between ranks, before the first step
        previous: OptimizerSync | None,  # of the same optimizer, on every rank
    ) -> None:
        self.runtime = runtime
        self.optimizer = optimizer
        self.named = list(named)
        self.number = next(runtime.optimizer_numbers)
        """Among those of the runtime, the same on every rank."""
        self.last_active: int | None = None
        """A rank that has made the latest step, where others had joined; the same on every rank."""
        self._name = name = options.name
        self._op = options.op
        self._names = [n for n, _ in named]
        self._params = params = [p for _, p in named]
        self._sparse_as_dense = sparse_as_dense
        self._check_parameters = check_parameters
        self._on_difference = on_difference
        kind = type(optimizer)
        specs = [tensors.spec(n, p) for n, p in named]
        this = weakref.ref(self)
        self.reducer = reducer = Reducer(
            runtime,
            specs,
            options,
            active=[p.requires_grad for p in params],
            compared={
                "the optimizer's class": f"{kind.__module__}.{kind.__qualname__}",
                **{
                    f"the memory order of {n}": tensors.unusual_order(p) or "row by row"
                    for n, p in named
                },
            },
            location=tensors.location_of(name, named),
            fetch=lambda index: sync.source(index) if (sync := this()) is not None else None,
        )
        # From here on nothing fails, so earlier owners of these parameters may let them go.
        if previous is not None:
            previous.release()
        for parameter_name, param in named:
            if (other := owners.get(id(param))) is not None and other is not previous:
                other.hand_over(parameter_name)
        self.successor = ""
        """The part of this optimizer that another one has taken over, if any."""
        self._sparse: dict[int, torch.Tensor] = {}
        self._local = local
        self._calls = calls
        self._after_backward = after_backward
        self._unsent: set[int] = set()  # parameters with gradients of such passes
        self._lent: list[Callable[[], tensors.LentTensor | None]] = [lambda: None] * len(named)
        """By index, the memory that ``p.grad`` was put in last, unless no plan uses it any more."""
        self._storages = [0] * len(named)
        """Of the last averages, which outlive what was lent if the plan changes."""
        # Data travels in the order that parameters have now, whatever becomes of them.
        self._layouts = [tensors.Layout.of(p) for p in params]
        self._on_host = params[0].device.type == "cpu"  # to ask a parameter under way would wait
        self._guard = GradientGuard(f"{runtime.where}: {name}", self._names, self._on_host)
        self._forward = ForwardProfiler(reducer, params)
        self.held: Reduced | None = None
        """Reduced gradients, if ``p.grad`` does not show them all."""
        self._compared = False
        self._drift = Drift(runtime, reducer, params)
        self.has_left = False
        self._is_clipped = False
        # The factors that this object and the program have applied to the averages, and those of
        # both of the last steps.
        self._clipped = self._scaled = 1.0
        self._usual, self._used_step = deque([1.0], _USUAL_STEPS), -1
        self._averages: dict[int, torch.Tensor] = {}
        """Samples of averages that the program may change before it steps, by index."""
        self._alone = False  # whether the last step was reduced with ranks that had joined
        sharding = None
        if reducer.may_decouple:
            sharding = StateSharding(runtime, specs, params, optimizer, reducer.channel)
        self._step_whole = _timed(reducer, step)
        self.update = Update(reducer, optimizer, self._step_whole, params, sharding, name)
        for param in params:
            owners[id(param)] = self
        self._left: list[tuple[weakref.ref[torch.Tensor], int] | None] = [None] * len(params)
        """Gradients and their versions, as they were when no new ones were there."""
        self._left_samples: dict[int, torch.Tensor] = {}
        self._differentiations: list[Differentiation] = []  # of methods that run
        self._hooks: dict[int, Any] = {}
        for index, param in enumerate(params):
            if param.requires_grad:
                self._hook(index)
        weakref.finalize(self, _remove, self._hooks, reducer, self._forward.abandon)
        self.made = next(_made)

    @property
    def open(self) -> bool:
        """Whether backward has made gradients that no step has taken."""
        return self.reducer.open or bool(self._sparse or self._unsent)

    def note_gradients(self, force: bool = False) -> None:
        """No gradients are new now. (Without ``force`` only noted if methods may ask.)"""
        if force or has_own_methods(self.optimizer):
            grads = [param.grad for param in self._params]
            self._left = [g if g is None else (weakref.ref(g), g._version) for g in grads]
            self._left_samples = {} if force else self._sample_some()

    def _changed(self) -> Iterator[torch.Tensor | None]:
        """Gradients that are not as they were when last noted."""
        for param, left in zip(self._params, self._left, strict=True):
            grad = param.grad
            if grad is None or left is None:
                is_same = grad is None and left is None
            else:
                is_same = left[0]() is grad and left[1] == grad._version
            if not is_same:
                yield grad

    def _sample_some(self) -> dict[int, torch.Tensor]:
        """Samples of a few gradients, by index, if methods may meet them. (The host would wait for
        those of a device.)"""
        params = self._params
        if not (self._on_host and own_method_names(self.optimizer)):
            return {}
        chosen = range(0, len(params), max(1, len(params) // _SAMPLED_GRADIENTS))
        grads = {k: params[k].grad for k in chosen}
        return {
            k: tensors.sample(grad)
            for k, grad in grads.items()
            if grad is not None and grad.layout is torch.strided
        }

    def has_new(self) -> bool:
        """Whether gradients have appeared since they were noted, by backward or as the program has
        set or changed them."""
        if self.open or not has_own_methods(self.optimizer):
            return self.open
        if any(grad is not None for grad in self._changed()):
            return True
        before = self._left_samples  # PyTorch does not count all changes
        return any(not _same(before.get(k), now) for k, now in self._sample_some().items())

    def has_moved_on(self) -> bool:
        """Whether any gradients have appeared or gone since they were noted."""
        return self.open or any(True for _ in self._changed())

    # Gradients, from backward to the close of the step.

    def _hook(self, index: int) -> None:
        """Announce the parameter's gradient from now on, whenever backward has accumulated it."""
        param = self._params[index]
        mark_ready = self.reducer.mark_ready
        dtype = param.dtype
        count = param.numel() if param.is_contiguous() else -1
        if count == 1 or param.is_complex():
            count = -1  # its gradient may be a lazy conjugate, or the imaginary part of one
        this = weakref.ref(self)
        seen, samples = self._guard.seen, self._guard.samples
        wants_sample, take_sample = self._guard.wants_sample, self._guard.take_sample
        local, unsent, calls = self._local, self._unsent, self._calls

        @uncompiled
        def announce(param: torch.Tensor) -> None:
            # Within no_sync() it stays here, unless it was announced in this step and now grows.
            if local and seen[index] is None:
                unsent.add(index)
                return
            if calls and calls[-1]:
                this()._expect_use(calls[-1])  # type: ignore[union-attr]
            grad: Any = param.grad
            if grad is None:  # another hook has taken it: as if backward had made none
                this()._warn_taken(index)  # type: ignore[union-attr]
                return
            # A sparse gradient is never contiguous.
            if not (grad.is_contiguous() and grad.numel() == count and grad.dtype is dtype):
                this()._announce(index, grad)  # type: ignore[union-attr]
                return
            address = grad.data_ptr()
            mark_ready(index, address or _EMPTY, grad)
            # As GradientGuard.watch() does, without another call.
            seen[index] = grad, grad._version, address
            if wants_sample or index in samples:
                take_sample(index, grad)

        handle = param.register_post_accumulate_grad_hook(announce)  # type: ignore[no-untyped-call]
        self._hooks[index] = handle

    def _warn_taken(self, index: int) -> None:
        self.runtime.warn_once(
            f"taken {self._name}",
            f"{self._name}: a hook has set the gradient of {self._names[index]} to None before it "
            "was averaged, so this step has none. If the hook updates the parameter, ranks drift "
            "apart: average the gradient by wfbp.allreduce() there",
        )

    def _expect_use(self, call: str) -> None:
        """A method of the optimizer runs backward: have its gradients averaged as soon as that
        pass is over, because the method may use them."""
        if self._op is not Op.AVERAGE or (call == "step" and self.reducer.may_decouple):
            why = "op=Sum adds up" if self._op is not Op.AVERAGE else "a step may be taken in parts"
            raise RuntimeError(
                f"{self._name}: {call}() runs backward, whose gradients must be averaged before "
                f"it uses them; this is impossible, because {why}. Call backward() before {call}(),"
                " in a closure of step(), or use op=Average and no optimizer_sharding"
            )
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    @contextmanager
    def differentiation(self) -> Iterator[Differentiation]:
        """While a method of the optimizer runs: detects what it computes."""
        with Differentiation(self._params) as found:
            self._differentiations.append(found)
            try:
                yield found
            finally:
                self._differentiations.remove(found)

    def average_within(self, closing_call: int) -> None:
        """Average the gradients of a backward pass that a method of the optimizer has run."""
        if cleared := self._guard.check(self._params):
            self._guard.refuse(cleared[0], "used, or cleared,")
        self.synchronize(closing_call)

    def _announce(self, index: int, grad: torch.Tensor) -> None:
        """Announce a gradient that cannot be sent as it is."""
        if not self._keep_sparse(index):
            self.reducer.mark_ready(index, *self._source(index, grad))
        self._guard.watch(index, grad)

    def source(self, index: int) -> GradientRef | None:
        """The gradient of a parameter for which no hook ran, or None; when the step closes."""
        param = self._params[index]
        if param.requires_grad and index not in self._hooks:
            self._hook(index)
        grad = param.grad
        return None if grad is None or self._keep_sparse(index) else self._source(index, grad)

    def _source(self, index: int, grad: torch.Tensor) -> GradientRef:
        """A gradient's address, in the memory order and element type of its parameter."""
        layout = self._layouts[index]
        grad = tensors.resolved(grad.to_dense() if grad.is_sparse else grad)
        layout.check(self._params[index], grad, f"{self._name}: {self._names[index]}")
        if grad.stride() != layout.stride or grad.dtype is not layout.dtype:
            grad = layout.empty(grad.device).copy_(grad)
        return grad.data_ptr() or _EMPTY, grad

    def _keep_sparse(self, index: int) -> bool:
        """Whether a gradient is sparse and travels so, when the step closes."""
        grad = self._params[index].grad
        self._sparse.pop(index, None)
        if grad is None or not grad.is_sparse or self._sparse_as_dense:
            return False
        if self.reducer.may_decouple:
            raise ValueError(
                f"{self._name}: the gradient of {self._names[index]} is sparse, and the schedule "
                "may leave ranks shards of it; make its layer with sparse=False, or pass "
                "sparse_as_dense=True or a schedule of all-reduces, such as schedule='oasr', to "
                "DistributedOptimizer"
            )
        self._sparse[index] = grad
        return True

    def _close(
        self, whole: bool, closing_call: int = 0, evaluates: bool = False
    ) -> list[BufferView | None]:
        """Close the step, wait, and let ``p.grad`` be the reduced gradients, except of shards."""
        reducer = self.reducer
        if self.successor:
            raise RuntimeError(
                f"{self._name}: another DistributedOptimizer was made of {self.successor}; use "
                "that one. A parameter's gradient can be exchanged by one of them only"
            )
        if self._local:
            raise RuntimeError(
                f"{self._name}: gradients cannot be averaged within no_sync(); end its block, and "
                "do the step's last backward pass outside"
            )
        for index in self._guard.check(self._params):
            reducer.drop(index)
        seen = self._guard.seen
        for index in [k for k in range(len(seen)) if seen[k] is None or k in self._sparse]:
            self._keep_sparse(index)
        sparse = dict(self._sparse)
        reduced = reducer.synchronize(
            whole,
            sparse=sparse,
            closing_call=closing_call,
            mark=self._drift.mark,
            evaluates=evaluates,
        )
        self._check_drift()
        for found in self._differentiations:
            found.happened = False  # it was a backward pass, or is averaged now
        self._sparse.clear()
        self._unsent.clear()
        self._guard.clear()
        self._is_clipped = False
        self._clipped = self._scaled = 1.0
        reducer.used_scale = 0.0
        self._averages.clear()
        self._take(reduced)
        if reducer.outcome.sparse:
            average = self._op is Op.AVERAGE
            unplanned_exchanges.add_sparse_sums(reducer, self._params, sparse, reduced, average)
        if self._forward.watching is not reducer.profiling:
            self._forward.follow()
        if not self._compared:
            self._compare()
        if self._alone or reducer.outcome.joined:
            self._note_joined()
        return reduced

    def _take(self, reduced: Sequence[BufferView | None]) -> None:
        """Let ``p.grad`` be the reduced gradient where it is whole."""
        overlapping: set[int] | None = None  # once that matters
        for index, slot in enumerate(reduced):
            if slot is None or not slot.whole:
                continue
            param, layout, before = self._params[index], self._layouts[index], self._lent[index]()
            lent = tensors.lent(slot, layout)
            self._lent[index], self._storages[index] = weakref.ref(lent), lent.storage
            average = lent.alias()
            grad = param.grad
            if grad is None or not _can_be(grad, layout):
                param.grad = average
                continue
            # Programs may keep it, or views of it, or the memory that it is a view of, and use them
            # in later steps: then it stays where it is. A weak reference shows whether they keep
            # the object, once this loop has dropped its own.
            kept = weakref.ref(grad)
            if not tensors.num_sharing(grad, before):
                del grad
                param.grad = average
            if (grad := kept()) is None:
                continue
            param.grad = grad
            overlapping = _overlapping(self._params) if overlapping is None else overlapping
            if tensors.is_writeable(grad) and index not in overlapping:
                grad.detach().copy_(average)
            else:
                param.grad = average

    def _compare(self) -> None:
        """Before the first update, compare parameters and hyperparameters; a collective."""
        # After the step's gradients: all ranks must use the backend in the same order.
        params = self._params if self._check_parameters else []
        for error in unplanned_exchanges.beginnings_that_differ(
            self.reducer, self.optimizer, params
        ):
            self._on_difference(error)
            self.update.replicate()
            self._check_parameters = False
        self._compared = True

    # Steps.

    def reduce(self, whole: bool = False) -> None:
        """Close the step and wait for averages, whole ones if any rank needs these."""
        if self.reducer.decoupled:  # what the previous step gathers must have arrived
            self.update.pending.wait_all()
        reduced = self._close(whole or self.update.sharding is None)
        self.held = None
        for slot in reduced:
            if slot is not None and not slot.whole:
                self.held = reduced

    def synchronize(self, closing_call: int = 0, evaluates: bool = False) -> bool:
        """Have whole averages and parameters; whether any rank had a gradient."""
        self.update.flush()
        if self.held is None:
            whole = self._close(True, closing_call, evaluates)
        else:
            self.check_no_new_gradients()
            # A rank in step() would gather parameters.
            self.reducer.channel.exchange(b"", "synchronize() after clip_grad_norm_()")
            whole = self.reducer.gathers.gather_gradients(self.held)
            self.reducer.gathers.flush()
            self._take(whole)
            self.held = None
        return any(slot is not None for slot in whole) or bool(self.reducer.outcome.sparse)

    def note_averages(self) -> None:
        """The program may scale the averages, and this should learn by how much."""
        if self.reducer.encoded:
            self._averages = self._sample_encoded()

    def _sample_encoded(self) -> dict[int, torch.Tensor]:
        encoded = self.reducer.encoded
        chosen = encoded[:: max(1, len(encoded) // _SAMPLED_GRADIENTS)]
        grads = {k: self._params[k].grad for k in chosen}
        return {
            k: tensors.sample(grad).view(grad.dtype)
            for k, grad in grads.items()
            if grad is not None and grad.layout is torch.strided
        }

    def _note_scale(self) -> None:
        """Learn by how much the program has scaled the averages since they were noted."""
        before, now = self._averages, self._sample_encoded() if self._averages else {}
        was, became = (
            sum(float(values[k].abs().sum(dtype=torch.float64)) for k in before if k in now)
            for values in (before, now)
        )
        self._scaled *= became / was if was else 1.0
        self._averages = now

    def use_averages(self) -> None:
        """The averages are used, as they are now. Errors of encoding are in the units of averages
        before they were scaled. So a steady factor leaves them as they are, and only a much smaller
        one than usual (of a gradient that was clipped as an exception) shrinks them."""
        self._note_scale()
        scale = self._clipped * self._scaled
        if not scale < math.inf:
            self.reducer.used_scale = 0.0
            return
        if self.reducer.num_steps != self._used_step:  # else the same averages are used again
            self._used_step = self.reducer.num_steps
            self._usual.append(scale)
        self._usual[-1] = scale
        usual = max(self._usual)
        self.reducer.used_scale = scale / usual if scale < _UNUSUAL * usual else 1.0

    def check_no_new_gradients(self, assigned: bool = False) -> None:
        """Raise ``RuntimeError`` if gradients have appeared since they were reduced, by backward or
        ``assigned`` by the program; or if they have changed after they were clipped."""
        if self.open or assigned:
            raise RuntimeError(
                f"{self._name}: gradients have appeared since they were averaged. Every backward() "
                "must come before synchronize() or clip_grad_norm_(); a program that leaves out a "
                "step after these must call optimizer.zero_grad(), on every rank, before the next "
                "backward()"
            )
        if self._is_clipped:
            self._check_clipped()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Let the optimizer step; from here on decoupled parameters travel."""
        if self._is_clipped:
            self._check_clipped()
        if self.held is not None and (args or kwargs or self.update.sharding is None):
            self.synchronize()
        self.use_averages()
        if args or kwargs:
            self.prepare_whole()
            self.compare_arguments(args, kwargs)
            return self._step_whole(*args, **kwargs)
        update, reduced = self.update, self.held
        self.held = None
        try:
            if self._alone or update.sharding is None:
                return self._step_whole()
            return update.apply(reduced)
        finally:
            if self.reducer.decoupled and self.reducer.profiling:
                update.flush()  # nothing travels where compute is measured
            elif self.reducer.decoupled:
                update.pending.leave()

    def _check_drift(self) -> None:
        """Raise, or only warn, if parameters have drifted apart; after a step was reduced."""
        if not self.reducer.outcome.marks_agree and (error := self._drift.compare()) is not None:
            self._check_parameters = False  # where it only warns
            self._on_difference(error)

    def forget_parameters(self) -> None:
        """Do not compare parameters at the next step, unless they are noted again."""
        self._drift.forget()

    def note_parameters(self) -> None:
        """Parameters have been updated: watch that ranks keep the same."""
        # While some travel, or ranks have joined, they are not to be compared.
        if self._alone or self.reducer.decoupled or not self._check_parameters:
            self.forget_parameters()
        else:
            self._drift.sample()

    def compare_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise unless all ranks pass equal further arguments to ``step()``; a collective if this
        rank passes any."""
        arguments = {**{f"argument {k}": value for k, value in enumerate(args, 1)}, **kwargs}
        for name, value in arguments.items():
            if any(map(callable, tree_leaves(value))):
                raise TypeError(
                    f"{self._name}: step() was given a function or module as {name}, and would use "
                    "what it returns on this rank alone. Only a closure, the first argument, is "
                    "evaluated on all ranks"
                )
        if arguments and not self._alone:
            unplanned_exchanges.compare_arguments(self.reducer, arguments)

    def clip_grad_norm_(self, limit: Limit, is_reduced_here: bool) -> torch.Tensor:
        """Scale the reduced gradients; see the optimizer's method of that name."""
        watches = is_reduced_here or self._is_clipped
        if self._is_clipped:
            self._check_clipped()
        shards, whole = [], []
        own: dict[tuple[int, int], torch.Tensor] = {}  # once each, though gradients share memory
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for param, slot in zip(self._params, self.held or [None] * len(self._params), strict=True):
            if id(param) not in stepped:  # the program has removed it
                continue
            grad = param.grad
            if slot is not None and not slot.whole:
                if len(slot.data):
                    shards.append(tensors.shared(slot.data).view(param.dtype))
                if grad is not None:
                    # So that what a program carries over to the next step is scaled, too.
                    if not tensors.is_writeable(tensors.values(grad)):
                        param.grad = grad = tensors.resolved(grad).clone()
                    mine = tensors.values(grad)
                    own[tensors.storage_of(mine), mine.data_ptr()] = mine
            elif grad is not None and (self.held is None or slot is not None):
                mine = tensors.values(grad)
                whole.append(mine)
                if slot is not None and slot.address != mine.data_ptr():
                    # The program keeps its own tensor; the update takes the slot.
                    own[0, slot.address] = tensors.shared(slot.data).view(param.dtype)
        scaled = list(own.values())
        channel = None if self._alone else self.reducer.channel
        self._note_scale()
        norm, factor = clip(self.runtime, channel, limit, shards, whole, scaled)
        self._clipped *= factor
        if self._averages:
            self.note_averages()
        if watches:
            # If the optimizer uses shards, that the program changes p.grad would be in vain.
            self._is_clipped = True
            self._guard.clear()
            for index, param in enumerate(self._params):
                if param.grad is not None:
                    self._guard.watch(index, param.grad, averaged=True)
        wide = functools.reduce(torch.promote_types, {p.dtype.to_real() for p in self._params})
        return torch.tensor(norm, dtype=wide, device=self._params[0].device)

    def _check_clipped(self) -> None:
        """Raise if the program has changed gradients after :meth:`clip_grad_norm_`, which may be in
        vain; the same under every schedule."""
        guard = self._guard
        for index in guard.check(self._params):
            guard.refuse(index, "removed")
        for index, param in enumerate(self._params):
            if guard.seen[index] is None and param.grad is not None:
                guard.refuse(index, "set", averaged=True)
        guard.clear()
        self._is_clipped = False

    def prepare_whole(self) -> None:
        """For a step with a closure: whole parameters, whole state, whole gradients."""
        self.held = None
        self.update.make_whole()

    def discard(self) -> None:
        """Forget gradients that appeared since the last step."""
        if self.open and self._check_parameters and not self.reducer.decoupled:
            self._drift.note_discard()
        self.held = None
        self._is_clipped = False
        self._guard.clear()
        self._sparse.clear()
        self._unsent.clear()
        if not self.successor:
            self.reducer.discard()

    # Ranks that have joined, because they have no more data.

    def _note_joined(self) -> None:
        """If ranks have joined, let the others step whole parameters; collective."""
        joined = self.reducer.outcome.joined
        self._alone = bool(joined)
        if joined:
            self.last_active = next(r for r in range(self.runtime.size) if r not in joined)
            self.update.make_whole()

    def join(self, note_progress: Callable[[], None]) -> None:
        """Take part in all steps of the other ranks, without gradients, until they join, too."""
        self.discard()
        for param in self._params:
            param.grad = None
        reducer = self.reducer
        try:
            while True:
                self.update.flush()
                reducer.synchronize(joined=True)
                self._check_drift()
                if reducer.outcome.sparse:
                    unplanned_exchanges.sparse_sums(reducer, self._params, {}, average=False)
                if not self._compared:
                    self._compare()
                if len(reducer.outcome.joined) == self.runtime.size:
                    return
                self._note_joined()
                if reducer.outcome.evaluated:
                    unplanned_exchanges.combined_losses(
                        reducer, 0.0, self._op is Op.AVERAGE, joined=True
                    )
                note_progress()
        finally:
            self._alone = False

    # The end.

    def release(self) -> None:
        """Let the parameters go, up to date, and the state, whole; a collective."""
        self.prepare_whole()
        self.hand_over("these parameters")

    def hand_over(self, shared: str) -> None:
        """Let the parameters go, up to date, because another object takes over ``shared``."""
        self.update.flush()
        self.update.let_go()
        self.successor, self.has_left = shared, True
        _remove(self._hooks, self.reducer, self._forward.stop)

    def leave_buffers(self) -> None:
        """Copy ``p.grad`` out of the reducer's memory, which ``shutdown()`` frees."""
        for param, storage in zip(self._params, self._storages, strict=True):
            grad = param.grad
            if grad is not None and not grad.is_sparse and tensors.storage_of(grad) == storage:
                param.grad = grad.clone()

    def leave(self) -> None:
        """Let the parameters go, because the runtime ends; they are up to date."""
        self.has_left = True
        self.update.let_go()
        self.leave_buffers()
        _remove(self._hooks, self.reducer, self._forward.stop)


def _overlapping(params: Sequence[torch.Tensor]) -> set[int]:
    """Indices of parameters whose gradients have elements in common, as autograd or the program
    may put them."""
    places = []
    for index, param in enumerate(params):
        grad = param.grad
        if grad is not None and grad.layout is torch.strided:
            places.append((tensors.storage_of(grad), *tensors.extent(grad), index))
    overlapping = set()
    storage, end, last = 0, 0, -1
    for place, start, stop, index in sorted(places):
        if place == storage and start < end:
            overlapping |= {last, index}
        if place != storage or stop > end:
            storage, end, last = place, stop, index
    return overlapping


def _same(before: torch.Tensor | None, now: torch.Tensor) -> bool:
    return before is not None and before.shape == now.shape and torch.equal(before, now)


def _can_be(grad: torch.Tensor, layout: tensors.Layout) -> bool:
    """Whether an average can be written to a gradient of the program."""
    is_plain = grad.layout is torch.strided and grad.shape == layout.shape
    return is_plain and grad.dtype is layout.dtype


def _timed(reducer: Reducer, step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's ordinary step on whole gradients, whose time the reducer learns."""

    def step_whole(*args: Any, **kwargs: Any) -> Any:
        start = reducer.clock.start_update()
        result = step(*args, **kwargs)
        reducer.clock.mark_update(start)
        return result

    return step_whole


def _remove(hooks: dict[int, Any], reducer: Reducer, unwatch: Callable[[], None]) -> None:
    unwatch()
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
    reducer.close()
