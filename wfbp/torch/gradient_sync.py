"""One distributed optimizer's part in the steps of all ranks.

:class:`GradientHooks` ties parameters to an engine: hooks announce gradients, and results become
``p.grad``. :class:`OptimizerSync` closes steps, has the optimizer updated, and keeps reads of
parameters up to date. Hyperparameters are compared among ranks before the first update.
"""

from __future__ import annotations

import functools
import json
import logging
import pickle
import struct
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from numbers import Real
from typing import Any

import torch

from wfbp.core.types import Op, TensorSpec
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime import process
from wfbp.runtime.arguments import EngineOptions
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.step import BufferView, GradientRef
from wfbp.torch import pending_parameters, tensors
from wfbp.torch.clipping import Limit, clip
from wfbp.torch.forward_profiler import ForwardProfiler
from wfbp.torch.grad_guard import GradientGuard
from wfbp.torch.optimizer_probe import UpdateCoupling
from wfbp.torch.state_sharding import State, StateSharding, gives_every_rank_a_shard
from wfbp.torch.tensors import device_of
from wfbp.torch.uncompiled import uncompiled
from wfbp.torch.updates import Reduced, ReplicatedUpdate, ShardedUpdate, Step, Update

_EMPTY = 1
"""Stands for the address of a tensor without elements, which has none; 0 means no gradient."""

follows_horovod = False
"""Whether programs find what Horovod's do, where that is another habit and not an error:
hyperparameters that differ between ranks are a warning, and ``broadcast_optimizer_state()`` leaves
zeros where there is no gradient. ``wfbp.horovod`` sets it, on every rank.
"""


class GradientHooks:
    """The gradients of one optimizer's parameters.

    Used by the training thread. Hooks run in the thread that called ``backward()``.

    Args:
        runtime: with more than one rank.
        named: names and parameters, equal on every rank.
        specs: of the parameters.
        options: equal on every rank.
        sparse_as_dense: whether sparse gradients are made dense; otherwise they stay sparse.
        kind: the optimizer's class, which must be the same on every rank.
    """

    def __init__(
        self,
        runtime: Runtime,
        named: Sequence[tuple[str, torch.Tensor]],
        specs: Sequence[TensorSpec],
        options: EngineOptions,
        *,
        sparse_as_dense: bool,
        kind: type,
    ) -> None:
        self._names = [n for n, _ in named]
        self.params = self._params = [p for _, p in named]
        self._sparse_as_dense = sparse_as_dense
        self._sparse: set[int] = set()
        self._only_sparse = issubclass(kind, torch.optim.SparseAdam)
        self._op = options.op
        self._name = name = options.name
        self._views: list[torch.Tensor | None] = [None] * len(named)
        self._moved: list[dict[int, torch.Tensor]] = [{} for _ in named]
        self._zeros: dict[int, tuple[torch.Tensor, int]] = {}
        self._views_of = 0
        self._successor = ""
        # Data travels in the order that parameters have now, whatever becomes of them.
        self._layouts = [tensors.Layout.of(p) for p in self._params]
        self.engine = self._engine = engine = Reducer(
            runtime,
            specs,
            options,
            active=[p.requires_grad for p in self._params],
            compared={
                "the optimizer's class": f"{kind.__module__}.{kind.__qualname__}",
                "memory order": [
                    f"{n} {order}" for n, p in named if (order := tensors.unusual_order(p))
                ],
            },
            device=device_of(name, named),
            fetch=_fetcher(weakref.ref(self)),
        )
        self._guard = GradientGuard(name, self._names)
        self.report = engine.report
        self.stats = engine.stats
        self._forward = ForwardProfiler(engine, self._params)
        self._hooks: dict[int, Any] = {}
        weakref.finalize(self, _remove, self._hooks, self._engine, self._forward)

    def attach(self) -> None:
        """Announce gradients from now on; no other object may exchange them any more."""
        for index, param in enumerate(self._params):
            if param.requires_grad:
                self._hook(index)

    @property
    def open(self) -> bool:
        """Whether gradients have appeared that no step has taken."""
        return self._engine.open or bool(self._sparse)

    @property
    def handed_over(self) -> bool:
        """Whether this object exchanges the parameters' gradients no longer."""
        return bool(self._successor)

    def reduce(self, whole: bool, wanted: bool = False) -> list[BufferView | None]:
        """Close the step, wait, and let ``p.grad`` be the reduced gradient of each parameter.

        Args:
            whole: whether the optimizer needs whole gradients; the same on every rank.
            wanted: whether this rank's program needs them, which the others do not know.

        Returns:
            Where each gradient lies; where it is a shard, ``p.grad`` is left as it is.

        Raises:
            RuntimeError: gradients were changed since backward, or a parameter has been wrapped
                again.
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        if self._successor:
            raise RuntimeError(
                f"{self._name}: another DistributedOptimizer was made of {self._successor}; use "
                "that one. A parameter's gradient can be exchanged by one of them only"
            )
        gone = self._guard.check(self._params)
        for index in gone:
            self._engine.drop(index)
        if self._views_of != self._engine.num_installed:  # they hold another plan's buffers
            self._views_of = self._engine.num_installed
            self._views = [None] * len(self._params)
            self._moved = [{} for _ in self._params]
        engine = self._engine
        for index in range(len(self._params)):
            self._holds_sparse(index)
        engine.sparse = sorted(self._sparse)
        reduced = engine.synchronize(whole, wanted)
        self._guard.clear()
        self._zeros.clear()
        self.take(reduced)
        if engine.sparse_anywhere:
            self._exchange_sparse(engine.sparse_anywhere, reduced)
        self._sparse.clear()
        self._forward.follow()
        return reduced

    def take(self, reduced: Sequence[BufferView | None]) -> None:
        """Let ``p.grad`` be the reduced gradient where it is whole."""
        views, params, layouts = self._views, self._params, self._layouts
        for index, slot in enumerate(reduced):
            if slot is None or not slot.whole:
                continue
            held = views[index]
            # The program may have let the gradient be another memory, or reordered it.
            if (
                held is None
                or held.data_ptr() != slot.address
                or held.stride() != layouts[index].stride
            ):
                if held is not None and params[index].grad is held:
                    # Programs that accumulate into it may hold it, too: it stays the same object.
                    moved = self._moved[index]
                    if slot.address not in moved:
                        moved[slot.address] = tensors.view(slot.data, layouts[index])
                    held.data = moved[slot.address]
                    continue
                held = views[index] = tensors.view(slot.data, layouts[index])
            if params[index].grad is not held:
                params[index].grad = held
        if self._only_sparse:
            for index, slot in enumerate(reduced):
                grad = params[index].grad
                if slot is not None and grad is not None and not grad.is_sparse:
                    params[index].grad = grad.to_sparse(1)

    def _holds_sparse(self, index: int) -> bool:
        """Whether a parameter's gradient is sparse and travels so; known again now."""
        grad = self._params[index].grad
        is_sparse = grad is not None and grad.is_sparse and not self._sparse_as_dense
        if is_sparse and self._engine.may_decouple:
            raise ValueError(
                f"{self._name}: the gradient of {self._names[index]} is sparse, and the schedule "
                "may leave ranks shards of it; make its layer with sparse=False, or pass "
                "sparse_as_dense=True or a schedule of all-reduces, such as schedule='oasr', to "
                "DistributedOptimizer"
            )
        (self._sparse.add if is_sparse else self._sparse.discard)(index)
        return is_sparse

    def _exchange_sparse(
        self, indices: Sequence[int], reduced: Sequence[BufferView | None]
    ) -> None:
        """Combine the sparse gradients of these parameters, by all ranks' indices and values; a
        collective.

        Where other ranks have a dense gradient, the result is dense.
        """
        mine: list[tuple[int, bytes, bytes] | None] = []
        for index in indices:
            grad = self._params[index].grad
            if index not in self._sparse or grad is None:
                mine.append(None)
                continue
            sparse = grad.detach().coalesce()
            places, values = tensors.on_host(sparse.indices()), tensors.on_host(sparse.values())
            mine.append(
                (places.shape[0], tensors.raw(places).tobytes(), tensors.raw(values).tobytes())
            )
        payloads = self._engine.exchange(pickle.dumps(mine), "sparse gradients")
        ranks = [pickle.loads(payload) for payload in payloads]
        for position, index in enumerate(indices):
            param = self._params[index]
            parts = [rank[position] for rank in ranks if rank[position] is not None]
            total = _combined_sparse(param, parts, len(ranks) if self._op is Op.AVERAGE else 1)
            if reduced[index] is not None and param.grad is not None and not param.grad.is_sparse:
                param.grad.add_(total)
            else:
                param.grad = total

    def close_without_gradients(self) -> None:
        """Close a step of the other ranks, without gradients, and leave ``p.grad`` unchanged."""
        engine = self._engine
        engine.sparse = ()
        engine.synchronize(whole=True)
        if engine.sparse_anywhere:
            nothing = pickle.dumps([None] * len(engine.sparse_anywhere))
            engine.exchange(nothing, "sparse gradients")

    def watch_shards(self, reduced: Sequence[BufferView | None]) -> None:
        """Have :meth:`check_shards` notice changes of gradients of which there are shards."""
        self._guard.clear()
        for index, slot in enumerate(reduced):
            grad = self._params[index].grad
            if slot is not None and not slot.whole and grad is not None:
                self._guard.watch(index, grad)

    def check_shards(self, reduced: Sequence[BufferView | None]) -> None:
        """Raise ``RuntimeError`` if the program has changed ``p.grad`` where the optimizer uses a
        shard of it."""
        guard = self._guard
        for index in guard.check(self._params):
            guard.refuse(index, "removed")
        for index, slot in enumerate(reduced):
            shard = slot is not None and not slot.whole
            if shard and guard.grads[index] is None and self._params[index].grad is not None:
                guard.refuse(index, "set")
        guard.clear()

    def leave_buffers(self) -> None:
        """Let ``p.grad`` be memory of its own: the engine's goes at ``shutdown()``."""
        for param, view in zip(self._params, self._views, strict=True):
            if view is not None and param.grad is view:
                param.grad = view.clone()
        self._views = [None] * len(self._params)

    def discard(self) -> None:
        """Forget gradients that appeared since the last step."""
        self._guard.clear()
        self._sparse.clear()
        if not self._successor:
            self._engine.discard()

    def show_zeros(self) -> None:
        """Let ``p.grad`` be zeros where there is none.

        They count as none, until the next step, unless something is added or written to them.
        """
        for index, param in enumerate(self._params):
            if param.requires_grad and param.grad is None:
                param.grad = zeros = torch.zeros_like(param)
                self._zeros[index] = zeros, zeros._version

    def release(self, shared: str = "these parameters") -> None:
        """Let the parameters go; another object exchanges the gradients of ``shared``."""
        self._successor = shared
        self.stop()

    def stop(self) -> None:
        """Watch for gradients no longer, and send none."""
        _remove(self._hooks, self._engine, self._forward)

    def source(self, index: int) -> GradientRef | None:
        """Where a parameter's gradient lies now, or None."""
        param = self._params[index]
        if param.requires_grad and index not in self._hooks:
            self._hook(index)
        grad = param.grad
        zeros, version = self._zeros.pop(index, (None, 0))
        if zeros is not None and grad is zeros and grad._version == version:
            param.grad = grad = None
        if grad is None or self._holds_sparse(index):
            return None
        return self._source(index, grad)

    def _source(self, index: int, grad: torch.Tensor) -> GradientRef:
        """A gradient's address, in the memory order and element type of its parameter."""
        layout = self._layouts[index]
        if grad.is_sparse:
            grad = grad.to_dense()
        layout.check(self._params[index], grad, f"{self._name}: {self._names[index]}")
        if grad.stride() != layout.stride or grad.dtype is not layout.dtype:
            grad = layout.empty(grad.device).copy_(grad)
        return grad.data_ptr() or _EMPTY, grad

    def _hook(self, index: int) -> None:
        """Announce the parameter's gradient from now on, whenever backward has accumulated it."""
        param = self._params[index]
        mark_ready = self._engine.mark_ready
        dtype = param.dtype
        count = param.numel() if param.is_contiguous() else -1
        this = weakref.ref(self)
        guard = self._guard
        grads, versions, sample = guard.grads, guard.versions, guard.sample
        wanted, uses, tensor, watched = guard.wanted, guard.uses, torch.Tensor, guard.watched

        @uncompiled
        def announce(param: torch.Tensor) -> None:
            grad = param.grad
            assert grad is not None
            kind = type(grad)
            if kind is watched:
                grad.__class__ = kind = tensor
            # A sparse gradient is never contiguous.
            if grad.is_contiguous() and grad.numel() == count and grad.dtype is dtype:
                mark_ready(index, grad.data_ptr() or _EMPTY, grad)
            elif grad.is_sparse and this()._holds_sparse(index):  # type: ignore[union-attr]
                return
            else:
                address, owner = this()._source(index, grad)  # type: ignore[union-attr]
                mark_ready(index, address, owner)
            grads[index] = grad
            versions[index] = grad._version
            if index in wanted:
                sample(index, grad)
            if uses:
                uses.pop(index, None)
            if kind is tensor:
                grad.__class__ = watched

        handle = param.register_post_accumulate_grad_hook(announce)  # type: ignore[no-untyped-call]
        self._hooks[index] = handle


def _combined_sparse(
    param: torch.Tensor, parts: Sequence[tuple[int, bytes, bytes]], divisor: int
) -> torch.Tensor:
    """The sum of ranks' sparse gradients of a parameter, divided; halves are added in float32.

    ``parts`` are the number of sparse dimensions, indices and values of each rank that has a
    gradient.
    """
    wide = torch.promote_types(param.dtype, torch.float32)
    places, values = [], []
    for dimensions, where, what in parts:
        place = torch.frombuffer(bytearray(where), dtype=torch.int64) if where else torch.empty(0)
        value = torch.frombuffer(bytearray(what), dtype=param.dtype) if what else torch.empty(0)
        count = place.numel() // dimensions
        places.append(place.to(torch.int64).reshape(dimensions, count))
        values.append(value.to(wide).reshape(count, *param.shape[dimensions:]))
    total = torch.sparse_coo_tensor(
        torch.cat(places, 1), torch.cat(values), param.shape, check_invariants=True
    ).coalesce()
    if divisor > 1:
        total = total / divisor
    return total.to(param.dtype).to(param.device).coalesce()


def _dense_part(grad: torch.Tensor) -> torch.Tensor:
    """All that is not zero of a reduced gradient."""
    return grad._values() if grad.is_sparse else grad


def _fetcher(this: weakref.ref[GradientHooks]) -> Callable[[int], GradientRef | None]:
    def fetch(index: int) -> GradientRef | None:
        gradients = this()
        return None if gradients is None else gradients.source(index)

    return fetch


def _remove(hooks: dict[int, Any], engine: Reducer, forward: ForwardProfiler) -> None:
    forward.stop()
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
    engine.close()


def check_equal_on_ranks(
    runtime: Runtime, engine: Reducer, optimizer: torch.optim.Optimizer, name: str
) -> None:
    """Raise ``DisagreementError`` on every rank unless all have the same hyperparameters; a
    collective.

    Those for which the optimizer has defaults are compared, as far as they are plain values.
    """
    mine = _hyperparameters(optimizer)
    payload, what = json.dumps(mine).encode(), "comparing learning rates and the like"
    by_rank = [json.loads(text) for text in engine.exchange(payload, what)]
    for rank, theirs in enumerate(by_rank):
        for what in {**by_rank[0], **theirs}:
            first, other = by_rank[0].get(what), theirs.get(what)
            if first != other:
                raise DisagreementError(
                    f"{runtime.where}: {name}: ranks disagree: {what} is {first} on rank 0 and "
                    f"{other} on rank {rank}. Give every rank the same, or rank 0's by "
                    "broadcast_optimizer_state(optimizer, root_rank=0) before the first step"
                )


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The compared values, by their names in messages."""
    groups = optimizer.param_groups
    # An optimizer that never called its base class's constructor has none.
    known = getattr(optimizer, "defaults", {})
    numbers: dict[str, Any] = {"the number of parameter groups": len(groups)}
    for number, group in enumerate(groups):
        for key in known:
            numbers[f"{key} of parameter group {number}"] = _plain(group.get(key))
    return numbers


def _plain(value: Any) -> Any:
    """A value as it can be compared; None for one that cannot."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None


log = logging.getLogger("wfbp")


def _finish(runtime: Runtime) -> None:
    """Before a runtime ends, bring parameters up to date, which is impossible afterwards."""
    if runtime is not process.current("shutdown()"):
        _leave_process_set(runtime)
        return
    for sync in set(_owners.values()):
        sync.leave_buffers()
    for pending in list(pending_parameters.unfinished):
        is_known = runtime.thread.error is not None  # to the program, by any call since
        try:
            pending.wait_all()
        except Exception as error:
            if not is_known or not isinstance(error, WfbpError):
                log.error("parameters are not up to date at the end: %s", error)
        pending.release()


process.before_end(_finish)

_owners: weakref.WeakValueDictionary[int, OptimizerSync] = weakref.WeakValueDictionary()
"""By a parameter's id, the object that exchanges its gradients, and keeps it alive.

(An attribute of the parameter would be pickled with it.)
"""
_in_use: weakref.WeakValueDictionary[int, OptimizerSync] = weakref.WeakValueDictionary()
"""All that have not let their parameters go, in the order of making."""
_made = count()


def in_use(runtime: Runtime | None = None) -> list[OptimizerSync]:
    """Those of one runtime or of all, in the order of making."""
    return [s for s in list(_in_use.values()) if s.exchanges and runtime in (None, s.runtime)]


def _leave_process_set(runtime: Runtime) -> None:
    """Let its optimizers go, with whole parameters and state; collective among its ranks."""
    mine = {sync.number: sync for sync in in_use(runtime)}
    payloads = runtime.exchange(json.dumps(list(mine)).encode(), "removing a process set")
    # One that is forgotten may still be there on a rank whose interpreter has not collected it.
    common = set.intersection(*(set(json.loads(numbers)) for numbers in payloads))
    for number, sync in mine.items():
        if number in common:
            sync.prepare_whole()
        sync.leave()


class OptimizerSync:
    """Reduces gradients, has the optimizer updated, and keeps reads of parameters up to date.

    Between :meth:`reduce` and :meth:`step` it holds the reduced gradients, which may be shards.

    Args:
        runtime: with more than one rank.
        optimizer: the distributed one.
        named: names and parameters, equal on every rank.
        options: equal on every rank.
        coupling: of the optimizer; decides how it is updated.
        step: the optimizer's own step.
        sparse_as_dense: whether sparse gradients are made dense; otherwise they stay sparse.
        kind: the optimizer's own class.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, torch.Tensor]],
        options: EngineOptions,
        *,
        coupling: UpdateCoupling,
        step: Step,
        sparse_as_dense: bool,
        kind: type,
    ) -> None:
        self.runtime = runtime
        self.number = next(runtime.optimizer_numbers)
        """Among those of the runtime, the same on every rank."""
        self._name = options.name
        self._op = options.op
        self.optimizer = optimizer
        specs = [tensors.spec(name, param) for name, param in named]
        sharded = coupling is UpdateCoupling.ELEMENTWISE and gives_every_rank_a_shard(
            specs, runtime.size
        )
        options = replace(
            options, decouples=coupling is not UpdateCoupling.COUPLED, sharded_update=sharded
        )
        self._gradients = gradients = GradientHooks(
            runtime, named, specs, options, sparse_as_dense=sparse_as_dense, kind=kind
        )
        for parameter_name, param in named:
            if (previous := _owners.get(id(param))) is not None:
                previous.hand_over(parameter_name)
        self._engine = engine = gradients.engine
        self._params = params = gradients.params
        self.named = list(named)
        self._held: Reduced | None = None
        self._compared = False
        self._is_clipped = False
        # Where gradients are gathered in 16 bits, they are scaled behind that: see clip_grad_norm_.
        self._scales_later = bool(options.gather_dtype)
        self._shard_factor: float | None = None
        self._alone = False  # whether the last step was reduced with ranks that had joined
        self.last_active: int | None = None
        """A rank that has made the latest step, where others had joined; the same on every rank."""
        self._sharding: StateSharding | None = None
        if sharded:
            self._sharding = StateSharding(runtime, specs, params, optimizer)
            self._update: Update = ShardedUpdate(
                engine, optimizer, params, step, sharding=self._sharding
            )
        else:
            self._update = ReplicatedUpdate(engine, optimizer, params, step)
        for _, param in named:
            _owners[id(param)] = self
        gradients.attach()
        self._key = next(_made)
        _in_use[self._key] = self
        self.report = engine.report
        self.stats = engine.stats

    @property
    def open(self) -> bool:
        """Whether gradients have appeared that no step has taken."""
        return self._gradients.open

    @property
    def exchanges(self) -> bool:
        """Whether no other optimizer has taken over the parameters."""
        return not self._gradients.handed_over

    @property
    def shares_state(self) -> bool:
        """Whether this rank has shards of the optimizer's state."""
        return self._sharding is not None and bool(self._sharding.indices)

    @property
    def holds_shards(self) -> bool:
        """Whether gradients were reduced that ``p.grad`` does not show."""
        return self._held is not None

    def reduce(self, wanted: bool = False) -> None:
        """Close the step and wait for the gradients that the optimizer needs.

        ``wanted``: the program is about to look at all of them.
        """
        self._update.finish_pending()
        reduced = self._gradients.reduce(whole=False, wanted=wanted)
        self._compare()
        self._note_joined()
        shards = any(slot is not None and not slot.whole for slot in reduced)
        self._held = reduced if shards else None
        self._is_clipped, self._shard_factor = False, None

    def synchronize(self) -> bool:
        """Close the step, unless that was done, and have whole gradients and parameters.

        Returns whether any rank had a gradient.
        """
        self._update.flush()
        if self._held is not None:
            self.check_no_new_gradients()
            self._check_clipped()
            whole = self._engine.gather_gradients(self._held)
            self._engine.flush()
            if self._shard_factor is not None:
                for slot, held, param in zip(whole, self._held, self._params, strict=True):
                    if slot is not None and held is not None and not held.whole:
                        tensors.shared(slot.data).view(param.dtype).mul_(self._shard_factor)
            self._gradients.take(whole)
            self._shard_factor = None
        else:
            whole = self._gradients.reduce(whole=True)
            self._compare()
            self._note_joined()
        self._held = None
        return any(slot is not None for slot in whole) or bool(self._engine.sparse_anywhere)

    def _note_joined(self) -> None:
        """Where ranks have joined, the others step whole parameters, with whole state, by
        themselves; collective."""
        joined = self._engine.joined_ranks
        self._alone = bool(joined)
        if not joined:
            return
        self.last_active = next(r for r in range(self.runtime.size) if r not in joined)
        if isinstance(self._update, ShardedUpdate):
            self._update.make_whole()

    def join(self, note_progress: Callable[[], None]) -> None:
        """Take part in all steps of the other ranks, without gradients, until they join, too.

        Their steps change nothing here; see :attr:`last_active`. ``note_progress`` is called after
        each.
        """
        self.discard()
        for param in self._params:
            param.grad = None
        engine = self._engine
        engine.joined = True
        try:
            while self._take_part_without_gradients():
                note_progress()
        finally:
            engine.joined = self._alone = False

    def _take_part_without_gradients(self) -> bool:
        """Take part in one step; whether there are ranks that have not joined."""
        self._update.flush()
        self._gradients.close_without_gradients()
        self._compare()
        engine = self._engine
        if len(engine.joined_ranks) == self.runtime.size:
            return False
        self._note_joined()
        if engine.evaluated:
            self.combined_loss(None)
        return True

    def flush(self) -> None:
        """Have all parameters up to date."""
        self._update.flush()

    def check_no_new_gradients(self) -> None:
        """Raise ``RuntimeError`` if gradients have appeared since they were reduced."""
        if self.open:
            raise RuntimeError(
                f"{self._name}: gradients have appeared since they were averaged. Every backward() "
                "must come before synchronize() or clip_grad_norm_(); a program that leaves out a "
                "step after these must call optimizer.zero_grad(), on every rank, before the next "
                "backward()"
            )

    def step(self) -> Any:
        """Let the optimizer step with the reduced gradients; decoupled parameters travel from here
        on."""
        self._check_clipped()
        reduced, self._held = self._held, None
        factor, self._shard_factor = self._shard_factor, None
        update = self._update
        try:
            return update.apply_whole() if self._alone else update.apply(reduced, factor)
        finally:
            if self._engine.profiling:
                update.flush()  # nothing travels where compute is measured
            else:  # for parameters whose reads cannot be noticed
                update.pending.wait_for_exposed()

    def clip_grad_norm_(self, limit: Limit) -> torch.Tensor:
        """Scale the reduced gradients; see the optimizer's method of that name."""
        self._check_clipped()
        factor = self._shard_factor
        if factor is None and self._held is not None and self._scales_later:
            factor = 1.0
        norm, self._shard_factor = clip(
            self.runtime, limit, *self._reduced_tensors(), self._alone, factor
        )
        if self._held is not None:
            self._gradients.watch_shards(self._held)
            self._is_clipped = True
        wide = functools.reduce(torch.promote_types, {p.dtype for p in self._params})
        return torch.tensor(norm, dtype=wide, device=self._params[0].device)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it gradients are those of a closure, behind which ranks combine their losses."""
        self._engine.evaluates = True
        try:
            yield
        finally:
            self._engine.evaluates = False

    def combined_loss(self, loss: Any) -> Any:
        """The loss of all ranks, combined as their gradients are; a collective.

        An optimizer that looks at the loss, as in a line search, must see on every rank the loss of
        the averaged gradients. Only real numbers and tensors of one are combined, over the ranks
        that have one; the result has the same type, and the same bits on every rank. Anything else
        is returned as it is.
        """
        held = loss.detach() if isinstance(loss, torch.Tensor) else None
        if held is None:
            number = isinstance(loss, Real) and not isinstance(loss, bool)
        else:
            number = held.numel() == 1 and not held.is_complex()
        mine = struct.pack("d", float(loss if held is None else held)) if number else b""
        losses = self._engine.exchange(mine, "the loss of step(closure)")
        if not number:
            return loss
        values = [struct.unpack("d", text)[0] for text in losses if text]
        result = sum(values) / (len(values) if self._op is Op.AVERAGE else 1)
        if held is None:
            return result
        return torch.full_like(
            held, result, dtype=None if held.is_floating_point() else torch.float
        )

    def prepare_whole(self) -> None:
        """For a step with a closure: whole parameters, whole state, whole gradients."""
        self._update.flush()
        self._held = self._shard_factor = None
        if isinstance(self._update, ShardedUpdate):
            self._update.make_whole()

    def whole_state(self) -> State:
        """The optimizer's state as it would be without other ranks; any rank may ask, alone."""
        self._update.flush()
        if self._sharding is None:
            return self.optimizer.state
        return self._sharding.whole_state()

    def take_whole_state(self) -> None:
        """Let the state be whole here; on the other ranks it is about to be replaced by this."""
        self._update.flush()
        if isinstance(self._update, ShardedUpdate):
            self._update.sharding.take_whole_state()
            self._update.forget()

    def before_state_is_used(self) -> None:
        """The program or the optimizer looks up state: updates that are due come first."""
        if self._update.due and not self._update.pending.updates_here:
            self._update.pending.wait_all()

    def before_another_state(self, state: State) -> None:
        """The optimizer is given other state: updates that are due belong to that before."""
        if self._update.pending.updates_here:  # what an optimizer does itself is its own affair
            return
        self.flush()
        if self._sharding is not None and not self._sharding.lies_in(state):
            self.forget_state()

    def forget_state(self) -> None:
        """Another state has been loaded, on every rank; nothing was under way."""
        if isinstance(self._update, ShardedUpdate):
            self._update.forget()

    def show_zeros(self) -> None:
        """Zeros in place of missing gradients; see :meth:`GradientHooks.show_zeros`."""
        self._gradients.show_zeros()

    def discard(self) -> None:
        """Forget gradients that appeared since the last step."""
        self._held = None
        self._is_clipped, self._shard_factor = False, None
        self._gradients.discard()

    def release(self) -> None:
        """Let the parameters go, up to date, and the state, whole; a collective."""
        self.prepare_whole()
        self._update.pending.release()
        self._gradients.release()
        _in_use.pop(self._key, None)

    def hand_over(self, shared: str) -> None:
        """Let the parameters go, up to date, because another object takes over one of them."""
        self._update.flush()
        self._update.pending.release()
        self._gradients.release(shared)

    def leave_buffers(self) -> None:
        """Let ``p.grad`` be memory of its own: the engine's goes at ``shutdown()``."""
        self._gradients.leave_buffers()

    def leave(self) -> None:
        """Let the parameters go, because the runtime ends; they are up to date."""
        self._update.pending.release()
        self._gradients.leave_buffers()
        self._gradients.stop()
        _in_use.pop(self._key, None)

    def _check_clipped(self) -> None:
        """Raise if the program has changed gradients behind :meth:`clip_grad_norm_`, in vain."""
        if self._is_clipped and self._held is not None:
            self._gradients.check_shards(self._held)
        self._is_clipped = False

    def _compare(self) -> None:
        """Before the first update, compare hyperparameters.

        This follows the step's gradients, because their groups use the same backend in the same
        order.
        """
        if not self._compared:
            try:
                check_equal_on_ranks(self.runtime, self._engine, self.optimizer, self._name)
            except DisagreementError as error:
                if not follows_horovod:
                    raise
                warnings.warn(str(error), stacklevel=2)
            self._compared = True

    def _reduced_tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The shards of reduced gradients, and the whole ones."""
        if self._held is None:
            return [], [_dense_part(p.grad) for p in self._params if p.grad is not None]
        shards, whole = [], []
        for param, slot in zip(self._params, self._held, strict=True):
            if slot is None:
                continue
            if slot.whole and param.grad is not None:
                whole.append(param.grad)
            elif not slot.whole and len(slot.data):
                shards.append(tensors.shared(slot.data).view(param.dtype))
        return shards, whole
